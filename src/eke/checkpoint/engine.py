"""The engine: two threads that carry the bytes of a save from live tensors into files.

It knows nothing of models, files or ranks: a `Task` says how to fill a block from what is live and
what to do with the blocks, and a `Flow` says what is due. The copier fills slots of the pool; the
writer empties them, one save after another. Whoever has to wait for a capture (training, at a
barrier) copies too instead of only waiting, so a low-priority thread never holds it up.

From a device (`device`) copies are only issued, and it is the copier that waits for them. A barrier
waits until what it needs is issued; then the device's own stream waits, and training need not.

Properties:

* Memory: nothing but the pool. When it is full the copier waits for the writer; training waits
  only at a barrier.
* Both threads run at the lowest priority, sleep when there is nothing to do, and never spin.
* At most two saves are in flight: one being written, one captured behind it.
* A failure ends its own save only. It is raised by the ticket, and once by `raise_failed`; slots
  and threads are free for the next save.
* Every wait is bounded: a save that makes no progress for `patience_s` fails.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from eke.checkpoint.beside import step_aside
from eke.checkpoint.device import Issued
from eke.checkpoint.flight import Flight, Flights
from eke.checkpoint.flow import Check, Flow, Link, More, Spot
from eke.checkpoint.pool import Pool
from eke.checkpoint.ticket import State, Ticket, reaches
from eke.checkpoint.work import Task, Written
from eke.errors import EkeError

log = logging.getLogger("eke.checkpoint")

MAX_IN_FLIGHT = 2
_LOOK_S = 0.5
"""How often a bounded wait looks at the clock."""

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class _Work(NamedTuple):
    task: Task
    what: Spot | Check | More
    slot: int | None


class Engine:
    """Runs saves.

    Args:
        pool_bytes: memory for bytes on their way; taken when it is first needed.
        patience_s: how long a save may make no progress.
        warn: log failures at once, instead of keeping them to be raised.
    """

    def __init__(self, pool_bytes: int, patience_s: float, *, warn: bool = False) -> None:
        self._pool_bytes, self._patience_s, self._warn = pool_bytes, patience_s, warn
        self._turn = threading.Condition()
        self._pool: Pool | None = None
        self._tasks: deque[Task] = deque()
        self._held: dict[tuple[int, Spot], int] = {}
        self._flights = Flights()
        self._errors: deque[Ticket] = deque()
        self._threads: list[threading.Thread] = []
        self._to_touch: deque[int] = deque()
        self._stopping = False
        self._moved = time.monotonic()
        self._pid = os.getpid()
        self.stall_s = 0.0
        _engines.add(self)

    # ------------------------------------------------------------------ what training calls

    def prefault(self, nbytes: int) -> None:
        """Ready the pool for a state of this size, in the background."""
        if os.getpid() != self._pid:
            return  # a forked child that trains on saves nothing
        with self._turn:
            self._to_touch = deque(self._ready().untouched(nbytes))
            self._turn.notify_all()

    def slot_bytes(self) -> int:
        """The length of a block."""
        with self._turn:
            return self._ready().slot_bytes

    def wait_for_room(self) -> None:
        """Wait until a save may be submitted: one at most is in flight, and it is captured."""
        with self._turn:
            while len(self._tasks) >= MAX_IN_FLIGHT or any(
                not task.flow.all_captured for task in self._tasks if not task.ticket.final
            ):
                self._pause()
                failed = next((t.ticket.error for t in self._tasks if t.ticket.error), None)
                if failed is not None and self._stuck():
                    raise failed

    def submit(self, task: Task) -> None:
        """Start a save; returns when what cannot wait is captured."""
        with self._turn:
            self._ready()
            self._to_touch.clear()
            if not self._tasks:
                self._moved = time.monotonic()
            self._tasks.append(task)
            self._note_captured(task)
            for lane, blocks in task.eager.items():
                task.flow.want(lane, blocks)
        try:
            # The copier sleeps on: one at low priority, with a block that this thread waits for or
            # with the interpreter's lock, would hold it up.
            self._help(task, lambda flow: _all_captured(flow, task.eager))
        finally:
            with self._turn:
                self._turn.notify_all()

    def barrier(self, storages: Callable[[], Collection[object] | None]) -> None:
        """Return once these storages (None: all) may change: captured, or, on a device, as soon as
        all copies of them are issued and what this thread asks of it next waits for them."""
        if not self._tasks:
            return
        with self._turn:
            tasks = [t for t in self._tasks if not t.ticket.final and not t.flow.all_captured]
        if not tasks:
            return
        began = time.perf_counter()
        chosen = storages()
        for task in tasks:
            self._help(task, lambda flow: flow.grown)
            self._until_safe(task, task.wanted(chosen))
        self.charge(tasks[0].ticket, time.perf_counter() - began)

    def wait(self, ticket: Ticket, state: State, timeout: float | None = None) -> None:
        """Wait for a save. See `Ticket.wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._turn:
            while not reaches(ticket.state, state):
                if ticket.error is not None:
                    self._forget(ticket)
                    raise ticket.error
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise EkeError(
                        f"step {ticket.step} was not {state} within {timeout} s; it is "
                        f"{ticket.state}",
                        fix="Wait longer, or see what the disk is doing",
                    )
                self._pause(left)

    def drain(self) -> None:
        """Wait until nothing is in flight. Failures stay to be raised."""
        with self._turn:
            while self._tasks:
                if self._tasks[0].ticket.final and self._stuck():
                    return  # its writer is inside a call that does not return
                self._pause()

    def raise_failed(self) -> None:
        """Raise the oldest failure that nobody has heard of yet."""
        with self._turn:
            if self._errors:
                ticket = self._errors[0]
                self._forget(ticket)
                assert ticket.error is not None
                raise ticket.error

    def unheard(self) -> Ticket | None:
        """The oldest failed save that nobody has heard of yet; it stays so."""
        with self._turn:
            return self._errors[0] if self._errors else None

    def heard(self, serial: int) -> Ticket | None:
        """The ranks report this failure now: not again, also if it is yet to come to this one.

        Returns this rank's ticket of it, if the save is in flight or has failed unheard.
        """
        with self._turn:
            for ticket in (*self._errors, *(task.ticket for task in self._tasks)):
                if ticket.serial == serial:
                    self._forget(ticket)
                    return ticket
        return None

    def _forget(self, ticket: Ticket) -> None:
        ticket.heard = True
        if ticket in self._errors:
            self._errors.remove(ticket)

    def close(self) -> None:
        """Wait for what is in flight, then end the threads. Failures stay to be raised."""
        if os.getpid() != self._pid:
            return  # a forked child has neither the threads nor the pool
        self.drain()
        self.stop()
        for thread in self._threads:
            thread.join(timeout=0 if self._tasks else self._patience_s)
        if not self._tasks and not self._flights:
            self._threads.clear()
            self._pool = None

    def stop(self) -> None:
        """End the threads once nothing is in flight; does not wait."""
        with self._turn:
            self._stopping = True
            self._turn.notify_all()

    # ------------------------------------------------------------------ waiting

    def charge(self, ticket: Ticket, seconds: float) -> None:
        """Training has waited so long for a save."""
        ticket.stall_s += seconds
        ticket.marks.waited(seconds)
        self.stall_s += seconds

    def _stuck(self) -> bool:
        return time.monotonic() - self._moved > self._patience_s

    def _pause(self, most_s: float | None = None) -> None:
        """Sleep until something happens; give up on the first save if nothing does for long."""
        self._turn.wait(_LOOK_S if most_s is None else min(_LOOK_S, most_s))
        if not self._tasks or not self._stuck():
            return
        for task in self._tasks:
            self._fail(
                task,
                EkeError(
                    f"saving step {task.ticket.step} has made no progress for "
                    f"{self._patience_s:g} s; it is {task.ticket.state}"
                    + (f", {task.doing}" if task.doing else ""),
                    fix="See whether the disk answers and the other ranks live",
                ),
            )

    def _until_safe(self, task: Task, wanted: Mapping[int, int]) -> None:
        """Wait until the first blocks of some lanes are issued, and copy meanwhile; then make what
        training asks of a device wait for those that are still under way."""
        with self._turn:
            for lane, blocks in wanted.items() if not task.ticket.final else ():
                task.flow.want(lane, blocks)
                if task.device(lane) is not None:
                    task.flow.give_up_check(lane)  # training would wait for the device
            self._turn.notify_all()
        self._help(task, lambda flow: all(flow.issued(*one) for one in wanted.items()))
        with self._turn:
            error = None if task.ticket.final else self._flights.hold(task, wanted)
            if error is not None:
                self._fail(task, error)

    def _help(self, task: Task, enough: Callable[[Flow], bool]) -> None:
        """Do what is due until a save is far enough, or has failed."""
        while True:
            with self._turn:
                if task.ticket.final or enough(task.flow):
                    return
                work = self._next()
                if work is None:
                    self._pause()
                    continue
            self._do(work)

    # ------------------------------------------------------------------ copying

    def _next(self) -> _Work | None:
        """What to copy now, marked as begun; None if nothing can be."""
        assert self._pool is not None
        first = True  # whether all before it are committed
        for number, task in enumerate(self._tasks):
            first = number == 0 or (first and self._tasks[number - 1].ticket.state == "committed")
            if task.ticket.final or task.flow.all_started:
                continue
            what = task.flow.next_copy(first=first)
            while isinstance(what, Check) and not first:
                task.flow.start_check(what.lane)  # there is nothing to compare with yet
                task.flow.checked(what.lane, same=False)
                what = task.flow.next_copy(first=False)
            if isinstance(what, More):
                task.flow.start_more()
                return _Work(task, what, None)
            slot = None if what is None else self._pool.take()
            if what is None or slot is None:
                return None
            if isinstance(what, Check):
                task.flow.start_check(what.lane)
            else:
                task.flow.start_copy(what)
            return _Work(task, what, slot)
        return None

    def _do(self, work: _Work) -> None:
        """Copy a block, look through a lane, or find out what lanes there are."""
        task, what, slot = work
        assert self._pool is not None
        error: BaseException | None = None
        same, issued = False, None
        began = time.perf_counter()
        found: tuple[Sequence[int], Collection[int], Collection[int]] = ((), (), ())
        try:
            if slot is None:
                found = task.more()
            elif not isinstance(what, More):
                self._pool.pin(task.device(what.lane))
                if isinstance(what, Check):
                    same = task.same(what.lane, self._pool.array(slot))
                else:
                    issued = task.fill(what, self._pool.array(slot))
        except BaseException as caught:  # noqa: BLE001 - raised where the save is waited for
            error = caught
        task.ticket.marks.captured(began, compare=isinstance(what, Check))
        with self._turn:
            self._moved = time.monotonic()
            if error is not None and not (isinstance(what, Check) and task.flow.idle(what.lane)):
                self._fail(task, error)
            if isinstance(what, More):
                task.flow.grow(*found)
            elif isinstance(what, Spot) and slot is not None:
                self._settle(task, what, slot, issued)
            elif slot is not None:
                self._pool.give_back(slot)
            if isinstance(what, Check) and not task.ticket.final:
                task.flow.checked(what.lane, same=same)
            self._note_captured(task)
            self._turn.notify_all()
        if error is not None and not isinstance(error, Exception):
            raise error  # an interrupt is not only the save's

    def _settle(self, task: Task, spot: Spot, slot: int, issued: Issued | None) -> None:
        """A block is issued, or there. No slot is free while a copy may still write to it."""
        assert self._pool is not None
        if issued is not None:
            self._flights.add(Flight(task, spot, slot, issued))
            task.flow.issue(spot)
        elif task.ticket.final:
            self._pool.give_back(slot)
        else:
            self._held[id(task), spot] = slot
            task.flow.copied(spot)

    def _land(self, flight: Flight) -> None:
        """Wait for a block that is under way. For the copier: a device may never answer."""
        failed = flight.wait()
        with self._turn:
            self._moved = time.monotonic()
            error = self._flights.land(flight) or failed
            if error is not None:
                self._fail(flight.task, error)
            self._settle(flight.task, flight.spot, flight.slot, None)
            self._note_captured(flight.task)
            self._turn.notify_all()

    def _note_captured(self, task: Task) -> None:
        if task.ticket.state == "capturing" and task.flow.all_captured:
            task.ticket.reach("captured")

    def _copy_loop(self) -> None:
        step_aside()
        while True:
            with self._turn:
                while True:
                    work = self._next()
                    flight = self._flights.next() if work is None else None
                    if work or flight or (self._stopping and not self._tasks):
                        break
                    if self._to_touch and not self._tasks:
                        break
                    self._turn.wait()
                if work is None and flight is None and not self._to_touch:
                    return
                if work is None and flight is None:
                    self._touch()
                    continue
            if work is not None:
                self._do(work)
            elif flight is not None:
                self._land(flight)
            work = flight = None  # it sleeps for long, and keeps nothing alive

    def _touch(self) -> None:
        """Make one more slot's pages real. Under the lock, so that nobody takes it meanwhile."""
        slot = self._to_touch.popleft()
        if self._pool is not None:
            self._pool.prefault(slot)

    # ------------------------------------------------------------------ writing

    def _blocks(self, task: Task) -> Iterator[Written]:
        """The captured blocks in the order in which they are due; a slot is freed when the next
        one is asked for."""
        assert self._pool is not None
        while True:
            with self._turn:
                while True:
                    if task.ticket.error is not None:
                        raise task.ticket.error
                    if task.flow.all_written:
                        return
                    what = task.flow.next_write()
                    if what is not None:
                        break
                    self._turn.wait()
                task.flow.start_write(what)
            if isinstance(what, Link):
                yield what, None
            else:
                yield what, self._pool.array(self._held[id(task), what]).data
            with self._turn:
                self._moved = time.monotonic()
                if isinstance(what, Spot):
                    self._pool.give_back(self._held.pop((id(task), what)))
                task.flow.written(what)
                self._turn.notify_all()

    def _progress(self) -> None:
        with self._turn:
            self._moved = time.monotonic()

    def _write_loop(self) -> None:
        step_aside()
        while True:
            with self._turn:
                while not self._tasks:
                    if self._stopping:
                        return
                    self._turn.wait()
                task = self._tasks[0]
            error: BaseException | None = None
            size = 0
            try:
                size = task.run(self._blocks(task), self._progress)
            except BaseException as caught:  # noqa: BLE001 - raised where the save is waited for
                error = caught
            with self._turn:
                self._moved = time.monotonic()
                if error is not None:
                    self._fail(task, error)
                elif not task.ticket.final:
                    task.ticket.bytes_written = size
                    task.ticket.reach("committed")
                for key in [key for key in self._held if key[0] == id(task)]:
                    assert self._pool is not None
                    self._pool.give_back(self._held.pop(key))
                self._turn.notify_all()
            task.release()
            try:
                task.tidy()
            except BaseException as caught:  # noqa: BLE001 - the save's own outcome is settled
                log.warning("after saving step %d: %s", task.ticket.step, caught)
            with self._turn:
                self._moved = time.monotonic()
                self._tasks.popleft()
                self._turn.notify_all()
            del task

    def _fail(self, task: Task, error: BaseException) -> None:
        if task.ticket.final:
            return
        task.ticket.error = task.failure(error)
        task.ticket.reach("failed")
        if self._warn:
            log.warning("%s", task.ticket.error)
        elif not task.ticket.heard:
            self._errors.append(task.ticket)
        self._turn.notify_all()

    def _ready(self) -> Pool:
        """The pool and the threads, made when they are first needed."""
        if self._pool is None:
            self._pool = Pool(self._pool_bytes)
        if not self._threads:
            for name, loop in (("copier", self._copy_loop), ("writer", self._write_loop)):
                thread = threading.Thread(target=loop, name=f"eke-{name}", daemon=True)
                thread.start()
                self._threads.append(thread)
        return self._pool


def _all_captured(flow: Flow, wanted: Mapping[int, int]) -> bool:
    """Whether the first so many blocks of these lanes are captured."""
    return all(flow.captured(lane, blocks) for lane, blocks in wanted.items())


@atexit.register
def _finish() -> None:
    """A process that ends in any way but a kill first commits what it began to save."""
    for engine in list(_engines):
        engine.close()
        for ticket in engine._errors:
            log.error("%s", ticket.error)

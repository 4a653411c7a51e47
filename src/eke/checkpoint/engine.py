"""The engine: two threads that carry the bytes of a save from live tensors into files.

It knows nothing of models, files or ranks: a `Task` says how to fill a block from what is live and
what to do with the blocks, and a `Flow` says what is due. The copier (`copying`) fills slots of the
pool; the writer, here, empties them, one save after another. What they share lies on a `Desk`.

From a device (`device`) copies are only issued. A barrier waits until what it needs is issued; then
the device's own stream waits, and training need not.

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
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping

from eke.checkpoint.beside import step_aside
from eke.checkpoint.copying import Copier
from eke.checkpoint.desk import Desk, Running
from eke.checkpoint.flow import Flow, Link, Spot
from eke.checkpoint.owner import Home
from eke.checkpoint.pool import Pool
from eke.checkpoint.ticket import State, Ticket, reaches
from eke.checkpoint.work import Task, Written
from eke.errors import EkeError

log = logging.getLogger("eke.checkpoint")

MAX_IN_FLIGHT = 2

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """Runs saves.

    Args:
        pool_bytes: memory for bytes on their way; taken when it is first needed.
        patience_s: how long a save may make no progress.
        warn: log failures at once, instead of keeping them to be raised.
    """

    def __init__(self, pool_bytes: int, patience_s: float, *, warn: bool = False) -> None:
        self._pool_bytes = pool_bytes
        self._desk = Desk(patience_s, warn=warn)
        self._copier = Copier(self._desk)
        self._tasks = self._desk.tasks
        self._threads: list[threading.Thread] = []
        self._begun: dict[str, threading.Thread] = {}
        self.home = Home()
        self.stall_s = 0.0
        _engines.add(self)

    @property
    def _pool(self) -> Pool | None:
        return self._desk.pool

    # ------------------------------------------------------------------ what training calls

    def prefault(self, nbytes: int) -> None:
        """Ready the pool for a state of this size, in the background."""
        if not self.home.here:
            return  # a forked child that trains on saves nothing
        with self._desk.turn.lock:
            self._copier.to_touch = deque(self._ready().untouched(nbytes))
            self._desk.turn.notify_all()

    def slot_bytes(self) -> int:
        """The length of a block."""
        with self._desk.turn.lock:
            return self._ready().slot_bytes

    def wait_for_room(self) -> None:
        """Wait until a save may be submitted: one at most is in flight, and it is captured."""
        with self._desk.turn.lock:
            self._copier.abandon()
            while len(self._tasks) >= MAX_IN_FLIGHT or any(
                not task.flow.all_captured for task in self._tasks if not task.ticket.final
            ):
                self._desk.pause()
                failed = [task.ticket for task in self._tasks if task.ticket.error is not None]
                if failed and self._desk.patience.over:
                    ticket = next((one for one in failed if not one.heard), failed[0])
                    self._desk.forget(ticket)
                    assert ticket.error is not None
                    raise ticket.error

    def submit(self, task: Task) -> None:
        """Start a save; returns when what cannot wait is captured."""
        try:
            with self._desk.turn.lock:
                self._ready()
                self._copier.to_touch.clear()
                if not self._tasks:
                    self._desk.patience.moved()
                self._tasks.append(task)
                self._desk.note_captured(task)
                for lane, blocks in task.eager.items():
                    task.flow.want(lane, blocks)
            # The copier sleeps on: one at low priority, with a block that this thread waits for or
            # with the interpreter's lock, would hold it up.
            self._copier.help(task, lambda flow: _all_captured(flow, task.eager))
            with self._desk.turn.lock:
                self._desk.turn.notify_all()
        except BaseException as error:
            # What is captured before `save` returns is not, and will have changed.
            with self._desk.turn.lock:
                self._copier.abandon(error)
                task.ticket.heard = task not in self._tasks  # else it is told when it is over
                self._desk.fail(task, error)
                self._desk.turn.notify_all()
            raise

    def barrier(self, storages: Callable[[], Collection[object] | None]) -> None:
        """Return once these storages (None: all) may change: captured, or, on a device, as soon as
        all copies of them are issued and what this thread asks of it next waits for them."""
        self.home.require()
        if not self._tasks:
            return
        with self._desk.turn.lock:
            tasks = [t for t in self._tasks if not t.ticket.final and not t.flow.all_captured]
        if not tasks:
            return
        began = time.perf_counter()
        chosen = storages()
        try:
            for task in tasks:
                self._copier.help(task, lambda flow: flow.grown)
                self._until_safe(task, task.wanted(chosen))
        except BaseException as error:
            with self._desk.turn.lock:
                self._copier.abandon(error)
                self._desk.turn.notify_all()
            raise
        self.charge(tasks[0].ticket, time.perf_counter() - began)

    def wait(self, ticket: Ticket, state: State, timeout: float | None = None) -> None:
        """Wait for a save. See `Ticket.wait`."""
        self.home.require()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._desk.turn.lock:
            self._copier.abandon()
            while not reaches(ticket.state, state):
                if ticket.error is not None:
                    self._desk.forget(ticket)
                    raise ticket.error
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise EkeError(
                        f"step {ticket.step} was not {state} within {timeout} s; it is "
                        f"{ticket.state}",
                        fix="Wait longer, or see what the disk is doing",
                    )
                self._desk.pause(left)

    def drain(self) -> Ticket | None:
        """Wait until nothing is in flight. Failures stay to be raised.

        Returns the save whose writer is inside a call that does not return, if there is one.
        """
        with self._desk.turn.lock:
            self._copier.abandon()
            while self._tasks:
                ticket = self._tasks[0].ticket
                if self._desk.patience.over and (ticket.final or ticket.error is not None):
                    return ticket
                self._desk.pause()
        return None

    def raise_failed(self) -> None:
        """Raise the oldest failure that nobody has heard of yet."""
        with self._desk.turn.lock:
            if self._desk.errors:
                ticket = self._desk.errors[0]
                self._desk.forget(ticket)
                assert ticket.error is not None
                raise ticket.error

    def unheard(self) -> Ticket | None:
        """The oldest failed save that nobody has heard of yet; it stays so."""
        with self._desk.turn.lock:
            return self._desk.errors[0] if self._desk.errors else None

    def heard(self, serial: int) -> Ticket | None:
        """The ranks report this failure now: not again, also if it is yet to come to this one.

        Returns this rank's ticket of it, if the save is in flight or has failed unheard.
        """
        with self._desk.turn.lock:
            for ticket in (*self._desk.errors, *(task.ticket for task in self._tasks)):
                if ticket.serial == serial:
                    self._desk.forget(ticket)
                    return ticket
        return None

    def close(self) -> None:
        """Wait for what is in flight, then end the threads. Failures stay to be raised."""
        if not self.home.here:
            return  # a forked child has neither the threads nor the pool
        self.drain()
        self.stop()
        for thread in (*self._begun.values(), *self._threads):
            thread.join(timeout=0 if self._tasks else self._desk.patience.most_s)
        if not self._tasks and not self._copier.flights:
            self._threads.clear()
            self._begun.clear()
            self._desk.pool = None

    def stop(self) -> None:
        """End the threads once nothing is in flight; does not wait."""
        if not self.home.here:
            return
        with self._desk.turn.lock:
            self._desk.stopping = True
            self._desk.turn.notify_all()

    # ------------------------------------------------------------------ waiting

    def charge(self, ticket: Ticket, seconds: float) -> None:
        """Training has waited so long for a save."""
        ticket.stall_s += seconds
        ticket.marks.waited(seconds)
        self.stall_s += seconds

    def _until_safe(self, task: Task, wanted: Mapping[int, int]) -> None:
        """Wait until the first blocks of some lanes are issued, and copy meanwhile; then make what
        training asks of a device wait for those that are still under way."""
        with self._desk.turn.lock:
            for lane, blocks in wanted.items() if not task.ticket.final else ():
                task.flow.want(lane, blocks)
                if task.device(lane) is not None:
                    task.flow.give_up_check(lane)  # training would wait for the device
            self._desk.turn.notify_all()
        self._copier.help(task, lambda flow: all(flow.issued(*one) for one in wanted.items()))
        with self._desk.turn.lock:
            error = None if task.ticket.final else self._copier.flights.hold(task, wanted)
            if error is not None:
                self._desk.fail(task, error)

    # ------------------------------------------------------------------ writing

    def _blocks(self, task: Task) -> Iterator[Written]:
        """The captured blocks in the order in which they are due; a slot is freed when the next
        one is asked for."""
        assert self._desk.pool is not None
        while True:
            with self._desk.turn.lock:
                while True:
                    if task.ticket.error is not None:
                        raise task.ticket.error
                    if task.flow.all_written:
                        return
                    what = task.flow.next_write()
                    if what is not None:
                        break
                    self._desk.turn.wait()
                task.flow.start_write(what)
            if isinstance(what, Link):
                yield what, None
            else:
                yield what, self._desk.pool.array(self._desk.held[id(task), what]).data
            with self._desk.turn.lock:
                self._desk.patience.moved()
                if isinstance(what, Spot):
                    self._desk.pool.give_back(self._desk.held.pop((id(task), what)))
                task.flow.written(what)
                self._desk.turn.notify_all()

    def _write_loop(self) -> None:
        step_aside()
        while True:
            with self._desk.turn.lock:
                while not self._tasks:
                    if self._desk.stopping:
                        return
                    self._desk.turn.wait()
                task = self._tasks[0]
            error: BaseException | None = None
            size = 0
            try:
                size = task.run(self._blocks(task), Running(self._desk, task))
            except BaseException as caught:  # noqa: BLE001 - raised where the save is waited for
                error = caught
            with self._desk.turn.lock:
                self._desk.end(task, size, error)
                for key in [key for key in self._desk.held if key[0] == id(task)]:
                    assert self._desk.pool is not None
                    self._desk.pool.give_back(self._desk.held.pop(key))
                self._desk.turn.notify_all()
            task.release()
            try:
                task.tidy()
            except BaseException as caught:  # noqa: BLE001 - the save's own outcome is settled
                log.warning("after saving step %d: %s", task.ticket.step, caught)
            with self._desk.turn.lock:
                self._desk.patience.moved()
                self._tasks.popleft()
                self._desk.turn.notify_all()
            del task

    def _ready(self) -> Pool:
        """The pool and the threads, made when they are first needed."""
        if self._desk.pool is None:
            self._desk.pool = Pool(self._pool_bytes)
        for name, loop in (("copier", self._copier.loop), ("writer", self._write_loop)):
            if name not in self._begun:
                thread = threading.Thread(
                    target=self._live, args=(loop,), name=f"eke-{name}", daemon=True
                )
                thread.start()
                self._begun[name] = thread
        return self._desk.pool

    def _live(self, loop: Callable[[], None]) -> None:
        """A thread's life. It may have been begun twice, by somebody who was interrupted."""
        mine = threading.current_thread()
        with self._desk.turn.lock:
            if any(thread.name == mine.name for thread in self._threads):
                return
            self._threads.append(mine)
        loop()


def _all_captured(flow: Flow, wanted: Mapping[int, int]) -> bool:
    """Whether the first so many blocks of these lanes are captured."""
    return all(flow.captured(lane, blocks) for lane, blocks in wanted.items())


@atexit.register
def _finish() -> None:
    """A process that ends in any way but a kill first commits what it began to save."""
    for engine in [one for one in _engines if one.home.here]:
        engine.close()
        for ticket in engine._desk.errors:
            log.error("%s", ticket.error)

"""The copying half of the engine: from live tensors into slots of the pool.

The copier's thread does what is due, at the lowest priority. Whoever has to wait for a capture
(training, at a barrier) copies too instead of only waiting, so that thread never holds it up.

From a device (`device`) copies are only issued, and it is the copier that waits for them.

Property: wherever training's thread is interrupted (Python raises `KeyboardInterrupt` between any
two steps of the main thread), no slot is lost, and a block that it had begun fails its save at
once. What is shared is changed in an order that can be cut short and done again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from eke.checkpoint.beside import step_aside
from eke.checkpoint.desk import Desk
from eke.checkpoint.device import Issued
from eke.checkpoint.flight import Flight, Flights
from eke.checkpoint.flow import Check, Flow, More, Spot
from eke.checkpoint.work import Task


@dataclass(eq=False)
class Work:
    """What one thread is at: a block, a lane or the lanes, and the slot that it takes.

    Attributes:
        issued: what of the block a device is copying.
    """

    task: Task
    what: Spot | Check | More | None = None
    slot: int | None = None
    issued: Issued | None = None


class Copier:
    """Captures what is in flight on a desk.

    Attributes:
        flights: the blocks that are under way on a device.
        to_touch: the slots of the pool that are to be made ready while nothing is in flight.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.flights = Flights()
        self.to_touch: deque[int] = deque()
        self._at: dict[int, Work] = {}

    def help(self, task: Task, enough: Callable[[Flow], bool]) -> None:
        """Do what is due until a save is far enough, or has failed."""
        while True:
            with self._desk.turn.lock:
                if task.ticket.final or enough(task.flow):
                    return
                work = self._next()
                if work is None:
                    self._desk.pause()
                    continue
            self._do(work)

    def _next(self) -> Work | None:
        """What to copy now, marked as begun; None if nothing can be."""
        self.abandon()
        first = True  # whether all before it are committed
        for number, task in enumerate(self._desk.tasks):
            first = number == 0 or (
                first and self._desk.tasks[number - 1].ticket.state == "committed"
            )
            if task.ticket.final or task.flow.all_started:
                continue
            # From here to the end of `_settle`, whoever is interrupted is found to be at it.
            work = self._at[threading.get_ident()] = Work(task)
            if self._begin(work, first):
                return work
            del self._at[threading.get_ident()]
            return None
        return None

    def _begin(self, work: Work, first: bool) -> bool:
        """Mark what is due of a save as begun, if anything is and there is a slot for it."""
        assert self._desk.pool is not None
        flow = work.task.flow
        what = flow.next_copy(first=first)
        while isinstance(what, Check) and not first:
            flow.start_check(what.lane)  # there is nothing to compare with yet
            flow.checked(what.lane, same=False)
            what = flow.next_copy(first=False)
        if what is None:
            return False
        work.what = what
        if isinstance(what, More):
            flow.start_more()
            return True
        work.slot = self._desk.pool.take(work)
        if work.slot is None:
            return False
        if isinstance(what, Check):
            flow.start_check(what.lane)
        else:
            flow.start_copy(what)
        return True

    def abandon(self, error: BaseException | None = None) -> None:
        """Let go of what this thread was at when it was interrupted, if it was: the save fails, and
        no slot is lost. Under the lock; itself interrupted, it is done by whoever comes next."""
        work = self._at.get(threading.get_ident())
        if work is None:
            return
        assert self._desk.pool is not None
        self._desk.fail(work.task, KeyboardInterrupt() if error is None else error)
        for slot in self._desk.pool.owned(work):
            if slot in self._desk.held.values():
                continue  # it was settled, and is given back with its save
            if work.issued is None or not isinstance(work.what, Spot):
                self._desk.pool.give_back(slot)
            elif not self.flights.know(work.issued):
                self.flights.add(Flight(work.task, work.what, slot, work.issued))
        self._at.pop(threading.get_ident(), None)
        self._desk.turn.notify_all()

    def _do(self, work: Work) -> None:
        """Copy a block, look through a lane, or find out what lanes there are."""
        task, what, slot = work.task, work.what, work.slot
        assert self._desk.pool is not None
        error: Exception | None = None
        same = False
        began = time.perf_counter()
        found: tuple[Sequence[int], Collection[int], Collection[int]] = ((), (), ())
        try:
            if slot is None:
                found = task.more()
            elif isinstance(what, Check | Spot):
                self._desk.pool.pin(task.device(what.lane))
                if isinstance(what, Check):
                    same = task.same(what.lane, self._desk.pool.array(slot))
                else:
                    work.issued = task.fill(what, self._desk.pool.array(slot))
        except Exception as caught:  # noqa: BLE001 - raised where the save is waited for
            error = caught
        task.ticket.marks.captured(began, compare=isinstance(what, Check))
        with self._desk.turn.lock:
            self._desk.patience.moved()
            if error is not None and not (isinstance(what, Check) and task.flow.idle(what.lane)):
                self._desk.fail(task, error)
            if isinstance(what, More):
                task.flow.grow(*found)
            elif isinstance(what, Spot) and slot is not None:
                self._settle(task, what, slot, work.issued)
            elif slot is not None:
                self._desk.pool.give_back(slot)
            if isinstance(what, Check) and not task.ticket.final:
                task.flow.checked(what.lane, same=same)
            self._desk.note_captured(task)
            self._desk.turn.notify_all()
            del self._at[threading.get_ident()]
            work.issued = None  # it keeps tensors alive, and its slot's owner lives on

    def _settle(self, task: Task, spot: Spot, slot: int, issued: Issued | None) -> None:
        """A block is issued, or there. No slot is free while a copy may still write to it."""
        assert self._desk.pool is not None
        if issued is not None:
            self.flights.add(Flight(task, spot, slot, issued))
            task.flow.issue(spot)
        elif task.ticket.final:
            self._desk.pool.give_back(slot)
        else:
            self._desk.held[id(task), spot] = slot
            task.flow.copied(spot)

    def _land(self, flight: Flight) -> None:
        """Wait for a block that is under way. For the copier: a device may never answer."""
        failed = flight.wait()
        with self._desk.turn.lock:
            self._desk.patience.moved()
            error = self.flights.land(flight) or failed
            if error is not None:
                self._desk.fail(flight.task, error)
            self._settle(flight.task, flight.spot, flight.slot, None)
            self._desk.note_captured(flight.task)
            self._desk.turn.notify_all()

    def loop(self) -> None:
        """What the copier's thread runs."""
        step_aside()
        while True:
            with self._desk.turn.lock:
                while True:
                    work = self._next()
                    flight = self.flights.next() if work is None else None
                    if work or flight or (self._desk.stopping and not self._desk.tasks):
                        break
                    if self.to_touch and not self._desk.tasks:
                        break
                    self._desk.turn.wait()
                if work is None and flight is None and not self.to_touch:
                    return
                if work is None and flight is None:
                    self._touch()
                    continue
            if work is not None:
                try:
                    self._do(work)
                except BaseException as error:  # noqa: BLE001 - raised where the save is waited for
                    with self._desk.turn.lock:
                        self.abandon(error)
            elif flight is not None:
                self._land(flight)
            work = flight = None  # it sleeps for long, and keeps nothing alive

    def _touch(self) -> None:
        """Make one more slot's pages real. Under the lock, so that nobody takes it meanwhile."""
        slot = self.to_touch.popleft()
        if self._desk.pool is not None:
            self._desk.pool.prefault(slot)

"""What the engine's threads, and whoever waits for them, share: the saves in flight, the memory
that they go through, the failures that nobody has heard of, and the clock of progress.

All of it is used under one lock, `turn.lock`; `turn` is where to sleep until something happens.
"""

from __future__ import annotations

import logging
from collections import deque

from eke.checkpoint.flow import Spot
from eke.checkpoint.patience import Patience
from eke.checkpoint.pool import Pool
from eke.checkpoint.ticket import Ticket
from eke.checkpoint.turn import Turn
from eke.checkpoint.work import Task
from eke.errors import EkeError

log = logging.getLogger("eke.checkpoint")

_LOOK_S = 0.5
"""How often a bounded wait looks at the clock."""


class Desk:
    """One engine's.

    Args:
        patience_s: how long a save may make no progress.
        warn: log failures at once, instead of keeping them to be raised.

    Attributes:
        patience: with what is in flight.
        tasks: the saves in flight, oldest first; the first is being written.
        pool: None before it is needed.
        held: the captured blocks that are not written, (id of the task, block) -> slot.
        errors: the failed saves that nobody has heard of, oldest first.
        undecided: the save that the disk, or rank 0, is making a checkpoint: nobody here can stop
            it any more, or say that it has failed.
        stopping: whether the threads end once nothing is in flight.
    """

    def __init__(self, patience_s: float, *, warn: bool = False) -> None:
        self.patience, self._warn = Patience(patience_s), warn
        self.turn = Turn()
        self.tasks: deque[Task] = deque()
        self.pool: Pool | None = None
        self.held: dict[tuple[int, Spot], int] = {}
        self.errors: deque[Ticket] = deque()
        self.undecided: Task | None = None
        self.stopping = False

    def pause(self, most_s: float | None = None) -> None:
        """Sleep until something happens; give up on what is in flight if nothing does for long."""
        self.patience.sleep(self.turn.wait, _LOOK_S if most_s is None else min(_LOOK_S, most_s))
        if not self.tasks or not self.patience.over:
            return
        for task in self.tasks:
            known = task is not self.undecided
            error = EkeError(
                f"saving step {task.ticket.step} has made no progress for "
                f"{self.patience.most_s:g} s; it is {task.ticket.state}"
                + (f", {task.doing}" if task.doing else ""),
                rule=None
                if known
                else "it may or may not become a checkpoint when the disk answers",
                fix="See whether the disk answers and the other ranks live",
            )
            if known:
                self.fail(task, error)
            elif task.ticket.error is None:
                self._tell(task.ticket, task.failure(error))

    def fail(self, task: Task, error: BaseException) -> None:
        """A save has failed, unless it is over or the disk's to decide."""
        if task.ticket.final or task is self.undecided:
            return
        self._tell(task.ticket, task.failure(error))
        task.ticket.reach("failed")

    def _tell(self, ticket: Ticket, error: EkeError) -> None:
        """Whoever waits for a save is to hear this, or whoever calls next."""
        ticket.error = error
        if self._warn:
            log.warning("%s", error)
        elif not ticket.heard and ticket not in self.errors:
            self.errors.append(ticket)
        self.turn.notify_all()

    def end(self, task: Task, bytes_written: int, error: BaseException | None) -> None:
        """The writer is done with a save: it is committed, or has failed."""
        self.patience.moved()
        self.undecided = None
        if error is not None:
            self.fail(task, error)
        elif not task.ticket.final:
            task.ticket.bytes_written = bytes_written
            task.ticket.error = None
            if task.ticket in self.errors:
                self.errors.remove(task.ticket)  # nobody has heard that it was in doubt
            task.ticket.reach("committed")
        self.turn.notify_all()

    def forget(self, ticket: Ticket) -> None:
        """What a save failed with is being told: not again."""
        ticket.heard = True
        if ticket in self.errors:
            self.errors.remove(ticket)

    def note_captured(self, task: Task) -> None:
        """Something of a save was captured, perhaps the last."""
        if task.ticket.state == "capturing" and task.flow.all_captured:
            task.ticket.reach("captured")


class Running:
    """The save that is being written, as it tells how far it is (see `work.Progress`)."""

    def __init__(self, desk: Desk, task: Task) -> None:
        self._desk, self._task = desk, task

    def moved(self) -> None:
        """See `work.Progress`."""
        with self._desk.turn.lock:
            self._desk.patience.moved()

    def persisted(self) -> None:
        """See `work.Progress`."""
        with self._desk.turn.lock:
            self._go_on()
            self._task.ticket.reach("persisted")
            self._desk.turn.notify_all()

    def decide(self) -> None:
        """See `work.Progress`."""
        with self._desk.turn.lock:
            self._go_on()
            self._desk.undecided = self._task

    def _go_on(self) -> None:
        self._desk.patience.moved()
        if self._task.ticket.error is not None:
            raise self._task.ticket.error

"""The blocks of which copies are under way on a device: issued, and not there yet.

Property: a slot is in flight from when its block is issued until no copy can write to it any more,
whatever becomes of the save meanwhile. Not thread-safe: the engine uses it under its lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eke.checkpoint.device import Issued
from eke.checkpoint.flow import Spot
from eke.checkpoint.work import Task
from eke.errors import EkeError


@dataclass(eq=False)
class Flight:
    """A block under way.

    Attributes:
        held: whether a compute stream waits for it, so that its tensors may change for training.
    """

    task: Task
    spot: Spot
    slot: int
    issued: Issued
    held: bool = False

    def wait(self) -> Exception | None:
        """Sleep until no copy of it is under way; returns what failed. Not under the lock."""
        try:
            self.issued.wait()
        except Exception as error:  # noqa: BLE001 - the save fails with it
            return error
        return None


class Flights:
    """All of them, oldest first."""

    def __init__(self) -> None:
        self._flying: list[Flight] = []

    def __len__(self) -> int:
        return len(self._flying)

    def know(self, issued: Issued) -> bool:
        """Whether these copies are one of them."""
        return any(one.issued is issued for one in self._flying)

    def add(self, flight: Flight) -> None:
        """It is issued."""
        self._flying.append(flight)

    def next(self) -> Flight | None:
        """Which one to wait for: one that is there if possible, else the oldest."""
        done = (one for one in self._flying if one.issued.done())
        return next(done, self._flying[0]) if self._flying else None

    def land(self, flight: Flight) -> EkeError | None:
        """It has been waited for; returns how it was changed, if it was and might not be."""
        self._flying.remove(flight)
        try:
            if not flight.held:
                flight.issued.check()
        except EkeError as error:
            return error
        return None

    def hold(self, task: Task, wanted: Mapping[int, int]) -> Exception | None:
        """Let this thread's compute streams wait for the first so many blocks of a save's lanes,
        whose tensors may change from now on; returns what failed."""
        try:
            for one in self._flying:
                if one.task is task and one.spot.block < wanted.get(one.spot.lane, 0):
                    one.held = True
                    one.issued.hold()
        except Exception as error:  # noqa: BLE001 - the save fails with it
            return error
        return None

"""What the engine is asked to do: one save, as it sees it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from eke.checkpoint.device import Device, Issued
from eke.checkpoint.flow import Flow, Link, Spot
from eke.checkpoint.ticket import Ticket
from eke.errors import EkeError

Array = npt.NDArray[np.uint8]
Written = tuple[Spot, memoryview] | tuple[Link, None]


class Progress(Protocol):
    """How a task that runs says how far it is, and hears whether to go on."""

    def moved(self) -> None:
        """It waits for something that has a bound of its own."""
        ...

    def persisted(self) -> None:
        """This rank's files are written. Raises what the save has failed with meanwhile."""
        ...

    def decide(self) -> None:
        """What it does next makes it a checkpoint, and cannot be undone: from now on the save fails
        only with what `run` raises. Raises what it has failed with meanwhile: it is to go no
        further then."""
        ...


class Task(Protocol):
    """One save, as the engine sees it."""

    ticket: Ticket
    flow: Flow
    doing: str  # what its writer is at, for the error when it is at it for too long
    eager: Mapping[int, int]  # what `submit` waits for: lane -> its first so many blocks

    def more(self) -> tuple[Sequence[int], Collection[int], Collection[int]]:
        """Find out the lanes that are not known yet; returns what `Flow.grow` takes."""
        ...

    def wanted(self, storages: Collection[object] | None) -> Mapping[int, int]:
        """Lane -> how many of its first blocks hold any of these storages; None for all."""
        ...

    def device(self, lane: int) -> Device | None:
        """What some of a lane's tensors are copied by; None if they are all in host memory."""
        ...

    def fill(self, spot: Spot, slot: Array) -> Issued | None:
        """Copy a block from what is live; returns what of it is still under way, if anything.

        When it raises, nothing is.
        """
        ...

    def same(self, lane: int, scratch: Array) -> bool:
        """Whether a lane is the same as in the newest checkpoint."""
        ...

    def run(self, blocks: Iterator[Written], progress: Progress) -> int:
        """Write all blocks and commit; returns the bytes written."""
        ...

    def tidy(self) -> None:
        """Do what is left once the save is committed or failed: only the next one waits for it."""
        ...

    def failure(self, error: BaseException) -> EkeError:
        """What the user is told."""
        ...

    def release(self) -> None:
        """Let go of everything live."""
        ...

"""How a loader reaches its like on the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from eke.distributed import Channel, ranks_around, world
from eke.errors import EkeError, InputError


@runtime_checkable
class Exchange(Protocol):
    """Bytes between all ranks. Both calls are collectives, and end on every rank with an answer or
    with an `EkeError` that names the rank at fault."""

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order."""
        ...

    def swap(self, outgoing: Sequence[bytes]) -> list[bytes]:
        """What each rank gave to this one, for what this one gives to each."""
        ...

    def leave(self, why: str) -> None:
        """Make the others' next call fail with this reason. Not a collective."""
        ...


class Alone:
    """One rank."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self._left = False

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes.

        Raises:
            EkeError: after `leave`.
        """
        if self._left:
            raise EkeError("this rank has left")
        return [data]

    def swap(self, outgoing: Sequence[bytes]) -> list[bytes]:
        """The same.

        Raises:
            EkeError: after `leave`.
        """
        return self.gather(outgoing[0])

    def leave(self, why: str) -> None:
        """Nobody is there to hear it."""
        self._left = True


def exchange_of_job(patience_s: float) -> Exchange:
    """A channel of its own between the ranks of the torch.distributed job, or this process alone.

    A collective: all ranks open their loaders in the same order.

    Raises:
        InputError: the environment describes a job that this process has not joined.
        EkeError: the other ranks did not come.
    """
    here, size = world(), ranks_around()
    if size > 1 and here.size != size:
        raise InputError(
            f"there are {size} ranks (WORLD_SIZE, torch.distributed) but this process has not "
            "joined the other ranks",
            rule="alone, every rank would train on all samples",
            fix="Call eke.distributed.init() before you build the loader",
        )
    return Channel("batching", patience_s) if here.size > 1 else Alone()

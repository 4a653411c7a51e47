"""Datasets of known tokens, and several ranks simulated by threads of one process."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch

from eke.batching import Exchange
from eke.errors import EkeError


def token_item(n: int, index: int) -> dict[str, Any]:
    """Sample `index`, of n tokens; its labels begin to train somewhere that depends on `index`."""
    ids = (torch.arange(n) * 7 + index * 13) % 50
    labels = ids.clone()
    labels[: (index * 5) % (n + 1)] = -100
    return {"input_ids": ids, "labels": labels, "index": index}


class TokenDataset:
    """Item i has `lengths[i]` tokens; its labels begin to train somewhere that depends on i."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return token_item(self.lengths[index], index)


class TokenStream:
    """An iterable; sample p of its part s of S has `parts[s][p]` tokens, and number p * S + s.

    `given` are the numbers that it gave so far, to anybody in this process.
    """

    def __init__(self, *parts: Sequence[int]) -> None:
        self.numbered = [
            [(n, place * len(parts) + part) for place, n in enumerate(lengths)]
            for part, lengths in enumerate(parts)
        ]
        self.given: list[int] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for n, number in itertools.chain(*self.numbered):
            self.given.append(number)
            yield token_item(n, number)


class SeekingStream(TokenStream):
    """One that can be read in parts, and from a place on."""

    @property
    def num_shards(self) -> int:
        return len(self.numbered)

    def shard(self, num_shards: int, index: int) -> SeekingStream:
        return self._with(self.numbered[index::num_shards])

    def skip(self, n: int) -> SeekingStream:
        return self._with([list(itertools.chain(*self.numbered))[n:]])

    def _with(self, numbered: list[list[tuple[int, int]]]) -> SeekingStream:
        other = SeekingStream()
        other.numbered, other.given = numbered, self.given
        return other


class Meeting:
    """What the ranks of a `MemoryExchange` share."""

    def __init__(self, size: int, patience_s: float = 30.0) -> None:
        self.size, self.patience_s = size, patience_s
        self.turn = threading.Condition()
        self.calls: dict[int, dict[int, list[bytes]]] = {}
        self.left: dict[int, str] = {}
        self.beside: dict[int, Meeting] = {}


class MemoryExchange:
    """A rank's end of an exchange among threads: bytes are copied, as between processes."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, meeting.size
        self._call = self._others = 0

    def another(self) -> MemoryExchange:
        """One more among the same ranks, who all ask for theirs in the same order."""
        self._others += 1
        with self._meeting.turn:
            other = self._meeting.beside.setdefault(self._others, Meeting(self.size))
        return MemoryExchange(other, self.rank)

    def gather(self, data: bytes) -> list[bytes]:
        return [one[0] for one in self._all([data])]

    def swap(self, outgoing: Sequence[bytes]) -> list[bytes]:
        return [one[self.rank] for one in self._all(list(outgoing))]

    def leave(self, why: str) -> None:
        with self._meeting.turn:
            self._meeting.left.setdefault(self.rank, why)
            self._meeting.turn.notify_all()

    def _all(self, mine: list[bytes]) -> list[list[bytes]]:
        meeting = self._meeting
        self._call += 1
        with meeting.turn:
            if self.rank in meeting.left:
                raise EkeError("this rank has left")
            there = meeting.calls.setdefault(self._call, {})
            there[self.rank] = mine
            meeting.turn.notify_all()
            meeting.turn.wait_for(
                lambda: len(there) == self.size or meeting.left, timeout=meeting.patience_s
            )
            if len(there) == self.size:
                return [there[rank] for rank in range(self.size)]
            if meeting.left:
                rank, why = next(iter(meeting.left.items()))  # the others left because of it
                raise EkeError(f"rank {rank} of {self.size} has left: {why}")
            late = min(set(range(self.size)) - there.keys())
            raise EkeError(f"rank {late} of {self.size} kept the others waiting")


def _run_ranks(size: int, run: Callable[[MemoryExchange], Any]) -> list[Any]:
    """`run` on every rank; each result in rank order, or the exception that it raised."""
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, MemoryExchange(meeting, r)) for r in range(size)]
    return [future.exception() or future.result() for future in futures]


@pytest.fixture(scope="session")
def token_dataset() -> type[TokenDataset]:
    return TokenDataset


@pytest.fixture(scope="session")
def token_stream() -> type[TokenStream]:
    return TokenStream


@pytest.fixture(scope="session")
def seeking_stream() -> type[SeekingStream]:
    return SeekingStream


@pytest.fixture
def nothing_leaks() -> Iterator[None]:
    """After the test: no child process, and no descriptor more than before.

    A server that other tests start their processes from may be there before and after.
    """
    me = psutil.Process()
    gc.collect()
    before, others = me.num_fds(), set(me.children(recursive=True))
    yield
    assert set(me.children(recursive=True)) <= others
    # A queue's thread closes its end of the pipe when it gets to run.
    deadline = time.monotonic() + 30
    while me.num_fds() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert me.num_fds() <= before


@pytest.fixture(scope="session")
def run_ranks() -> Callable[[int, Callable[[Exchange], Any]], list[Any]]:
    return _run_ranks

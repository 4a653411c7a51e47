"""Datasets of known tokens, and several ranks simulated by threads of one process."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch

from eke.batching import Ranks


class TokenDataset:
    """Item i has `lengths[i]` tokens; its labels begin to train somewhere that depends on i."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        n = self.lengths[index]
        ids = (torch.arange(n) * 7 + index * 13) % 50
        labels = ids.clone()
        labels[: (index * 5) % (n + 1)] = -100
        return {"input_ids": ids, "labels": labels, "index": index}


class Exchange:
    """An all-gather among threads, with JSON on the way as between processes."""

    def __init__(self, size: int) -> None:
        self._slots = [""] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        def exchange(value: Any) -> list[Any]:
            self._slots[rank] = json.dumps(value)
            self._barrier.wait()
            values = [json.loads(slot) for slot in self._slots]
            self._barrier.wait()
            return values

        return exchange


def _run_ranks(size: int, run: Callable[[Ranks], Any]) -> list[Any]:
    """`run` on every rank; each result in rank order, or the exception that it raised."""
    exchange = Exchange(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, Ranks(r, size, exchange.of(r))) for r in range(size)]
    return [future.exception() or future.result() for future in futures]


@pytest.fixture(scope="session")
def token_dataset() -> type[TokenDataset]:
    return TokenDataset


@pytest.fixture
def nothing_leaks() -> Iterator[None]:
    """After the test: no child process, and no descriptor more than before."""
    me = psutil.Process()
    gc.collect()
    before = me.num_fds()
    yield
    assert me.children(recursive=True) == []
    # A queue's thread closes its end of the pipe when it gets to run.
    deadline = time.monotonic() + 30
    while me.num_fds() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert me.num_fds() <= before


@pytest.fixture(scope="session")
def run_ranks() -> Callable[[int, Callable[[Ranks], Any]], list[Any]]:
    return _run_ranks

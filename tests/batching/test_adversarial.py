"""Many random jobs among threads: ranks of any pace, uneven and unusable samples, data by item and
one by one, early stops, a second loader beside the first, several epochs, and a resume on another
number of ranks after each stop. Every one of them must deliver each usable sample of each epoch
exactly once."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from eke.batching import DynamicLoader, Exchange

MakeDataset = Callable[[Sequence[int]], Any]
RunRanks = Callable[[int, Callable[[Exchange], Any]], list[Any]]
CAP = 16


class Slow:
    """A rank's exchange, before whose calls it sometimes dawdles."""

    def __init__(self, exchange: Exchange, rng: random.Random) -> None:
        self.rank, self.size = exchange.rank, exchange.size
        self._exchange, self._rng = exchange, rng

    def gather(self, data: bytes) -> list[bytes]:
        self._dawdle()
        return self._exchange.gather(data)

    def swap(self, outgoing: Sequence[bytes]) -> list[bytes]:
        self._dawdle()
        return self._exchange.swap(outgoing)

    def leave(self, why: str) -> None:
        self._exchange.leave(why)

    def _dawdle(self) -> None:
        if self._rng.random() < 0.2:
            time.sleep(self._rng.random() * 0.001)


class OneByOne:
    """The same samples as an iterable, of which nobody knows how long it is."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return (self._dataset[i] for i in range(len(self._dataset)))


def lengths_of(rng: random.Random, size: int) -> list[int]:
    """Samples without tokens, too long ones, and positions that one rank's are all empty of."""
    n = rng.randint(1, 40)
    lengths = [rng.choice([0, 1, 2, 3, rng.randint(1, 16), rng.randint(1, 30)]) for _ in range(n)]
    if rng.random() < 0.3:
        for i in range(rng.randrange(size), n, size):
            lengths[i] = 0
    return lengths


def run_seed(seed: int, make_dataset: MakeDataset, run_ranks: RunRanks) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 4)
    lengths = lengths_of(rng, size)
    overlength = rng.choice(["truncate", "skip", "solo"])
    usable = [i for i, n in enumerate(lengths) if n and (n <= CAP or overlength != "skip")]
    if not usable:
        return
    epochs = rng.randint(1, 3)
    settings = {
        "micro_tokens": CAP, "overlength": overlength, "epochs": epochs,
        "per_step": rng.choice(["tokens:16", "tokens:50", "samples:1", "samples:5", "samples:64"]),
        "window": rng.randint(1, 8), "seed": seed, "shuffle": rng.random() < 0.8,
        "packing": rng.random() < 0.4, "wait_rounds": rng.randint(0, 1),
        "move_samples": rng.random() < 0.6,
    }  # fmt: skip
    dataset = make_dataset(lengths)
    if random.Random(f"stream {seed}").random() < 0.3:
        dataset = OneByOne(dataset)
    seen: Counter[tuple[int, int]] = Counter()
    state: Any = None
    for number in itertools.count():
        stage = Stage(
            dataset, settings, state, name=f"{seed}/{number}",
            stopper=rng.randrange(size), stop_at=rng.randint(0, 6) if number < 3 else None,
            lower_at=rng.choice([None, rng.randint(1, 6)]) if overlength != "skip" else None,
            second=rng.random() < 0.3, early=[rng.random() < 0.5 for _ in range(size)],
        )  # fmt: skip
        results = run_ranks(size, stage.run)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        assert all(result[1:] == results[0][1:] for result in results), "the ranks differ"
        for result in results:
            seen.update(uid for step in result[0] for uid in step)
        _, _, stopped, after, _ = results[0]
        state = json.loads(json.dumps(after))
        if not stopped:
            break
        assert stopped == ("enough" if size == 1 else f"rank {stage.stopper}: enough")
        size = rng.randint(1, 4)
    assert seen == Counter((e, i) for e in range(epochs) for i in usable)


@dataclass(frozen=True)
class Stage:
    """What a job's ranks do from one start to the next.

    Attributes:
        stopper, stop_at: the rank that wishes to stop, and after how many steps; `None` never.
        lower_at: the step that runs out of memory on all ranks.
        second: another loader is used in turns with the first.
        early: which ranks make their rounds in a thread.
    """

    dataset: Any
    settings: dict[str, Any]
    state: Any
    name: str
    stopper: int
    stop_at: int | None
    lower_at: int | None
    second: bool
    early: list[bool]

    def run(self, exchange: Any) -> Any:
        """One rank's steps, which must be the same on all but for the first of what it returns."""
        rng = random.Random(f"{self.name}/{exchange.rank}")
        loader = DynamicLoader(self.dataset, exchange=Slow(exchange, rng), **self.settings)
        loader._thread_ahead = self.early[exchange.rank]
        other = None
        if self.second:
            beside = Slow(exchange.another(), rng)
            other = DynamicLoader(self.dataset, exchange=beside, **self.settings)
        uids: list[Any] = []
        steps: list[Any] = []
        seen_beside = 0
        with loader, other or contextlib.nullcontext():
            if self.state is not None:
                loader.load_state_dict(self.state)
            others = iter(()) if other is None else other.blocks()
            for number, block in enumerate(loader.blocks()):
                if number == self.stop_at and exchange.rank == self.stopper:
                    loader.stop("enough")
                uids.append([uid for mb in block for uid in mb.uids])
                steps.append((len(block), block.position))
                seen_beside += next(others, None) is not None
                alike = len(set(self.early)) == 1
                if number == self.lower_at and loader.micro_tokens > CAP // 2 and alike:
                    uids.pop()
                    steps.pop()
                    loader.lower_cap(loader.micro_tokens - 1)
            return uids, steps, loader.stopped, loader.state_dict(), seen_beside


def run_seeds(seeds: range, make_dataset: MakeDataset, run_ranks: RunRanks) -> None:
    for seed in seeds:
        try:
            run_seed(seed, make_dataset, run_ranks)
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error


def test_200_random_jobs(token_dataset: MakeDataset, run_ranks: RunRanks) -> None:
    run_seeds(range(200), token_dataset, run_ranks)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", range(200, 10_200, 1000))
def test_10_000_random_jobs(token_dataset: MakeDataset, run_ranks: RunRanks, start: int) -> None:
    run_seeds(range(start, start + 1000), token_dataset, run_ranks)

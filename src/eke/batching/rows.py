"""A rank's samples, or those of all, as whole numbers for cutting and for packing: pure functions.

Property: numbers of samples are their places in the sequence that was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from eke.batching.packing import Packed, Shares, pack, shares_of
from eke.batching.partition import Sorted, reach_of
from eke.batching.plan import Rules, Sample


class Row(NamedTuple):
    """Samples as `partition` takes them, longest first, their numbers in this order, and how many
    tokens they have."""

    order: list[int]
    sorted: Sorted
    tokens: int

    def time(self) -> int:
        """What they take without padding."""
        return sum(self.sorted.weights) + (self.sorted.loads[-1] if self.sorted.loads else 0)


def sorted_row(samples: Sequence[Sample], rules: Rules) -> Row:
    """Samples, longest first, equal ones in their order."""
    lengths = np.array([sample.length for sample in samples], dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    lengths = lengths[order]
    caps = rules.cost.caps()
    amounts = np.zeros((len(samples), len(caps)), dtype=np.int64)
    loads: list[int] = []
    if caps and samples:
        amounts = np.array([sample.loads for sample in samples], dtype=np.int64)[order]
        extra = rules.cost.load_weights(amounts)
        loads = [0, *np.cumsum(extra).tolist()] if extra.any() else []
    reach = reach_of(lengths, rules.micro_tokens, amounts, caps)
    times = rules.cost.weights(lengths).tolist()
    return Row(order.tolist(), Sorted(times, loads, reach), int(lengths.sum()))


class Sizes(NamedTuple):
    """Samples as `packing` takes them, in their order."""

    lengths: list[int]
    times: list[int]
    loads: list[tuple[int, ...]]

    def pack(self, k: int, rules: Rules, numbers: Sequence[int], first: int = 0) -> Packed:
        """Those of these numbers in `k` micro-batches; those below `first` choose first."""
        tokens, caps = rules.micro_tokens, rules.cost.caps()
        return pack(self.lengths, self.times, numbers, k, tokens, self.loads, caps, first)

    def least(self, rules: Rules, numbers: Sequence[int], each: int) -> int:
        """How many times `each` micro-batches those of these numbers need at least."""
        if not numbers:
            return 0
        sums, counts = self._shares(rules, numbers)
        return max(-(-have // (n * each)) for have, n in sums + counts)

    def full(self, rules: Rules, numbers: Sequence[int], each: int) -> int:
        """How many times `each` micro-batches they may fill, by what they take."""
        sums, _ = self._shares(rules, numbers)
        return max(have // (n * each) for have, n in sums)

    def _shares(self, rules: Rules, numbers: Sequence[int]) -> Shares:
        return shares_of(self.lengths, numbers, rules.micro_tokens, self.loads, rules.cost.caps())

    def busiest_first(self, bins: list[list[int]]) -> list[list[int]]:
        """Micro-batches by falling time, without empty ones."""
        bins = [*filter(None, bins)]
        if not bins:
            return []
        flat = np.array([*chain.from_iterable(bins)], dtype=np.int64)
        starts = np.cumsum([0, *map(len, bins[:-1])])
        times = np.add.reduceat(np.array(self.times, dtype=np.int64)[flat], starts)
        return [bins[at] for at in np.argsort(-times, kind="stable").tolist()]


def sizes_of(samples: Sequence[Sample], rules: Rules) -> Sizes:
    """What samples take under the rules' cost model."""
    lengths = [sample.length for sample in samples]
    times = rules.cost.weights(np.array(lengths, dtype=np.int64))
    loads = [sample.loads for sample in samples] if rules.cost.loads else []
    if loads:
        times = times + rules.cost.load_weights(np.array(loads, dtype=np.int64))
    return Sizes(lengths, times.tolist(), loads)

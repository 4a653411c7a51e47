"""Cutting sorted samples into padded micro-batches: pure functions over whole numbers.

Samples are sorted, longest first, and a micro-batch is a stretch of them: its padded length is
its first sample's. Under hard caps a stretch that starts at a sample has a furthest end, its
*reach*. A stretch of B samples takes B times its first sample's weight, and the time of its loads.

Properties: `fewest` is the least number of stretches that respect the caps; `cut` is, among all
ways to cut into at most k stretches, one whose costliest stretch is cheapest; no stretch passes
its reach, and every sample is in one.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple


class Sorted(NamedTuple):
    """Samples, longest first.

    Attributes:
        weights: each one's time in a padded micro-batch of its length; falling.
        loads: the running sum of the times of the loads, starting with 0; empty if all are 0.
        reach: the end of the longest stretch from each sample that the caps allow.
    """

    weights: list[int]
    loads: list[int]
    reach: list[int]


def reach_of(
    lengths: Sequence[int], tokens: int, loads: Sequence[Sequence[int]], caps: Sequence[int]
) -> list[int]:
    """The end of the longest stretch from each sample of falling `lengths` that fits.

    What does not fit alone has a stretch of its own.

    Args:
        tokens: most padded tokens.
        loads: of each further resource, what each sample takes.
        caps: the most of each resource.
    """
    n = len(lengths)
    ends = [min(n, at + max(1, tokens // length)) for at, length in enumerate(lengths)]
    for amounts, cap in zip(loads, caps, strict=True):
        total = [0, *accumulate(amounts)]
        for at in range(n):
            fits = bisect_right(total, total[at] + cap, at + 1) - 1
            ends[at] = max(at + 1, min(ends[at], fits))
    return ends


def fewest(samples: Sorted) -> int:
    """The least number of stretches."""
    at = count = 0
    reach = samples.reach
    while at < len(reach):
        at = reach[at]
        count += 1
    return count


def cost(samples: Sorted, start: int, stop: int) -> int:
    """The time of a stretch."""
    loads = samples.loads
    extra = loads[stop] - loads[start] if loads else 0
    return (stop - start) * samples.weights[start] + extra


def cut(samples: Sorted, k: int) -> list[tuple[int, int]]:
    """Stretches, at most `k` of them, the costliest as cheap as it can be.

    Bisection on the cost of the costliest; filling each stretch as far as it goes is optimal for
    a given cost, since a stretch that starts later never has to end earlier. Then the costliest
    ones are cut in two while there are fewer than `k`.

    Args:
        k: at least `fewest(samples)`.
    """
    n = len(samples.weights)
    if n == 0:
        return []
    k = min(k, n)
    extra = samples.loads[-1] if samples.loads else 0
    low = samples.weights[0] if not extra else max(cost(samples, at, at + 1) for at in range(n))
    low = max(low, -(-(sum(samples.weights) + extra) // k))
    high = max(low, n * samples.weights[0] + extra)
    while low < high:
        middle = (low + high) // 2
        if _fits(samples, middle, k):
            high = middle
        else:
            low = middle + 1
    starts = []
    at = 0
    while at < n:
        starts.append(at)
        at = _end(samples, at, low)
    return _split([*pairwise([*starts, n])], samples, k)


def _end(samples: Sorted, at: int, most: int) -> int:
    """Where the longest stretch from `at` of at most this cost ends."""
    weights, loads, reach = samples
    if not loads:
        return min(reach[at], at + max(1, most // weights[at]))
    low, high = at + 1, reach[at]
    while low < high:
        middle = (low + high + 1) // 2
        if (middle - at) * weights[at] + loads[middle] - loads[at] <= most:
            low = middle
        else:
            high = middle - 1
    return low


def _fits(samples: Sorted, most: int, k: int) -> bool:
    """Whether `k` stretches of at most this cost hold all samples."""
    weights, loads, reach = samples
    at, n = 0, len(weights)
    if loads:
        for _ in range(k):
            at = _end(samples, at, most)
            if at >= n:
                return True
        return False
    for _ in range(k):
        # `most` is at least every weight, so a stretch is never empty.
        end = at + most // weights[at]
        at = reach[at] if reach[at] < end else end
        if at >= n:
            return True
    return False


def _split(stretches: list[tuple[int, int]], samples: Sorted, k: int) -> list[tuple[int, int]]:
    """Cut the costliest stretches in two until there are `k`."""
    if len(stretches) >= k:
        return stretches
    heap = [(-cost(samples, *one), *one) for one in stretches if one[1] - one[0] > 1]
    alone = [one for one in stretches if one[1] - one[0] == 1]
    heapq.heapify(heap)
    while heap and len(heap) + len(alone) < k:
        _, start, stop = heapq.heappop(heap)
        middle = min(
            range(start + 1, stop),
            key=lambda at: cost(samples, start, at) + cost(samples, at, stop),
        )
        for one in ((start, middle), (middle, stop)):
            if one[1] - one[0] > 1:
                heapq.heappush(heap, (-cost(samples, *one), *one))
            else:
                alone.append(one)
    return sorted([*alone, *((start, stop) for _, start, stop in heap)])

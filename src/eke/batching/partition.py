"""Cutting sorted samples into padded micro-batches: pure functions over whole numbers.

Samples are sorted, longest first, and a micro-batch is a stretch of them: its padded length is
its first sample's. Under hard caps a stretch that starts at a sample has a furthest end, its
*reach*. A stretch of B samples takes B times its first sample's weight, and the time of its loads.

Properties: `fewest` is the least number of stretches that respect the caps; `cut` is, among all
ways to cut into at most k stretches, one whose costliest stretch is cheapest; no stretch passes
its reach, and every sample is in one; `level` keeps to both, needs no more micro-steps than it
was given, and they never take longer in all.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from eke.batching.cost import Integers

_FINE = 32
"""A micro-step's length is sought to one part in so many."""


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


def reach_of(lengths: Integers, tokens: int, loads: Integers, caps: Sequence[int]) -> list[int]:
    """The end of the longest stretch from each sample of falling `lengths` that fits.

    What does not fit alone has a stretch of its own.

    Args:
        lengths: of n samples, in tokens `[n]`.
        tokens: most padded tokens.
        loads: what each sample takes of each further resource `[n, len(caps)]`.
        caps: the most of each resource.
    """
    n = len(lengths)
    ends = np.arange(n) + np.maximum(1, tokens // lengths)
    for column, cap in enumerate(caps):
        total = np.cumsum(loads[:, column])
        before = total - loads[:, column]
        cap = min(cap, int(total[-1]) if n else 0)  # a cap may be larger than any whole number
        ends = np.minimum(ends, np.searchsorted(total, before + cap, side="right"))
    found: list[int] = np.clip(ends, np.arange(1, n + 1), n).tolist()
    return found


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
    # It is seldom far above this bound, so look near it before bisecting.
    pace = max(1, low >> 6)
    while not _fits(samples, low + pace, k):
        low += pace + 1
        pace *= 2
    high = low + pace
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


def level(samples: Sorted, stretches: list[tuple[int, int]], ranks: int) -> list[tuple[int, int]]:
    """Other stretches, whose micro-steps take less time in all if any are found.

    Stretches are dealt to micro-steps of `ranks` ranks costliest first, and a micro-step lasts as
    long as its slowest rank. Equal stretches are not best: where one sample is very long, one long
    micro-step that all ranks fill and some short ones are. So each micro-step in turn is made as
    short as it can be, by bisection, while all others keep their length; whether the samples fit
    then is tried by giving each next sample's stretch to the length that it fills best.

    Returns:
        Stretches, costliest first, in at most as many micro-steps.
    """
    best, lasts = costliest_first(samples, stretches, ranks)
    least = sum(lasts)
    real = -(-(sum(samples.weights) + (samples.loads[-1] if samples.loads else 0)) // ranks)
    at = 0
    while at < len(lasts):
        # Without padding at all, it would still have to take what the others cannot.
        low = max(samples.weights[-1], real - sum(lasts) + lasts[at]) - 1
        high = lasts[at]
        fine = max(1, high // _FINE)
        while high - low > fine:
            middle = (low + high) // 2
            found = _cover(samples, [*lasts[:at], middle, *lasts[at + 1 :]], ranks)
            if found is None:
                low = middle
                continue
            high = middle
            found, times = costliest_first(samples, found, ranks)
            if sum(times) < least:
                best, least = found, sum(times)
        lasts = [cost(samples, *one) for one in best[::ranks]]
        at += 1
    return best


def costliest_first(
    samples: Sorted, stretches: list[tuple[int, int]], ranks: int
) -> tuple[list[tuple[int, int]], list[int]]:
    """Stretches in the order in which they are dealt, and how long each micro-step lasts."""
    pairs = sorted([(-cost(samples, *one), one) for one in stretches])
    return [one for _, one in pairs], [-time for time, _ in pairs[::ranks]]


def _cover(samples: Sorted, lasts: list[int], ranks: int) -> list[tuple[int, int]] | None:
    """Stretches that fit `ranks` times into each of these times, if this finds any."""
    weights, loads, reach = samples
    n = len(weights)
    times = sorted(set(lasts), reverse=True)
    free = [ranks * lasts.count(time) for time in times]
    found = []
    at = 0
    while at < n:
        chosen, size, value = -1, 0, 0
        weight, most = weights[at], reach[at] - at
        for number, time in enumerate(times):
            if loads:
                count = _end(samples, at, time) - at
                used = count * weight + loads[at + count] - loads[at]
                if used > time:
                    continue
            else:
                count = time // weight
                if count > most:
                    count = most
                used = count * weight
            # Of those that it fills alike, the shortest.
            if count and used * times[chosen] >= value * time:
                chosen, size, value = number, count, used
        if chosen < 0:
            return None
        found.append((at, at + size))
        at += size
        free[chosen] -= 1
        if not free[chosen]:
            del free[chosen], times[chosen]
    return found


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
        weights = samples.weights
        first = weights[start]
        # The loads come to the same wherever it is cut.
        halves = [(at - start) * first + (stop - at) * weights[at] for at in range(start + 1, stop)]
        middle = start + 1 + halves.index(min(halves))
        for one in ((start, middle), (middle, stop)):
            if one[1] - one[0] > 1:
                heapq.heappush(heap, (-cost(samples, *one), *one))
            else:
                alone.append(one)
    return sorted([*alone, *((start, stop) for _, start, stop in heap)])

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eke.batching.partition import Sorted, cost, costliest_first, cut, fewest, level, reach_of

TOKENS, CAP = 64, 20
Stretches = list[tuple[int, int]]


@st.composite
def samples(draw: st.DrawFn, most: int = 8) -> tuple[list[int], list[int], Sorted]:
    """Lengths, loads, and both as sorted samples; some have no loads, some loads that take time."""
    lengths = sorted(draw(st.lists(st.integers(1, 70), min_size=1, max_size=most)), reverse=True)
    n = len(lengths)
    loads = draw(st.just([0] * n) | st.lists(st.integers(0, 25), min_size=n, max_size=n))
    columns = np.array(loads, dtype=np.int64)[:, None]
    reach = reach_of(np.array(lengths, dtype=np.int64), TOKENS, columns, [CAP])
    time = draw(st.integers(0, 3))
    times = [0, *np.cumsum(np.array(loads) * time).tolist()] if time and any(loads) else []
    return lengths, loads, Sorted(lengths, times, reach)


def _of(lengths: list[int], tokens: int) -> Sorted:
    none = np.zeros((len(lengths), 0), dtype=np.int64)
    return Sorted(lengths, [], reach_of(np.array(lengths, dtype=np.int64), tokens, none, []))


def _all(n: int, k: int) -> list[Stretches]:
    return [list(zip((0, *c), (*c, n), strict=True)) for c in combinations(range(1, n), k - 1)]


def _fits(lengths: list[int], loads: list[int], stretches: Stretches) -> bool:
    return all(
        b - a == 1 or ((b - a) * lengths[a] <= TOKENS and sum(loads[a:b]) <= CAP)
        for a, b in stretches
    )


def _slowest(given: Sorted, stretches: Stretches, ranks: int) -> int:
    return sum(sorted((cost(given, a, b) for a, b in stretches), reverse=True)[::ranks])


@settings(max_examples=200)
@given(samples())
def test_fewest_and_cut_equal_brute_force(case: tuple[list[int], list[int], Sorted]) -> None:
    lengths, loads, given_ = case
    n = len(lengths)
    feasible = {k: [c for c in _all(n, k) if _fits(lengths, loads, c)] for k in range(1, n + 1)}
    least = min(k for k, cuts in feasible.items() if cuts)
    assert fewest(given_) == least
    for k in range(least, n + 3):
        found = cut(given_, k)
        assert len(found) == min(k, n), "as many as were asked for"
        assert found in _all(n, len(found)), "in order, and every sample in one"
        assert _fits(lengths, loads, found)
        best = min(
            max(cost(given_, *one) for one in c)
            for j in range(1, min(k, n) + 1)
            for c in feasible[j]
        )
        assert max(cost(given_, *one) for one in found) == best


@settings(max_examples=200)
@given(samples(12), st.integers(1, 4), st.integers(0, 6))
def test_levelling_keeps_the_caps_and_never_takes_longer(
    case: tuple[list[int], list[int], Sorted], ranks: int, more: int
) -> None:
    lengths, loads, given_ = case
    before = cut(given_, fewest(given_) + more)
    found = level(given_, before, ranks)
    assert sorted(found) in _all(len(lengths), len(found)), "every sample in one"
    assert _fits(lengths, loads, found)
    assert -(-len(found) // ranks) <= -(-len(before) // ranks)
    assert _slowest(given_, found, ranks) <= _slowest(given_, before, ranks)
    assert (found, [cost(given_, *one) for one in found[::ranks]]) == costliest_first(
        given_, found, ranks
    )


def test_levelling_is_near_the_best_there_is() -> None:
    """Within 2 % on average of the best of all ways to cut; without levelling it is 4 %."""
    ratios = []
    for seed in range(300):
        order = random.Random(seed)
        n, ranks = order.randint(1, 8), order.randint(2, 3)
        lengths = sorted((order.randint(1, order.choice([15, 70])) for _ in range(n)), reverse=True)
        given_ = _of(lengths, TOKENS)
        most = -(-fewest(given_) // ranks) * ranks + order.choice([0, ranks])
        found = level(given_, cut(given_, most), ranks)
        cuts = (c for k in range(1, min(n, most) + 1) for c in _all(n, k))
        best = min(_slowest(given_, c, ranks) for c in cuts if _fits(lengths, [0] * n, c))
        ratios.append(_slowest(given_, found, ranks) / best)
    assert min(ratios) >= 1
    assert max(ratios) <= 1.5
    assert sum(ratios) / len(ratios) <= 1.02


def test_one_very_long_sample_does_not_make_every_micro_step_long() -> None:
    given_ = _of([100, 50, 50, *[10] * 12], 100)
    even = cut(given_, 4)
    assert _slowest(given_, even, 2) == 200
    assert _slowest(given_, level(given_, even, 2), 2) == 160, "nothing is padded"


def test_no_samples_make_no_stretches() -> None:
    nothing = _of([], 9)
    assert cut(nothing, 3) == []
    assert fewest(nothing) == 0

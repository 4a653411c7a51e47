from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.batching import packing
from eke.batching.packing import Packed, fill, pack, shares_of

TOKENS, CAPS = 64, (20, 9)


@st.composite
def samples(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, ...]]]:
    """Lengths, and loads of two resources or of none; some exceed a cap alone."""
    lengths = draw(st.lists(st.integers(1, 30) | st.integers(60, 70), max_size=25))
    n = len(lengths)
    load = st.tuples(st.integers(0, 22), st.integers(0, 10))
    loads = draw(st.just([]) | st.lists(load, min_size=n, max_size=n))
    return lengths, loads


@given(samples(), st.integers(1, 30))
def test_caps_are_strict_and_every_sample_is_in_one_micro_batch_or_left(
    case: tuple[list[int], list[tuple[int, ...]]], k: int
) -> None:
    lengths, loads = case
    numbers = range(0, len(lengths), 2) if k % 2 else range(len(lengths))
    bins, left, room = pack(lengths, lengths, numbers, k, TOKENS, loads, CAPS)
    assert len(bins) == k
    assert sorted([n for one in bins for n in one] + left) == list(numbers)
    for one in bins:
        sizes = [lengths[n] for n in one]
        assert sizes == sorted(sizes, reverse=True)
        assert room[bins.index(one)] == TOKENS - sum(sizes)
        if len(one) > 1:
            assert sum(sizes) <= TOKENS
            for column, cap in enumerate(CAPS if loads else ()):
                assert sum(loads[n][column] for n in one) <= cap
    if k >= len(numbers):
        assert not left
    assert not left or all(bins), "nothing is left beside an empty micro-batch"


@given(samples())
def test_fewer_micro_batches_than_any_share_says_leave_something(
    case: tuple[list[int], list[tuple[int, ...]]],
) -> None:
    lengths, loads = case
    sums, counts = shares_of(lengths, range(len(lengths)), TOKENS, loads, CAPS)
    least = max(-(-have // n) for have, n in sums + counts)
    assert bool(least) == bool(lengths)
    for k in range(1, least):
        assert pack(lengths, lengths, range(len(lengths)), k, TOKENS, loads, CAPS).left


def test_a_load_that_no_cap_holds_takes_a_micro_batch_before_short_ones_spread() -> None:
    loads = [(1, 1)] * 30 + [(CAPS[0] + 1, 0)]
    bins, left, _ = pack([4] * 30 + [1], [4] * 30 + [1], range(31), 4, TOKENS, loads, CAPS)
    assert [30] in bins
    assert len(left) == 30 - 3 * CAPS[1]


@given(samples(), st.integers(1, 8))
def test_what_is_left_fits_nowhere(case: tuple[list[int], list[tuple[int, ...]]], k: int) -> None:
    lengths, _ = case
    bins, left, _ = pack(lengths, lengths, range(len(lengths)), k, TOKENS)
    for number in left:
        assert all(sum(lengths[n] for n in one) + lengths[number] > TOKENS for one in bins)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 8))
def test_where_nothing_is_near_a_cap_times_differ_by_a_sample_at_most(
    lengths: list[int], k: int
) -> None:
    times = [n * n for n in lengths]
    bins, left, _ = pack(lengths, times, range(len(lengths)), k, 1000)
    loads = [sum(times[n] for n in one) for one in bins]
    assert not left
    assert max(loads) - min(loads) <= max(times)


@given(st.lists(st.integers(1, 70), max_size=25), st.integers(1, 5), st.integers(0, 25))
def test_filling_loses_nothing_keeps_the_cap_and_what_must_stay(
    lengths: list[int], k: int, must: int
) -> None:
    packed = pack(lengths, lengths, range(0, len(lengths), 2), k, TOKENS)
    bins, left, _ = packed
    before = [sum(lengths[n] for n in one) for one in bins]
    had = {n for one in bins for n in one}
    spare = [*left, *range(1, len(lengths), 2)]
    rest = fill(packed, spare, lengths, must)
    assert sorted([n for one in bins for n in one] + rest) == list(range(len(lengths)))
    assert not {n for n in had if n < must} & set(rest)
    for one, tokens in zip(bins, before, strict=True):
        now = sum(lengths[n] for n in one)
        assert tokens <= now <= max(TOKENS, tokens)
        assert len(one) == 1 or now <= TOKENS
        assert [lengths[n] for n in one] == sorted((lengths[n] for n in one), reverse=True)
    assert packed.room == [TOKENS - sum(lengths[n] for n in one) for one in bins]


def test_filling_adds_what_fits_and_exchanges_for_what_leaves_least_room() -> None:
    lengths = [30, 20, 9, 21, 12]
    packed = Packed([[0, 1]], [], [14])
    assert fill(packed, [2, 3, 4], lengths, 0) == [2, 1]
    assert packed == Packed([[0, 3, 4]], [], [1])
    packed = Packed([[0, 1]], [], [14])
    assert fill(packed, [2, 3, 4], lengths, 2) == [2, 3]
    assert packed.bins == [[0, 1, 4]], "the exchange would put one off that must not wait"


@given(st.lists(st.integers(1, 70), max_size=60), st.integers(1, 12), st.integers(0, 30))
def test_many_at_a_time_are_packed_as_one_at_a_time(lengths: list[int], k: int, first: int) -> None:
    times = [n + n * n // 16 for n in lengths]
    found = []
    for many in (1, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packing, "MANY", many)
            found.append(pack(lengths, times, range(len(lengths)), k, TOKENS, first=first))
    assert found[0] == found[1]


def _one_at_a_time(
    lengths: list[int], times: list[int], k: int
) -> tuple[list[list[int]], set[int]]:
    """The rule itself, without any haste."""
    bins: list[list[int]] = [[] for _ in range(k)]
    left = set()
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        room = [TOKENS - sum(lengths[n] for n in one) for one in bins]
        spent = [sum(times[n] for n in one) for one in bins]
        at = spent.index(min(spent))
        if lengths[number] > room[at]:
            fits = [free for free in room if free >= lengths[number]]
            if lengths[number] > TOKENS:
                fits = [free for free in room if free == TOKENS]
            if not fits:
                left.add(number)
                continue
            at = room.index(min(fits))
        bins[at].append(number)
    return bins, left


@given(st.lists(st.integers(1, 70), max_size=60), st.integers(1, 12))
def test_the_least_busy_is_first_and_the_fullest_second(lengths: list[int], k: int) -> None:
    times = [n + n * n // 16 for n in lengths]
    bins, left, _ = pack(lengths, times, range(len(lengths)), k, TOKENS)
    assert (bins, set(left)) == _one_at_a_time(lengths, times, k)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 40))
def test_what_must_not_be_left_has_the_first_choice(lengths: list[int], first: int) -> None:
    numbers = range(len(lengths))
    k = max(1, sum(lengths) // TOKENS)
    left = pack(lengths, lengths, numbers, k, TOKENS, first=first).left
    alone = pack(lengths, lengths, numbers[:first], k, TOKENS).left
    assert {n for n in left if n < first} == set(alone), "the others take nothing from them"

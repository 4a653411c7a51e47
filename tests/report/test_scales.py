from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eke.report.scales import (
    Scale,
    linear_ticks,
    log_ticks,
    quantile_along,
    smooth,
    thin,
    widen,
)

number = st.floats(-1e100, 1e100)
positive = st.floats(1e-90, 1e100)


@given(number, number, st.integers(1, 12))
@example(0.0, 1.0, 5)
@example(2.6400, 2.6401, 6)
def test_linear_ticks_ascend_inside_the_range_at_round_values(
    a: float, b: float, about: int
) -> None:
    low, high = widen(min(a, b), max(a, b))
    ticks = linear_ticks(low, high, about)
    assert all(low <= t <= high for t in ticks)
    assert ticks == sorted(set(ticks))
    assert len(ticks) <= 4 * about + 1
    if len(ticks) > 1 and (high - low) > 1e-6 * max(abs(low), abs(high)):
        step = ticks[1] - ticks[0]
        digit = step / 10 ** math.floor(math.log10(step) + 1e-9)
        assert min(abs(digit - m) for m in (1, 2, 5, 10)) < 1e-3


def test_linear_ticks_are_what_a_person_would_write() -> None:
    assert linear_ticks(0, 100, 5) == [0, 20, 40, 60, 80, 100]
    assert linear_ticks(2.3, 6.7, 5) == [3, 4, 5, 6]
    assert linear_ticks(-1, 1, 4) == [-1, -0.5, 0, 0.5, 1]
    assert linear_ticks(3, 3) == []


@given(positive, positive, st.integers(2, 10))
def test_log_ticks_ascend_inside_the_range(a: float, b: float, about: int) -> None:
    low, high = widen(min(a, b), max(a, b))
    if low <= 0:
        return
    ticks = log_ticks(low, high, about)
    assert ticks == sorted(ticks)
    assert all(low <= t <= high for t in ticks)
    assert len(ticks) <= 4 * about + 1


def test_log_ticks_thin_many_decades_and_refine_few() -> None:
    assert log_ticks(1e12, 1e15) == [1e12, 1e13, 1e14, 1e15]
    assert log_ticks(1, 1e12, 6) == [1, 1e3, 1e6, 1e9, 1e12]
    assert log_ticks(1.5e12, 4e13) == [2e12, 5e12, 1e13, 2e13]
    assert len(log_ticks(1.2e12, 1.3e12)) >= 2
    assert log_ticks(0, 5) == []


@given(positive, positive, st.lists(number, min_size=2), st.booleans())
def test_a_scale_is_monotone_and_stays_in_its_range(
    a: float, b: float, values: list[float], log: bool
) -> None:
    low, high = widen(min(a, b), max(a, b))
    if log and low <= 0:
        return
    scale = Scale(low, high, 10.0, 110.0, log=log)
    pixels = [scale(v) for v in sorted(values)]
    assert all(10 <= p <= 110 for p in pixels)
    assert pixels == sorted(pixels)
    assert scale(low) == pytest.approx(10)
    assert scale(high) == pytest.approx(110)


def test_a_scale_without_a_range_is_refused() -> None:
    with pytest.raises(ValueError, match="low < high"):
        Scale(1, 1, 0, 1)
    with pytest.raises(ValueError, match="log"):
        Scale(0, 1, 0, 1, log=True)


@given(st.lists(st.tuples(st.floats(0, 1e6), number), max_size=400).map(sorted), st.integers(4, 60))
def test_thinning_keeps_the_extremes_and_the_order(
    points: list[tuple[float, float]], limit: int
) -> None:
    thinned = thin(points, limit)
    assert len(thinned) <= limit
    remaining = iter(points)
    assert all(any(p == q for q in remaining) for p in thinned)  # a subsequence
    if points:
        ys, thin_ys = [y for _, y in points], [y for _, y in thinned]
        assert (min(thin_ys), max(thin_ys)) == (min(ys), max(ys))
    if len(points) <= limit:
        assert thinned == points


def test_thinning_along_a_log_axis_keeps_the_first_decades() -> None:
    points = [(float(x), 1.0 / x) for x in range(1, 100_001)]
    thinned = thin(points, 2000, math.log)
    assert len(thinned) <= 2000
    assert sum(x < 100 for x, _ in thinned) >= 90
    assert sum(x < 100 for x, _ in thin(points, 2000)) <= 4


@given(st.lists(number, max_size=200), st.integers(0, 40))
def test_smoothing_stays_between_the_extremes(values: list[float], half: int) -> None:
    means = smooth(values, half)
    assert len(means) == len(values)
    assert all(min(values) <= m <= max(values) for m in means)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=60), st.integers(1, 9))
def test_smoothing_is_the_mean_of_its_window(values: list[float], half: int) -> None:
    for i, mean in enumerate(smooth(values, half)):
        left, right = min(half, i // 2), min(half, i // 2, len(values) - 1 - i)
        window = values[i - left : i + right + 1]
        assert mean == pytest.approx(sum(window) / len(window), abs=1e-9)


@given(st.lists(st.tuples(st.integers(0, 50), number), min_size=1).map(sorted), st.floats(0, 1))
def test_a_quantile_along_the_axis_covers_its_share(
    rows: list[tuple[int, float]], q: float
) -> None:
    points = [(float(x), y) for x, y in rows]
    found = quantile_along(points, q)
    assert found in [y for _, y in points]
    xs = [x for x, _ in points]
    width = (
        [b - a for a, b in zip([xs[0], *xs[:-1]], [*xs[1:], xs[-1]], strict=True)]
        if xs[0] < xs[-1]
        else [1.0] * len(xs)
    )
    below = sum(w for w, (_, y) in zip(width, points, strict=True) if y <= found)
    strictly = sum(w for w, (_, y) in zip(width, points, strict=True) if y < found)
    assert below >= q * sum(width) - 1e-9
    assert strictly <= q * sum(width) + 1e-9


def test_the_first_steps_weigh_what_they_are_wide_on_a_log_axis() -> None:
    points = [(float(x), 100.0 / x) for x in range(1, 10_001)]
    assert quantile_along(points, 0.99, math.log) == 100.0
    assert quantile_along(points, 0.99) < 2.0


@given(number, number)
def test_a_widened_range_is_never_empty(a: float, b: float) -> None:
    low, high = widen(min(a, b), max(a, b))
    assert low < high
    assert low <= min(a, b)
    assert high >= max(a, b)

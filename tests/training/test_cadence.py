"""How often to save: against trying other intervals, and the floors."""

from __future__ import annotations

import math
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.training.cadence import (
    BACKGROUND_SHARE,
    EAGER_S,
    LEAST_S,
    MOST_SHARE,
    WHY,
    SlowDown,
    auto_interval,
    expected_save,
)

costs = st.floats(0, 600)


@given(costs, costs, st.floats(0, 600), st.floats(60, 1e7))
def test_the_interval_loses_least_of_those_that_are_allowed(
    stall_s: float, background_s: float, save_s: float, mtbf_s: float
) -> None:
    found = auto_interval(stall_s, mtbf_s, background_s=background_s, save_s=save_s)
    cost_s = stall_s + background_s

    def allowed(interval_s: float) -> bool:
        slack = interval_s * (1 + 1e-9)
        return (
            slack >= LEAST_S and cost_s <= MOST_SHARE * slack and save_s <= BACKGROUND_SHARE * slack
        )

    def lost_share(interval_s: float) -> float:
        return cost_s / interval_s + interval_s / (2 * mtbf_s)

    assert allowed(found.seconds)
    others = [found.seconds * f for f in (0.2, 0.5, 0.8, 0.95, 1.05, 1.25, 2, 5)]
    assert all(
        lost_share(found.seconds) <= lost_share(other) * (1 + 1e-9)
        for other in others
        if allowed(other)
    )
    assert found.share <= MOST_SHARE * (1 + 1e-9)
    assert found.why in WHY
    young_s = math.sqrt(2 * cost_s * mtbf_s)
    assert (found.why == "failures") == (found.seconds == young_s)


@given(costs, costs, st.floats(60, 1e7), st.floats(1, 10))
def test_dearer_saves_and_rarer_failures_never_come_more_often(
    stall_s: float, save_s: float, mtbf_s: float, more: float
) -> None:
    least = auto_interval(stall_s, mtbf_s, save_s=save_s).seconds
    assert auto_interval(stall_s * more, mtbf_s, save_s=save_s).seconds >= least
    assert auto_interval(stall_s, mtbf_s * more, save_s=save_s).seconds >= least
    assert auto_interval(stall_s, mtbf_s, save_s=save_s, background_s=more).seconds >= least


steps = st.lists(st.tuples(st.floats(0.01, 10), st.floats(1e3, 1e9)), max_size=12)


@given(steps, steps, st.floats(1, 3))
def test_the_slow_down_is_what_steps_took_beyond_the_calm_pace(
    calm: list[tuple[float, float]], during: list[tuple[float, float]], slower: float
) -> None:
    watch = SlowDown()
    for seconds, flops in calm:
        watch.step(seconds, flops)
    watch.began()
    for _, flops in during:
        pace = median(s / f for s, f in calm) if calm else 1.0
        watch.step(pace * flops * slower, flops)
    watch.ended()
    if not calm or not during:
        assert watch.background_s == 0
        return
    pace = median(s / f for s, f in calm)
    extra = pace * sum(f for _, f in during) * (slower - 1)
    assert watch.background_s == pytest.approx(extra, rel=1e-6, abs=1e-9 * pace * 1e10)


@given(st.integers(0, 10**13), st.integers(1, 10**10), st.floats(0, 1e4), st.floats(0, 1e4))
def test_longer_steps_and_larger_pools_never_stall_more(
    state: int, pool: int, step_s: float, more_s: float
) -> None:
    stall_s, save_s = expected_save(state, pool, step_s)
    assert stall_s is not None
    assert EAGER_S <= stall_s <= save_s + 1e-9 or state == 0
    assert (expected_save(state, pool, step_s + more_s)[0] or 0) <= stall_s
    assert (expected_save(state, pool * 2, step_s)[0] or 0) <= stall_s + 1e-9
    assert expected_save(state, pool, None) == (None, save_s)

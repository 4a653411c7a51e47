"""The cadence: within its share of the budget, and dense enough for the rule's window."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.errors import InputError
from eke.governor import Rule, eval_interval
from eke.governor.pacing import points_in_window

HORIZON = 1000.0
COSTS = st.floats(0, 50)
STEPS = st.one_of(st.none(), st.floats(0.01, 300))


def evaluation_costs(interval):
    """Where evaluations fall, one by one: before the first step, then before the end."""
    count = 0
    while count * interval < HORIZON * (1 - 1e-9):
        yield count * interval
        count += 1


@given(COSTS, STEPS, st.sampled_from([0.01, 0.03, 0.2]))
def test_it_stays_within_its_share(eval_cost, step_cost, share):
    pace = eval_interval(eval_cost, HORIZON, share, step_cost=step_cost)
    count = len(list(evaluation_costs(pace.interval))) + 1  # and the finished model
    assert pace.evaluations == count
    assert pace.share == pytest.approx(count * eval_cost / HORIZON)
    fits = 2 * eval_cost <= share * HORIZON
    assert not fits or pace.share <= share * (1 + 1e-9)
    assert fits or (count == 2 and not pace.enough and "hold out fewer" in pace.reason)


@given(COSTS, STEPS, st.integers(3, 8))
def test_enough_means_enough_at_every_evaluation_that_may_decide(eval_cost, step_cost, points):
    pace = eval_interval(eval_cost, HORIZON, step_cost=step_cost, window_points=points)
    costs = list(evaluation_costs(pace.interval))
    seen = [
        sum(max(t * 0.5, 0.1 * HORIZON) * (1 - 1e-9) <= c <= t for c in costs)
        for t in costs
        if 0.4 * HORIZON * (1 - 1e-9) <= t <= 0.9 * HORIZON
    ]
    if pace.enough:
        assert all(count >= points for count in seen)
    if seen:
        assert seen[0] == pace.window_points
        assert pace.enough == (seen[0] >= points)


@given(COSTS, st.floats(0.01, 300))
def test_intervals_are_whole_steps(eval_cost, step_cost):
    pace = eval_interval(eval_cost, HORIZON, step_cost=step_cost)
    assert pace.interval_steps is not None
    assert pace.interval_steps >= 1
    assert pace.interval == pace.interval_steps * step_cost


def test_a_cheap_evaluation_is_made_as_often_as_the_rule_was_measured_with():
    pace = eval_interval(0.1, HORIZON)
    assert (pace.interval, pace.interval_steps, pace.evaluations) == (25.0, None, 41)
    assert pace.enough
    assert pace.share == pytest.approx(0.0041)
    assert eval_interval(0.0, HORIZON).interval == 25.0


def test_a_dear_evaluation_is_made_less_often():
    pace = eval_interval(2.0, HORIZON, step_cost=0.5)
    assert pace.evaluations == 15  # 30 units are allowed
    assert pace.interval_steps == math.ceil(1000 / 14 / 0.5)
    assert pace.enough


def test_it_says_when_its_share_is_too_small():
    pace = eval_interval(5.0, HORIZON)
    assert not pace.enough
    assert pace.evaluations == 6
    assert pace.reason == (
        "3.0% of the budget pays for 6 evaluations, which leave 2 of the 4 that the rule needs "
        "by 40% of the budget: hold out fewer examples, or allow evaluation a larger share."
    )
    assert "too few steps" in eval_interval(0.1, HORIZON, step_cost=200.0).reason
    assert "Even 2 evaluations take 8.0%" in eval_interval(40.0, HORIZON).reason


def test_immunity_after_the_start_narrows_the_window():
    assert points_in_window(50.0, HORIZON, at=0.4, rule=Rule()) == 5
    assert points_in_window(50.0, HORIZON, at=0.4, rule=Rule(immunity=0.3)) == 3


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("eval_cost", {"eval_cost": -1.0}),
        ("eval_cost", {"eval_cost": math.nan}),
        ("horizon", {"horizon": 0.0}),
        ("share", {"share": 0.0}),
        ("share", {"share": 1.0}),
        ("step_cost", {"step_cost": 0.0}),
        ("min_evaluations", {"min_evaluations": 1}),
        ("window_points", {"window_points": 2}),
        ("decisive_from", {"decisive_from": 1.0}),
    ],
)
def test_bad_input_is_named(name, arguments):
    with pytest.raises(InputError, match=f"{name} is out of bounds"):
        eval_interval(**{"eval_cost": 1.0, "horizon": HORIZON, **arguments})

"""Bad evaluations, events and constants are refused with one clear error; bad losses are not."""

from __future__ import annotations

import math

import pytest

from eke.errors import InputError
from eke.governor import Evaluation, Event, Rule
from eke.governor.records import MAX_LOSS


@pytest.mark.parametrize(
    ("step", "cost", "losses", "says"),
    [
        (-1, 1.0, (1.0, 1.0), "step"),
        (1.5, 1.0, (1.0, 1.0), "step"),
        (True, 1.0, (1.0, 1.0), "step"),
        (1, -0.1, (1.0, 1.0), "cost"),
        (1, math.nan, (1.0, 1.0), "cost"),
        (1, math.inf, (1.0, 1.0), "cost"),
        (1, 1.0, (), "two held-out examples"),
        (1, 1.0, (1.0,), "two held-out examples"),
        (1, 1.0, (1.0, -0.5), "negative"),
        (1, 1.0, (1.0, -math.inf), "negative"),
    ],
)
def test_a_bad_evaluation_is_refused(step, cost, losses, says):
    with pytest.raises(InputError, match=says):
        Evaluation(step, cost, losses)


@pytest.mark.parametrize("bad", [math.nan, math.inf, MAX_LOSS * 2])
def test_a_loss_that_is_not_finite_is_a_fact_and_no_error(bad):
    assert not Evaluation(1, 1.0, (1.0, bad)).finite
    assert Evaluation(1, 1.0, (1.0, MAX_LOSS)).finite


def test_the_loss_is_the_mean_over_examples():
    assert Evaluation(1, 1.0, (1.0, 2.0, 6.0)).loss == 3.0


def test_a_bad_event_is_refused():
    with pytest.raises(InputError, match="unknown kind of event"):
        Event(1.0, "lunch")
    with pytest.raises(InputError, match="cost"):
        Event(math.nan, "restart")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epsilon", 0.0),
        ("epsilon", 1.0),
        ("epsilon", math.nan),
        ("breaches", 0),
        ("breaches", 1.5),
        ("window", 1.0),
        ("window_points", 2),
        ("immunity", -0.1),
        ("immunity", 1.0),
        ("reserve", 1.0),
        ("harm_se", -1.0),
        ("harm_se", math.inf),
        ("harm_share", 1.0),
        ("harm_rises", 0),
        ("bigram_factor", 0.0),
        ("bigram_factor", 1.1),
        ("min_gain", -1.0),
        ("min_gain", math.nan),
    ],
)
def test_a_constant_out_of_bounds_is_named(name, value):
    with pytest.raises(InputError, match=f"the governor's {name} is out of bounds"):
        Rule(**{name: value})


def test_the_defaults_are_the_measured_constants():
    rule = Rule()
    assert (rule.epsilon, rule.breaches, rule.immunity, rule.reserve) == (0.015, 2, 0.10, 0.10)
    assert (rule.harm_se, rule.harm_share, rule.harm_rises) == (2.0, 0.005, 3)
    assert (rule.bigram_factor, rule.min_gain, rule.usable) == (0.97, None, 0.9)

"""Quantiles against numpy's, and the properties of the order of measurements."""

import numpy as np
import pytest
from benchmarks.stats import enough_time, quantile, schedule, summary
from hypothesis import given
from hypothesis import strategies as st

FINITE = st.lists(st.integers(-999, 999).map(lambda n: n / 7), min_size=1, max_size=9)
SHARES = st.integers(0, 64).map(lambda n: n / 64)


@given(FINITE, SHARES)
def test_a_quantile_is_numpys(values, q):
    assert quantile(values, q) == pytest.approx(float(np.quantile(values, q)), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(("values", "q"), [([], 0.5), ([1.0], -0.1), ([1.0], 1.1)])
def test_what_has_no_quantile(values, q):
    with pytest.raises(ValueError, match="a quantile needs"):
        quantile(values, q)


@given(FINITE)
def test_a_summary_is_in_order(values):
    s = summary(values)
    assert s["n"] == len(values)
    # Interpolation between two floats may round one ulp past its neighbour.
    ranked = [s[key] for key in ("min", "p25", "median", "p75", "p95", "max")]
    assert ranked == pytest.approx(sorted(ranked))
    assert (s["min"], s["max"]) == (min(values), max(values))


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 6)), st.integers(0, 99))
def test_every_arm_comes_as_often_as_it_should_and_once_a_round(times, seed):
    last = set("abc")
    rounds = schedule(times, seed, last)
    for arms in rounds:
        assert len(set(arms)) == len(arms)
    everything = [arm for arms in rounds for arm in arms]
    assert {arm: everything.count(arm) for arm in times} == times
    assert schedule(times, seed, last) == rounds


def test_the_order_changes_from_round_to_round_and_with_the_seed():
    times = dict.fromkeys("abcdefgh", 4)
    rounds = schedule(times, 0)
    assert len({tuple(arms) for arms in rounds}) == 4
    assert schedule(times, 1) != rounds


def test_what_can_be_spared_comes_last():
    rounds = schedule({"a": 3, "b": 1, "c": 2}, 5, last={"c"})
    assert [sorted(arms) for arms in rounds] == [["a", "b"], ["a", "c"], ["a", "c"]]


@pytest.mark.parametrize(
    ("spent_s", "done_s", "next_s", "budget_s", "goes_on"),
    [
        (0.0, 0.0, 50.0, 0.0, True),  # the first round always
        (60.0, 60.0, 60.0, 120.0, True),
        (60.0, 60.0, 60.0, 119.0, False),
        (60.0, 30.0, 30.0, 120.0, True),  # all takes twice as long as was thought
        (60.0, 30.0, 31.0, 120.0, False),
        (1e9, 5.0, 5.0, float("inf"), True),
    ],
)
def test_only_whole_rounds_are_begun(spent_s, done_s, next_s, budget_s, goes_on):
    assert enough_time(spent_s, done_s, next_s, budget_s) is goes_on

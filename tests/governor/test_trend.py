"""The regression and the paired rise, against scipy and numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from eke.governor.trend import log_cost_trend, mean, paired_rise

TABLES = hnp.array_shapes(min_dims=2, max_dims=2, min_side=3, max_side=12).flatmap(
    lambda shape: hnp.arrays(np.float64, shape, elements=st.floats(0, 12))
)


def costs_for(table, seed):
    return np.cumsum(np.random.default_rng(seed).uniform(0.1, 3.0, len(table))).tolist()


@given(TABLES, st.integers(0, 9))
def test_it_is_least_squares_on_log_cost(table, seed):
    costs = costs_for(table, seed)
    trend = log_cost_trend(costs, table.tolist())
    x = np.log(costs)
    assert trend is not None
    assert trend.points == len(costs)
    line = np.polyfit(x, table.mean(axis=1), 1)
    residuals = table.mean(axis=1) - np.polyval(line, x)
    variance = (residuals**2).sum() / (len(x) - 2) / ((x - x.mean()) ** 2).sum()
    assert trend.slope == pytest.approx(-line[0], abs=1e-8)
    assert trend.se_residual == pytest.approx(np.sqrt(variance), abs=1e-7)
    each = [-np.polyfit(x, column, 1)[0] for column in table.T]
    assert trend.se_paired == pytest.approx(stats.sem(each), abs=1e-8)
    assert trend.se == max(trend.se_paired, trend.se_residual)


def test_it_agrees_with_scipy_on_a_noisy_line():
    rng = np.random.default_rng(0)
    table = 4 - np.log(np.arange(1, 21))[:, None] + rng.normal(0, 0.1, (20, 64))
    fit = stats.linregress(np.log(np.arange(1, 21)), table.mean(axis=1))
    trend = log_cost_trend([float(t) for t in range(1, 21)], table.tolist())
    assert trend is not None
    assert (trend.slope, trend.se_residual) == pytest.approx((-fit.slope, fit.stderr))


@given(TABLES, st.integers(0, 9), st.randoms(use_true_random=False))
def test_the_order_of_examples_changes_no_bit(table, seed, random):
    costs = costs_for(table, seed)
    order = list(range(table.shape[1]))
    random.shuffle(order)
    assert log_cost_trend(costs, table.tolist()) == log_cost_trend(costs, table[:, order].tolist())
    assert paired_rise(table[0].tolist(), table[1].tolist()) == paired_rise(
        table[0, order].tolist(), table[1, order].tolist()
    )


@given(TABLES)
def test_the_rise_is_the_paired_mean_and_its_error(table):
    rise = paired_rise(table[0].tolist(), table[1].tolist())
    assert rise.mean == pytest.approx((table[0] - table[1]).mean(), abs=1e-12)
    assert rise.se == pytest.approx(stats.sem(table[0] - table[1]), abs=1e-12)


def test_pairing_removes_what_makes_examples_hard():
    hard = np.random.default_rng(0).uniform(1, 6, 256)
    later = hard - 0.02 + np.random.default_rng(1).normal(0, 0.01, 256)
    rise = paired_rise(later.tolist(), hard.tolist())
    unpaired = np.hypot(stats.sem(hard), stats.sem(later))
    assert rise.se < unpaired / 50
    assert rise.mean == pytest.approx(-0.02, abs=3 * rise.se)


def test_a_curve_linear_in_log_cost_is_found_exactly():
    costs = [1.0, 2.0, 4.0, 8.0]
    losses = [[5 - 0.3 * k, 3 - 0.3 * k] for k in range(4)]
    trend = log_cost_trend(costs, losses)
    assert trend is not None
    assert trend.slope == pytest.approx(0.3 / np.log(2))
    assert trend.se == pytest.approx(0, abs=1e-12)


def test_too_little_gives_none():
    assert log_cost_trend([1.0, 2.0], [[1.0, 2.0], [1.0, 2.0]]) is None
    assert log_cost_trend([2.0, 2.0, 2.0], [[1.0, 2.0]] * 3) is None


def test_the_mean_is_exactly_summed():
    assert mean([1e16, 1.0, -1e16, 1.0]) == 0.5

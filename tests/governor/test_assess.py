"""What one evaluation says: windows, phases, bounds and harm, against a second computation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eke.governor import Evaluation, Rule
from eke.governor.assess import assess, at_or_past, phase_start


def falling(i):
    return 4.0 - 0.5 * math.log(i + 1)


def test_the_bound_is_slope_plus_error_times_the_logarithm_left(history_of):
    history = history_of([falling(i) for i in range(40)])[:30]
    seen = assess(history, horizon=100.0, phase_starts=[], rule=Rule())
    inside = [e for e in history if 37.5 <= e.cost <= 75]
    x = np.log([e.cost for e in inside])
    table = np.array([e.losses for e in inside])
    slopes = np.array([-np.polyfit(x, column, 1)[0] for column in table.T])
    line = np.polyfit(x, table.mean(1), 1)
    residuals = table.mean(1) - np.polyval(line, x)
    se_residual = np.sqrt((residuals**2).sum() / (len(x) - 2) / ((x - x.mean()) ** 2).sum())
    se = max(slopes.std(ddof=1) / math.sqrt(len(slopes)), se_residual)
    assert seen.points == len(inside) == 16
    assert seen.gain_bound == pytest.approx((slopes.mean() + se) * math.log(0.9 / 0.75))
    assert seen.threshold == pytest.approx(0.015 * history[-1].loss)
    assert not seen.lacks_gain


def test_the_window_does_not_reach_into_immunity(history_of):
    history = history_of([3.0] * 40)[:24]  # up to 60 of 100
    plain = assess(history, horizon=100.0, phase_starts=[], rule=Rule())
    assert (plain.window_from, plain.points) == (pytest.approx(0.30), 13)
    after = assess(history, horizon=100.0, phase_starts=[40.0], rule=Rule())
    assert after.phase_share == pytest.approx(0.40)
    assert (after.window_from, after.points) == (pytest.approx(0.50), 5)
    immune = assess(history, horizon=100.0, phase_starts=[55.0], rule=Rule())
    assert (immune.points, immune.gain_bound, immune.phase_best_loss) == (0, None, None)
    assert not immune.lacks_gain
    assert not immune.harmed


def test_an_evaluation_before_the_first_step_is_in_no_window():
    rule = Rule(immunity=0.0)
    history = [Evaluation(i, float(i), (3.0, 2.0)) for i in range(3)]
    seen = assess(history, horizon=3.0, phase_starts=[], rule=rule)
    assert (seen.points, seen.slope) == (2, None)


def test_nothing_varies(history_of):
    history = history_of([3.0] * 20, noise=0.0)[:10]
    seen = assess(history, horizon=100.0, phase_starts=[], rule=Rule())
    assert seen.gain_bound == pytest.approx(0.0, abs=1e-12)
    assert seen.lacks_gain


def test_a_rising_loss_leaves_nothing_to_gain(history_of):
    history = history_of([2 + 0.01 * i for i in range(20)], noise=0.001)[:10]
    seen = assess(history, horizon=100.0, phase_starts=[], rule=Rule())
    assert seen.slope is not None
    assert seen.slope < 0
    assert seen.gain_bound == 0.0


def test_harm_needs_significance_size_and_a_rise(history_of):
    def harmed(means, noise=0.001, **constants):
        history = history_of(means + [2.0] * (20 - len(means)), noise=noise)[: len(means)]
        return assess(history, horizon=100.0, phase_starts=[], rule=Rule(**constants)).harmed

    flat = [2.0] * 8
    assert harmed([*flat, 2.02])
    assert not harmed([*flat, 2.009])  # significant, but below 0.5 %
    assert not harmed([*flat, 2.02], noise=0.5)  # large, but within two standard errors
    assert not harmed([*flat, 2.04, 2.02])  # above the best, but falling again
    assert harmed([*flat, 2.02, 2.04])


def test_the_phase_best_forgets_what_came_before_the_phase(history_of):
    history = history_of([2.0] * 10 + [3.0] * 6 + [3.1] * 4)[:17]
    before = assess(history, horizon=100.0, phase_starts=[], rule=Rule())
    assert before.phase_best_loss == pytest.approx(2.0)
    assert before.excess == pytest.approx(1.1)
    after = assess(history, horizon=100.0, phase_starts=[50.0], rule=Rule())
    assert after.phase_best_loss == pytest.approx(3.0)
    assert after.excess == pytest.approx(0.1)


def test_a_price_is_charged_on_what_is_left_before_the_reserve(history_of):
    history = history_of([3.0] * 40)[:20]
    seen = assess(history, horizon=100.0, phase_starts=[], rule=Rule(min_gain=0.2))
    assert seen.threshold == pytest.approx(0.2 * (0.9 - 0.5))


def test_beyond_the_reserve_there_is_nothing_to_gain(history_of):
    history = history_of([falling(i) for i in range(40)])[:38]
    seen = assess(history, horizon=100.0, phase_starts=[], rule=Rule())
    assert seen.gain_bound == 0.0


def test_phases_begin_at_the_last_event_reached():
    assert phase_start(0.5, []) == 0.0
    assert phase_start(0.5, [0.4, 0.2, 0.6]) == 0.4
    assert phase_start(0.5, [0.5]) == 0.5


def test_rounding_does_not_miss_a_mark():
    assert at_or_past(0.1 + 0.2, 0.3)
    assert at_or_past(0.3, 0.1 + 0.2)
    assert not at_or_past(0.2999, 0.3)
    assert at_or_past(0.0, 0.0)

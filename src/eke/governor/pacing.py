"""How often to evaluate: often enough for the rule, for at most a small share of the budget.

Properties:
    * The evaluations of the whole run, the one before the first step and the one of the finished
      model included, cost at most `share` of the budget, unless not even those two fit.
    * Where `enough` is true, every evaluation from `decisive_from` of the budget on has at least
      `window_points` evaluations in the rule's window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from eke.errors import InputError
from eke.governor.records import DEFAULT_RULE, Rule


@dataclass(frozen=True)
class Pace:
    """A cadence of evaluations.

    Attributes:
        interval: cost between evaluations, in the budget's coin.
        interval_steps: the same in whole optimizer steps; `None` where a step's cost is unknown.
        evaluations: how many the whole run makes.
        share: what they cost, as a share of the budget.
        window_points: evaluations in the rule's window at the first one past `decisive_from`.
        enough: whether that is as many as were asked for.
        reason: one sentence.
    """

    interval: float
    interval_steps: int | None
    evaluations: int
    share: float
    window_points: int
    enough: bool
    reason: str


def points_in_window(interval: float, horizon: float, *, at: float, rule: Rule) -> int:
    """Evaluations in the rule's window at the first evaluation at or past share `at`.

    Evaluations lie at multiples of `interval`; the window at cost t is [window * t, t] and does
    not reach into the immunity after the start.
    """
    slack = 1e-9
    last = max(1, math.ceil(at * horizon / interval * (1 - slack)))
    start = max(rule.window * last, rule.immunity * horizon / interval)
    first = max(1, math.ceil(start * (1 - slack)))
    return max(0, last - first + 1)


def eval_interval(
    eval_cost: float,
    horizon: float,
    share: float = 0.03,
    *,
    step_cost: float | None = None,
    min_evaluations: int = 41,
    window_points: int = 4,
    decisive_from: float = 0.4,
    rule: Rule = DEFAULT_RULE,
) -> Pace:
    """The cost, and the optimizer steps, between two evaluations.

    It aims at `min_evaluations` over the budget, which is what the rule was measured with, and
    makes fewer where they would cost more than `share` of it.

    Args:
        eval_cost: measured cost of one evaluation, in the unit of `horizon`.
        horizon: the whole budget.
        share: the most that all evaluations together may cost.
        step_cost: measured cost of one optimizer step; intervals are then whole steps.
        min_evaluations: evaluations to aim at.
        window_points: evaluations that the rule's regression should see,
        decisive_from: from this share of the budget on.

    Raises:
        InputError: a cost or share out of bounds.
    """
    _check(eval_cost, horizon, share, step_cost, min_evaluations, window_points, decisive_from)
    allowed = min_evaluations
    if eval_cost > 0:
        affordable = share * horizon / eval_cost * (1 + 1e-12)
        allowed = math.floor(min(affordable, min_evaluations))
    # Two are spent anyway: before the first step, and on the finished model.
    interval = horizon / (max(2, min(min_evaluations, allowed)) - 1)
    steps: int | None = None
    if step_cost is not None:
        steps = max(1, math.ceil(interval / step_cost * (1 - 1e-12)))
        interval = steps * step_cost
    evaluations = max(1, math.ceil(horizon / interval * (1 - 1e-12))) + 1
    points = points_in_window(interval, horizon, at=decisive_from, rule=rule)
    enough = points >= window_points
    spent = evaluations * eval_cost / horizon
    if spent > share:
        reason = (
            f"Even {evaluations} evaluations take {spent:.1%} of the budget, above {share:.1%}: "
            "hold out fewer examples"
        )
    elif not enough and allowed < min_evaluations:
        reason = (
            f"{share:.1%} of the budget pays for {evaluations} evaluations, which leave {points} "
            f"of the {window_points} that the rule needs by {decisive_from:.0%} of the budget: "
            "hold out fewer examples, or allow evaluation a larger share"
        )
    elif not enough:
        reason = (
            f"{evaluations} evaluations leave {points} of the {window_points} that the rule needs "
            f"by {decisive_from:.0%} of the budget: the run has too few steps"
        )
    else:
        reason = f"{evaluations} evaluations take {spent:.1%} of the budget"
    return Pace(interval, steps, evaluations, spent, points, enough, reason + ".")


def _check(
    eval_cost: float,
    horizon: float,
    share: float,
    step_cost: float | None,
    min_evaluations: int,
    window_points: int,
    decisive_from: float,
) -> None:
    def check(name: str, value: float, ok: bool, rule: str) -> None:
        if not (math.isfinite(value) and ok):
            raise InputError(
                f"cannot pace evaluations: {name} is out of bounds", value=value, rule=rule
            )

    check("eval_cost", eval_cost, eval_cost >= 0, "it is at least 0")
    check("horizon", horizon, horizon > 0, "it is above 0")
    check("share", share, 0 < share < 1, "it is above 0 and below 1")
    if step_cost is not None:
        check("step_cost", step_cost, step_cost > 0, "it is above 0")
    check("min_evaluations", min_evaluations, min_evaluations >= 2, "it is at least 2")
    check("window_points", window_points, window_points >= 3, "it is at least 3")
    check("decisive_from", decisive_from, 0 < decisive_from < 1, "it is above 0 and below 1")

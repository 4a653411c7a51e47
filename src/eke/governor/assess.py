"""What one evaluation says, given those before it: the numbers, before any decision.

Property: the assessment of evaluation k is a function of the evaluations up to k alone, so
"twice running" can be derived from the history and needs no counter that could be lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eke.governor.records import Evaluation, Rule
from eke.governor.trend import log_cost_trend, paired_rise

TOLERANCE = 1e-9
"""Relative slack where a share of the budget is compared with a mark: an evaluation meant to be
at the mark may lie a rounding error below it."""


def at_or_past(value: float, mark: float) -> bool:
    """Whether `value` has reached `mark`, rounding errors forgiven."""
    return value >= mark * (1.0 - TOLERANCE)


@dataclass(frozen=True)
class Assessment:
    """One evaluation in the light of those before it. Losses are nats per token.

    Attributes:
        step, loss: of the evaluation.
        share: of the budget that is spent.
        phase_share: where the phase began (the last event, or the start).
        immune_until: the share at which the phase stops being immune, where windows start.
        window_from: the share at which the regression's window starts.
        points, slope, se_paired, se_residual: the regression; `None` where there is too little.
        gain_bound: upper bound of what training up to the reserve may still gain.
        threshold: what that bound must exceed.
        lacks_gain: whether it does not; False where there is too little to say.
        phase_best_step, phase_best_loss: the best of the phase since its immunity ended.
        excess, excess_se: how far the loss is above that best, and its paired standard error.
        harmed: whether the excess is significant, large enough, and the loss still rising.
    """

    step: int
    loss: float
    share: float
    phase_share: float
    immune_until: float
    window_from: float
    points: int
    slope: float | None
    se_paired: float | None
    se_residual: float | None
    gain_bound: float | None
    threshold: float
    lacks_gain: bool
    phase_best_step: int | None
    phase_best_loss: float | None
    excess: float | None
    excess_se: float | None
    harmed: bool

    def to_json(self) -> dict[str, Any]:
        """The assessment as JSON values."""
        return asdict(self)


def phase_start(share: float, starts: Sequence[float]) -> float:
    """The share of the budget at which the present phase began: the last event, or the start."""
    return max((e for e in starts if at_or_past(share, e)), default=0.0)


def assess(
    history: Sequence[Evaluation],
    *,
    horizon: float,
    phase_starts: Sequence[float],
    rule: Rule,
) -> Assessment:
    """Assess the last of `history`, whose evaluations are all finite and in order of cost.

    `phase_starts` are the costs of whatever began a new phase; the start of the run is implied.
    """
    last = history[-1]
    shares = [e.cost / horizon for e in history]
    share = shares[-1]
    phase = phase_start(share, [cost / horizon for cost in phase_starts])
    immune_until = phase + rule.immunity
    window_from = max(share * rule.window, immune_until)

    # Step 0 costs nothing and has no logarithm.
    inside = [i for i, s in enumerate(shares) if s > 0 and at_or_past(s, window_from)]
    trend = None
    if len(inside) >= rule.window_points:
        trend = log_cost_trend([shares[i] for i in inside], [history[i].losses for i in inside])
    left = max(0.0, rule.usable - share)
    threshold = rule.epsilon * last.loss if rule.min_gain is None else rule.min_gain * left
    gain_bound: float | None = None
    if trend is not None:
        # A loss that rises has nothing to gain; a negative "gain" would only confuse a reader.
        gain_bound = max(0.0, (trend.slope + trend.se) * _log_ratio(rule.usable, share))

    best: Evaluation | None = None
    excess: float | None = None
    excess_se: float | None = None
    harmed = False
    if at_or_past(share, immune_until):
        phase_history = [
            e for e, s in zip(history, shares, strict=True) if at_or_past(s, immune_until)
        ]
        best = min(phase_history, key=lambda e: e.loss)
        rise = paired_rise(last.losses, best.losses)
        excess, excess_se = rise.mean, rise.se
        harmed = (
            len(phase_history) >= 2
            and excess > rule.harm_se * excess_se
            and excess > rule.harm_share * best.loss
            and last.loss > phase_history[-2].loss
        )
    return Assessment(
        step=last.step,
        loss=last.loss,
        share=share,
        phase_share=phase,
        immune_until=immune_until,
        window_from=window_from,
        points=len(inside),
        slope=None if trend is None else trend.slope,
        se_paired=None if trend is None else trend.se_paired,
        se_residual=None if trend is None else trend.se_residual,
        gain_bound=gain_bound,
        threshold=threshold,
        lacks_gain=gain_bound is not None and gain_bound <= threshold,
        phase_best_step=None if best is None else best.step,
        phase_best_loss=None if best is None else best.loss,
        excess=excess,
        excess_se=excess_se,
        harmed=harmed,
    )


def _log_ratio(usable: float, share: float) -> float:
    return math.log(usable / share) if share < usable else 0.0

"""Two statistics over paired evaluations: the slope against log cost, and a rise above the best.

The evaluations hold the losses of the same examples each time, so both are computed example by
example and averaged last: what makes one example harder than another cancels, and only what
changed remains.

Properties:
    * The result does not depend on the order of the examples, not even in the last bit: sums
      over examples are exactly rounded (`math.fsum`), and everything else is element-wise.
    * Multiplying every cost by one factor shifts every logarithm alike, so the result changes
      by rounding only.
    * The same numbers give the same bits on the same machine: no threaded or blocked sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Trend:
    """How fast the loss falls per unit of log cost.

    Attributes:
        points: evaluations that the regression saw.
        slope: -dL / d ln(cost), nats per token; positive while the loss falls.
        se_paired: standard error over examples, each with its own regression.
        se_residual: standard error from how the mean losses scatter about their line.
    """

    points: int
    slope: float
    se_paired: float
    se_residual: float

    @property
    def se(self) -> float:
        """The larger of the two errors: examples see sampling, residuals see the optimizer."""
        return max(self.se_paired, self.se_residual)


@dataclass(frozen=True)
class Rise:
    """By how much one evaluation is above another, on the same examples (nats per token)."""

    mean: float
    se: float


def mean(values: Sequence[float]) -> float:
    """The exactly summed mean, whatever the order of the values."""
    return math.fsum(values) / len(values)


def _standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean of at least two values."""
    centre = mean(values)
    squares = math.fsum((v - centre) ** 2 for v in values)
    return math.sqrt(squares / (len(values) - 1) / len(values))


def log_cost_trend(costs: Sequence[float], losses_PE: Sequence[Sequence[float]]) -> Trend | None:
    """Ordinary least squares of the loss on ln(cost), for each example and for their mean.

    Args:
        costs: P positive costs, one an evaluation.
        losses_PE: P evaluations of the same E >= 2 examples.

    Returns:
        The trend, or `None` where the residuals leave nothing to estimate an error from: fewer
        than three evaluations, or all of them at one cost.
    """
    points = len(costs)
    if points < 3:
        return None
    x = [math.log(cost) for cost in costs]
    x_mean = mean(x)
    centred = [value - x_mean for value in x]
    spread = math.fsum(value * value for value in centred)
    if spread <= 1e-18:
        return None
    slopes_E = np.zeros(len(losses_PE[0]))
    for value, losses in zip(centred, losses_PE, strict=True):
        slopes_E += np.asarray(losses, dtype=np.float64) * (-value / spread)
    per_example: list[float] = slopes_E.tolist()
    slope = mean(per_example)
    means = [mean(losses) for losses in losses_PE]
    level = mean(means)
    squares = math.fsum(
        (m - level + slope * value) ** 2 for m, value in zip(means, centred, strict=True)
    )
    return Trend(
        points=points,
        slope=slope,
        se_paired=_standard_error(per_example),
        se_residual=math.sqrt(squares / (points - 2) / spread),
    )


def paired_rise(losses_E: Sequence[float], best_E: Sequence[float]) -> Rise:
    """The mean of `losses_E - best_E` over the same E >= 2 examples, and its standard error."""
    differences = [a - b for a, b in zip(losses_E, best_E, strict=True)]
    return Rise(mean(differences), _standard_error(differences))

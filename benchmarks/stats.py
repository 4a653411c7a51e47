"""Quantiles, and the order in which arms are measured. All pure."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

Arm = TypeVar("Arm")


def quantile(values: Sequence[float], q: float) -> float:
    """Linear interpolation between order statistics (type 7 of Hyndman and Fan, 1996).

    Raises:
        ValueError: there are no values, or `q` is not between 0 and 1.
    """
    if not values or not 0 <= q <= 1:
        raise ValueError(f"a quantile needs values and 0 <= q <= 1; got {len(values)}, {q}")
    ranked = sorted(values)
    place = q * (len(ranked) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Number, extremes, quartiles, median and 95th percentile."""
    return {
        "n": len(values),
        "min": min(values),
        "p25": quantile(values, 0.25),
        "median": quantile(values, 0.5),
        "p75": quantile(values, 0.75),
        "p95": quantile(values, 0.95),
        "max": max(values),
    }


def schedule(times: Mapping[Arm, int], seed: int) -> list[list[Arm]]:
    """Rounds in which every arm comes once, in another order each time, until it came often enough.

    Args:
        times: how often each arm is to be measured.
    """
    rng = random.Random(seed)
    rounds = []
    for number in range(max(times.values(), default=0)):
        arms = [arm for arm in times if number < times[arm]]
        rounds.append(rng.sample(arms, len(arms)))
    return rounds


def enough_time(spent_s: float, rounds_done: int, budget_s: float) -> bool:
    """Whether one more round, as long as those before it on average, ends within the budget.

    The first round is always worth its time.
    """
    return rounds_done == 0 or spent_s + spent_s / rounds_done <= budget_s

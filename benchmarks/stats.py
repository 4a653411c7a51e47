"""Quantiles, and the order in which arms are measured. All pure."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
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


def schedule(times: Mapping[Arm, int], seed: int, last: Collection[Arm] = ()) -> list[list[Arm]]:
    """Rounds in which every arm comes once at most, each round in another order.

    Args:
        times: how often each arm is to be measured.
        last: the arms that come in the last rounds, not the first, if they come less often: what
            can be spared if the time is up before.
    """
    rng = random.Random(seed)
    count = max(times.values(), default=0)
    rounds = []
    for number in range(count):
        arms = [
            arm
            for arm in times
            if (number >= count - times[arm] if arm in last else number < times[arm])
        ]
        rounds.append(rng.sample(arms, len(arms)))
    return rounds


def enough_time(spent_s: float, done_s: float, next_s: float, budget_s: float) -> bool:
    """Whether one more round ends within the budget; the first is always worth its time.

    Args:
        spent_s: what the rounds so far have taken.
        done_s: what they were thought to take.
        next_s: what the next one is thought to take; it is as wrong as they were.
    """
    return done_s <= 0 or spent_s + next_s * spent_s / done_s <= budget_s

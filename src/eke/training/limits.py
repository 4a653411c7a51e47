"""What the hard limits allow next: another step, the final decay, or the end.

Pure arithmetic over what was spent, what the next step will cost and what finishing costs.

Properties: a step is allowed only if it *and* finishing fit inside every limit, so a limit is
never passed and there is always a finished model; the decay starts when the share held in reserve
for it is all that is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from eke.budget import Budget
from eke.training.schedule import Decay


@dataclass(frozen=True)
class Move:
    """What to do next, why, and which limit (a bill's unit) is behind it."""

    kind: Literal["train", "decay", "finish"]
    reason: str = ""
    unit: str | None = None


def add(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    """The sum, unit by unit."""
    return {unit: a.get(unit, 0.0) + b.get(unit, 0.0) for unit in {*a, *b}}


def next_move(
    budget: Budget,
    spent: Mapping[str, float],
    step_cost: Mapping[str, float],
    finish_cost: Mapping[str, float],
    decay: Decay | None,
    reserve: float,
) -> Move:
    """Decide before a step.

    Args:
        budget: the limits.
        spent: so far, by unit; progress units (tokens, steps, epochs) included.
        step_cost: of the next step, exact or an upper estimate.
        finish_cost: of the final evaluation, checkpoint, model and report.
        decay: the running decay, if it has started.
        reserve: the share of each limit that the decay gets.
    """
    unit = budget.passes(spent, add(step_cost, finish_cost))
    if unit is not None:
        return Move("finish", f"the {NAMES[unit]} budget is used up", unit)
    if decay is not None:
        if decay.progress(spent) >= 1.0:
            if decay.unit is not None:
                return Move("finish", f"the {NAMES[decay.unit]} budget is used up", decay.unit)
            return Move("finish", decay.reason)
        return Move("train")
    for unit, total in budget.limits().items():
        if spent.get(unit, 0.0) + finish_cost.get(unit, 0.0) >= total * (1.0 - reserve):
            return Move("decay", f"the {NAMES[unit]} budget is down to its reserve", unit)
    return Move("train")


def start_decay(
    budget: Budget,
    spent: Mapping[str, float],
    finish_cost: Mapping[str, float],
    reserve: float,
    reason: str,
    unit: str | None = None,
) -> Decay:
    """The decay that starts now: it may spend `reserve` of each limit, as far as that is left."""
    start, end = {}, {}
    for name, total in budget.limits().items():
        now = spent.get(name, 0.0)
        start[name] = now
        end[name] = max(now, min(now + reserve * total, total - finish_cost.get(name, 0.0)))
    return Decay(start, end, reason, unit)


NAMES = {
    "flops": "FLOP",
    "seconds": "wall-time",
    "joules": "energy",
    "money": "cost",
    "tokens": "token",
    "steps": "step",
    "epochs": "epoch",
}
"""How a unit of the ledger is called in a sentence."""

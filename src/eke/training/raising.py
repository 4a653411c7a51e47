"""Going on with a run under other limits than it had: what may change, and what follows.

Properties: a limit that is there may take any value that is not below what the run has spent; no
limit comes or goes, and nothing else of the budget changes; a run that the governor ended, or that
ended by a limit that is not raised, stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eke.budget.jsonl import Record, effective
from eke.errors import InputError
from eke.training.limits import NAMES
from eke.training.schedule import Decay

LIMIT_KEYS = {
    "wall_time": "seconds",
    "flops": "flops",
    "tokens": "tokens",
    "steps": "steps",
    "epochs": "epochs",
    "energy": "joules",
    "cost": "money",
}
"""The keys of [budget] that may be given anew, and what a bill calls them."""
_KEY_OF = {unit: key for key, unit in LIMIT_KEYS.items()}


def progress_of(metrics: Sequence[Record]) -> dict[str, float]:
    """How far the steps that stand have come: steps, tokens, and whole epochs."""
    kept, _ = effective(metrics)
    steps = [r.value for r in kept if r.value.get("kind") == "step"]
    if not steps:
        return {}
    last = steps[-1]
    return {
        "steps": float(last["step"]),
        "tokens": float(last["tokens_total"]),
        "epochs": float(last["epoch"]),
    }


def check_limits(limits: Mapping[str, float], spent: Mapping[str, float | None]) -> None:
    """Refuse limits that the run has passed already.

    Raises:
        InputError: names the limit, and what is spent.
    """
    for unit, total in limits.items():
        used = spent.get(unit)
        if used is not None and used > total * (1 + 1e-9):
            raise InputError(
                f"budget.{_KEY_OF[unit]} is below what this run has spent",
                value=total,
                rule=f"{used:.6g} is spent",
                fix="Raise it, or start a new run (--set run.name=...)",
            )


def goes_on(status: Mapping[str, Any], limits: Mapping[str, float]) -> bool:
    """Whether a finished run goes on, because the limit that ended it was raised.

    Args:
        status: of the finished run: its `unit` (None: no limit ended it) and its `limits`.
        limits: those that are given now.

    Raises:
        InputError: limits were changed, but not so that the run could go on.
    """
    before = status.get("limits")
    if before is None or before == limits:
        return False
    unit = status.get("unit")
    if unit is None:
        raise InputError(
            "this run was not ended by a limit, so other limits do not let it go on",
            value=str(status.get("reason")),
            fix="Start a new run from its model (model.source = its model folder)",
        )
    if limits[unit] <= before[unit]:
        raise InputError(
            f"the {NAMES[unit]} budget ended this run, and it is not raised",
            value=limits[unit],
            rule=f"it was {before[unit]:g}",
            fix=f"Raise budget.{_KEY_OF[unit]}",
        )
    return True


def decay_under(
    decay: Decay | None, before: Mapping[str, float], limits: Mapping[str, float]
) -> Decay | None:
    """The decay that still holds: under other limits, one that a limit asked for does not."""
    if decay is None or not before or before == limits or decay.unit is None:
        return decay
    return None

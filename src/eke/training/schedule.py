"""Warm-up, stable, decay: a learning-rate schedule whose decay can be started at any time.

The decay is not a number of steps but a share of the budget: it runs from what was spent when it
started to what may be spent at its end, whichever unit gets there first, so that the last step
before a limit is the last step of the decay.

Properties: the factor is in [0, 1]; it rises during warm-up, is 1 until a decay starts, and falls
linearly with spending to 0 at the decay's end.

Source: the WSD schedule of MiniCPM (Hu et al. 2024, arXiv 2404.06395).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Decay:
    """The final decay: per limited unit, what was spent at its start and may be by its end.

    `unit` is the limit that made it start; None when the governor did.
    """

    start: Mapping[str, float]
    end: Mapping[str, float]
    reason: str
    unit: str | None = None

    def progress(self, spent: Mapping[str, float]) -> float:
        """The share of the decay that is done, in [0, 1]."""
        shares = [
            (spent.get(unit, 0.0) - self.start[unit]) / (self.end[unit] - self.start[unit])
            if self.end[unit] > self.start[unit]
            else 1.0
            for unit in self.end
        ]
        return min(1.0, max(0.0, *shares)) if shares else 1.0

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "start": dict(self.start),
            "end": dict(self.end),
            "reason": self.reason,
            "unit": self.unit,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Decay:
        """The inverse of `to_json`."""
        return cls(dict(value["start"]), dict(value["end"]), value["reason"], value.get("unit"))


def lr_factor(step: int, warmup_steps: int, decay_progress: float | None) -> float:
    """What the peak learning rate is multiplied by at optimizer step `step` (counted from 0)."""
    warm = min(1.0, (step + 1) / (warmup_steps + 1))
    return warm if decay_progress is None else warm * (1.0 - decay_progress)


def phase(step: int, warmup_steps: int, decay: Decay | None) -> str:
    """`warmup`, `stable` or `decay`."""
    if decay is not None:
        return "decay"
    return "warmup" if step < warmup_steps else "stable"

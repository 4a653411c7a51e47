"""Bills: what one activity cost, in every unit that could be measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

Activity = Literal[
    "startup",  # imports, corpus, model, probes: before the first step
    "train",  # forward, backward and update on real tokens
    "padding",  # the same on padding, which teaches nothing
    "wait",  # the loop waiting for data
    "eval",  # held-out evaluation
    "checkpoint",  # training stalled by a save, or by a restore
    "govern",  # deciding, logging, and everything between two steps
    "lost",  # work that a crash undid
    "finish",  # the finished model and the report
]
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)

UNITS = ("flops", "seconds", "joules", "money", "tokens")
"""The additive units of a bill. `peak_bytes` is a maximum, not a sum, and stands apart."""


@dataclass(frozen=True)
class Bill:
    """What `who` spent on `what`. `None` means unknown, which is never the same as 0.

    Attributes:
        flops: floating-point operations, all ranks together.
        seconds: wall-clock seconds.
        joules: energy; `None` where no counter exists.
        money: in the budget's currency; `None` without a price.
        tokens: real (not padding) training tokens, all ranks together.
        peak_bytes: the process's highest resident memory so far.
        measured: False for a bill that is an estimate, such as work in flight at a crash.
    """

    who: str
    what: Activity
    step: int
    flops: float | None = 0.0
    seconds: float | None = 0.0
    joules: float | None = None
    money: float | None = None
    tokens: int | None = 0
    peak_bytes: int | None = None
    measured: bool = True

    def __post_init__(self) -> None:
        if self.what not in ACTIVITIES:
            raise ValueError(f"a bill's activity is one of {', '.join(ACTIVITIES)}; {self.what!r}")
        for unit in UNITS:
            amount = getattr(self, unit)
            if amount is not None and not amount >= 0:
                raise ValueError(f"a bill is never negative or NaN; {unit} = {amount!r}")

    def to_json(self) -> dict[str, Any]:
        """The bill as JSON values; zeros and unknown units are kept, so that they differ."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Bill:
        """The inverse of `to_json`; keys it does not know are ignored."""
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in record.items() if k in known})

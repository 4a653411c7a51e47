"""What the parts tell one another: small frozen values, carried by `training/`.

Parts never import each other (see `docs/architecture.md`). A part that has something to say
returns one of these, and the training loop carries it to the part that must hear it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from eke.budget.bill import Bill

Action = Literal["continue", "decay", "stop", "rollback"]
"""`decay` starts the final decay, after which the run stops with a finished model; `stop` ends
it there and then; `rollback` returns to the best checkpoint first."""


@dataclass(frozen=True)
class Interval:
    """A quoted quantity: the true value is expected inside `[low, high]`."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"an interval needs low <= high; got [{self.low}, {self.high}]")


@dataclass(frozen=True)
class Headroom:
    """Memory that is free now, and that stays free until the next change of plan (bytes)."""

    bytes_now: int
    bytes_until_switch: int


@dataclass(frozen=True)
class Offer:
    """A proposal with what it costs and what it is expected to gain (nats per token)."""

    who: str
    what: str
    bill: Bill
    gain_nats: Interval


@dataclass(frozen=True)
class Alternative:
    """An action that was open and was not taken, and why."""

    action: Action
    why: str


@dataclass(frozen=True)
class Decision:
    """What the governor chose.

    `evidence` holds every number the rule looked at, as plain JSON values, so that the
    decision can be derived again from the run's files.
    """

    action: Action
    step: int
    reason: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The decision as JSON values, for `decisions.jsonl`."""
        record = asdict(self)
        record["alternatives"] = [asdict(a) for a in self.alternatives]
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Decision:
        """The inverse of `to_json`; keys it does not know are ignored."""
        return cls(
            action=record["action"],
            step=record["step"],
            reason=record["reason"],
            evidence=dict(record["evidence"]),
            alternatives=tuple(Alternative(**a) for a in record["alternatives"]),
        )

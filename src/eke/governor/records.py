"""What the rule looks at: evaluations, events, and the constants it goes by.

Everything here is plain, frozen data, checked when it is made, so that the rule itself never
meets a value it cannot reason about. A loss that is not finite is the exception: it is a fact
about the run, not a mistake of the caller, and the rule answers it with a rollback.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from eke.errors import InputError
from eke.governor.trend import mean

EventKind = Literal["start", "restart", "data_change", "switch"]
"""`start` of training, `restart` of the optimizer, `data_change` of what is trained on, `switch`
of batch size, plan or precision. Resuming from a checkpoint bit by bit is none of them."""
EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)

MAX_LOSS = 1e9
"""Nats per token beyond which a loss counts as not finite: the model is as dead as at infinity."""


def usable(loss: float) -> bool:
    """Whether a loss is finite and not beyond `MAX_LOSS`."""
    return math.isfinite(loss) and loss <= MAX_LOSS


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of the same held-out examples.

    Attributes:
        step: optimizer steps so far.
        cost: what training has cost so far, in the budget's coin (FLOPs, seconds, tokens, ...),
            counted from its first step.
        losses: mean nats per token of each example, always the same examples in the same order.

    Raises:
        InputError: fewer than two examples, a negative loss, or a step or cost below 0.
    """

    step: int
    cost: float
    losses: tuple[float, ...]

    def __post_init__(self) -> None:
        if not _whole(self.step) or self.step < 0:
            raise InputError("an evaluation's step is a whole number >= 0", value=self.step)
        if not (math.isfinite(self.cost) and self.cost >= 0):
            raise InputError("an evaluation's cost is a finite number >= 0", value=self.cost)
        if len(self.losses) < 2:
            raise InputError(
                "an evaluation needs the losses of at least two held-out examples",
                value=len(self.losses),
                rule="without two there is no standard error",
                fix="Hold out 256 examples or more",
            )
        for loss in self.losses:
            if loss < 0:
                raise InputError(
                    "a held-out loss is negative",
                    value=loss,
                    rule="losses are nats per token, which are >= 0",
                )

    @cached_property
    def finite(self) -> bool:
        """Whether every example has a usable loss."""
        return all(usable(loss) for loss in self.losses)

    @cached_property
    def loss(self) -> float:
        """The mean over examples (nats per token); only for a finite evaluation."""
        return mean(self.losses)


@dataclass(frozen=True)
class Event:
    """Something at `cost` that changed what training is, and so what its curve says.

    Raises:
        InputError: an unknown kind, or a cost that is not a finite number >= 0.
    """

    cost: float
    kind: EventKind

    def __post_init__(self) -> None:
        if self.kind not in EVENT_KINDS:
            raise InputError(
                "unknown kind of event", value=self.kind, rule=f"one of {', '.join(EVENT_KINDS)}"
            )
        if not (math.isfinite(self.cost) and self.cost >= 0):
            raise InputError("an event's cost is a finite number >= 0", value=self.cost)


@dataclass(frozen=True)
class Rule:
    """The constants of the stopping rule; the defaults are the measured ones.

    Attributes:
        epsilon: stop when what is left to gain is below this share of the loss.
        breaches: evaluations running that must agree before a stop.
        window: the regression sees costs from this share of the present cost on.
        window_points: fewer evaluations than this in the window decide nothing.
        immunity: share of the budget after an event in which nothing is decided.
        reserve: share of the budget kept for the final decay.
        harm_se: paired standard errors above the best that count as harm, together with
        harm_share: this share of the best loss,
        harm_rises: for this many evaluations running, each above the one before.
        bigram_factor: from scratch, no stop until the best loss is at most this much of the
            bigram model's.
        min_gain: the user's price, in nats per token per whole budget; it replaces `epsilon`.
            At 0.1 the run goes on only while it may still gain at a rate of 0.1 nats per token
            for a whole budget spent, that is 0.01 for each tenth of it. 0 stops only where no
            gain at all is left. `None`: no price.

    Raises:
        InputError: a constant outside its bounds.
    """

    epsilon: float = 0.015
    breaches: int = 2
    window: float = 0.5
    window_points: int = 3
    immunity: float = 0.10
    reserve: float = 0.10
    harm_se: float = 2.0
    harm_share: float = 0.005
    harm_rises: int = 3
    bigram_factor: float = 0.97
    min_gain: float | None = None

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, rule: str) -> None:
            if not ok:
                raise InputError(
                    f"the governor's {name} is out of bounds", value=getattr(self, name), rule=rule
                )

        check("epsilon", 0 < self.epsilon < 1, "it is above 0 and below 1")
        check("breaches", _whole(self.breaches) and self.breaches >= 1, "it is at least 1")
        check("window", 0 < self.window < 1, "it is above 0 and below 1")
        points = self.window_points
        check("window_points", _whole(points) and points >= 3, "it is at least 3")
        check("immunity", 0 <= self.immunity < 1, "it is at least 0 and below 1")
        check("reserve", 0 <= self.reserve < 1, "it is at least 0 and below 1")
        check("harm_se", math.isfinite(self.harm_se) and self.harm_se >= 0, "it is at least 0")
        check("harm_share", 0 <= self.harm_share < 1, "it is at least 0 and below 1")
        check("harm_rises", _whole(self.harm_rises) and self.harm_rises >= 1, "it is at least 1")
        check("bigram_factor", 0 < self.bigram_factor <= 1, "it is above 0 and at most 1")
        price = self.min_gain
        check(
            "min_gain",
            price is None or (math.isfinite(price) and price >= 0),
            "it is at least 0 nats per token per whole budget",
        )

    @property
    def usable(self) -> float:
        """The share of the budget before the reserve."""
        return 1.0 - self.reserve


DEFAULT_RULE = Rule()

"""The governor of one run: it remembers the evaluations and asks the rule about them.

Properties:
    * A decision depends on the constructor's arguments, what was observed and noted, and nothing
      else, so `replay` derives every decision of a run again from the run's files, bit by bit.
    * `load_state_dict(state_dict())`, through JSON, changes no later decision.
    * An observation that is refused leaves the state as it was.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from eke.budget.messages import Action, Alternative, Decision
from eke.errors import InputError
from eke.governor.records import DEFAULT_RULE, Evaluation, Event, EventKind, Rule
from eke.governor.replay import ReplayReport, replay_run
from eke.governor.rule import decide

ACTIONS: frozenset[Action] = frozenset({"decay", "rollback"})
"""What a governor may be allowed to do; to continue is always allowed."""

_VERSION = 1


class Governor:
    """Decides, after each held-out evaluation, whether training is still worth its cost.

    Args:
        horizon: the whole budget, in the unit in which `observe` is told costs.
        rule: the constants.
        actions: those of `decay` and `rollback` that it may choose. What it may not do it still
            names, as an alternative to going on.
        bigram_loss: loss of a bigram model on the held-out examples, averaged as theirs are.
        from_scratch: whether the model starts from random weights; then `bigram_loss` is needed.
        scheduled_changes: costs at which the training data will change.

    Raises:
        InputError: an argument out of bounds.
    """

    def __init__(
        self,
        *,
        horizon: float,
        rule: Rule = DEFAULT_RULE,
        actions: Collection[str] = ACTIONS,
        bigram_loss: float | None = None,
        from_scratch: bool = False,
        scheduled_changes: Sequence[float] = (),
    ) -> None:
        unknown = sorted(set(actions) - ACTIONS)
        if unknown:
            raise InputError(
                "the governor does not know these actions",
                value=unknown,
                rule=f"it may be allowed any of {', '.join(sorted(ACTIONS))}",
            )
        self.rule = rule
        self.actions = frozenset(actions)
        self.bigram_loss = bigram_loss
        self.from_scratch = from_scratch
        self.scheduled_changes = tuple(float(c) for c in scheduled_changes)
        self._history: list[Evaluation] = []
        self._events: list[Event] = []
        self._horizon = 0.0
        self.set_horizon(horizon)
        # A first decision on made-up losses, so that a bad argument fails now and not mid-run.
        self._decide([Evaluation(0, 0.0, (1.0, 1.0))])

    @property
    def horizon(self) -> float:
        """The whole budget, in the budget's coin."""
        return self._horizon

    @property
    def best_step(self) -> int | None:
        """The step of the lowest finite held-out loss so far: where a rollback goes."""
        finite = [e for e in self._history if e.finite]
        return min(finite, key=lambda e: e.loss).step if finite else None

    def set_horizon(self, horizon: float) -> None:
        """Change the whole budget; every decision records the one that it was made with.

        Raises:
            InputError: it is not a finite cost above 0.
        """
        if not (math.isfinite(horizon) and horizon > 0):
            raise InputError("the governor's horizon is a finite cost above 0", value=horizon)
        self._horizon = float(horizon)

    def note_event(self, kind: EventKind, cost: float) -> None:
        """Note what changed training at `cost`: a new phase begins, immune at first.

        Raises:
            InputError: an unknown kind or a negative cost.
        """
        self._events.append(Event(float(cost), kind))

    def observe(self, *, step: int, cost: float, losses: Sequence[float]) -> Decision:
        """What to do, given one more evaluation.

        Args:
            step: optimizer steps so far.
            cost: what training has cost so far, in the unit of `horizon`.
            losses: mean nats per token of each held-out example, the same ones each time.

        Raises:
            InputError: the evaluation does not follow on the earlier ones; see `rule.decide`.
        """
        evaluation = Evaluation(step, float(cost), tuple(float(loss) for loss in losses))
        decision = self._decide([*self._history, evaluation])
        self._history.append(evaluation)
        return decision

    def _decide(self, history: Sequence[Evaluation]) -> Decision:
        decision = decide(
            history,
            horizon=self._horizon,
            events=self._events,
            rule=self.rule,
            bigram_loss=self.bigram_loss,
            from_scratch=self.from_scratch,
            scheduled_changes=self.scheduled_changes,
        )
        if decision.action == "continue" or decision.action in self.actions:
            return decision
        refused = Alternative(decision.action, f"It is not allowed here. {decision.reason}")
        return Decision(
            "continue",
            decision.step,
            f"The rule asks for {decision.action}, which is not among the allowed actions: "
            + decision.reason,
            {**decision.evidence, "asked_for": decision.action},
            (refused, *(a for a in decision.alternatives if a.action != "continue")),
        )

    def config(self) -> dict[str, Any]:
        """What it was constructed with, as JSON: the first line of `decisions.jsonl`."""
        return {
            "version": _VERSION,
            "horizon": self._horizon,
            "rule": asdict(self.rule),
            "actions": sorted(self.actions),
            "bigram_loss": self.bigram_loss,
            "from_scratch": self.from_scratch,
            "scheduled_changes": list(self.scheduled_changes),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Governor:
        """The inverse of `config`.

        Raises:
            InputError: it is not a governor's configuration, or of another version.
        """
        _check_version(config, "configuration")
        try:
            return cls(
                horizon=config["horizon"],
                rule=Rule(**config["rule"]),
                actions=config["actions"],
                bigram_loss=config["bigram_loss"],
                from_scratch=config["from_scratch"],
                scheduled_changes=config["scheduled_changes"],
            )
        except (KeyError, TypeError) as error:
            raise InputError(
                "the governor's configuration cannot be read", value=str(error)
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Everything observed and noted, as JSON values."""
        return {
            "version": _VERSION,
            "horizon": self._horizon,
            "events": [asdict(e) for e in self._events],
            "history": [
                {"step": e.step, "cost": e.cost, "losses": list(e.losses)} for e in self._history
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`; the constructor's arguments stay as they are.

        Raises:
            InputError: it is not a governor's state, or of another version.
        """
        _check_version(state, "state")
        try:
            events = [Event(e["cost"], e["kind"]) for e in state["events"]]
            history = [
                Evaluation(e["step"], e["cost"], tuple(e["losses"])) for e in state["history"]
            ]
            horizon = state["horizon"]
        except (KeyError, TypeError) as error:
            raise InputError("the governor's state cannot be read", value=str(error)) from error
        self.set_horizon(horizon)
        self._events, self._history = events, history

    @classmethod
    def replay(cls, run_dir: str | os.PathLike[str]) -> ReplayReport:
        """Derive every decision of a run again from its files, and say which differ.

        Raises:
            InputError: there is no such run, or it does not say how its governor was made.
            EkeError: one of its files is damaged.
        """
        return replay_run(run_dir, cls.from_config)


def _check_version(record: Mapping[str, Any], what: str) -> None:
    if record.get("version") != _VERSION:
        raise InputError(
            f"the governor's {what} is of another version",
            value=record.get("version"),
            rule=f"this eke reads version {_VERSION}",
        )

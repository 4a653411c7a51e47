"""Is the next unit of compute worth it? One decision from the held-out losses so far.

Near the end of its budget a run's loss falls about linearly in the logarithm of its cost t, so

    s = -dL / d ln t,  by regression over costs [t/2, t], example by example
    SE = max(standard error over examples, standard error of the residuals)
    what training may still gain  <=  (s + SE) * ln(T / t)

with T the share of the budget before the reserve for the final decay. When that bound is not
above `epsilon` of the loss (or the user's price), for `breaches` evaluations running, the run
decays its learning rate and stops. When the loss is significantly above the best of its phase
and rising, for `harm_rises` evaluations running, it goes back to its best checkpoint and stops.

Properties:
    * `decide` is a pure function of its arguments: no clock, no counter, no file.
    * It does not depend on the order of the examples, nor on the unit of cost.
    * Inside a guard it never stops for lack of gain or for harm: for `immunity` of the budget
      after the start and each event; before a scheduled change; from scratch, until the model
      is better than a bigram. Only a loss that is not finite, and the reserve, ignore guards.
    * From scratch, passing the bigram model is an event like the others: the loss falls fastest
      just then, while a window full of the plateau before would say that nothing is to be had.
    * `evidence` holds every number that was looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from eke.budget.messages import Action, Alternative, Decision
from eke.errors import InputError
from eke.governor.assess import Assessment, assess, at_or_past
from eke.governor.records import (
    DEFAULT_RULE,
    EVENT_KINDS,
    Evaluation,
    Event,
    EventKind,
    Rule,
    usable,
)

__all__ = ["DEFAULT_RULE", "EVENT_KINDS", "Evaluation", "Event", "EventKind", "Rule", "decide"]


def decide(
    history: Sequence[Evaluation],
    *,
    horizon: float,
    events: Sequence[Event] = (),
    rule: Rule = DEFAULT_RULE,
    bigram_loss: float | None = None,
    from_scratch: bool = False,
    scheduled_changes: Sequence[float] = (),
) -> Decision:
    """What to do after the last evaluation of `history`.

    Args:
        history: every evaluation so far, in order of cost.
        horizon: the whole budget, in the unit of the evaluations' `cost`.
        events: what happened to the run so far; each starts a new, immune phase.
        rule: the constants.
        bigram_loss: mean over the held-out examples of the loss of a bigram model fitted on
            the training tokens (`eke.governor.bigram`); needed when training from scratch.
        from_scratch: whether the model started from random weights.
        scheduled_changes: costs at which the data will change; once passed they count as events.

    Returns:
        `continue`, `decay` (then stop) or `rollback` (to the best checkpoint, then stop).

    Raises:
        InputError: no evaluation, costs out of order, another number of examples than before,
            a horizon or bigram loss that is not above 0, or none where one is needed.
    """
    _check(history, horizon, bigram_loss, from_scratch, scheduled_changes)
    last = history[-1]
    passed = [c for c in scheduled_changes if at_or_past(last.cost, c)]
    pending = [c for c in scheduled_changes if not at_or_past(last.cost, c)]
    finite = [e for e in history if e.finite]
    best = min(finite, key=lambda e: e.loss, default=None)
    bar = rule.bigram_factor * bigram_loss if from_scratch and bigram_loss is not None else None
    beat_bigram = next((e.cost for e in finite if bar is not None and e.loss <= bar), None)
    facts: dict[str, Any] = {
        "cost": last.cost,
        "horizon": horizon,
        "share": last.cost / horizon,
        "usable_share": rule.usable,
        "evaluations": len(history),
        "examples": len(last.losses),
        "loss": last.loss if last.finite else None,
        "best_loss": None if best is None else best.loss,
        "best_step": None if best is None else best.step,
        "bigram_loss": bigram_loss,
        "from_scratch": from_scratch,
        "beat_bigram_cost": beat_bigram,
        "events": [{"kind": e.kind, "cost": e.cost} for e in events],
        "scheduled_changes": list(scheduled_changes),
    }
    if not last.finite:
        bad = sum(not usable(loss) for loss in last.losses)
        where = "there is no checkpoint with a finite loss" if best is None else f"step {best.step}"
        return Decision(
            "rollback",
            last.step,
            "The held-out loss is not finite: nothing trained from here can be of use "
            f"(best so far: {where}).",
            {**facts, "clause": "not_finite", "not_finite_examples": bad},
            (Alternative("continue", "A model whose loss is not finite does not recover."),),
        )

    starts = [e.cost for e in events] + passed
    starts += [] if beat_bigram is None else [beat_bigram]
    recent = [
        assess(finite[: len(finite) - back], horizon=horizon, phase_starts=starts, rule=rule)
        for back in range(min(len(finite), max(rule.breaches, rule.harm_rises)))
    ]
    now = recent[0]
    assert best is not None
    guards = _guards(now, pending, horizon)
    if bar is not None and beat_bigram is None:
        guards["bigram"] = (
            f"the best loss {best.loss:.4f} is not yet {rule.bigram_factor:g} of a bigram "
            f"model's {bigram_loss:.4f}, so a plateau is no end"
        )
    seen = _Seen(
        now,
        breaches=_running([a.lacks_gain for a in recent]),
        rises=_running([a.harmed for a in recent]),
        guards=guards,
        rule=rule,
        best_step=best.step,
    )
    facts |= {
        **now.to_json(),
        "breaches": seen.breaches,
        "rises": seen.rises,
        "guards": list(guards),
        "before": [a.to_json() for a in recent[1:]],
    }
    return _choose(seen, facts)


@dataclass(frozen=True)
class _Seen:
    """The last evaluation, how many running agree with it, and which guards hold."""

    now: Assessment
    breaches: int
    rises: int
    guards: dict[str, str]
    rule: Rule
    best_step: int

    @property
    def gain(self) -> str:
        """What may still be gained, as a clause."""
        if self.now.gain_bound is None:
            return (
                f"{self.now.points} evaluations lie in the window of the regression, "
                f"which needs {self.rule.window_points}"
            )
        relation = "not more" if self.now.lacks_gain else "more"
        return (
            f"at most {self.now.gain_bound:.4f} nats per token are left to gain before the "
            f"reserve, {relation} than the {self.now.threshold:.4f} that make it worth while"
        )

    @property
    def harm(self) -> str:
        """How the loss stands against the best of its phase, as a clause."""
        if self.now.excess is None or self.now.excess_se is None:
            return "the phase is too young to have a best loss"
        return (
            f"the loss is {self.now.excess:.4f} ± {self.now.excess_se:.4f} nats per token above "
            f"the best of its phase (step {self.now.phase_best_step})"
        )


def _choose(seen: _Seen, facts: dict[str, Any]) -> Decision:
    """The decision for a finite loss."""
    rule, now = seen.rule, seen.now

    def made(action: Action, clause: str, reason: str, *others: tuple[Action, str]) -> Decision:
        alternatives = tuple(Alternative(other, _sentence(why)) for other, why in others)
        return Decision(
            action, now.step, _sentence(reason), {**facts, "clause": clause}, alternatives
        )

    if at_or_past(now.share, rule.usable):
        return made(
            "decay",
            "reserve",
            f"{now.share:.1%} of the budget is spent and the rest is the reserve for the decay",
            ("continue", "no budget would be left to finish the model"),
        )
    harmful, idle = seen.rises >= rule.harm_rises, seen.breaches >= rule.breaches
    if seen.guards and (harmful or idle):
        wanted: Action = "rollback" if harmful else "decay"
        return made(
            "continue",
            "guarded",
            f"{seen.harm if harmful else seen.gain}, but {'; '.join(seen.guards.values())}",
            (wanted, "; ".join(seen.guards.values())),
        )
    if harmful:
        return made(
            "rollback",
            "harm",
            f"{seen.harm} and rising, {seen.rises} evaluations running",
            ("continue", "more of the same training makes the model worse"),
            ("decay", f"the model of step {seen.best_step} is better than this one"),
        )
    if idle:
        return made(
            "decay",
            "gain",
            f"{seen.gain}, {seen.breaches} evaluations running",
            ("continue", seen.gain),
            ("rollback", seen.harm),
        )
    count = f" ({seen.breaches} of {rule.breaches} running)" if now.lacks_gain else ""
    clause = "guarded" if seen.guards else "too_few" if now.gain_bound is None else "gain"
    why = "; ".join(seen.guards.values()) if seen.guards else seen.gain + count
    return made(
        "continue",
        clause,
        why,
        ("decay", why),
        ("rollback", f"{seen.harm}; {seen.rises} of {rule.harm_rises} rises running"),
    )


def _guards(now: Assessment, pending: Sequence[float], horizon: float) -> dict[str, str]:
    """The guards of time that forbid a stop now, each with its clause."""
    guards = {}
    if not at_or_past(now.share, now.immune_until):
        guards["immune"] = (
            f"nothing is decided before {now.immune_until:.1%} of the budget, "
            f"as the phase began at {now.phase_share:.1%}"
        )
    if pending:
        guards["scheduled_change"] = (
            f"a change of data is scheduled at {min(pending) / horizon:.1%} of the budget"
        )
    return guards


def _running(flags: Sequence[bool]) -> int:
    """How many flags are true from the first on."""
    return next((i for i, flag in enumerate(flags) if not flag), len(flags))


def _sentence(clause: str) -> str:
    return clause[:1].upper() + clause[1:] + "."


def _check(
    history: Sequence[Evaluation],
    horizon: float,
    bigram_loss: float | None,
    from_scratch: bool,
    scheduled_changes: Sequence[float],
) -> None:
    if not history:
        raise InputError("there is no evaluation to decide from")
    if not (math.isfinite(horizon) and horizon > 0):
        raise InputError("the governor's horizon is a finite cost above 0", value=horizon)
    for before, after in pairwise(history):
        if after.cost < before.cost:
            raise InputError(
                f"the evaluation at step {after.step} costs less than the one before",
                value=after.cost,
                rule=f"costs never fall; it was {before.cost!r}",
            )
        if len(after.losses) != len(before.losses):
            raise InputError(
                f"the evaluation at step {after.step} has another number of examples",
                value=len(after.losses),
                rule=f"the same examples are evaluated each time; there were {len(before.losses)}",
            )
    for cost in scheduled_changes:
        if not (math.isfinite(cost) and cost >= 0):
            raise InputError("a scheduled change's cost is a finite number >= 0", value=cost)
    if bigram_loss is not None and not (math.isfinite(bigram_loss) and bigram_loss > 0):
        raise InputError("the bigram model's loss is a finite number above 0", value=bigram_loss)
    if from_scratch and bigram_loss is None:
        raise InputError(
            "training from scratch needs the loss of a bigram model",
            rule="a plateau at n-gram level must not be taken for the end",
            fix="Fit one with eke.governor.bigram.fit_bigram and pass bigram_loss",
        )

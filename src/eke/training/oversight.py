"""Oversight: evaluate when due, ask the governor, and carry out what it decides."""

from __future__ import annotations

import math
from collections.abc import Mapping

from eke.budget import Decision
from eke.budget.flops import forward_flops, train_flops
from eke.distributed import world
from eke.errors import EkeError, InputError
from eke.governor import Governor, Rule, eval_interval, fit_bigram
from eke.training import memory
from eke.training.config import Cadence
from eke.training.evaluate import EvaluationShort, Scores
from eke.training.limits import NAMES, add, start_decay
from eke.training.saving import Saving
from eke.training.session import Session, agreed

BIGRAM_SAMPLES = 4096
"""Training samples that the bigram model is fitted on; more would cost more than it tells."""


class Oversight:
    """Owns the governor of a run. Costs are told to it in the trajectory's FLOPs."""

    def __init__(self, session: Session, saving: Saving) -> None:
        self._s, self._saving = session, saving
        if session.state.eval_micro_tokens:
            session.prepared.holdout.limit(session.state.eval_micro_tokens)
        self._governor = self._make_governor()

    # ------------------------------------------------------------------ start

    def _make_governor(self) -> Governor:
        """From the restored state, else anew."""
        s, g = self._s, self._s.config.governor
        if s.state.governor is not None:
            governor = Governor.from_config(s.state.governor["config"])
            governor.load_state_dict(s.state.governor["state"])
            return governor
        bigram = None
        if s.prepared.from_scratch and g.actions:
            s.say("fitting a bigram model to compare with")
            bigram = self._bigram_loss()
        governor = Governor(
            horizon=agreed(self.horizon()),
            rule=Rule(
                epsilon=g.epsilon, breaches=g.patience, reserve=g.reserve, min_gain=g.min_gain
            ),
            actions=g.actions,
            bigram_loss=bigram,
            from_scratch=bigram is not None,
        )
        if world().is_main:
            s.run.decisions.append({"kind": "governor", "config": governor.config()})
        return governor

    def _bigram_loss(self) -> float:
        p = self._s.prepared
        count = min(len(p.train), BIGRAM_SAMPLES)
        picks = (p.train[i * len(p.train) // count] for i in range(count))
        bigram = fit_bigram(
            ((x["input_ids"].numpy(), x["labels"].numpy()) for x in picks), p.shape.vocab
        )
        return bigram.mean_loss(
            (x["input_ids"].numpy(), x["labels"].numpy()) for x in p.holdout.samples
        )

    def check_one_step_fits(self) -> None:
        """Refuse a budget that one step and the two evaluations around it would pass.

        Raises:
            InputError: it is too small; says by how much.
        """
        s, p = self._s, self._s.prepared
        in_an_epoch = s.mean_length * len(p.train)
        rows = max(1, round(min(s.step_tokens, in_an_epoch) / s.mean_length))
        step = {
            "flops": train_flops(p.shape, rows, s.mean_length),
            "tokens": float(rows * s.mean_length),
            "steps": 1.0,
        }
        cost = add(step, {"flops": 2 * p.holdout.flops(p.shape)})
        if p.flops_per_s:
            cost = s.with_money({**cost, "seconds": cost["flops"] / p.flops_per_s})
        spent = agreed(s.spent())
        passed = s.budget.passes(spent, cost)
        if passed is not None:
            key = {"seconds": "wall_time", "joules": "energy", "money": "cost"}.get(passed, passed)
            raise InputError(
                f"the {NAMES[passed]} budget is smaller than one step",
                value=s.budget.limits()[passed],
                rule=(
                    f"one step and the evaluations around it need about {cost[passed]:.3g}, "
                    if passed in cost
                    else "nothing is left for it, "
                )
                + f"on top of {spent.get(passed, 0.0):.3g} spent",
                fix=f"Raise budget.{key}, or lower batch.per_step or data.eval_examples",
            )

    def pace(self) -> None:
        """Fix the interval between evaluations, once in a run."""
        s, g, p = self._s, self._s.config.governor, self._s.prepared
        if s.state.eval_interval:
            return
        if g.eval_every != "auto":
            s.state.eval_interval = Cadence.parse(g.eval_every).steps or 1
        else:
            pace = eval_interval(
                p.holdout.flops(p.shape),
                agreed(self.horizon()),
                g.eval_share,
                step_cost=s.step_tokens / s.mean_length * train_flops(p.shape, 1, s.mean_length),
            )
            s.state.eval_interval = pace.interval_steps or 1
            if not pace.enough:
                s.say(pace.reason)
        s.state.next_eval = s.state.step + s.state.eval_interval

    def horizon(self) -> float:
        """The trajectory's FLOPs when the budget ends, each limit's rest at the present rate.

        Limits on progress alone give the same horizon whatever was lost on the way.
        """
        s, p, state = self._s, self._s.prepared, self._s.state
        spent = s.spent()
        per_token = train_flops(p.shape, 1, s.mean_length) / s.mean_length
        per_step = float(s.step_tokens)
        if state.step and state.tokens:
            per_token, per_step = state.flops / state.tokens, state.tokens / state.step
        rates = {
            "flops": 1.0,
            "tokens": per_token,
            "steps": per_step * per_token,
            "epochs": len(p.train) * s.mean_length * per_token,
        }
        for unit in ("seconds", "joules", "money"):
            if spent.get("flops") and spent.get(unit):
                rates[unit] = spent["flops"] / spent[unit]
        if state.step == 0 and p.flops_per_s is not None:
            # So far there is little but the start, which says nothing about the speed.
            rates["seconds"] = p.flops_per_s * p.facts.world_size
            if s.budget.price_per_hour is not None:
                rates["money"] = rates["seconds"] * 3600 / s.budget.price_per_hour
        rest = s.budget.remaining(spent)
        bounds = [rest[unit] * rates[unit] for unit in rest if unit in rates]
        return max(1.0, state.flops + min(bounds, default=0.0))

    # ------------------------------------------------------------------ on the way

    def evaluate(self, *, finished: bool = False) -> Scores | None:
        """Score the holdout, bill it and log it.

        If it does not fit into memory, do it again in smaller batches; None where what that took
        has eaten what was kept for this evaluation.

        Raises:
            EkeError: a single example does not fit.
        """
        s, p = self._s, self._s.prepared
        s.gather("govern")
        try:
            scores = p.holdout.evaluate(p.model, p.device, p.autocast)
        except EvaluationShort as short:
            lost = sum(forward_flops(p.shape, b, t) for b, t in short.shapes)
            memory.recover_evaluation(s, short.shortages, lost)
            fits = self._evaluation_fits(finished=finished)
            return self.evaluate(finished=finished) if fits else None
        flops = p.holdout.flops(p.shape)
        s.state.flops += flops
        seconds = s.charge("eval", flops)
        s.eval_s = max(s.eval_s, seconds)
        first = {"weights": p.holdout.weights} if s.state.step == 0 else {}
        record = {
            "kind": "eval",
            "step": s.state.step,
            "cost": s.state.flops,
            "flops_total": s.state.flops,
            "budget_used": s.budget.share(s.spent())[0],
            "loss": scores.loss,
            "se": scores.se,
            "examples": len(scores.losses),
            "seconds": seconds,
            "losses": list(scores.losses),
            **first,
            "finished": finished,
        }
        s.log("metrics", record)
        return scores

    def evaluate_and_govern(self, *, save_due: bool) -> None:
        """Evaluate, decide, act; the best weights so far are saved, so that there is a way back."""
        s, state = self._s, self._s.state
        state.next_eval = state.step + state.eval_interval
        scores = self.evaluate() if self._evaluation_fits() else None
        if scores is None:
            if save_due:
                self._saving.save()
            return
        action = "continue"
        if s.config.governor.actions:
            self._governor.set_horizon(agreed(self.horizon()))
            decision = self._governor.observe(
                step=state.step, cost=state.flops, losses=scores.losses
            )
            state.governor = {
                "config": self._governor.config(),
                "state": self._governor.state_dict(),
            }
            s.record(decision, by="governor")
            action = decision.action
            if action == "rollback":
                self._roll_back()
            if action in ("decay", "rollback"):
                spent, finish = agreed([s.spent(), s.finish_cost()])
                self.start_decay(spent, finish, decision.reason)
        better = state.best_loss is None or scores.loss < state.best_loss
        if action == "continue" and better and math.isfinite(scores.loss):
            state.best_loss, state.best_step = scores.loss, state.step
            self._saving.save()
        elif save_due or action != "continue":
            self._saving.save()

    def _evaluation_fits(self, *, finished: bool = False) -> bool:
        """Whether an evaluation now leaves enough of every limit to finish the model; of the
        finished model, whether it fits itself."""
        s = self._s
        wanted = s.eval_cost() if finished else add(s.eval_cost(), s.finish_cost())
        spent, cost = agreed([s.spent(), wanted])
        return s.budget.passes(spent, cost) is None

    def start_decay(
        self,
        spent: Mapping[str, float],
        finish: Mapping[str, float],
        reason: str,
        unit: str | None = None,
    ) -> None:
        """Start the final decay from here; `unit` is the limit that asks for it, if one does."""
        s, reserve = self._s, self._s.config.governor.reserve
        s.state.decay = start_decay(s.budget, spent, finish, reserve, reason, unit)
        if unit is not None:  # the governor's own decisions are recorded with their evidence
            text = f"The final decay starts: {reason}."
            evidence = {"spent": dict(spent), "finish_cost": dict(finish), "unit": unit}
            s.record(Decision("decay", s.state.step, text, evidence), by="limits")

    def _roll_back(self) -> None:
        state = self._s.state
        if state.best_step is None:
            raise EkeError(
                "the held-out loss got worse and there is no better checkpoint to go back to",
                fix="Lower optimizer.lr and start a new run",
            )
        self._saving.back_to(state.best_step)
        state.rolled_back_to = state.best_step

    # ------------------------------------------------------------------ the end

    def last_evaluation(self, reason: str, unit: str | None) -> float | None:
        """Score the finished model, and keep the better of it and of what was gone back to.

        Returns its loss; None where lost work has eaten what was kept for this evaluation.
        """
        s, state = self._s, self._s.state
        scores = self.evaluate(finished=True) if self._evaluation_fits(finished=True) else None
        loss = None if scores is None else scores.loss
        best, back_to = state.best_loss, state.rolled_back_to
        if loss is not None and back_to is not None and best is not None and best < loss:
            self._saving.back_to(back_to, only=("model",))
            text = f"The decay did not help: the weights of step {back_to} are the finished model."
            evidence = {"loss": loss, "best_loss": best}
            s.record(Decision("stop", state.step, text, evidence), by="limits")
            loss = best
        end = {"loss": loss, "unit": unit}
        text = f"The run is over: {reason.rstrip('.')}."
        s.record(Decision("stop", state.step, text, end), by="limits")
        return loss

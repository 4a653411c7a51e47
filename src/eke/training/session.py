"""What the loop's helpers share: the prepared run, its state, its logs, its clock.

Rank 0 owns the clock and the files; on the other ranks charging and logging do nothing. Numbers
that decide something come from `agreed`, so that every rank decides alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from eke.budget import Activity, Budget, Decision
from eke.budget.jsonl import JsonlFile
from eke.distributed import gather_objects, world
from eke.training.billing import Biller
from eke.training.cadence import SlowDown
from eke.training.config import RunConfig
from eke.training.rundir import RunDir
from eke.training.setup import Prepared
from eke.training.state import RunState
from eke.training.timeline import Timeline

Observer = Callable[[Mapping[str, Any]], None]

LAP_NAMES = {
    "startup": "start",
    "wait": "data",
    "eval": "evaluation",
    "checkpoint": "save",
    "govern": "decide and log",
}
"""What an activity is called on the timeline."""


def steadfast(observer: Observer) -> Observer:
    """An observer that falls silent when its output is gone: a closed pipe must not end a run.

    rich ends the process (`SystemExit`) when it meets one.
    """
    failed = False

    def tell(record: Mapping[str, Any]) -> None:
        nonlocal failed
        if not failed:
            try:
                observer(record)
            except (OSError, SystemExit):
                failed = True

    return tell


def agreed(value: Any) -> Any:
    """Rank 0's value, on every rank. A collective."""
    return gather_objects(value)[0]


@dataclass
class Session:
    """One process's view of one run. `biller` is None on ranks that keep no clock.

    Attributes:
        save_s, eval_s: seconds that a save (until it is committed) and an evaluation take, as
            measured last or guessed.
        stall_s: how long training waited for the last save; None before one is measured.
        timeline: what this rank did when.
        slow_down: what saves cost training besides waiting, on the rank with the clock.
    """

    prepared: Prepared
    budget: Budget
    state: RunState
    run: RunDir
    biller: Biller | None
    observer: Observer
    save_s: float
    eval_s: float = 0.0
    stall_s: float | None = None
    timeline: Timeline = field(default_factory=Timeline)
    slow_down: SlowDown = field(default_factory=SlowDown)

    @property
    def config(self) -> RunConfig:
        """The resolved configuration."""
        return self.prepared.config

    # ------------------------------------------------------------------ what things cost

    @property
    def mean_length(self) -> int:
        """Mean length of a training sample (tokens)."""
        lengths = self.prepared.lengths
        return max(2, round(sum(lengths) / len(lengths)))

    @property
    def step_tokens(self) -> int:
        """Tokens that a step is asked to consume, all ranks together."""
        unit, _, number = self.config.batch.per_step.partition(":")
        return int(number) * (1 if unit == "tokens" else self.mean_length)

    def with_money(self, cost: dict[str, float]) -> dict[str, float]:
        """Add what the seconds cost, where there is a price."""
        if self.budget.price_per_hour is not None and "seconds" in cost:
            cost["money"] = cost["seconds"] / 3600 * self.budget.price_per_hour
        return cost

    def spent(self) -> dict[str, float]:
        """What the run has spent, and how far it has come. The clock's units on rank 0 only."""
        state = self.state
        spent = self.biller.spent() if self.biller is not None else {}
        # Samples that the loader dropped are behind the run too.
        epochs = (state.samples + state.dropped) / max(1, len(self.prepared.train))
        return {
            **spent,
            "tokens": float(state.tokens),
            "steps": float(state.step),
            "epochs": epochs,
        }

    def _cost(self, seconds: float) -> dict[str, float]:
        """Of one evaluation and whatever else fits into `seconds`, in every limited unit."""
        p = self.prepared
        cost = {"flops": p.holdout.flops(p.shape), "seconds": seconds}
        if self.budget.joules is not None:
            spent = self.spent()
            cost["joules"] = seconds * spent.get("joules", 0.0) / spent.get("seconds", 1.0)
        return self.with_money(cost)

    def eval_cost(self) -> dict[str, float]:
        """What an evaluation will take."""
        return self._cost(1.3 * self.eval_s)

    def finish_cost(self) -> dict[str, float]:
        """What the final evaluation, the last save, the model and the report will take."""
        return self._cost(1.3 * self.eval_s + 2.6 * self.save_s + 1.0)

    # ------------------------------------------------------------------ bills and records

    def charge(self, what: Activity, flops: float = 0.0) -> float:
        """Bill the time since the last bill to `what`; returns its seconds (0 without a clock)."""
        self.timeline.lap(LAP_NAMES.get(what, what))
        if self.biller is None:
            return 0.0
        return self.biller.charge(what, self.state.step, flops)

    def gather(self, what: Activity) -> None:
        """The same for crumbs of time, billed when enough has gathered."""
        self.timeline.lap(LAP_NAMES.get(what, what))
        if self.biller is not None:
            self.biller.gather(what, self.state.step)

    def flush(self) -> None:
        """Bill the crumbs."""
        if self.biller is not None:
            self.biller.flush(self.state.step)

    def log(self, file: str, record: dict[str, Any]) -> None:
        """Append a record to `metrics` or `decisions`, and show it to the observer."""
        if world().is_main:
            log: JsonlFile = getattr(self.run, file)
            record = {**record, "t": time.time()}
            log.append(record)
            self.observer(record)

    def record(self, decision: Decision, *, by: str) -> None:
        """Log a decision; `by` is `governor` (replayable), `limits` or `guard`."""
        if world().is_main:
            more = {"by": by, "ledger_offset": self.run.ledger.offset}
            self.log("decisions", {"kind": "decision", **decision.to_json(), **more})

    def say(self, text: str) -> None:
        """Tell the observer what is going on."""
        if world().is_main:
            self.observer({"kind": "say", "text": text})

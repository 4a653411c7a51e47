"""Replay: derive a run's decisions again from its files, and say which differ.

The evaluations come from `metrics.jsonl` (losses, and the cost where the line has one), and what
the governor was told besides (horizon, events) from the evidence of each decision. What a resume
undid is left out of both files, as it was left out of the governor's state.

Property: a report is ok exactly when every decision's action and evidence are equal, to the
last bit, to what the rule makes of the same inputs today.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eke.budget.jsonl import effective, read_records
from eke.budget.messages import Decision
from eke.errors import InputError
from eke.governor.records import EventKind


class Replayable(Protocol):
    """The part of a governor that a replay drives."""

    def set_horizon(self, horizon: float) -> None: ...
    def note_event(self, kind: EventKind, cost: float) -> None: ...
    def observe(self, *, step: int, cost: float, losses: Sequence[float]) -> Decision: ...


@dataclass(frozen=True)
class ReplayReport:
    """The outcome of a replay.

    Attributes:
        ok: whether nothing differs.
        compared: decisions that were derived again.
        differences: one sentence for each difference.
    """

    ok: bool
    compared: int
    differences: tuple[str, ...]


def replay_run(
    run_dir: str | os.PathLike[str], make: Callable[[Mapping[str, Any]], Replayable]
) -> ReplayReport:
    """Replay the run in `run_dir` with the governor that `make` builds from its configuration.

    Raises:
        InputError: there is no such run, or it does not say how its governor was made.
        EkeError: one of its files is damaged.
    """
    path = Path(run_dir)
    records = read_records(path / "decisions.jsonl")
    if not records:
        raise InputError(
            "there are no decisions to replay",
            value=str(path),
            rule="a run directory holds decisions.jsonl",
        )
    first = records[0].value
    if first.get("kind") != "governor" or not isinstance(first.get("config"), dict):
        raise InputError(
            "decisions.jsonl does not begin with the governor's configuration",
            value=first.get("kind"),
            rule='its first line is {"kind":"governor","config":{...}}',
        )
    governor = make(first["config"])
    decisions = [r.value for r in effective(records)[0] if _is_the_governors(r.value)]
    evaluations = [
        r.value
        for r in effective(read_records(path / "metrics.jsonl"))[0]
        if r.value.get("kind") == "eval"
    ]
    differences: list[str] = []
    compared = events_noted = at = 0
    for recorded in decisions:
        step, evidence = recorded["step"], recorded["evidence"]
        # Evaluations that asked for no decision, such as the finished model's, are passed over.
        found = next(
            (i for i in range(at, len(evaluations)) if evaluations[i].get("step") == step), None
        )
        if found is None:
            differences.append(f"step {step}: metrics.jsonl has no evaluation for this decision")
            continue
        at = found + 1
        evaluation = evaluations[found]
        try:
            governor.set_horizon(evidence["horizon"])
            for event in evidence["events"][events_noted:]:
                governor.note_event(event["kind"], event["cost"])
                events_noted += 1
            derived = governor.observe(
                step=step,
                cost=evaluation.get("cost", evidence["cost"]),
                losses=evaluation["losses"],
            )
        except (InputError, KeyError, TypeError) as error:
            differences.append(f"step {step}: cannot be derived again ({error})")
            continue
        compared += 1
        differences.extend(f"step {step}: {text}" for text in _differences(recorded, derived))
    return ReplayReport(not differences, compared, tuple(differences))


def _is_the_governors(record: Mapping[str, Any]) -> bool:
    """Limits and guards decide too, and say so in `by`; theirs are arithmetic, not the rule's."""
    return record.get("kind") == "decision" and record.get("by", "governor") == "governor"


def _differences(recorded: Mapping[str, Any], derived: Decision) -> list[str]:
    """What differs between a recorded decision and the one derived again, a phrase each."""
    texts = []
    if recorded["action"] != derived.action:
        texts.append(f"the run chose {recorded['action']!r}, the rule chooses {derived.action!r}")
    # Through JSON, so that tuples and lists are alike; floats survive it bit by bit.
    now = json.loads(json.dumps(dict(derived.evidence)))
    then = recorded["evidence"]
    for key in sorted(now.keys() | then.keys()):
        if key not in then:
            texts.append(f"{key} is missing from the record")
        elif key not in now:
            texts.append(f"{key} is recorded but not derived")
        elif json.dumps(now[key]) != json.dumps(then[key]):
            texts.append(f"{key} was {then[key]!r} and is derived as {now[key]!r}")
    return texts

"""What a report says, as plain data: built from a run's records, drawn by others.

Properties: records that a resume undid are in no series but `undone`; whatever a crash leaves
out of the records leaves a gap (`None` or an empty tuple), never a made-up number; `build` is a
pure function of the files' contents.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from eke.budget import Budget
from eke.budget.budget import PROGRESS_UNITS, SPENT_UNITS
from eke.budget.jsonl import RESUME, Record, effective
from eke.errors import InputError
from eke.report.accounting import Accounts, add_up
from eke.report.batches import batching_of
from eke.report.records import RunFiles
from eke.report.saves import saves_of
from eke.report.text import clean, duration, flatten, number, plain, whole
from eke.report.view import (
    DecisionRow,
    EvalPoint,
    Lengths,
    Limit,
    Phase,
    Proof,
    Restart,
    RunView,
    StepPoint,
)

LIMIT_KEYS = (
    "wall_time",
    "flops",
    "tokens",
    "steps",
    "epochs",
    "energy",
    "cost",
    "price_per_hour",
)
LIMIT_LABELS = {
    "flops": "FLOPs",
    "seconds": "wall time",
    "joules": "energy",
    "money": "cost",
    "tokens": "tokens",
    "steps": "steps",
    "epochs": "epochs",
}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def _values(records: Sequence[Record], kind: str) -> list[Mapping[str, Any]]:
    return [r.value for r in records if r.value.get("kind") == kind]


def _step(record: Mapping[str, Any], x_unit: str) -> StepPoint:
    tokens, padded = number(record.get("tokens")), number(record.get("padded_tokens"))
    computed = padded if padded and tokens is not None and padded >= tokens >= 0 else None
    step = whole(record.get("step")) or 0
    x = number(record.get("flops_total")) if x_unit == "flops" else float(step)
    return StepPoint(
        step=step,
        x=max(x or 0.0, 0.0),
        loss=number(record.get("loss")),
        phase=clean(record.get("phase") or "", 30),
        padding=None if computed is None or tokens is None else 1 - tokens / computed,
        tokens_per_s=number(record.get("tokens_per_s")),
        tokens_total=number(record.get("tokens_total")),
    )


def _eval(record: Mapping[str, Any], x_unit: str) -> EvalPoint:
    step = whole(record.get("step")) or 0
    x = number(record.get("flops_total")) if x_unit == "flops" else float(step)
    se = number(record.get("se"))
    return EvalPoint(
        step=step,
        x=max(x or 0.0, 0.0),
        loss=number(record.get("loss")),
        se=None if se is None or se < 0 else se,
        examples=whole(record.get("examples")),
        finished=record.get("finished") is True,
    )


def _phases(steps: Sequence[StepPoint]) -> tuple[Phase, ...]:
    phases: list[Phase] = []
    for point in steps:
        if phases and phases[-1].name == point.phase:
            phases[-1] = Phase(point.phase, phases[-1].start, point.x)
        else:
            start = phases[-1].end if phases else point.x
            phases.append(Phase(point.phase, start, point.x))
    return tuple(p for p in phases if p.name)


def _lengths(steps: Sequence[Mapping[str, Any]]) -> Lengths | None:
    shapes: Counter[tuple[float, int]] = Counter()
    histograms: list[tuple[tuple[float, int], list[float]]] = []
    for record in steps:
        counts, cap = record.get("lengths"), number(record.get("length_cap"))
        if not isinstance(counts, list) or not counts or cap is None or cap <= 0:
            continue
        shape = (cap, len(counts))
        shapes[shape] += 1
        histograms.append((shape, [max(number(c) or 0.0, 0.0) for c in counts]))
    if not shapes:
        return None
    # Bins of another width cannot be added; they only occur if a run went on with another cap.
    shape, used = shapes.most_common(1)[0]
    columns = zip(*(h for s, h in histograms if s == shape), strict=True)
    return Lengths(tuple(sum(c) for c in columns), shape[0], used, len(histograms) - used)


class _XAt:
    """Where on the axis a step ended; the place of the last step before it, else 0."""

    def __init__(self, points: Sequence[StepPoint]) -> None:
        ordered = sorted((p.step, p.x) for p in points)
        self._steps, self._xs = [s for s, _ in ordered], [x for _, x in ordered]

    def __call__(self, step: int) -> float:
        index = bisect_right(self._steps, step)
        return self._xs[index - 1] if index else 0.0


def _decisions(records: Sequence[Record], x_at: _XAt) -> tuple[DecisionRow, ...]:
    rows = []
    for value in _values(records, "decision"):
        step = whole(value.get("step"))
        evidence, alternatives = value.get("evidence"), value.get("alternatives")
        rows.append(
            DecisionRow(
                step=step,
                x=x_at(step or 0),
                action=clean(value.get("action") or "(none)", 40),
                reason=clean(value.get("reason") or "", 1000),
                evidence=tuple(flatten(evidence)) if isinstance(evidence, Mapping) else (),
                alternatives=tuple(
                    (clean(a.get("action", ""), 40), clean(a.get("why", ""), 1000))
                    for a in (alternatives if isinstance(alternatives, list) else [])
                    if isinstance(a, Mapping)
                ),
            )
        )
    return tuple(rows)


def _restarts(records: Sequence[Record], x_at: _XAt) -> tuple[Restart, ...]:
    restarts: list[Restart] = []
    standing: list[Record] = []
    for record in records:
        if record.value.get("kind") != RESUME:
            standing.append(record)
            continue
        cut = record.value["from_offset"]
        undone = [r for r in standing if r.offset >= cut and r.value.get("kind") == "step"]
        standing = [r for r in standing if r.offset < cut]
        last = max((whole(r.value.get("step")) or 0 for r in standing), default=0)
        step = whole(record.value.get("step"))
        step = last if step is None else step
        restarts.append(Restart(step, x_at(step), len(undone), number(record.value.get("t"))))
    return tuple(restarts)


def _limits(
    files: RunFiles, accounts: Accounts, steps: Sequence[StepPoint], used: float | None,
    notices: list[str],
) -> tuple[Limit, ...]:  # fmt: skip
    totals = {u: number(v) for u, v in _section(files.plan, "limits").items()}
    if not totals:
        stated = {k: v for k, v in _section(files.config, "budget").items() if k in LIMIT_KEYS}
        try:
            totals = dict(Budget.parse(**stated).limits())
        except InputError as error:
            notices.append(f"The budget in run.toml could not be read: {error}")
    limits = []
    for unit in (*SPENT_UNITS, *PROGRESS_UNITS):
        total = totals.get(unit)
        if total is None or total <= 0:
            continue
        amount, exact = accounts.total(unit), True
        spent: float | None
        if unit in SPENT_UNITS:
            spent, exact = amount.value, amount.is_exact
        elif unit == "tokens":
            spent = steps[-1].tokens_total if steps else 0.0
        elif unit == "steps":
            spent = float(steps[-1].step) if steps else 0.0
        else:
            # Epochs are logged whole; with no other limit the logged share says how far it got.
            spent = used * total if used is not None and len(totals) == 1 else None
        limits.append(Limit(unit, LIMIT_LABELS[unit], total, spent, exact))
    return tuple(limits)


def _budget_end_x(
    limits: Sequence[Limit], x_unit: str, last_x: float, used: float | None
) -> float | None:
    ends = []
    if used is not None and used > 0:
        ends.append(last_x / min(used, 1.0))
    for limit in limits:
        if limit.unit == "flops" and x_unit == "flops" and limit.used is not None:
            ends.append(last_x + max(limit.total - limit.used, 0.0))
        if limit.unit == "steps" and x_unit == "step":
            ends.append(max(limit.total, last_x))
    return min(ends, default=None) if last_x > 0 else None


def _proof(record: Mapping[str, Any]) -> Proof | None:
    columns = [record.get(k) for k in ("steps", "reference_losses", "resumed_losses")]
    lists = [c for c in columns if isinstance(c, list)]
    rows = list(zip(*lists, strict=False)) if len(lists) == 3 else []
    if not rows:
        return None
    identical = record.get("bit_identical")
    return Proof(
        steps=tuple(whole(s) or 0 for s, _, _ in rows),
        reference=tuple(number(a) for _, a, _ in rows),
        resumed=tuple(number(b) for _, _, b in rows),
        bit_identical=identical if isinstance(identical, bool) else None,
        killed_at=whole(record.get("killed_at_step")),
        resumed_from=whole(record.get("resumed_from_step")),
        what=clean(record.get("what") or "", 1000),
    )


def _config(
    files: RunFiles, governor: Sequence[Mapping[str, Any]]
) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    sections: list[tuple[str, tuple[tuple[str, str], ...]]] = []
    loose = {k: v for k, v in files.config.items() if not isinstance(v, Mapping)}
    if loose:
        sections.append(("(top)", tuple(flatten(loose))))
    for name, value in files.config.items():
        if isinstance(value, Mapping):
            sections.append((clean(name, 60), tuple(flatten(value))))
    config = _section(governor[-1], "config") if governor else {}
    if config:
        sections.append(("governor, as constructed", tuple(flatten(config))))
    return tuple(sections)


def _cadence(records: Sequence[Mapping[str, Any]]) -> str:
    last = records[-1] if records else {}
    every, cost = number(last.get("seconds")), number(last.get("cost_s"))
    if every is None or cost is None:
        return ""
    return (
        f"Left to itself, the run came to save every {duration(every)}, at a cost of "
        f"{duration(cost)} a save: {clean(last.get('reason') or 'no reason was recorded', 300)}."
    )


def _floats(value: object) -> tuple[float | None, ...]:
    return tuple(number(v) for v in value) if isinstance(value, list) else ()


def build(files: RunFiles) -> RunView:
    """The view of a run's records."""
    notices = list(files.notices)
    kept, undone = effective(files.metrics)
    step_records, eval_records = _values(kept, "step"), _values(kept, "eval")
    has_flops = any((number(r.get("flops_total")) or 0.0) > 0 for r in step_records)
    x_unit = "flops" if has_flops or not step_records else "step"
    steps = sorted((_step(r, x_unit) for r in step_records), key=lambda p: (p.x, p.step))
    evals = sorted((_eval(r, x_unit) for r in eval_records), key=lambda p: (p.x, p.step))
    undone_steps = [_step(r, x_unit) for r in _values(undone, "step")]
    x_at = _XAt(steps)

    logged = [r.value for r in kept]
    shares = [s for s in (number(v.get("budget_used")) for v in logged) if s is not None]
    used = shares[-1] if shares else None
    accounts = add_up(files.ledger)
    limits = _limits(files, accounts, steps, used, notices)
    # The log stops before the last bills; the limits, where they are known, count those too.
    used = max((limit.share for limit in limits if limit.share is not None), default=used)
    last_x = max([p.x for p in steps] + [e.x for e in evals], default=0.0)

    decisions, _ = effective(files.decisions)
    all_records = [*files.metrics, *files.ledger, *files.decisions]
    times = [t for t in (number(r.value.get("t")) for r in all_records) if t is not None]
    data, run = _section(files.config, "data"), _section(files.config, "run")
    weighted = [_floats(r.get("weights")) for r in eval_records]
    price = plain(_section(files.config, "budget").get("price_per_hour") or "").split()
    return RunView(
        name=clean(run.get("name") or files.name, 300),
        state=clean(files.status.get("state") or "unknown", 40),
        reason=clean(files.status.get("reason") or "", 1000),
        exit_code=whole(files.status.get("exit_code")),
        model=plain(_section(files.config, "model").get("source") or "unknown"),
        corpus=plain(data.get("train") or "unknown"),
        eval_corpus=plain(data.get("eval") or "rows of the same, chosen by content"),
        currency=price[-1] if len(price) == 2 else "",
        x_unit=x_unit,
        steps=tuple(steps),
        undone=tuple(sorted(undone_steps, key=lambda p: (p.x, p.step))),
        evals=tuple(evals),
        decisions=_decisions(decisions, x_at),
        restarts=_restarts(files.metrics, x_at),
        phases=_phases(steps),
        limits=limits,
        budget_used=used,
        budget_end_x=_budget_end_x(limits, x_unit, last_x, used),
        accounts=accounts,
        lengths=_lengths(step_records),
        proof=_proof(files.proof),
        began=min(times, default=None),
        ended=max(times, default=None),
        config=_config(files, _values(decisions, "governor")),
        plan=tuple(flatten(files.plan)),
        last_losses=_floats(eval_records[-1].get("losses")) if eval_records else (),
        weights=next((w for w in weighted if w), ()),
        notices=tuple(notices),
        saves=saves_of(files.trace),
        cadence=_cadence(_values(decisions, "cadence")),
        batching=batching_of(step_records),
        loss_of=clean(_section(files.config, "batch").get("loss") or "token", 30),
    )

"""From a run's view to what a page holds: pictures with captions, and tables of their numbers.

Every picture comes in two widths, because text that is scaled with its picture cannot be read
on a telephone; the page shows the one that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eke.report import charts
from eke.report.accounting import Amount
from eke.report.batch_chart import batch_chart, row_name
from eke.report.batches import PARTS, Parts, shares, sums, total
from eke.report.frame import tick_text
from eke.report.loss_chart import cut_points, loss_chart, losses, unnamed_marks
from eke.report.save_chart import milliseconds, save_chart
from eke.report.saves import LANES, SaveView
from eke.report.scales import LIMIT_POINTS, Point
from eke.report.text import UNKNOWN, amount, count, duration, loss, power, share
from eke.report.view import RunView

WIDE, NARROW = 1040, 340
TABLE_ROWS = 200
"""A table of numbers shows at most this many rows, evenly spread."""


@dataclass(frozen=True)
class Table:
    """A table as text; `numeric` are the columns that are aligned on the right."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[int, ...] = ()


@dataclass(frozen=True)
class Figure:
    """A picture in two widths (SVG markup), what to know when reading it, and its numbers."""

    wide: str
    narrow: str
    caption: str
    tables: tuple[Table, ...] = ()


def spread(rows: Sequence[tuple[str, ...]], limit: int = TABLE_ROWS) -> tuple[tuple[str, ...], ...]:
    """At most `limit` of the rows, evenly spread, the last among them."""
    if len(rows) <= limit:
        return tuple(rows)
    every = math.ceil(len(rows) / (limit - 1))
    return (*rows[:-1][::every], rows[-1])


def numbers(
    caption: str,
    columns: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    numeric: tuple[int, ...],
) -> Table:
    """A table of a picture's numbers; its caption says so where rows are left out."""
    if len(rows) > TABLE_ROWS:
        caption += f" ({TABLE_ROWS} at most of {count(len(rows))})"
    return Table(caption, columns, spread(rows), numeric)


def both(draw: Callable[[int, str], str], name: str, wide: int = WIDE) -> tuple[str, str]:
    """A picture in both widths, with ids that differ."""
    return draw(wide, f"{name}-w"), draw(NARROW, f"{name}-n")


def loss_figure(view: RunView) -> Figure:
    """Loss against FLOPs."""
    wide, narrow = both(lambda w, n: loss_chart(view, width=w, name=n), "loss")
    points = losses(view.steps)
    notes = []
    if len(points) // 40 >= 1:
        n = 2 * (len(points) // 40) + 1
        notes.append(f"The strong line is a centred mean of up to {n} steps.")
    if len(points) > LIMIT_POINTS:
        notes.append(
            f"{count(len(points))} steps are drawn as the lowest and highest loss of each of "
            f"{LIMIT_POINTS // 2:,} equal stretches of the axis."
        )
    if any(e.se for e in view.evals if e.loss is not None):
        notes.append("Bars on held-out losses are two standard errors on each side.")
    if any(d.action == "continue" for d in view.decisions):
        notes.append("Ticks along the top are decisions to go on.")
    if cut := cut_points(view):
        notes.append(f"{count(cut)} steps lie off the axis and are drawn at its edge.")
    if view.bad_losses:
        notes.append(f"{count(view.bad_losses)} steps had a loss that is not a number: left out.")
    if unnamed := unnamed_marks(view, WIDE):
        notes.append(f"{count(unnamed)} more marks are named in the table of decisions.")
    steps = [
        (count(s.step), power(s.x), loss(s.loss), s.phase or UNKNOWN, count(s.tokens_total))
        for s in view.steps
    ]
    evals = [
        (count(e.step), power(e.x), loss(e.loss), UNKNOWN if e.se is None else f"{power(e.se)}",
         count(e.examples), "yes" if e.finished else "no")
        for e in view.evals
    ]  # fmt: skip
    x = "FLOPs" if view.x_unit == "flops" else "axis"
    tables = (
        numbers(
            "Held-out evaluations",
            ("step", x, "loss", "standard error", "examples", "finished model"),
            evals,
            (0, 1, 2, 3, 4),
        ),
        numbers(
            "Training steps",
            ("step", x, "loss", "phase", "tokens so far"),
            steps,
            (0, 1, 2, 4),
        ),
    )
    return Figure(wide, narrow, " ".join(notes), tuple(t for t in tables if t.rows))


def budget_figures(view: RunView) -> tuple[Figure, ...]:
    """Seconds and FLOPs by activity."""
    accounts, figures = view.accounts, []
    for unit, heading in (("seconds", "Seconds"), ("flops", "FLOPs")):
        total = accounts.total(unit)
        bars = []
        for row in accounts.rows:
            part = row.amounts[unit]
            text = amount(unit, part.value)
            if part.value is not None and not part.is_exact:
                text = f"≥ {text}"
            elif part.value and total.is_exact:  # a share of a total that may be higher misleads
                text = f"{text} · {share(part.value / total.known)}"
            bars.append(charts.Bar(row.activity, row.label, part.value, text))
        whole = amount(unit, total.value)
        whole = whole if total.is_exact else f"≥ {whole}" if total.value is not None else whole
        if not accounts.rows:
            whole = "no bills"

        def draw(
            width: int, name: str, bars: list[charts.Bar] = bars, whole: str = whole,
            heading: str = heading,
        ) -> str:  # fmt: skip
            return charts.waterfall(bars, whole, heading=heading, width=width, name=name)

        wide, narrow = both(draw, f"spent-{unit}", 510)
        figures.append(Figure(wide, narrow, ""))
    return tuple(figures)


def budget_table(view: RunView) -> Table:
    """Every unit of every activity; unknown units say so."""
    accounts = view.accounts
    columns = [("seconds", "time"), ("flops", "FLOPs"), ("tokens", "tokens"), ("joules", "energy")]
    if accounts.total("money").value is not None and accounts.rows:
        columns.append(("money", "cost"))

    def cells(amounts: dict[str, Amount]) -> tuple[str, ...]:
        out = []
        for unit, _ in columns:
            part = amounts[unit]
            text = amount(unit, part.value, view.currency)
            out.append(text if part.is_exact or part.value is None else f"at least {text}")
        return tuple(out)

    rows = [
        (r.label + (" (in part estimated)" if r.estimates else ""), *cells(r.amounts))
        for r in accounts.rows
    ]
    if rows:
        rows.append(("all", *cells(accounts.totals)))
    return Table(
        "Bills by activity",
        ("activity", *(label for _, label in columns)),
        tuple(rows),
        tuple(range(1, len(columns) + 1)),
    )


def coverage(view: RunView) -> str:
    """How the bills compare with the wall clock, in sentences."""
    accounts = view.accounts
    if not accounts.rows:
        return "The ledger holds no bills."
    if accounts.wall_s is None:
        return "The ledger does not say when its bills were written, so the wall clock is unknown."
    if accounts.coverage is None:
        return "The bills of the ledger lasted no time that could be measured."
    unknown = accounts.total("seconds").unknown
    parts = [
        f"The bills account for {share(accounts.coverage)} of the wall clock: "
        f"{duration(accounts.accounted_s)} of {duration(accounts.wall_s)}"
        + (f" in {accounts.processes} processes." if accounts.processes > 1 else "."),
        "A process is counted from the start of its first bill to its last bill; work in flight "
        "at a crash is added as the ledger estimates it; time in which no process ran is left out.",
    ]
    if unknown:
        parts.append(f"{count(unknown)} bills do not know their seconds.")
    if accounts.undone_bills:
        parts.append(
            f"Lost work includes {count(accounts.undone_bills)} bills that a resume undid."
        )
    return " ".join(parts)


def _series(view: RunView, points: list[Point], kind: str) -> Figure:
    values = [v for _, v in points]
    if kind == "padding":
        heading = "Padding, share of computed positions"
        says = (
            f"between {share(min(values))} and {share(max(values))} a step, "
            f"{share(math.fsum(values) / len(values))} on average"
        )

        def text(ticks: Sequence[float]) -> Callable[[float], str]:
            inner = tick_text([100 * t for t in ticks])
            return lambda v: f"{inner(100 * v)} %"
    else:
        heading, says = (
            "Tokens per second",
            f"between {count(min(values))} and {count(max(values))} a second",
        )
        text = _compact
    name = f"series-{kind}"

    def draw(width: int, name: str) -> str:
        return charts.series(
            points, heading=heading, description=f"Over {count(len(points))} steps, {says}.",
            class_=kind, text=text, width=width, name=name,
        )  # fmt: skip

    wide, narrow = both(draw, name)
    shown = share if kind == "padding" else count
    rows = tuple((count(int(s)), shown(v)) for s, v in points)
    table = numbers(heading, ("step", heading.lower()), rows, (0, 1))
    note = f"{says[0].upper()}{says[1:]}."  # str.capitalize would make 12 M 12 m
    if len(points) > LIMIT_POINTS:
        note += f" Drawn as the lowest and highest of {LIMIT_POINTS // 2:,} equal stretches."
    return Figure(wide, narrow, note, (table,))


def _compact(ticks: Sequence[float]) -> Callable[[float], str]:
    inner = tick_text(ticks)
    return lambda v: f"{v / 1000:.4g} k" if 1e4 <= abs(v) < 1e6 else inner(v)


def length_figures(view: RunView) -> tuple[Figure, ...]:
    """Lengths of samples, padding over time, and tokens a second; those that were recorded."""
    figures = []
    if view.lengths is not None and view.lengths.samples > 0:
        lengths = view.lengths
        wide, narrow = both(lambda w, n: charts.histogram(lengths, width=w, name=n), "lengths")
        n = len(lengths.counts)
        rows = tuple(
            (f"{count(round(lengths.cap * i / n))} to {count(round(lengths.cap * (i + 1) / n))}",
             count(c), share(c / lengths.samples))
            for i, c in enumerate(lengths.counts)
        )  # fmt: skip
        note = f"{count(lengths.samples)} samples of {count(lengths.steps)} steps."
        if lengths.left_out:
            note += f" {count(lengths.left_out)} steps with other bins are left out."
        table = Table("Lengths", ("tokens", "samples", "share"), rows, (0, 1, 2))
        figures.append(Figure(wide, narrow, note, (table,)))
    padding = [(float(s.step), s.padding) for s in view.steps if s.padding is not None]
    rates = [(float(s.step), s.tokens_per_s) for s in view.steps if s.tokens_per_s is not None]
    if padding:
        figures.append(_series(view, padding, "padding"))
    if rates:
        figures.append(_series(view, rates, "rate"))
    return tuple(figures)


def batching_figure(view: RunView) -> Figure | None:
    """What each rank's time went to, step by step, before and after; None if no step says so."""
    shown = view.batching
    if shown is None:
        return None
    wide, narrow = both(lambda w, n: batch_chart(shown, width=w, name=n), "batching")

    def cells(before: Parts, after: Parts) -> tuple[str, ...]:
        pairs = zip(shares(before), shares(after), strict=True)
        return tuple(share(part) for pair in pairs for part in pair)

    by_rank = [
        (row_name(shown, row), *cells(sums(before), sums(after)))
        for row, (before, after) in enumerate(zip(shown.before, shown.after, strict=True))
    ]
    by_step = []
    for column, (before, after) in enumerate(
        zip(zip(*shown.before, strict=True), zip(*shown.after, strict=True), strict=True)
    ):
        if any(cell is not None for cell in after):
            first = shown.first + column * shown.per_column
            last = first + shown.per_column - 1
            name = count(first) if first == last else f"{count(first)} to {count(last)}"
            by_step.append((name, *cells(sums(before), sums(after))))
    columns = tuple(f"{part}, {side}" for part in PARTS for side in ("before", "after"))
    every = tuple(range(1, len(columns) + 1))
    tables = (
        numbers("By rank", ("rank", *columns), by_rank, every),
        numbers("By step", ("steps", *columns), by_step, (0, *every)),
    )
    caption = (
        "A lane is a rank's time until the slowest rank is through the step, counted in padded "
        "tokens; the figure on the right is the share of real tokens after all."
    )
    if shown.per_column > 1:
        caption += f" A column holds {count(shown.per_column)} steps."
    if shown.left_out:
        caption += f" {count(shown.left_out)} steps without these figures are left out."
    return Figure(wide, narrow, caption, tables)


def batching_lead(view: RunView) -> str:
    """What the picture of ranks and steps says, in sentences."""
    shown = view.batching
    if shown is None:
        return ""
    before, after = total(shown.before), total(shown.after)
    low, high = shown.samples
    most = count(low) if low == high else f"{count(low)} to {count(high)}"
    alone = "1 sample" if (low, high) == (1, 1) else f"at most {most} samples"
    said = [f"padding {share(before[1])} → {share(after[1])}"]
    if shown.ranks > 1:
        said.append(
            f"waiting for the slowest rank, dummies included, {share(before[2] + before[3])} → "
            f"{share(after[2] + after[3])}"
        )
    said.append(f"efficiency (real tokens) {share(before[0])} → {share(after[0])}")
    return (
        f"Of all ranks' time, counted in tokens: {'; '.join(said)}; passes of a rank "
        f"{count(shown.passes[0])} → {count(shown.passes[1])}. Before: the samples of each step in "
        f"the order of the epoch, in fixed batches of {alone}, as many as fit under the same cap "
        "on tokens if all are as long as the longest. After: as eke trained them."
    )


def proof_figure(view: RunView) -> Figure | None:
    """The resume proof, if one was made."""
    if view.proof is None:
        return None
    shown = view.proof
    wide, narrow = both(lambda w, n: charts.proof(shown, width=w, name=n), "proof")
    rows = tuple(
        (count(s), loss(a), loss(b), UNKNOWN if a is None or b is None else power(b - a))
        for s, a, b in zip(shown.steps, shown.reference, shown.resumed, strict=True)
    )
    table = numbers(
        "Losses", ("step", "never stopped", "killed and resumed", "difference"), rows, (0, 1, 2, 3)
    )
    return Figure(wide, narrow, shown.what, (table,))


def save_figures(view: RunView) -> tuple[Figure, ...]:
    """Where the time of the typical save went, and of the worst; nothing without a save."""
    if view.saves is None:
        return ()
    worst, typical = view.saves.worst, view.saves.typical
    shown = [("The worst save" if typical else "The save", worst, "save-worst")]
    if typical is not None:
        shown.insert(0, ("A typical save", typical, "save-typical"))
    return tuple(_save_figure(heading, save, name) for heading, save, name in shown)


def _save_figure(heading: str, save: SaveView, name: str) -> Figure:
    wide, narrow = both(lambda w, n: save_chart(save, heading=heading, width=w, name=n), name)
    bits = [("training", bit) for bit in save.stalls]
    bits += [(lane, bit) for lane in LANES[1:] for bit in save.lanes.get(lane, ())]
    rows = [
        (f"{bit.begin_ms:,.1f}", lane, bit.name, milliseconds(bit.ms))
        for lane, bit in sorted(bits, key=lambda one: one[1].begin_ms)
    ]
    table = numbers(heading, ("at (ms)", "lane", "what", "took"), rows, (0, 3))
    return Figure(wide, narrow, "", (table,) if rows else ())


def saves_lead(view: RunView) -> str:
    """What the pictures of saves say, in sentences."""
    if view.saves is None:
        return ""
    worst, typical = view.saves.worst, view.saves.typical
    if typical is None:
        waited = f"Training waited {milliseconds(worst.stall_ms)} for the save in trace.json."
    else:
        waited = (
            f"Of the {count(len(view.saves.stalls_ms))} saves in trace.json, training waited "
            f"{milliseconds(typical.stall_ms)} for a typical one and "
            f"{milliseconds(worst.stall_ms)} for the worst."
        )
    waited += " The rest of a save goes on in the background, while training does too."
    return f"{waited} {view.cadence}".rstrip()

"""Two to four runs side by side: their curves in one picture, and what differs between them.

Property: a difference of losses is only called paired when both runs evaluated the same number
of examples with the same weights; otherwise the two standard errors are combined.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eke.errors import InputError
from eke.report import text
from eke.report.figures import Figure, Table, both, spread
from eke.report.frame import Box, legend
from eke.report.loss_chart import axes, grid, held_out, log_key, losses, smoothed
from eke.report.model import build
from eke.report.records import load
from eke.report.render import page, write_whole
from eke.report.scales import LIMIT_POINTS, thin
from eke.report.svg import el, figure, path, title, words
from eke.report.view import LOSS_UNITS, RunView

MOST_RUNS = 4
NEVER_BILLED = "—"


@dataclass(frozen=True)
class Difference:
    """How far one run's final held-out loss is from another's (second - first)."""

    nats: float
    se: float | None
    paired: bool
    unit: str = LOSS_UNITS["token"]


def paired_difference(
    a: Sequence[float | None], b: Sequence[float | None], weights: Sequence[float | None]
) -> tuple[float, float] | None:
    """The weighted mean of `b - a` per example, and its standard error.

    The mean of n token-weighted losses is a ratio of sums; its error is the usual one of a ratio:
    sqrt(n / (n - 1) * sum (w_i (d_i - mean))^2) / sum w_i (Cochran, Sampling Techniques, 1977,
    chapter 6). None for fewer than two examples, unequal lengths, or values that are no numbers.
    """
    if not len(a) == len(b) == len(weights) or len(a) < 2:
        return None
    rows = [
        (w, y - x)
        for x, y, w in zip(a, b, weights, strict=True)
        if x is not None and y is not None and w is not None and w >= 0
    ]
    total = sum(w for w, _ in rows)
    if len(rows) < len(a) or total <= 0:
        return None
    mean = sum(w * d for w, d in rows) / total
    n = len(rows)
    spread_of = math.fsum((w * (d - mean)) ** 2 for w, d in rows)
    return mean, math.sqrt(n / (n - 1) * spread_of) / total


def difference(a: RunView, b: RunView) -> Difference | None:
    """The difference of the final held-out losses; None where one has none, or where the two are
    means of different things. Paired over the same examples it is per token, whatever they are."""
    if a.final is None or b.final is None or a.final.loss is None or b.final.loss is None:
        return None
    both_last = a.final == a.evals[-1] and b.final == b.evals[-1]
    if both_last and a.weights == b.weights:
        paired = paired_difference(a.last_losses, b.last_losses, a.weights)
        if paired is not None:
            return Difference(paired[0], paired[1], True)
    if a.loss_of != b.loss_of:
        return None
    errors = (a.final.se, b.final.se)
    se = None if None in errors else math.hypot(*(e or 0.0 for e in errors))
    return Difference(b.final.loss - a.final.loss, se, False, a.loss_unit)


def say(shown: Difference | None, first: str, second: str) -> str:
    """The difference as a sentence."""
    if shown is None:
        return (
            f"{second} and {first} cannot be compared: one has no held-out loss, or the two are "
            "means of different things."
        )
    way = "lower" if shown.nats < 0 else "higher"
    size = f"{second} is {text.loss(abs(shown.nats))} {shown.unit} {way} than {first}"
    if shown.nats == 0:
        size = f"{second} and {first} have the same held-out loss"
    if shown.se is None:
        return f"{size}."
    how = "paired over the same examples" if shown.paired else "unpaired"
    verdict = (
        "more than two standard errors"
        if abs(shown.nats) > 2 * shown.se
        else "within two standard errors, so it may be chance"
    )
    return f"{size} (± {text.power(shown.se)} SE, {how}): {verdict}."


def overlay(views: Sequence[RunView], names: Sequence[str], *, width: int, name: str) -> str:
    """The runs' curves in one picture: smoothed training loss faint, held-out loss strong."""
    entries = [(f"run-{i}", n) for i, n in enumerate(names)]
    key, key_height = legend(entries, 4.0, width - 4.0, 22.0)
    top = 22 + key_height + 8
    plot_height = 270 if width < 600 else 340
    if not any(losses(v.steps) or held_out(v.evals) for v in views):
        plot_height = 70
    height = int(top + plot_height + 44)
    box = Box(46.0, top, width - 10.0, height - 44.0)
    heading, a = "Loss against training FLOPs", axes(views, box, with_budget=False)
    units = {v.loss_unit for v in views}
    unit = units.pop() if len(units) == 1 else "each run's own mean"
    head = words(4, 15, f"Loss, {unit}", "strong")
    if a is None:
        empty = words(width / 2, (top + height) / 2, "no losses were recorded", "t", "middle")
        return figure(name, width, height, heading, "Nothing to show.", head, key, empty)
    out = [grid(a, width, views[0].x_unit)]
    for i, view in enumerate(views):
        mean = thin(smoothed(losses(view.steps)), LIMIT_POINTS, log_key)
        out.append(path(a.at(mean), f"run-{i} faint"))
        out.append(path(thin(a.at(held_out(view.evals))), f"run-{i}"))
        if view.final is not None and view.final.loss is not None:
            tip = title(f"{names[i]}: held-out {text.loss(view.final.loss)}")
            x, y = a.x(view.final.x), a.y(view.final.loss)
            out.append(el("circle", tip, cx=x, cy=y, r=4.0, class_=f"dot run-{i}"))
    says = "; ".join(
        f"{n}: {text.loss(v.final.loss) if v.final else 'no held-out loss'}"
        for n, v in zip(names, views, strict=True)
    )
    return figure(name, width, height, heading, f"{says}.", head, key, *out)


def _headline(views: Sequence[RunView], names: Sequence[str]) -> Table:
    def final(v: RunView) -> str:
        if v.final is None:
            return "none"
        se = "" if v.final.se is None else f" ± {text.power(v.final.se)}"
        return text.loss(v.final.loss) + se + ("" if v.final.finished else " (not finished)")

    rows: list[tuple[str, ...]] = [
        ("state", *(v.state for v in views)),
        ("final held-out loss", *(final(v) for v in views)),
        ("steps", *(text.count(v.last_step) for v in views)),
        ("tokens learned from", *(
            text.count(v.steps[-1].tokens_total) if v.steps else "0" for v in views
        )),
        ("wall time", *(text.duration(v.accounts.wall_s) for v in views)),
        ("FLOPs of all activities", *(
            text.power(v.accounts.total("flops").value) for v in views
        )),
        ("budget used", *(text.share(v.budget_used) for v in views)),
        ("restarts", *(text.count(len(v.restarts)) for v in views)),
        ("made", *(text.moment(v.ended) for v in views)),
    ]  # fmt: skip
    return Table("The runs", ("", *names), tuple(rows))


def _limits(views: Sequence[RunView], names: Sequence[str]) -> Table:
    labels = list(dict.fromkeys(limit.label for v in views for limit in v.limits))

    def cell(view: RunView, label: str) -> str:
        limit = next((x for x in view.limits if x.label == label), None)
        if limit is None:
            return "no limit"
        used = text.amount(limit.unit, limit.used, view.currency)
        total = text.amount(limit.unit, limit.total, view.currency)
        return f"{used} of {total}"

    rows = tuple((label, *(cell(v, label) for v in views)) for label in labels)
    return Table("Limits, used of stated", ("limit", *names), rows)


def _spending(views: Sequence[RunView], names: Sequence[str], unit: str, caption: str) -> Table:
    found = [row for v in views for row in v.accounts.rows]
    labels = {row.activity: row.label for row in found}

    def cell(view: RunView, activity: str) -> str:
        row = view.accounts.row(activity)
        if row is None:
            return NEVER_BILLED
        part, total = row.amounts[unit], view.accounts.total(unit).known
        shown = text.amount(unit, part.value)
        if part.value and part.is_exact and total > 0:
            shown += f" ({text.share(part.value / total)})"
        return shown

    rows = [(label, *(cell(v, key) for v in views)) for key, label in labels.items()]
    if rows:
        totals = (text.amount(unit, v.accounts.total(unit).value) for v in views)
        rows.append(("all", *totals))
    return Table(caption, ("activity", *names), tuple(rows))


def _differences(views: Sequence[RunView], names: Sequence[str]) -> Table:
    """The configuration keys whose values differ."""
    tables = [{f"{s}.{k}": v for s, rows in view.config for k, v in rows} for view in views]
    keys = dict.fromkeys(k for t in tables for k in t)
    rows = [(k, *(t.get(k, "(absent)") for t in tables)) for k in keys]
    unequal = tuple(row for row in rows if len(set(row[1:])) > 1)
    return Table("Configuration that differs", ("key", *names), unequal)


def compare(run_dirs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Write a page that holds runs against one another; returns its path.

    Args:
        run_dirs: two to four run directories; the others are compared with the first.
        out: the HTML file to write.

    Raises:
        InputError: another number of runs, or a directory that is not a run's.
        EkeError: a record is damaged, or the page cannot be written.
    """
    if not 2 <= len(run_dirs) <= MOST_RUNS:
        raise InputError(
            "a comparison needs other runs", value=len(run_dirs),
            rule=f"it takes 2 to {MOST_RUNS} run directories",
            fix="Give the directories one after another: eke report RUN_A RUN_B",
        )  # fmt: skip
    views = [build(load(d)) for d in run_dirs]
    if len({v.x_unit for v in views}) > 1:
        raise InputError(
            "these runs cannot share an axis",
            value=", ".join(v.name for v in views),
            rule="all of them, or none, record FLOPs",
            fix="Compare runs that the same version of eke recorded",
        )
    names = [f"{chr(ord('A') + i)}: {v.name}" for i, v in enumerate(views)]
    wide, narrow = both(lambda w, n: overlay(views, names, width=w, name=n), "overlay")
    numbers = tuple(
        Table(
            f"{n}: held-out evaluations",
            ("step", "axis", "loss"),
            spread([(text.count(e.step), text.power(e.x), text.loss(e.loss)) for e in v.evals]),
            (0, 1, 2),
        )
        for n, v in zip(names, views, strict=True)
        if v.evals
    )
    caption = "Strong: held-out loss, with a dot on the final one. Faint: training loss, smoothed."
    content = page(
        "compare.html.j2",
        {
            "names": names,
            "verdicts": [
                say(difference(views[0], v), names[0], n)
                for v, n in zip(views[1:], names[1:], strict=True)
            ],
            "headline": _headline(views, names),
            "chart": Figure(wide, narrow, caption, numbers),
            "limits": _limits(views, names),
            "seconds": _spending(views, names, "seconds", "Time by activity"),
            "flops": _spending(views, names, "flops", "FLOPs by activity"),
            "differences": _differences(views, names),
            "notices": [f"{n}: {x}" for n, v in zip(names, views, strict=True) for x in v.notices],
        },
    )
    return write_whole(Path(out), content)

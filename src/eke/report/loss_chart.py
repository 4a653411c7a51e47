"""The main chart: loss against FLOPs on a logarithmic axis, with what happened on the way.

Properties: every coordinate lies inside the picture; series longer than `LIMIT_POINTS` are
thinned by lowest and highest in equal stretches of the axis; a point at 0 FLOPs, which a
logarithm cannot show, gets a place of its own to the left of the axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eke.report.frame import SMALL, Box, in_lanes, legend, tick_text, x_axis, y_axis
from eke.report.scales import (
    LIMIT_POINTS,
    Point,
    Scale,
    linear_ticks,
    log_ticks,
    quantile_along,
    smooth,
    thin,
    widen,
)
from eke.report.svg import el, figure, line, path, rect, title, words
from eke.report.text import count, decade, fit, loss, power, share, text_width
from eke.report.view import EvalPoint, RunView, StepPoint

SHOWN_BUDGET = 10.0
"""At most this multiple of the compute used is shown as budget left: more would crush the run."""
PHASES = {"warmup": "warm-up", "stable": "stable", "decay": "final decay"}
COLUMNS = 72
"""How many places along the axis answer to the pointer."""


@dataclass(frozen=True)
class Axes:
    """Both scales of a loss chart and the box that they fill; `zero` is the place of 0 FLOPs."""

    box: Box
    x_log: Scale
    y: Scale
    zero: float | None
    cut: int

    def x(self, value: float) -> float:
        """The pixel of a value on the horizontal axis."""
        return self.x_log(value) if value > 0 or self.zero is None else self.zero

    def at(self, points: Sequence[Point]) -> list[Point]:
        """Values to pixels."""
        return [(self.x(x), self.y(y)) for x, y in points]


def losses(steps: Sequence[StepPoint]) -> list[Point]:
    """The steps that have a loss, as points."""
    return [(s.x, s.loss) for s in steps if s.loss is not None]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """The centred mean over at most a fortieth of the points on each side."""
    means = smooth([y for _, y in points], len(points) // 40)
    return [(x, m) for (x, _), m in zip(points, means, strict=True)]


def held_out(evals: Sequence[EvalPoint]) -> list[Point]:
    """The evaluations that have a loss, as points."""
    return [(e.x, e.loss) for e in evals if e.loss is not None]


def log_key(x: float) -> float:
    """A place on a logarithmic axis, for thinning."""
    return math.log(x) if x > 0 else -745.0


def axes(views: Sequence[RunView], box: Box, *, with_budget: bool = True) -> Axes | None:
    """Scales that hold all runs (and the budget that is left); None when there is nothing."""
    raw = [p for v in views for p in losses(v.steps)]
    evals = [e for v in views for e in v.evals if e.loss is not None]
    xs = [x for x, _ in raw] + [e.x for e in evals]
    positive = [x for x in xs if x > 1e-300]  # one that can be halved
    if not xs:
        return None
    low, high = (min(positive), max(positive)) if positive else (1.0, 10.0)
    ends = [v.budget_end_x for v in views if with_budget and v.budget_end_x is not None]
    high = max([high, *(min(e, high * SHOWN_BUDGET) for e in ends)])
    if high < low * 1.02:
        low, high = low / 1.5, high * 1.5
    has_zero = any(x <= 0 for x in xs)
    zero = box.left + 16 if has_zero else None

    # A spike must not flatten the curve: the top is what nearly all of it needs.
    ys = [y for e in evals for y in _bar(e)]
    for points in (losses(v.steps) for v in views):
        if points:
            ys += [
                quantile_along(points, q, lambda x: log_key(max(x, low))) for q in (0.002, 0.998)
            ]
    y_low, y_high = widen(min(ys), max(ys))
    room = y_high / 2 - y_low / 2
    y_low, y_high = y_low - room * 0.3, y_high + room * 0.12
    return Axes(
        box=box,
        x_log=Scale(low, high, box.left + (34 if has_zero else 0), box.right, log=True),
        y=Scale(y_low, y_high, box.bottom - 18, box.top),
        zero=zero,
        cut=sum(not y_low <= y <= y_high for _, y in raw),
    )


def _bar(point: EvalPoint) -> tuple[float, float]:
    middle, half = point.loss or 0.0, 2 * (point.se or 0.0)
    return middle - half, middle + half


def grid(a: Axes, width: int, x_unit: str) -> str:
    """Both axes with their grid."""
    ticks = log_ticks(a.x_log.low, a.x_log.high, max(2, int(a.box.width / 90)))
    texts = decade if x_unit == "flops" and a.x_log.low >= 1e4 else (lambda v: power(v, 1))
    if x_unit == "step":
        texts = count
    if len({texts(t) for t in ticks}) < len(ticks):  # a range too narrow for one digit
        texts = power
    y_ticks = linear_ticks(a.y.low, a.y.high, 6)
    label = "training FLOPs (log scale)" if x_unit == "flops" else "step (log scale)"
    out = y_axis(
        a.box, a.y, [t for t in y_ticks if a.y(t) <= a.box.bottom - 18], tick_text(y_ticks)
    )
    low = a.x_log.start if a.zero is None else a.x_log.start + 4
    shown = [t for t in ticks if a.x_log(t) >= low - 4]
    out += "".join(line(a.x(t), a.box.top, a.x(t), a.box.bottom, "grid") for t in shown)
    extra = [] if a.zero is None else [(a.zero, "start")]
    out += x_axis(a.box, a.x_log, shown, texts, width, extra)
    out += words(a.box.right, a.box.bottom + 36, label, "t", "end")
    if a.zero is not None:
        out += line(a.x_log.start - 6, a.box.top, a.x_log.start - 6, a.box.bottom, "grid dashed")
    return out


def _strip(a: Axes, view: RunView) -> str:
    """Tints for the phases and for the budget that is left, named along the bottom."""
    out: list[str] = []
    spans: list[tuple[float, float, tuple[str, ...], str]] = []
    names: tuple[str, ...]
    for i, phase in enumerate(view.phases):
        start = a.x_log.start if i == 0 else a.x(phase.start)
        names = (PHASES.get(phase.name, phase.name),)
        spans.append((start, a.x(phase.end), names, f"phase-{i % 3}"))
    last = max([s.x for s in view.steps] + [e.x for e in view.evals], default=0.0)
    if view.budget_end_x is not None and a.x(view.budget_end_x) > a.x(last):
        left = None if view.budget_used is None else max(0.0, 1 - view.budget_used)
        names = ("budget left", "left")
        if left is not None:
            names = (f"{share(left)} of the budget left", f"{share(left)} left", f"{left:.0%} left")
        spans.append((a.x(last), a.x(view.budget_end_x), names, "left"))
    for start, end, names, class_ in spans:
        tip = title(names[0])
        top, height = a.box.top, a.box.bottom - a.box.top
        out.append(rect(start, top, end - start, height, f"tint {class_}", tip))
        out.append(rect(start, a.box.bottom - 18, end - start, 18, f"strip {class_}", tip))
        text = next((n for n in names if text_width(n, SMALL) + 4 <= end - start), None)
        if text is not None:
            out.append(words((start + end) / 2, a.box.bottom - 5, text, "small", "middle"))
    return "".join(out)


def _evaluations(a: Axes, view: RunView) -> str:
    shown = [e for e in view.evals if e.loss is not None]
    if len(shown) > 400:  # every mark is three elements; the line through all of them stays
        shown = shown[:: math.ceil(len(shown) / 400)]
    out = [path(thin(a.at(held_out(view.evals))), "eval-line")]
    for e in shown:
        x, y = a.x(e.x), a.y(e.loss or 0.0)
        if e.se:
            low, high = (a.y(v) for v in _bar(e))
            out.append(line(x, low, x, high, "eval-bar"))
        bar = f" ± {power(2 * e.se)} (2 SE)" if e.se else ""
        tip = title(f"held-out loss {loss(e.loss)}{bar} at step {e.step}")
        out.append(
            el("circle", tip, cx=x, cy=y, r=3.2 if len(shown) <= 50 else 1.8, class_="eval-dot")
        )
    if view.final is not None and view.final.loss is not None:
        x, y = a.x(view.final.x), a.y(view.final.loss)
        text = loss(view.final.loss)
        low = min(max(x, a.box.left + text_width(text, 13)), a.box.right - 4)
        y = y + 22 if y + 26 < a.box.bottom - 18 else y - 14
        out.append(words(low, y, text, "final", "end"))
    return "".join(out)


def _marks(a: Axes, view: RunView, top: float, lanes: int) -> tuple[str, int]:
    """The governor's decisions and the restarts; returns the marks and how many have no text."""
    out = []
    for d in view.decisions:
        if d.action == "continue":
            tip = title(f"step {d.step}: continue. {d.reason}")
            x = a.x(d.x)
            out.append(line(x, a.box.top, x, a.box.top + 7, "mark-continue", tip))
    items = [
        (a.x(d.x), f"{d.action}: {d.reason}" if d.reason else d.action, "governor")
        for d in view.decisions
        if d.action != "continue"
    ]
    for r in view.restarts:
        again = f", {count(r.undone_steps)} steps done again" if r.undone_steps else ""
        items.append((a.x(r.x), f"resumed at step {count(r.step)}{again}", "restart"))
    items.sort()
    labels = in_lanes(
        [(x, t) for x, t, _ in items], 4.0, a.box.right, min(380.0, a.box.width), lanes
    )
    for (x, text, kind), label in zip(items[:400], labels, strict=False):
        y = a.box.top if label is None else top + 16 * (lanes - 1 - label[0]) + 2
        out.append(line(x, y, x, a.box.bottom, f"mark-{kind}", title(text)))
        if label is not None:
            out.append(words(label[1], y + 10, label[2], f"mark-text {kind}", None))
    return "".join(out), sum(label is None for label in labels)


def _hover(a: Axes, view: RunView) -> str:
    """Columns that show their step's numbers under the pointer, by style alone."""
    steps = [s for s in view.steps if s.loss is not None]
    evals = [e for e in view.evals if e.loss is not None]
    nearest: dict[int, StepPoint] = {}
    width = a.box.width / COLUMNS
    for s in steps:
        nearest[min(int((a.x(s.x) - a.box.left) / width), COLUMNS - 1)] = s
    out, j = [], -1
    for column, s in sorted(nearest.items()):
        while j + 1 < len(evals) and evals[j + 1].x <= s.x:
            j += 1
        rows = [f"step {count(s.step)}", f"training loss {loss(s.loss)}"]
        if view.x_unit == "flops":
            rows[0] += f", {power(s.x)} FLOPs"
        if j >= 0:
            rows.append(f"held-out {loss(evals[j].loss)} (step {count(evals[j].step)})")
        wide = max(text_width(r, SMALL) for r in rows) + 16
        x0 = a.box.right - wide - 4
        tip = el(
            "g",
            line(a.x(s.x), a.box.top, a.x(s.x), a.box.bottom, "cross"),
            rect(x0, a.box.top + 10, wide, 10 + 15 * len(rows), "tip-box"),
            *(words(x0 + 8, a.box.top + 26 + 15 * i, r, "small") for i, r in enumerate(rows)),
            class_="tip",
        )
        left = a.box.left + column * width
        hit = rect(left, a.box.top, width, a.box.bottom - a.box.top, "hit")
        out.append(el("g", hit, tip, class_="column"))
    return "".join(out)


def describe(view: RunView) -> str:
    """One sentence that says what the chart shows."""
    points = losses(view.steps)
    if not points and view.final is None:
        return "No step and no evaluation has a loss that is a number."
    parts = []
    if points:
        parts.append(f"training loss from {loss(points[0][1])} to {loss(smoothed(points)[-1][1])}")
    if view.final is not None:
        parts.append(f"held-out loss {loss(view.final.loss)} at step {count(view.final.step)}")
    if view.x_unit == "flops" and view.steps:
        parts.append(f"over {power(view.steps[-1].x)} training FLOPs")
    text = ", ".join(parts)
    return text[0].upper() + text[1:] + "."


def loss_chart(
    view: RunView, *, width: int, name: str, footer: str = "", hover: bool = True
) -> str:
    """The chart as one SVG element `width` pixels wide.

    Args:
        name: a prefix for ids, unique in the page.
        footer: a line of text under the axis, inside the picture.
        hover: answer to the pointer; of no use where the picture is shown as an image.
    """
    narrow = width < 600
    heading = f"Loss against training FLOPs: {view.name}"
    entries = [
        ("train-line", "training loss, smoothed") if view.steps else None,
        ("raw-line", "each step") if view.steps else None,
        ("eval-line", "held-out loss ± 2 SE") if held_out(view.evals) else None,
        ("undone-line", "undone by a crash") if losses(view.undone) else None,
        ("mark-governor", "governor") if view.decisions else None,
    ]
    shown, legend_height = legend([e for e in entries if e], 4.0, width - 4.0, 24.0)
    lanes = min(3, sum(d.action != "continue" for d in view.decisions) + len(view.restarts))
    lanes_top = 24 + legend_height + 4
    top = lanes_top + 16 * lanes + 4
    plot_height = 270 if narrow else 330
    if not losses(view.steps) and not held_out(view.evals):
        plot_height = 70
    height = int(top + plot_height + 44 + (20 if footer else 0))
    box = Box(46.0, top, width - 10.0, top + plot_height)
    a = axes([view], box)
    head = words(4, 15, f"Loss, {view.loss_unit}", "strong")
    foot = words(4, height - 6, fit(footer, width - 8, SMALL), "small") if footer else ""
    if a is None:
        empty = words(width / 2, top + plot_height / 2, "no losses were recorded", "t", "middle")
        return figure(name, width, height, heading, describe(view), head, empty, foot)
    points = losses(view.steps)
    marks, _ = _marks(a, view, lanes_top, lanes)
    mean = thin(smoothed(points), LIMIT_POINTS, log_key)
    return figure(
        name,
        width,
        height,
        heading,
        describe(view),
        head,
        shown,
        _strip(a, view),
        grid(a, width, view.x_unit),
        path(a.at(thin(losses(view.undone), LIMIT_POINTS, log_key)), "undone-line"),
        path(a.at(thin(points, LIMIT_POINTS, log_key)), "raw-line"),
        path(a.at(mean), "train-line"),
        _hover(a, view) if hover else "",
        marks,
        _evaluations(a, view),
        foot,
    )


def unnamed_marks(view: RunView, width: int) -> int:
    """How many marks the chart of this width draws without their text, for the caption."""
    a = axes([view], Box(46.0, 0.0, width - 10.0, 300.0))
    lanes = min(3, sum(d.action != "continue" for d in view.decisions) + len(view.restarts))
    return 0 if a is None else _marks(a, view, 0.0, lanes)[1]


def cut_points(view: RunView) -> int:
    """How many steps lie above or below the axis and are drawn at its edge."""
    a = axes([view], Box(46.0, 0.0, 990.0, 300.0))
    return 0 if a is None else a.cut

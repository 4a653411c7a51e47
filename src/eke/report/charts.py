"""The smaller charts: the budget's waterfall, lengths, series over steps, and resume proofs.

Properties: every coordinate lies inside the picture; an unknown amount is the word "unknown" and
never a bar; the bars of a waterfall follow one another without gap or overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from eke.report.frame import SIZE, Box, legend, placed, tick_text, x_axis, y_axis
from eke.report.scales import Point, Scale, linear_ticks, thin, widen
from eke.report.svg import el, figure, line, path, rect, title, words
from eke.report.text import clean, count, fit, power, text_width
from eke.report.view import Lengths, Proof


@dataclass(frozen=True)
class Bar:
    """One row of a waterfall; `value` None means unknown, `text` is what is printed."""

    key: str
    label: str
    value: float | None
    text: str


def waterfall(bars: Sequence[Bar], total_text: str, *, heading: str, width: int, name: str) -> str:
    """Bars that add up from left to right, and their total below.

    Args:
        heading: what is added up, such as "Seconds".
    """
    row, top = 27, 26
    height = top + row * (len(bars) + 1) + 8
    total = sum(b.value or 0.0 for b in bars)
    label_width = 112.0 if width < 420 else 124.0
    texts = [*(b.text for b in bars), total_text]
    value_width = min(max(text_width(t, SIZE) for t in texts) + 14, width * 0.42)
    # Without a total every bar has no width; the scale only needs to exist.
    scale = Scale(0.0, total if total > 0 else 1.0, label_width, width - value_width)
    out = [words(2, 14, heading, "strong")]
    so_far = 0.0
    for i, bar in enumerate(bars):
        y = top + row * i
        start, end = scale(so_far), scale(so_far + (bar.value or 0.0))
        tip = title(f"{bar.label}: {bar.text}")
        out.append(
            words(label_width - 8, y + 16, fit(bar.label, label_width - 10, SIZE), "t", "end")
        )
        out.append(words(width - 2, y + 16, fit(bar.text, value_width - 6, SIZE), "value", "end"))
        if bar.value is None:
            out.append(line(start, y + 3, start, y + row - 5, "unknown", tip))
        else:
            # Half a pixel at least, inside the axis, so that a small cost can be seen.
            seen = max(end - start, 0.5) if bar.value > 0 else 0.0
            left = min(start, scale.end - seen)
            out.append(rect(left, y + 3, seen, row - 8, f"bar {bar.key}", tip))
        so_far += bar.value or 0.0
        link = y + row - 5 if bar.value else y + 3
        out.append(line(scale(so_far), link, scale(so_far), y + row + 3, "link"))
    y = top + row * len(bars)
    out.append(rect(scale.start, y + 3, scale(total) - scale.start, row - 8, "bar total"))
    out.append(words(label_width - 8, y + 16, "all", "strong", "end"))
    out.append(words(width - 2, y + 16, fit(total_text, value_width - 6, SIZE), "strong", "end"))
    says = "; ".join(f"{b.label} {b.text}" for b in bars) or "nothing was billed"
    return figure(name, width, height, f"{heading} by activity", f"{says}; all {total_text}.", *out)


def histogram(lengths: Lengths, *, width: int, name: str) -> str:
    """How many samples had which length in tokens."""
    height = 210
    box = Box(48.0, 30.0, width - 10.0, height - 44.0)
    most = max([*lengths.counts, 1.0])
    y = Scale(0.0, most * 1.05, box.bottom, box.top)
    x = Scale(0.0, lengths.cap, box.left, box.right)
    ticks = linear_ticks(0.0, most * 1.05, 4)
    n = len(lengths.counts)
    bins = []
    for i, samples in enumerate(lengths.counts):
        low, high = lengths.cap * (i / n), lengths.cap * ((i + 1) / n)
        tip = title(f"{count(round(low))} to {count(round(high))} tokens: {count(samples)} samples")
        left, right = x(low), x(high)
        gap = 1.0 if right - left > 4 else 0.0
        bins.append(rect(left, y(samples), right - left - gap, box.bottom - y(samples), "bin", tip))
    return figure(
        name,
        width,
        height,
        "Lengths of the training samples",
        f"{count(lengths.samples)} samples in {n} bins up to {count(lengths.cap)} tokens.",
        words(4, 15, "Samples by length in tokens", "strong"),
        y_axis(box, y, ticks, tick_text(ticks)),
        *bins,
        x_axis(box, x, linear_ticks(0.0, lengths.cap, 5), count, width),
        words(box.right, box.bottom + 36, "tokens", "t", "end"),
    )


def series(
    points: Sequence[Point], *, heading: str, description: str, class_: str,
    text: Callable[[Sequence[float]], Callable[[float], str]] = tick_text, width: int, name: str,
) -> str:  # fmt: skip
    """One quantity over the steps, from 0 upwards.

    Args:
        points: (step, value), in ascending order, at least one.
        text: makes the formatter of the vertical ticks.
    """
    height = 210
    box = Box(48.0, 30.0, width - 10.0, height - 44.0)
    x = Scale(*widen(points[0][0], points[-1][0]), box.left, box.right)
    highest = max(v for _, v in points)
    y = Scale(0.0, highest * 1.08 if highest > 0 else 1.0, box.bottom, box.top)
    ticks = linear_ticks(y.low, y.high, 5)
    steps = [t for t in linear_ticks(x.low, x.high, 5) if t == int(t)]
    drawn = [(x(a), y(b)) for a, b in thin(points)]
    area = [(drawn[0][0], box.bottom), *drawn, (drawn[-1][0], box.bottom)]
    return figure(
        name,
        width,
        height,
        heading,
        description,
        words(4, 15, heading, "strong"),
        y_axis(box, y, ticks, text(ticks)),
        path(area, f"area {class_}"),
        path(drawn, f"series {class_}"),
        x_axis(box, x, steps, count, width),
        words(box.right, box.bottom + 36, "step", "t", "end"),
    )


def proof(shown: Proof, *, width: int, name: str) -> str:
    """Both runs' losses over the steps, and their difference below."""
    rows = list(zip(shown.steps, shown.reference, shown.resumed, strict=True))
    a = [(float(s), v) for s, v, _ in rows if v is not None]
    b = [(float(s), v) for s, _, v in rows if v is not None]
    gap = [(float(s), v - u) for s, u, v in rows if u is not None and v is not None]
    entries = [("proof-a", "never stopped"), ("proof-b", "killed and resumed")]
    key, key_height = legend(entries, 4.0, width - 4.0, 22.0)
    top = 22 + key_height + 22
    upper = Box(58.0, top, width - 12.0, top + 150)
    lower = Box(58.0, upper.bottom + 40, width - 12.0, upper.bottom + 100)
    height = int(lower.bottom + 42)
    x = Scale(*widen(float(min(shown.steps)), float(max(shown.steps))), upper.left, upper.right)
    values = [v for _, v in a + b] or [0.0]
    low, high = widen(min(values), max(values))
    y = Scale(low - (high - low) * 0.06, high + (high - low) * 0.06, upper.bottom, upper.top)
    widest = max((abs(v) for _, v in gap), default=0.0)
    d = Scale(-(widest * 1.2 or 1.0), widest * 1.2 or 1.0, lower.bottom, lower.top)
    y_ticks = linear_ticks(y.low, y.high, 4)
    d_ticks = [-widest, 0.0, widest] if widest else [0.0]
    steps = [t for t in linear_ticks(x.low, x.high, 6) if t == int(t)]

    moments = []
    if shown.resumed_from is not None:
        moments.append((x(float(shown.resumed_from)), "resumed from", shown.resumed_from))
    if shown.killed_at is not None:
        moments.append((x(float(shown.killed_at)), "killed at", shown.killed_at))
    marks = [
        line(at, upper.top, at, lower.bottom, "mark-restart", title(f"{what} step {step}"))
        for at, what, step in moments
    ]
    names = placed([(at, f"{what} {count(step)}") for at, what, step in moments], 4.0, width - 4.0)
    return figure(
        name,
        width,
        height,
        "A killed and resumed run against one that never stopped",
        f"{len(rows)} steps; largest difference of the loss {power(shown.largest_difference)}.",
        words(4, 15, "Training loss", "strong"),
        key,
        y_axis(upper, y, y_ticks, tick_text(y_ticks)),
        line(upper.left, upper.bottom, upper.right, upper.bottom, "axis"),
        *marks,
        *(words(at, upper.top - 6, text, "mark-text restart", "middle") for at, text in names),
        path([(x(s), y(v)) for s, v in thin(a)], "proof-a"),
        path([(x(s), y(v)) for s, v in thin(b)], "proof-b"),
        words(4, lower.top - 14, "Difference", "strong"),
        y_axis(lower, d, d_ticks, lambda v: power(v, 1)),
        path([(x(s), d(v)) for s, v in thin(gap)], "proof-gap"),
        x_axis(lower, x, steps, count, width),
        words(lower.right, lower.bottom + 36, "step", "t", "end"),
    )


def meter(share: float | None, name: str, label: str) -> str:
    """A bar that fills with the share used; red once the limit is passed."""
    filled = 0.0 if share is None else min(max(share, 0.0), 1.0)
    over = share is not None and share > 1.0
    return el(
        "svg",
        el("title", escape(clean(label)), id=f"{name}-title"),
        rect(0, 0, 100, 4, "meter"),
        rect(0, 0, 100 * filled, 4, "meter-over" if over else "meter-used"),
        xmlns="http://www.w3.org/2000/svg",
        viewBox="0 0 100 4",
        preserveAspectRatio="none",
        class_="meter-svg",
        role="img",
        aria_labelledby=f"{name}-title",
    )

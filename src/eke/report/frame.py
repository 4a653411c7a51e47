"""What charts share: axes, labels that do not collide, legends that wrap.

Property: two labels drawn by one call never overlap, and none leaves the horizontal range that
it was given (by the estimate of `text_width`, which is an upper one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eke.report.scales import Point, Scale
from eke.report.svg import line, path, words
from eke.report.text import count, fit, power, text_width

SIZE = 12.0
"""Font size of chart text (pixels at full width)."""
SMALL = 11.0


@dataclass(frozen=True)
class Box:
    """The plotting area inside a picture (pixels)."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def width(self) -> float:
        """Pixels from left to right."""
        return self.right - self.left


def placed(
    labels: Sequence[tuple[float, str]], low: float, high: float, gap: float = 8.0
) -> list[tuple[float, str]]:
    """Centres for labels at given pixels, inside `[low, high]`; those that would collide go."""
    kept: list[tuple[float, str]] = []
    free_from = low
    for at, text in sorted(labels):
        half = text_width(text, SMALL) / 2
        if 2 * half > high - low:
            continue
        centre = min(max(at, low + half), high - half)
        if centre - half >= free_from - 1e-9:
            kept.append((centre, text))
            free_from = centre + half + gap
    return kept


def x_axis(
    box: Box,
    scale: Scale,
    ticks: Sequence[float],
    text: Callable[[float], str],
    width: float,
    extra: Sequence[tuple[float, str]] = (),
) -> str:
    """The horizontal axis below the box: its line, ticks and labels; `extra` labels by pixel."""
    marks = "".join(line(scale(t), box.bottom, scale(t), box.bottom + 4, "axis") for t in ticks)
    labels = placed([*extra, *((scale(t), text(t)) for t in ticks)], 2.0, width - 2.0)
    return (
        line(box.left, box.bottom, box.right, box.bottom, "axis")
        + marks
        + "".join(words(x, box.bottom + 17, t, "tick", "middle") for x, t in labels)
    )


def y_axis(box: Box, scale: Scale, ticks: Sequence[float], text: Callable[[float], str]) -> str:
    """Horizontal grid lines with labels to the left of the box."""
    out = []
    for tick in ticks:
        y = scale(tick)
        out.append(line(box.left, y, box.right, y, "grid"))
        out.append(words(box.left - 7, y + 4, fit(text(tick), box.left - 9, SMALL), "tick", "end"))
    return "".join(out)


def tick_text(ticks: Sequence[float]) -> Callable[[float], str]:
    """A formatter with as many decimals as the distance of the ticks needs."""
    step = abs(ticks[1] - ticks[0]) if len(ticks) > 1 else abs(ticks[0]) if ticks else 1.0
    if max((abs(t) for t in ticks), default=0.0) >= 1e6 or 0 < step < 1e-4:
        return lambda v: "0" if v == 0 else power(v, 1)
    if step >= 1 and all(float(t).is_integer() for t in ticks):
        return count
    decimals = next((d for d in range(5) if step * 10**d >= 0.999), 4)
    return lambda v: f"{v:.{decimals}f}"


def legend(
    entries: Sequence[tuple[str, str]], left: float, right: float, top: float
) -> tuple[str, float]:
    """Swatches with text, wrapped into rows; returns the markup and the height it took.

    Args:
        entries: the class of the swatch's line, and its text.
    """
    out, x, y = [], left, top
    for class_, text in entries:
        text = fit(text, right - left - 26, SIZE)
        width = 26 + text_width(text, SIZE)
        if x > left and x + width > right:
            x, y = left, y + 18
        swatch: list[Point] = [(x, y + 8), (x + 18, y + 8)]
        out.append(path(swatch, class_))
        out.append(words(x + 24, y + 12, text, "t"))
        x += width + 16
    return "".join(out), (y - top + 18 if entries else 0.0)


def in_lanes(
    items: Sequence[tuple[float, str]], low: float, high: float, widest: float, lanes: int
) -> list[tuple[int, float, str] | None]:
    """Place labels beside marks, in lanes so that none overlap.

    Args:
        items: the mark's pixel and its text, in ascending order.

    Returns:
        For each item its lane (0 is the lowest), where its text starts, and the text as it fits;
        None where all lanes are taken.
    """
    taken: list[list[tuple[float, float]]] = [[] for _ in range(lanes)]
    out: list[tuple[int, float, str] | None] = []
    for at, text in items:
        found = None
        shown = fit(text, min(widest, high - low), SMALL)
        width = text_width(shown, SMALL)
        # Right of the mark; left of it at the right edge; else pushed inside.
        for start in (at + 5, at - 5 - width, min(max(at, low), high - width)):
            if found is not None or start < low or start + width > high + 1e-9:
                continue
            for lane, spans in enumerate(taken):
                if all(start + width + 8 <= a or start >= b + 8 for a, b in spans):
                    spans.append((start, start + width))
                    found = (lane, start, shown)
                    break
        out.append(found)
    return out

"""Just enough SVG: elements as strings, with every text and attribute escaped.

Property: whatever strings and finite numbers go in, what comes out is well-formed XML.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

from eke.report.scales import Point
from eke.report.text import clean


def px(value: float) -> str:
    """A coordinate with two decimals at most.

    Raises:
        ValueError: it is not finite, which no renderer draws.
    """
    if not math.isfinite(value):
        raise ValueError(f"a coordinate is finite; got {value}")
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def el(name: str, *children: str, **attributes: object) -> str:
    """One element. `class_` becomes `class`, `_` becomes `-`; None is left out.

    `children` are markup already: text goes through `words` or `title`.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is not None:
            # Never cut: half a path or half an id is not a shorter one but a broken one.
            shown = px(value) if isinstance(value, float) else clean(value, sys.maxsize)
            parts.append(f"{key.rstrip('_').replace('_', '-')}={quoteattr(shown)}")
    inner = "".join(children)
    return f"<{' '.join(parts)}>{inner}</{name}>" if inner else f"<{' '.join(parts)}/>"


def title(text: str) -> str:
    """A tooltip, and what a screen reader says."""
    return el("title", escape(clean(text)))


def words(
    x: float, y: float, text: str, class_: str = "t", anchor: str | None = None, *children: str
) -> str:
    """Text at a point; `anchor` is None (start), "middle" or "end"."""
    return el(
        "text", *children, escape(clean(text)), x=float(x), y=float(y), class_=class_,
        text_anchor=anchor,
    )  # fmt: skip


def rect(x: float, y: float, width: float, height: float, class_: str, *children: str) -> str:
    """A rectangle; a width or height below 0 is drawn as 0."""
    # The order of max's arguments matters: the other one would turn NaN into 0.
    return el(
        "rect", *children, x=float(x), y=float(y), width=max(float(width), 0.0),
        height=max(float(height), 0.0), class_=class_,
    )  # fmt: skip


def line(x1: float, y1: float, x2: float, y2: float, class_: str, *children: str) -> str:
    """A straight line."""
    return el(
        "line", *children, x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_
    )


def path(points: Sequence[Point], class_: str, *children: str) -> str:
    """A line through points, or nothing where there are none; one point becomes a dot."""
    if not points:
        return ""
    if len(points) == 1:
        return el(
            "circle", *children, cx=points[0][0], cy=points[0][1], r=1.5, class_="dot " + class_
        )
    d = "M" + "L".join(f"{px(x)} {px(y)}" for x, y in points)
    return el("path", *children, d=d, class_=class_)


def figure(
    name: str, width: int, height: int, heading: str, description: str, *children: str
) -> str:
    """A whole picture; `name` must be unique in the page, as other ids start with it."""
    return el(
        "svg",
        el("title", escape(clean(heading)), id=f"{name}-title"),
        el("desc", escape(clean(description)), id=f"{name}-desc"),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        class_="chart",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
        preserveAspectRatio="xMidYMid meet",
    )

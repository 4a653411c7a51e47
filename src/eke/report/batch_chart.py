"""Ranks against steps: what each rank's time went to, in fixed batches and as trained.

Property: a lane is filled in every column that the rank took part in, to the last pixel: its parts
are shares of one time, and lie on top of one another without gap or overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

from eke.report.batches import PARTS, Batching, Parts, shares, sums, total
from eke.report.frame import SMALL, Box, legend, x_axis
from eke.report.scales import Point, Scale, linear_ticks
from eke.report.svg import figure, path, rect, title, words
from eke.report.text import count, share, text_width

SAID = {
    "real": "real tokens",
    "padding": "padding",
    "waiting": "waiting for the slowest rank",
    "dummies": "without a sample (dummies)",
}
GAP = 3.0


def spoken(parts: Parts) -> str:
    """Shares in words: `real 81.2 %, padding 12.0 %, ...`, those of nothing left out."""
    shown = [
        f"{name} {share(part)}"
        for name, part in zip(PARTS, shares(parts), strict=True)
        if part or name == "real"
    ]
    return ", ".join(shown)


def headings(shown: Batching) -> tuple[str, str]:
    """What is said above either half."""
    return (
        f"Before, fixed batches: {spoken(total(shown.before))}",
        f"After, as trained: {spoken(total(shown.after))}",
    )


def row_name(shown: Batching, row: int) -> str:
    """`rank 3`; `ranks 8–15` where a row stands for several."""
    first, last = row * shown.per_row, min((row + 1) * shown.per_row, shown.ranks) - 1
    return f"rank {first}" if first == last else f"ranks {first}–{last}"


def _counted(number: int, what: str) -> str:
    return f"{count(number)} {what}" + "s" * (number != 1)


def batch_chart(shown: Batching, *, width: int, name: str) -> str:
    """Two halves of one lane a rank, over the same steps."""
    rows = len(shown.after)
    lane = {1: 58.0, 2: 42.0}.get(rows, 30.0 if rows <= 4 else 20.0 if rows <= 8 else 14.0)
    names = [row_name(shown, row) for row in range(rows)]
    left = max(text_width(text, SMALL) for text in names) + 12
    used = [
        part
        for index, part in enumerate(PARTS)
        if any(cell[index] for side in (shown.before, shown.after) for row in side for cell in row
               if cell is not None)
    ]  # fmt: skip
    key, key_height = legend([(f"g-key b-{part}", SAID[part]) for part in used], 4, width - 4, 22)
    first = float(shown.first)
    last = first + shown.columns * shown.per_column
    right = width - 50.0
    # One step has no width on an axis of step numbers: a column is from its first step to the next.
    x = Scale(first, max(last, first * (1 + 1e-12) + 1e-9), left, right)
    edges = [x(first + column * shown.per_column) for column in range(shown.columns + 1)]
    out, y = [], 22 + key_height + 8
    for heading, side in zip(headings(shown), (shown.before, shown.after), strict=True):
        lines = _wrapped(heading, width - 8.0)
        for number, text in enumerate(lines):
            out.append(words(4, y + 12 + 16 * number, text, "strong"))
        y += 16 * len(lines) + 6
        for row, cells in enumerate(side):
            of_row = sums(cells)
            middle = y + lane / 2 + 4
            out.append(words(left - 8, middle, names[row], "tick", "end"))
            out.append(words(right + 6, middle, share(shares(of_row)[0]), "tick"))
            out.append(rect(left, y, right - left, lane, "g-lane"))
            out += _lane(cells, edges, y, lane)
            tip = title(f"{names[row]}, {heading.split(':')[0].lower()}: {spoken(of_row)}")
            out.append(rect(left, y, right - left, lane, "hit", tip))
            y += lane + GAP
        y += 12
    box = Box(left, y, right, y - 8)
    # The last column ends where a step after the last would begin.
    ticks = [
        t for t in linear_ticks(first, last, 4 if width < 500 else 8)
        if t == int(t) and t < first + shown.steps
    ]  # fmt: skip
    out.append(x_axis(box, x, ticks, count, width))
    out.append(words(right, box.bottom + 36, "step", "t", "end"))
    description = ". ".join(
        f"{heading}. " + "; ".join(
            f"{names[row]}: {spoken(sums(cells))}" for row, cells in enumerate(side)
        )
        for heading, side in zip(headings(shown), (shown.before, shown.after), strict=True)
    )  # fmt: skip
    return figure(
        name,
        width,
        int(box.bottom + 44),
        "Every rank's time by step, counted in tokens",
        f"{_counted(shown.steps, 'step')}, {_counted(shown.ranks, 'rank')}. {description}.",
        words(4, 15, "Every rank's time by step, counted in tokens", "strong"),
        key,
        *out,
    )


def _lane(
    cells: Sequence[Parts | None], edges: Sequence[float], y: float, lane: float
) -> list[str]:
    """The parts of one lane. Each is drawn from the bottom to its top edge, the highest first, so
    that no seam shows between them."""
    out = []
    for index in reversed(range(len(PARTS))):
        if not any(cell[index] for cell in cells if cell is not None):
            continue
        for begin, end in _stretches(cells):
            points: list[Point] = [(edges[begin], y + lane)]
            for column in range(begin, end):
                cell = cells[column]
                assert cell is not None
                top = y + lane * (1 - min(1.0, sum(shares(cell)[: index + 1])))
                if abs(points[-1][1] - top) > 1e-6 or len(points) < 3:
                    points += [(edges[column], top), (edges[column + 1], top)]
                else:
                    points[-1] = (edges[column + 1], top)
            points.append((edges[end], y + lane))
            out.append(path(points, f"b-area b-{PARTS[index]}"))
    return out


def _stretches(cells: Sequence[Parts | None]) -> list[tuple[int, int]]:
    """Where columns follow one another that hold something."""
    found: list[tuple[int, int]] = []
    for column, cell in enumerate(cells):
        if cell is None or sum(cell) <= 0:
            continue
        if found and found[-1][1] == column:
            found[-1] = (found[-1][0], column + 1)
        else:
            found.append((column, column + 1))
    return found


def _wrapped(text: str, wide: float) -> list[str]:
    """Lines that are no wider than this."""
    lines, line = [], ""
    for word in text.split(" "):
        longer = f"{line} {word}".strip()
        if line and text_width(longer, 13.5) > wide:
            lines.append(line)
            longer = word
        line = longer
    return [*lines, line]

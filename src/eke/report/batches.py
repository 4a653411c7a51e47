"""What every rank's steps were made of, as trained and in plain fixed batches, in columns of steps.

Properties: a step counts on both sides or on neither, and one whose record does not say what it
should is left out; every column is of equally many step numbers; the sums over all columns and rows
are the sums over all steps that are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eke.report.text import number, whole

PARTS = ("real", "padding", "waiting", "dummies")
"""What a rank's time is made of; see `ranks` in docs/run-directory.md."""

MOST_COLUMNS, MOST_ROWS = 80, 16

Parts = tuple[float, float, float, float]
"""Tokens, or shares of them, in the order of `PARTS`."""
Grid = tuple[tuple[Parts | None, ...], ...]
"""Rows of columns; None where a row took part in no step of a column."""


@dataclass(frozen=True)
class Batching:
    """The same samples twice: in fixed batches (`before`), and as they were trained (`after`).

    Attributes:
        first: the first step.
        columns, per_column: how many columns, and how many step numbers in each.
        ranks, per_row: how many ranks at most, and how many of them in a row.
        samples: the fewest and the most samples that fixed batches were allowed.
        passes: micro-batches of a rank, before and after.
        steps, left_out: how many steps are counted, and how many do not say enough.
    """

    before: Grid
    after: Grid
    first: int
    columns: int
    per_column: int
    ranks: int
    per_row: int
    samples: tuple[int, int]
    passes: tuple[int, int]
    steps: int
    left_out: int


def sums(cells: Sequence[Parts | None]) -> Parts:
    """The sums, part by part."""
    known = [cell for cell in cells if cell is not None]
    a, b, c, d = (sum(cell[part] for cell in known) for part in range(4))
    return (a, b, c, d)


def shares(parts: Parts) -> Parts:
    """The same as parts of their sum; nothing but real where the sum is 0."""
    total = sum(parts)
    if total <= 0:
        return (1.0, 0.0, 0.0, 0.0)
    a, b, c, d = (part / total for part in parts)
    return (a, b, c, d)


def total(grid: Grid) -> Parts:
    """The shares of a whole side."""
    return shares(sums([cell for row in grid for cell in row]))


def _ranks(value: object) -> list[Parts] | None:
    """The figures of each rank of a step, if they are that."""
    found: list[Parts] = []
    for row in value if isinstance(value, list) else []:
        parts = [number(part) for part in row] if isinstance(row, list) else []
        if len(parts) != len(PARTS) or any(part is None or part < 0 for part in parts):
            return None
        a, b, c, d = (part or 0.0 for part in parts)
        found.append((a, b, c, d))
    return found or None


@dataclass(frozen=True)
class _Step:
    number: int
    before: list[Parts]
    after: list[Parts]
    samples: int
    passes: tuple[int, int]


def _step(record: Mapping[str, Any]) -> _Step | None:
    fixed = record.get("fixed")
    if not isinstance(fixed, Mapping):
        return None
    step, samples = whole(record.get("step")), whole(fixed.get("samples"))
    before, after = _ranks(fixed.get("ranks")), _ranks(record.get("ranks"))
    planned, passed = whole(fixed.get("micro_batches")), whole(record.get("micro_batches"))
    if before is None or after is None or len(before) != len(after):
        return None
    if step is None or samples is None or planned is None or passed is None:
        return None
    if min(step, samples, planned, passed) < 0:
        return None
    return _Step(step, before, after, samples, (planned, passed))


def batching_of(records: Sequence[Mapping[str, Any]]) -> Batching | None:
    """What the records of steps say; None if none says it, as those of earlier versions."""
    steps = [step for step in map(_step, records) if step is not None]
    if not steps:
        return None
    first, last = min(s.number for s in steps), max(s.number for s in steps)
    ranks = max(len(s.after) for s in steps)
    per_row, per_column = -(-ranks // MOST_ROWS), -(-(last - first + 1) // MOST_COLUMNS)
    rows, columns = -(-ranks // per_row), -(-(last - first + 1) // per_column)

    def grid(side: str) -> Grid:
        cells: list[list[list[Parts]]] = [[[] for _ in range(columns)] for _ in range(rows)]
        for step in steps:
            for rank, parts in enumerate(getattr(step, side)):
                cells[rank // per_row][(step.number - first) // per_column].append(parts)
        return tuple(tuple(sums(cell) if cell else None for cell in row) for row in cells)

    return Batching(
        before=grid("before"),
        after=grid("after"),
        first=first,
        columns=columns,
        per_column=per_column,
        ranks=ranks,
        per_row=per_row,
        samples=(min(s.samples for s in steps), max(s.samples for s in steps)),
        passes=(sum(s.passes[0] for s in steps), sum(s.passes[1] for s in steps)),
        steps=len(steps),
        left_out=len(records) - len(steps),
    )

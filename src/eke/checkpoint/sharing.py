"""How ranks that hold the same tensors share out the writing of them: a pure function.

Properties, for every list of tensors and every number of ranks: every row of every tensor is
given to exactly one rank; one tensor's rows go to ranks in rank order; every rank computes the
same answer; and no rank gets more than an equal share plus one unsplittable piece.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

SPLIT_BYTES = 1 << 20
"""Tensors smaller than this stay whole: a shard costs an entry in the manifest."""


class Item(NamedTuple):
    """One tensor: `rows` pieces of `row_bytes` along its first dimension (a scalar is one row)."""

    name: str
    rows: int
    row_bytes: int


class Part(NamedTuple):
    """Rows `begin` to `end` of a tensor."""

    name: str
    begin: int
    end: int


def holders(boxes: Sequence[Any], rank: int) -> tuple[int, ...]:
    """The ranks that hold what `rank` does, in order, from every rank's box."""
    return tuple(other for other, box in enumerate(boxes) if box == boxes[rank])


def share_out(
    items: Sequence[Item], ranks: int, split_bytes: int = SPLIT_BYTES
) -> list[list[Part]]:
    """Each rank's parts.

    The tensors are laid end to end and the whole is cut into `ranks` equal stretches; a tensor
    under `split_bytes` goes to the stretch that holds its middle, a larger one is cut at the
    nearest row.
    """
    total_bytes = sum(item.rows * item.row_bytes for item in items)
    cuts = [total_bytes * rank // ranks for rank in range(1, ranks)]
    parts: list[list[Part]] = [[] for _ in range(ranks)]
    start = 0
    for name, rows, row_bytes in items:
        size = rows * row_bytes
        if size < split_bytes or rows < 2:
            rank = bisect_right(cuts, start + size // 2) if total_bytes else 0
            parts[rank].append(Part(name, 0, rows))
        else:
            nearest = [(cut - start + row_bytes // 2) // row_bytes for cut in cuts]
            edges = [min(max(row, 0), rows) for row in nearest]
            for rank, (begin, end) in enumerate(zip([0, *edges], [*edges, rows], strict=True)):
                if begin < end:
                    parts[rank].append(Part(name, begin, end))
        start += size
    return parts

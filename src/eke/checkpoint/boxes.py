"""Boxes of a tensor, and where they overlap: pure functions over offsets and shapes.

A shard on disk is a box of the whole tensor whose elements lie in row-major order; what a rank
takes is another box. Properties, for every two boxes: `overlap` names the same elements in both,
each once; `span` is the range of elements in row-major order that a part of a box takes, if it is
one range; and the `pieces` of consecutive stretches of a shard bring every common element to its
place exactly once, however the shard is cut into stretches.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from eke.checkpoint.plan import boxes
from eke.distributed import Box

Slices = tuple[slice, ...]


class Piece(NamedTuple):
    """A part of a stretch of a shard, and where it goes.

    Attributes:
        at: where in the stretch the elements begin.
        shape: the shape that they have; `prod(shape)` of them follow each other.
        taken: what of that shape is wanted.
        place: where it belongs in the box that is wanted.
    """

    at: int
    shape: tuple[int, ...]
    taken: Slices
    place: Slices


def overlap(a: Box, b: Box) -> tuple[Slices, Slices] | None:
    """Where the elements that both boxes have are in `a`, and where in `b`; None if there are none.

    A box without dimensions is the one element that there is.
    """
    in_a, in_b = [], []
    for start_a, size_a, start_b, size_b in zip(a.offset, a.shape, b.offset, b.shape, strict=True):
        begin, end = max(start_a, start_b), min(start_a + size_a, start_b + size_b)
        if begin >= end:
            return None
        in_a.append(slice(begin - start_a, end - start_a))
        in_b.append(slice(begin - start_b, end - start_b))
    return tuple(in_a), tuple(in_b)


def span(shape: tuple[int, ...], part: Slices) -> tuple[int, int] | None:
    """The elements of a tensor, counted in row-major order, that `part` takes, if without gaps.

    Args:
        shape: of the tensor.
        part: one slice for each dimension, none of them empty.

    Returns:
        (begin, end), or None if the part is not one range.
    """
    begin, stride, whole = 0, 1, True
    for size, taken in zip(reversed(shape), reversed(part), strict=True):
        count = taken.stop - taken.start
        if not whole and count > 1:
            return None
        whole = whole and count == size
        begin += taken.start * stride
        stride *= size
    return begin, begin + prod(taken.stop - taken.start for taken in part)


def pieces(shard: Box, wanted: Box, begin: int, end: int) -> Iterator[Piece]:
    """What of elements `begin` to `end` of a shard, in row-major order, belongs where.

    There are at most two for each dimension.
    """
    at = 0
    for part in boxes(shard.shape, begin, end):
        starts, shape = [], []
        for taken, size in zip(part, shard.shape, strict=True):
            start, stop, _ = taken.indices(size)
            starts.append(start)
            shape.append(stop - start)
        offset = tuple(o + s for o, s in zip(shard.offset, starts, strict=True))
        common = overlap(Box(offset, tuple(shape)), wanted)
        if common is not None:
            yield Piece(at, tuple(shape), *common)
        at += prod(shape)

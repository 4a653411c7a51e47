"""How the bytes of a file are cut into blocks: a pure function.

A file is a header and then tensors without gaps. It is captured and written in blocks of one slot
each, so that a block is one aligned write however many tensors it holds, and a tensor larger than
the whole pool is simply many blocks.

Properties: the blocks of a file tile it from 0 to its end in order; every block but the last is
exactly one slot long; the parts of a block tile it; and the parts of each tensor, in order, are all
its bytes once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

HEADER = -1
"""The `tensor` of a part that belongs to the header."""


class Part(NamedTuple):
    """Bytes `begin` to `end` of a tensor (by its number in the file), at `at` in the block."""

    tensor: int
    begin: int
    end: int
    at: int


class Block(NamedTuple):
    """Bytes `begin` to `end` of a file."""

    begin: int
    end: int
    parts: tuple[Part, ...]


def cut(header_bytes: int, sizes: Sequence[int], block_bytes: int) -> list[Block]:
    """The blocks of a file with this header and tensors of these sizes (bytes)."""
    blocks: list[Block] = []
    parts: list[Part] = []
    begin = position = 0
    for tensor, size in enumerate((header_bytes, *sizes), HEADER):
        done = 0
        while done < size:
            taken = min(size - done, begin + block_bytes - position)
            parts.append(Part(tensor, done, done + taken, position - begin))
            done, position = done + taken, position + taken
            if position == begin + block_bytes:
                blocks.append(Block(begin, position, tuple(parts)))
                begin, parts = position, []
    if parts:
        blocks.append(Block(begin, position, tuple(parts)))
    return blocks


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[slice, ...]]:
    """The boxes that hold elements `begin` to `end` of a tensor in row-major order, in order.

    There are at most two for each dimension, whatever the tensor's size.
    """
    if begin >= end:
        return
    if not shape:
        yield ()
        return
    row = prod(shape[1:])
    (first, start), (last, stop) = divmod(begin, row), divmod(end, row)
    if first == last:
        yield from ((slice(first, first + 1), *box) for box in boxes(shape[1:], start, stop))
        return
    if start:
        yield from ((slice(first, first + 1), *box) for box in boxes(shape[1:], start, row))
        first += 1
    if first < last:
        yield (slice(first, last), *(slice(None) for _ in shape[1:]))
    yield from ((slice(last, last + 1), *box) for box in boxes(shape[1:], 0, stop))

"""One rank's files: which tensors are its to write, cut into blocks, and the writing of them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from eke.checkpoint.beside import Beside
from eke.checkpoint.capture import Captured, Held, rank_name
from eke.checkpoint.device import begin_save, foreign
from eke.checkpoint.dtypes import STORED, stored_shape, tensor_bytes
from eke.checkpoint.lane import Lane, Layout, Stated
from eke.checkpoint.plan import HEADER, Block, cut
from eke.checkpoint.providers import FROZEN, OTHER
from eke.checkpoint.sharing import Item, share_out
from eke.checkpoint.storage import Storage
from eke.checkpoint.tensorfile import FileWriter, Piece, arrange, build_header
from eke.checkpoint.tensors import dtype_name
from eke.distributed import World

DIRECT_FROM_BYTES = 1 << 20
"""Smaller files go through the page cache: the last, partial block does so anyway."""
BESIDE_FROM_BYTES = 1 << 20
"""Smaller blocks are hashed sooner than another thread is told to."""


class Cut(NamedTuple):
    """A box of a tensor that this rank writes."""

    held: Held
    tensor: torch.Tensor
    offset: tuple[int, ...]


def objects_file(rank: int) -> str:
    """The file of a rank's objects."""
    return f"{rank_name(rank)}.objects.json"


def cuts_of(captured: Captured, here: World) -> dict[str, list[Cut]]:
    """What this rank writes, by group: its share of the shared tensors, and all of its own."""
    cuts: dict[str, list[Cut]] = {}
    by_name = {held.name: held for held in captured.shared}
    everyone = tuple(range(here.size))
    items: dict[tuple[str, tuple[int, ...]], list[Item]] = {}
    for held in captured.shared:
        ranks = everyone
        if held.spread is not None:
            if held.spread.box is None:
                continue  # it has nothing of this one
            ranks = held.spread.holders
        shape = tuple(held.tensor.shape)
        rows = shape[0] if shape else 1
        size = tensor_bytes(dtype_name(held.tensor.dtype), shape)
        item = Item(held.name, rows, size // rows if rows else 0)
        items.setdefault((held.group, ranks), []).append(item)
    for (group, ranks), shared in items.items():
        for name, begin, end in share_out(shared, len(ranks))[ranks.index(here.rank)]:
            held = by_name[name]
            part, offset = held.tensor, [0] * held.tensor.dim()
            if held.spread is not None and held.spread.box is not None:
                offset = list(held.spread.box.offset)
            if offset and end - begin < part.shape[0]:
                part = part.detach().narrow(0, begin, end - begin)
                offset[0] += begin
            cuts.setdefault(group, []).append(Cut(held, part, tuple(offset)))
    for held in captured.own:
        one = Cut(held, held.tensor, (0,) * held.tensor.dim())
        cuts.setdefault(held.group, []).append(one)
    return cuts


def layouts_of(captured: Captured, here: World, block_bytes: int) -> list[tuple[Layout, list[Cut]]]:
    """This rank's files with what is in them, what must be captured first before the rest."""
    found = []
    for group, cuts in cuts_of(captured, here).items():
        by_key = {one.held.name: one for one in cuts}
        names, header, starts, sizes, blocks = _lay_out(tuple(map(_piece, cuts)), block_bytes)
        ordered = [by_key[name] for name in names]
        eager_until = max(
            (
                start + size
                for one, start, size in zip(ordered, starts, sizes, strict=True)
                if one.held.eager or foreign(one.tensor.device)
            ),
            default=0,
        )
        eager_blocks = sum(block.begin < eager_until for block in blocks)
        file = f"{rank_name(here.rank)}.{group}.safetensors"
        entries = [
            _entry(one, group, file, start, size)
            for one, start, size in zip(ordered, starts, sizes, strict=True)
        ]
        layout = Layout(file, group, header, names, entries, starts, sizes, blocks, eager_blocks)
        found.append((layout, ordered))
    # What no optimizer changes is waited for by nobody, so it is captured last.
    return sorted(
        found, key=lambda pair: (pair[0].eager_blocks == 0, pair[0].group in (FROZEN, OTHER))
    )


@lru_cache(maxsize=16)
def _lay_out(
    pieces: tuple[Piece, ...], block_bytes: int
) -> tuple[list[str], bytes, list[int], list[int], list[Block]]:
    """Of a file: its keys in order, its header, where each tensor starts and how long it is, its
    blocks. Remembered, because most saves are of the same tensors as the one before."""
    ordered = arrange(pieces)
    header, starts = build_header(ordered)
    sizes = [piece.nbytes for piece in ordered]
    blocks = cut(len(header), sizes, block_bytes)
    return [piece.key for piece in ordered], header, starts, sizes, blocks


def lanes_of(captured: Captured, here: World, block_bytes: int) -> list[Lane]:
    """This rank's files, ready to be filled."""
    begin_save({held.tensor.device for held in (*captured.shared, *captured.own)})
    lanes = []
    for layout, cuts in layouts_of(captured, here, block_bytes):
        lane = Lane(layout, [one.tensor for one in cuts])
        lane.watch({n: one.held.spread.live for n, one in enumerate(cuts) if one.held.spread})
        lanes.append(lane)
    return lanes


def _entry(one: Cut, group: str, file: str, begin: int, size: int) -> dict[str, Any]:
    """A tensor's entry in the manifest, without its hash."""
    return {
        "dtype": dtype_name(one.tensor.dtype),
        "shape": list(one.held.shape),
        "group": group,
        "role": one.held.role,
        "shards": [
            {
                "file": file,
                "key": one.held.name,
                "offset": list(one.offset),
                "shape": list(one.tensor.shape),
                "begin": begin,
                "end": begin + size,
                "xxh3_128": "",
            }
        ],
    }


class LaneWriter:
    """Writes a lane's blocks, in order, and hashes each while it is being written: large ones in a
    thread of its own, which `finish` and `close` end."""

    def __init__(self, storage: Storage, directory: Path, lane: Lane) -> None:
        self._layout = lane.layout
        self._hashes: dict[int, str] = {}
        self._open: xxhash.xxh3_128 | None = None
        self._beside = Beside()
        self._file = FileWriter(
            storage,
            directory / lane.layout.file,
            direct=lane.layout.nbytes >= DIRECT_FROM_BYTES,
        )

    def write(self, block: int, data: memoryview) -> None:
        """Append a block.

        Raises:
            OSError: the disk refused it.
        """
        here = self._layout.blocks[block]
        data = data[: here.end - here.begin]
        if len(data) < BESIDE_FROM_BYTES:
            self._hash(here, data)
            self._file.append(data)
        else:
            self._beside.run(lambda: self._hash(here, data), lambda: self._file.append(data))

    def _hash(self, here: Block, data: memoryview) -> None:
        """Hash a block: what it has of each tensor, and all of it for the file."""
        sizes, hashes = self._layout.sizes, self._hashes
        for tensor, begin, end, at in here.parts:
            if tensor == HEADER:
                continue
            part = data[at : at + end - begin]
            last = end == sizes[tensor]
            if begin == 0 and last:
                hashes[tensor] = xxhash.xxh3_128_hexdigest(part)
                continue
            if begin == 0:
                self._open = xxhash.xxh3_128()
            assert self._open is not None
            self._open.update(part)
            if last:
                hashes[tensor] = self._open.hexdigest()
        self._file.hash(data)

    def finish(self, durable: bool) -> tuple[dict[str, Any], Stated]:
        """Make the file durable if asked to; returns its entry, and what is in it."""
        self._beside.end()
        entry = dict(vars(self._file.finish(durable)))
        empty = xxhash.xxh3_128_hexdigest(b"")
        hashes = {n: self._hashes.get(n, empty) for n in range(len(self._layout.names))}
        return entry, Stated(self._layout, hashes)

    def close(self) -> None:
        """Let the file go."""
        self._beside.end()
        self._file.close()


def _piece(one: Cut) -> Piece:
    dtype, shape = dtype_name(one.tensor.dtype), tuple(one.tensor.shape)
    parts = STORED[dtype].parts
    offset = one.offset if parts == 1 else (*one.offset, 0)
    return Piece(one.held.name, STORED[dtype].name, stored_shape(dtype, shape), offset)

"""One rank's files: which tensors are its to write, cut into blocks, and the writing of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from eke.checkpoint.capture import Captured, Held, rank_name
from eke.checkpoint.dtypes import STORED, stored_shape, tensor_bytes
from eke.checkpoint.plan import HEADER, Block, cut
from eke.checkpoint.providers import FROZEN, OTHER
from eke.checkpoint.sharing import Item, share_out
from eke.checkpoint.source import Changed, Source, storage_of
from eke.checkpoint.storage import Storage
from eke.checkpoint.tensorfile import FileWriter, Piece, arrange, build_header
from eke.checkpoint.tensors import dtype_name
from eke.distributed import World
from eke.errors import EkeError

DIRECT_FROM_BYTES = 1 << 20
"""Smaller files go through the page cache: the last, partial block does so anyway."""


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
    for group in sorted({held.group for held in captured.shared}):
        items = []
        for held in captured.shared:
            if held.group == group:
                shape = tuple(held.tensor.shape)
                rows = shape[0] if shape else 1
                size = tensor_bytes(dtype_name(held.tensor.dtype), shape)
                items.append(Item(held.name, rows, size // rows if rows else 0))
        for name, begin, end in share_out(items, here.size)[here.rank]:
            held = by_name[name]
            whole, rest = held.tensor, held.tensor.dim() - 1
            if rest >= 0 and end - begin < whole.shape[0]:
                whole = whole.detach()
                one = Cut(held, whole.narrow(0, begin, end - begin), (begin, *[0] * rest))
            else:
                one = Cut(held, whole, (0,) * (rest + 1))
            cuts.setdefault(group, []).append(one)
    for held in captured.own:
        one = Cut(held, held.tensor, (0,) * held.tensor.dim())
        cuts.setdefault(held.group, []).append(one)
    return cuts


@dataclass
class Lane:
    """One file: what is live, and the blocks that it is captured and written in.

    Attributes:
        cuts: in the order of their bytes in the file.
        starts: where in the file each of them begins.
        eager_blocks: the first so many blocks hold all that must be captured at once.
    """

    file: str
    group: str
    header: bytes
    cuts: list[Cut]
    starts: list[int]
    sources: list[Source]
    blocks: list[Block]
    eager_blocks: int

    @property
    def nbytes(self) -> int:
        """The file's length."""
        return self.blocks[-1].end

    def fill(self, block: int, slot: npt.NDArray[np.uint8]) -> None:
        """Copy a block from what is live.

        Raises:
            EkeError: a tensor was changed before it was captured.
        """
        for tensor, begin, end, at in self.blocks[block].parts:
            target = slot[at:]
            if tensor == HEADER:
                target[: end - begin] = np.frombuffer(self.header, np.uint8)[begin:end]
                continue
            with self._unchanged(tensor):
                self.sources[tensor].fill(target, begin, end)

    def digest(self, tensor: int, scratch: npt.NDArray[np.uint8]) -> str:
        """The hash of a tensor as it is now.

        Raises:
            EkeError: it was changed before it was captured.
        """
        with self._unchanged(tensor):
            return self.sources[tensor].digest(scratch)

    @contextmanager
    def _unchanged(self, tensor: int) -> Iterator[None]:
        try:
            yield
        except Changed as error:
            raise EkeError(
                f"the tensor {self.cuts[tensor].held.name} was changed before it was captured",
                rule="between save() and the next step() of a torch.optim optimizer, nothing "
                "changes what is attached",
                fix="Call Checkpointer.barrier() before anything else changes it: an average "
                "of weights, a hand-written update, load_state_dict",
            ) from error

    def entries(self, hashes: Mapping[int, str]) -> dict[str, Any]:
        """The manifest's entries of this file's tensors, from their hashes."""
        found = {}
        for number, (one, begin) in enumerate(zip(self.cuts, self.starts, strict=True)):
            found[one.held.name] = {
                "dtype": dtype_name(one.tensor.dtype),
                "shape": list(one.held.tensor.shape),
                "group": self.group,
                "role": one.held.role,
                "shards": [
                    {
                        "file": self.file,
                        "key": one.held.name,
                        "offset": list(one.offset),
                        "shape": list(one.tensor.shape),
                        "begin": begin,
                        "end": begin + self.sources[number].nbytes,
                        "xxh3_128": hashes[number],
                    }
                ],
            }
        return found

    def last_blocks(self) -> dict[Hashable, int]:
        """Memory -> how many of the first blocks hold all of it."""
        found: dict[Hashable, int] = {}
        for number, block in enumerate(self.blocks, 1):
            for part in block.parts:
                if part.tensor != HEADER:
                    found[storage_of(self.cuts[part.tensor].tensor)] = number
        return found


def lanes_of(captured: Captured, here: World, block_bytes: int) -> list[Lane]:
    """This rank's files, what must be captured first before the rest."""
    lanes = []
    devices = {held.tensor.device for held in (*captured.shared, *captured.own)}
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what other threads copy was computed by this one
    for group, cuts in cuts_of(captured, here).items():
        by_key = {one.held.name: one for one in cuts}
        keys, header, starts, blocks = _lay_out(tuple(map(_piece, cuts)), block_bytes)
        ordered = [by_key[key] for key in keys]
        sources = [Source(one.tensor) for one in ordered]
        eager_until = max(
            (
                start + source.nbytes
                for one, start, source in zip(ordered, starts, sources, strict=True)
                if one.held.eager or one.tensor.device.type != "cpu"
            ),
            default=0,
        )
        eager_blocks = sum(block.begin < eager_until for block in blocks)
        file = f"{rank_name(here.rank)}.{group}.safetensors"
        lanes.append(Lane(file, group, header, ordered, starts, sources, blocks, eager_blocks))
    # What no optimizer changes is waited for by nobody, so it is captured last.
    return sorted(lanes, key=lambda lane: (lane.eager_blocks == 0, lane.group in (FROZEN, OTHER)))


@lru_cache(maxsize=16)
def _lay_out(
    pieces: tuple[Piece, ...], block_bytes: int
) -> tuple[list[str], bytes, list[int], list[Block]]:
    """Of a file: its keys in order, its header, where each tensor starts, its blocks.

    Remembered, because most saves are of the same tensors as the one before.
    """
    ordered = arrange(pieces)
    header, starts = build_header(ordered)
    blocks = cut(len(header), [piece.nbytes for piece in ordered], block_bytes)
    return [piece.key for piece in ordered], header, starts, blocks


class LaneWriter:
    """Writes a lane's blocks, in order, and hashes them."""

    def __init__(self, storage: Storage, directory: Path, lane: Lane) -> None:
        self.lane = lane
        self._hashes: dict[int, str] = {}
        self._open: xxhash.xxh3_128 | None = None
        self._file = FileWriter(
            storage, directory / lane.file, direct=lane.nbytes >= DIRECT_FROM_BYTES
        )

    def write(self, block: int, data: memoryview) -> None:
        """Append a block.

        Raises:
            OSError: the disk refused it.
        """
        here = self.lane.blocks[block]
        for tensor, begin, end, at in here.parts:
            if tensor == HEADER:
                continue
            part = data[at : at + end - begin]
            last = end == self.lane.sources[tensor].nbytes
            if begin == 0 and last:
                self._hashes[tensor] = xxhash.xxh3_128_hexdigest(part)
                continue
            if begin == 0:
                self._open = xxhash.xxh3_128()
            assert self._open is not None
            self._open.update(part)
            if last:
                self._hashes[tensor] = self._open.hexdigest()
        self._file.write(data[: here.end - here.begin])

    def finish(self, durable: bool) -> dict[str, Any]:
        """Make the file durable if asked to; returns this file's part of the rank's report."""
        entry = dict(vars(self._file.finish(durable)))
        empty = xxhash.xxh3_128_hexdigest(b"")
        hashes = {n: self._hashes.get(n, empty) for n in range(len(self.lane.cuts))}
        return {"files": {self.lane.file: entry}, "tensors": self.lane.entries(hashes)}

    def close(self) -> None:
        """Let the file go."""
        self._file.close()


def _piece(one: Cut) -> Piece:
    dtype, shape = dtype_name(one.tensor.dtype), tuple(one.tensor.shape)
    parts = STORED[dtype].parts
    offset = one.offset if parts == 1 else (*one.offset, 0)
    return Piece(one.held.name, STORED[dtype].name, stored_shape(dtype, shape), offset)

"""One rank's files: which tensors are its to write, and the writing of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from eke.checkpoint.capture import Captured, Held, rank_name
from eke.checkpoint.dtypes import STORED, stored_shape, tensor_bytes
from eke.checkpoint.opening import OBJECTS_FORMAT, OBJECTS_VERSION
from eke.checkpoint.sharing import Item, share_out
from eke.checkpoint.storage import Storage
from eke.checkpoint.tensorfile import FileWriter, Piece, arrange, build_header, write_file
from eke.checkpoint.tensors import as_bytes, dtype_name
from eke.distributed import World


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
            whole, rest = held.tensor.detach(), held.tensor.dim() - 1
            if rest >= 0:
                cut = Cut(held, whole.narrow(0, begin, end - begin), (begin, *[0] * rest))
            else:
                cut = Cut(held, whole, ())
            cuts.setdefault(group, []).append(cut)
    for held in captured.own:
        cut = Cut(held, held.tensor.detach(), (0,) * held.tensor.dim())
        cuts.setdefault(held.group, []).append(cut)
    return cuts


def write_rank(
    storage: Storage, directory: Path, captured: Captured, here: World, durable: bool
) -> dict[str, Any]:
    """Write this rank's files; returns its parts of the manifest's `files`, `tensors` and
    `aliases`.

    Raises:
        OSError: the disk refused something; its `filename` says which file.
    """
    report: dict[str, Any] = {"files": {}, "tensors": {}, "aliases": captured.aliases}
    for group, cuts in cuts_of(captured, here).items():
        path = directory / f"{rank_name(here.rank)}.{group}.safetensors"
        _write_tensors(storage, path, cuts, durable, report)
    values = {
        "format": OBJECTS_FORMAT,
        "version": OBJECTS_VERSION,
        "rank": here.rank,
        "objects": {
            name: tree
            for name, tree in captured.objects.items()
            if here.rank == 0 or captured.per_rank[name]
        },
    }
    data = json.dumps(values, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    path = directory / objects_file(here.rank)
    report["files"][path.name] = write_file(storage, path, data, durable)
    return report


def _write_tensors(
    storage: Storage, path: Path, cuts: list[Cut], durable: bool, report: dict[str, Any]
) -> None:
    by_key = {cut.held.name: cut for cut in cuts}
    pieces = arrange(_piece(cut) for cut in cuts)
    header, starts = build_header(pieces)
    writer = None
    try:
        writer = FileWriter(storage, path)
        writer.write(memoryview(header))
        for piece, begin in zip(pieces, starts, strict=True):
            cut = by_key[piece.key]
            data = as_bytes(cut.tensor)
            writer.write(data)
            report["tensors"][piece.key] = {
                "dtype": dtype_name(cut.tensor.dtype),
                "shape": list(cut.held.tensor.shape),
                "group": cut.held.group,
                "role": cut.held.role,
                "shards": [
                    {
                        "file": path.name,
                        "key": piece.key,
                        "offset": list(cut.offset),
                        "shape": list(cut.tensor.shape),
                        "begin": begin,
                        "end": begin + piece.nbytes,
                        "xxh3_128": xxhash.xxh3_128_hexdigest(data),
                    }
                ],
            }
        report["files"][path.name] = dict(vars(writer.finish(durable)))
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        if writer is not None:
            writer.close()


def _piece(cut: Cut) -> Piece:
    dtype, shape = dtype_name(cut.tensor.dtype), tuple(cut.tensor.shape)
    parts = STORED[dtype].parts
    offset = cut.offset if parts == 1 else (*cut.offset, 0)
    return Piece(cut.held.name, STORED[dtype].name, stored_shape(dtype, shape), offset)

"""How two checkpoints differ, tensor by tensor, from their hashes. No torch, unless it must read.

Property: a tensor is `same` if and only if type, shape and every byte are; ranks, files and
groups do not matter. Hashes tell where both were cut into the same boxes; else both are read, and
every hash checked on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eke.checkpoint.dtypes import tensor_bytes
from eke.checkpoint.errors import reading
from eke.checkpoint.layout import checkpoint_of
from eke.checkpoint.manifest import Manifest, TensorEntry
from eke.checkpoint.opening import open_manifest
from eke.checkpoint.storage import Storage


def diff(a: str | Path, b: str | Path) -> list[dict[str, Any]]:
    """Every tensor of two checkpoints, in the order of their names.

    Each entry has `tensor`, `status`, and the `bytes` it takes in the later one that has it. The
    status is `same`; `changed` (other values); `reshaped` (another type or shape); `added` (only in
    b); or `removed` (only in a).

    Args:
        a: a checkpoint's directory; of a run or a directory of checkpoints, the newest one.
        b: another.

    Raises:
        InputError: there is no such directory.
        CorruptCheckpoint: a manifest, or a tensor that had to be read, is damaged.
        EkeError: the disk failed.
    """
    with reading(a):
        before = checkpoint_of(a)
        old = open_manifest(before, Storage())
    with reading(b):
        after = checkpoint_of(b)
        new = open_manifest(after, Storage())
        return list(_rows((before, old), (after, new)))


def _rows(a: tuple[Path, Manifest], b: tuple[Path, Manifest]) -> Iterator[dict[str, Any]]:
    for name in sorted({*a[1].names(), *b[1].names()}):
        old, new = a[1].find(name), b[1].find(name)
        shown = new or old
        assert shown is not None
        if old is None:
            status = "added"
        elif new is None:
            status = "removed"
        elif (old.dtype, old.shape) != (new.dtype, new.shape):
            status = "reshaped"
        elif _boxes(old) == _boxes(new):
            status = "same" if _hashes(old) == _hashes(new) else "changed"
        else:
            status = "same" if _equal(name, a, b) else "changed"
        yield {"tensor": name, "status": status, "bytes": tensor_bytes(shown.dtype, shown.shape)}


def _boxes(entry: TensorEntry) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return sorted((shard.offset, shard.shape) for shard in entry.shards)


def _hashes(entry: TensorEntry) -> list[tuple[tuple[int, ...], str]]:
    return sorted((shard.offset, shard.xxh3_128) for shard in entry.shards)


def _equal(name: str, a: tuple[Path, Manifest], b: tuple[Path, Manifest]) -> bool:
    from eke.checkpoint.reader import Reader
    from eke.checkpoint.tensors import as_bytes

    with Reader(*a, Storage()) as old, Reader(*b, Storage()) as new:
        return as_bytes(old.read(name)) == as_bytes(new.read(name))

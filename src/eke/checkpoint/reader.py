"""Reads the tensors of one committed checkpoint, checking every hash on the way.

A tensor is put together from its shards, however many ranks wrote them. Memory: one tensor at a
time, in a buffer that is used again.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import TracebackType

import torch
import xxhash

from eke.checkpoint.checks import ManifestError
from eke.checkpoint.dtypes import tensor_bytes
from eke.checkpoint.errors import CorruptCheckpoint, Kind, Problem
from eke.checkpoint.manifest import MANIFEST, Manifest, Shard, TensorEntry
from eke.checkpoint.storage import Storage, read_exactly
from eke.checkpoint.tensors import copy_exactly, from_bytes


class Reader:
    """Tensors of one checkpoint by their names in the manifest, aliases among them."""

    def __init__(self, path: Path, manifest: Manifest, storage: Storage) -> None:
        self.path, self.manifest = path, manifest
        self._storage = storage
        self._files: dict[str, int] = {}
        self._staging = torch.empty(0, dtype=torch.uint8)

    def read(self, name: str) -> torch.Tensor:
        """A new CPU tensor.

        Raises:
            CorruptCheckpoint: there is no such tensor, or its bytes are not the ones written.
            OSError: the disk failed.
        """
        entry = self._entry(name)
        return self._fill(name, entry, torch.empty(self._bytes(entry), dtype=torch.uint8))

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        """Fill a live tensor of the same dtype and shape; it never sees bytes that are wrong.

        Raises:
            CorruptCheckpoint: as for `read`; the target is then as it was.
            OSError: the disk failed.
        """
        entry = self._entry(name)
        needed = self._bytes(entry)
        if self._staging.numel() < needed:
            self._staging = torch.empty(needed, dtype=torch.uint8)
        copy_exactly(target, self._fill(name, entry, self._staging[:needed]))

    @staticmethod
    def _bytes(entry: TensorEntry) -> int:
        return tensor_bytes(entry.dtype, entry.shape)

    def _entry(self, name: str) -> TensorEntry:
        entry = self.manifest.find(name)
        if entry is None:
            raise CorruptCheckpoint(
                str(self.path),
                [Problem(MANIFEST, name, "corrupt", "it is named but not listed")],
            )
        for shard in entry.shards:  # before memory is taken for what a file may not have
            self._open(name, shard.file)
        return entry

    def _open(self, name: str, file: str) -> None:
        if file in self._files:
            return
        try:
            fd = self._files[file] = self._storage.open(self.path / file)
        except FileNotFoundError as error:
            problem = Problem(file, name, "incomplete", "the file is missing")
            raise CorruptCheckpoint(str(self.path), [problem]) from error
        except ManifestError as error:
            problem = Problem(file, name, error.kind, error.detail)
            raise CorruptCheckpoint(str(self.path), [problem]) from error
        size, stated = self._storage.size(fd), self.manifest.files[file].bytes
        if size != stated:
            detail = f"the file has {size} bytes instead of {stated}"
            kind: Kind = "incomplete" if size < stated else "corrupt"
            raise CorruptCheckpoint(str(self.path), [Problem(file, name, kind, detail)])

    def _fill(self, name: str, entry: TensorEntry, raw: torch.Tensor) -> torch.Tensor:
        tensor = from_bytes(raw, entry.dtype, entry.shape)
        for shard in entry.shards:
            if shard.shape == entry.shape:
                self._read_shard(name, shard, raw)
            elif math.prod(shard.shape):
                part = torch.empty(shard.end - shard.begin, dtype=torch.uint8)
                self._read_shard(name, shard, part)
                box = tensor
                for axis, (start, length) in enumerate(zip(shard.offset, shard.shape, strict=True)):
                    box = box.narrow(axis, start, length)
                box.copy_(from_bytes(part, entry.dtype, shard.shape))
        return tensor

    def _read_shard(self, name: str, shard: Shard, raw: torch.Tensor) -> None:
        view = raw.numpy().data
        count = read_exactly(self._storage, self._files[shard.file], view, shard.begin)
        if count < len(view):
            problem = Problem(shard.file, name, "incomplete", "the file ends inside it")
            raise CorruptCheckpoint(str(self.path), [problem])
        if xxhash.xxh3_128_hexdigest(view) != shard.xxh3_128:
            problem = Problem(shard.file, name, "corrupt", "its bytes do not match its hash")
            raise CorruptCheckpoint(str(self.path), [problem])

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._storage.close(self._files.popitem()[1])

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

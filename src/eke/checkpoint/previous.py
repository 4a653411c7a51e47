"""The newest committed checkpoint, as far as a save needs it to find what has not changed.

Property: a file is linked only if the new file would have the same length, the same tensors at the
same places, and every tensor's live bytes hash to what the committed file's do. Small tensors are
compared first, so that a group that has changed is found to have at once: an optimizer's step
counts change with every step.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eke.checkpoint.engine import Array
from eke.checkpoint.errors import CorruptCheckpoint
from eke.checkpoint.layout import latest, step_name
from eke.checkpoint.opening import open_manifest
from eke.checkpoint.storage import Storage, read_exactly
from eke.checkpoint.tensorfile import CHUNK_BYTES, FileWriter
from eke.checkpoint.write import Lane


class Previous:
    """What this rank wrote into the newest committed checkpoint."""

    def __init__(self, root: Path, storage: Storage) -> None:
        self._root, self._storage = root, storage
        self._known = False
        self._path: Path | None = None
        self._files: Mapping[str, Mapping[str, Any]] = {}
        self._tensors: Mapping[str, Mapping[str, Any]] = {}

    def committed(self, path: Path, report: Mapping[str, Any]) -> None:
        """A save was committed; `report` is this rank's."""
        self._path, self._known = path, True
        self._files, self._tensors = report["files"], report["tensors"]

    def forget(self) -> None:
        """Checkpoints were deleted or replaced: look at the disk again."""
        self._path, self._known = None, False

    def _look(self) -> None:
        """Read the newest checkpoint's manifest, once in a process."""
        self._known = True
        step = latest(self._root)
        if step is None:
            return
        path = self._root / step_name(step)
        try:
            manifest = open_manifest(path, self._storage)
        except (CorruptCheckpoint, OSError):
            return  # then all is written
        self._path = path
        self._files = {name: vars(entry) for name, entry in manifest.files.items()}
        self._tensors = {
            name: {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "group": entry.group,
                "role": entry.role,
                "shards": [
                    {
                        **vars(shard),
                        "offset": list(shard.offset),
                        "shape": list(shard.shape),
                    }
                    for shard in entry.shards
                ],
            }
            for name, entry in manifest.tensors.items()
        }

    def same(self, lane: Lane, scratch: Array) -> bool:
        """Whether a lane's file would be the very one that is there.

        Args:
            lane: what would be written.
            scratch: memory for tensors that are not in order.

        Raises:
            EkeError: a tensor changed while it was read.
        """
        if not self._known:
            self._look()
        there = self._files.get(lane.file)
        if self._path is None or there is None or there["bytes"] != lane.nbytes:
            return False
        stated: dict[str, str] = {}
        for name, entry in self._tensors.items():
            for shard in entry["shards"]:
                if shard["file"] == lane.file:
                    stated[name] = shard["xxh3_128"]
        hashes = {n: stated.get(one.held.name, "") for n, one in enumerate(lane.cuts)}
        for name, entry in lane.entries(hashes).items():
            old = self._tensors.get(name)
            if old is None or entry["shards"][0] not in old["shards"]:
                return False
            if any(entry[key] != old[key] for key in ("dtype", "shape", "group", "role")):
                return False
        if len(stated) != len(lane.cuts):
            return False
        by_size = sorted(range(len(lane.cuts)), key=lambda n: lane.sources[n].nbytes)
        return all(lane.digest(n, scratch) == hashes[n] for n in by_size)

    def link(self, lane: Lane, directory: Path, durable: bool) -> dict[str, Any]:
        """Give the committed file a name in an attempt; returns this file's part of the report.

        Where the file system has no links, the file is copied, and its hash checked.

        Raises:
            OSError: the disk failed, or the committed file is gone or damaged.
        """
        assert self._path is not None
        source, target = self._path / lane.file, directory / lane.file
        entry = dict(self._files[lane.file])
        try:
            self._storage.link(source, target)
        except OSError:
            if self._copy(source, target, durable) != entry:
                raise OSError(errno.EIO, "its bytes are not those that were committed") from None
        else:
            self._settle(target, entry["bytes"], durable)
        names = [one.held.name for one in lane.cuts]
        return {
            "files": {lane.file: entry},
            "tensors": {
                name: {
                    **self._tensors[name],
                    "shards": [s for s in self._tensors[name]["shards"] if s["file"] == lane.file],
                }
                for name in names
            },
        }

    def _copy(self, source: Path, target: Path, durable: bool) -> dict[str, Any]:
        fd = self._storage.open(source)
        try:
            writer = FileWriter(self._storage, target)
            try:
                buffer, position = memoryview(bytearray(CHUNK_BYTES)), 0
                while count := read_exactly(self._storage, fd, buffer, position):
                    writer.write(buffer[:count])
                    position += count
                return dict(vars(writer.finish(durable)))
            finally:
                writer.close()
        finally:
            self._storage.close(fd)

    def _settle(self, path: Path, nbytes: int, durable: bool) -> None:
        """The file may have been committed by a saver that makes nothing durable."""
        fd = self._storage.open(path)
        try:
            if self._storage.size(fd) != nbytes:
                raise OSError(errno.EIO, "its length is not the one that was committed")
            if durable:
                self._storage.sync(fd)
        finally:
            self._storage.close(fd)

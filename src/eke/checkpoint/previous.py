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

from eke.checkpoint.errors import CorruptCheckpoint
from eke.checkpoint.lane import Lane, Stated
from eke.checkpoint.layout import latest, step_name
from eke.checkpoint.opening import open_manifest
from eke.checkpoint.storage import Storage, read_exactly
from eke.checkpoint.tensorfile import CHUNK_BYTES, FileWriter
from eke.checkpoint.work import Array


class Previous:
    """What this rank wrote into the newest committed checkpoint."""

    def __init__(self, root: Path, storage: Storage) -> None:
        self._root, self._storage = root, storage
        self._known = False
        self._path: Path | None = None
        self._files: Mapping[str, Mapping[str, Any]] = {}
        self._tensors: Mapping[str, Mapping[str, Any]] = {}
        self._written: dict[str, Stated] = {}
        self._aliases: Mapping[str, str] = {}

    def committed(
        self,
        path: Path,
        files: Mapping[str, Mapping[str, Any]],
        written: Mapping[str, Stated],
        aliases: Mapping[str, str],
    ) -> None:
        """A save was committed, whose manifest was checked; this is this rank's part of it."""
        self._path, self._known = path, True
        self._files, self._tensors = files, {}
        self._written, self._aliases = dict(written), aliases

    def forget(self) -> None:
        """Checkpoints were deleted or replaced: look at the disk again."""
        self._path, self._known, self._written, self._aliases = None, False, {}, {}

    def alike(
        self,
        files: Mapping[str, Mapping[str, Any]],
        written: Mapping[str, Stated],
        aliases: Mapping[str, str],
    ) -> bool:
        """Whether a save's tensors lie exactly as in the newest checkpoint, which this process
        committed: then there is nothing to check of them but the files' lengths."""
        return (
            written.keys() == self._written.keys()
            and all(
                stated.layout.like(self._written[file].layout)
                and files[file]["bytes"] == stated.layout.nbytes
                for file, stated in written.items()
            )
            and aliases == self._aliases
        )

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
        layout = lane.layout
        there = self._files.get(layout.file)
        if self._path is None or there is None or there["bytes"] != layout.nbytes:
            return False
        written = self._written.get(layout.file)
        if written is not None and not written.layout.like(layout):
            return False
        if written is None:
            stated = _shards_of(self._tensors, layout.file)
            if stated.keys() != set(layout.names):
                return False
            hashes = {
                n: stated[name]["shards"][0]["xxh3_128"] for n, name in enumerate(layout.names)
            }
            if layout.stated(hashes) != stated:
                return False
            written = Stated(layout, hashes)
        if any(lane.digest(n, scratch) != written.hashes[n] for n in layout.by_size):
            return False
        self._written[layout.file] = written
        return True

    def link(self, lane: Lane, directory: Path, durable: bool) -> tuple[dict[str, Any], Stated]:
        """Give the committed file a name in an attempt; returns its entry, and what is in it.

        Where the file system has no links, the file is copied, and its hash checked.

        Raises:
            OSError: the disk failed, or the committed file is gone or damaged.
        """
        assert self._path is not None
        file = lane.layout.file
        source, target = self._path / file, directory / file
        entry = dict(self._files[file])
        try:
            self._storage.link(source, target)
        except OSError:
            if self._copy(source, target, durable) != entry:
                raise OSError(errno.EIO, "its bytes are not those that were committed") from None
        else:
            self._settle(target, entry["bytes"], durable)
        return entry, self._written[file]

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


def _shards_of(tensors: Mapping[str, Mapping[str, Any]], file: str) -> dict[str, Any]:
    """The entries of the tensors that have a shard in a file, each with that shard alone."""
    found = {}
    for name, entry in tensors.items():
        shards = [shard for shard in entry["shards"] if shard["file"] == file]
        if shards:
            found[name] = {**entry, "shards": shards}
    return found

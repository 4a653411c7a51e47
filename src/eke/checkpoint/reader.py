"""Reads the tensors of one committed checkpoint into live ones, checking every hash as it passes.

Shards are read by a few threads, each once and whole. Where a live tensor's memory lies as the file
does, bytes go straight into it; else through a scratch buffer of each thread, in pieces. That is
all the memory there is, whatever the size of a tensor.

Property: for every tensor, however it was cut into shards, and for every box of it, the target then
holds that box; or an error was raised, and the target may hold anything.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from eke.checkpoint.boxes import overlap
from eke.checkpoint.checks import ManifestError
from eke.checkpoint.errors import CorruptCheckpoint, Kind, Problem
from eke.checkpoint.lease import lease
from eke.checkpoint.manifest import MANIFEST, Manifest, Shard, TensorEntry
from eke.checkpoint.opening import open_objects
from eke.checkpoint.sink import Bytes, Sink, clashing
from eke.checkpoint.storage import Storage, read_exactly
from eke.checkpoint.tensorfile import header_of, scan
from eke.distributed import Box
from eke.errors import InputError

SCRATCH_BYTES = 1 << 20
"""Read, hash and copy this much at a time: it stays in a core's cache in between."""
MAX_THREADS = 4
SMALL_BYTES = 1 << 17
"""Neighbours in a file that are smaller are read together."""


class Fill(NamedTuple):
    """One thing to read: the box of a tensor that begins at `offset`, into a live tensor.

    Attributes:
        name: in the manifest, or an alias.
        target: a plain strided tensor on any device, with the shape of the box.
        offset: one number for each dimension; None for the whole tensor's first element.
    """

    name: str
    target: torch.Tensor
    offset: tuple[int, ...] | None = None


class _Job(NamedTuple):
    """A shard, and where it goes."""

    name: str
    shard: Shard
    sink: Sink

    @property
    def box(self) -> Box:
        return Box(self.shard.offset, self.shard.shape)


class Reader:
    """Tensors of one checkpoint by their names in the manifest, aliases among them.

    While it is entered, the checkpoint has a lease.

    Attributes:
        path: the checkpoint's directory.
        manifest: its manifest.
        resharded: names of what was taken as another box than any saved shard.
        cast: names of what was converted to another type.
    """

    def __init__(self, path: Path, manifest: Manifest, storage: Storage) -> None:
        self.path, self.manifest = path, manifest
        self.resharded: set[str] = set()
        self.cast: set[str] = set()
        self._storage = storage
        self._lease = ExitStack()
        self._files: dict[str, int] = {}
        self._objects: dict[str, Mapping[str, Any]] = {}

    def read(self, name: str) -> torch.Tensor:
        """A new CPU tensor.

        Raises:
            CorruptCheckpoint: there is no such tensor, or its bytes are not the ones written.
            OSError: the disk failed.
        """
        return self.read_all([name])[name]

    def read_all(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """New CPU tensors by name; memory is taken once their files are known to be that long.

        Raises:
            CorruptCheckpoint: as for `read`.
            OSError: the disk failed.
        """
        entries = {name: self.entry(name) for name in names}
        made = {
            name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            for name, entry in entries.items()
        }
        self.fill([Fill(name, tensor) for name, tensor in made.items()])
        return made

    def copy_into(
        self, name: str, target: torch.Tensor, offset: tuple[int, ...] | None = None
    ) -> None:
        """Fill one live tensor; see `fill`."""
        self.fill([Fill(name, target, offset)])

    def fill(self, wanted: Sequence[Fill]) -> None:
        """Fill live tensors, in place, on any device.

        A target has the shape of its box. It may be of another floating-point type than the saved
        tensor, and is then converted.

        Raises:
            CorruptCheckpoint: there is no such tensor, or its bytes are not the ones written.
                Targets then hold what they held, or wrong bytes.
            InputError: a target does not fit.
            OSError: the disk failed.
        """
        jobs: list[_Job] = []
        sinks = []
        for name, target, offset in wanted:
            entry = self.entry(name)
            sink = self._sink(name, entry, target, offset)
            sinks.append(sink)
            common = [
                shard
                for shard in entry.shards
                if prod(shard.shape) and overlap(Box(shard.offset, shard.shape), sink.box)
            ]
            jobs += [_Job(name, shard, sink) for shard in common]
            if common and (len(common) > 1 or _box(common[0]) != sink.box):
                self.resharded.add(name)
        for one in clashing(sinks):
            one.serial = True
        _Pass(self, self._storage, self._files, units(jobs)).run()
        for sink in sinks:
            sink.finish()

    def _sink(
        self, name: str, entry: TensorEntry, target: torch.Tensor, offset: tuple[int, ...] | None
    ) -> Sink:
        saved = getattr(torch, entry.dtype)
        assert isinstance(saved, torch.dtype)
        start = (0,) * len(entry.shape) if offset is None else tuple(offset)
        ends = [o + n for o, n in zip(start, target.shape, strict=False)]
        if (
            len(start) != len(entry.shape)
            or target.dim() != len(entry.shape)
            or any(o < 0 for o in start)
            or any(end > size for end, size in zip(ends, entry.shape, strict=True))
            or (offset is None and tuple(target.shape) != entry.shape)
        ):
            raise InputError(
                f"a tensor of shape {tuple(target.shape)} cannot take {name} from {start}",
                rule=f"saved was {entry.shape}",
                fix="Give it one of that shape",
            )
        if target.dtype != saved:
            if not (target.is_floating_point() and saved.is_floating_point):
                raise InputError(
                    f"a {target.dtype} cannot take {name}",
                    rule=f"saved was {entry.dtype}",
                    fix="Give it one of that type",
                )
            self.cast.add(name)
        return Sink(target, start, saved)

    def entry(self, name: str) -> TensorEntry:
        """What the manifest says of a tensor whose files are there and as long as they should be.

        Raises:
            CorruptCheckpoint: they are not, or there is no such tensor.
            OSError: the disk failed.
        """
        entry = self.manifest.find(name)
        if entry is None:
            problem = Problem(MANIFEST, name, "corrupt", "it is named but not listed")
            raise CorruptCheckpoint(str(self.path), [problem])
        for shard in entry.shards:
            self.open(shard.file, name)
        return entry

    def open(self, file: str, tensor: str | None = None) -> int:
        """A file's descriptor, once its length has been checked. It stays open until `close`.

        Raises:
            CorruptCheckpoint: the file is absent, or of another length.
            OSError: the disk failed.
        """
        if file in self._files:
            return self._files[file]
        try:
            fd = self._storage.open(self.path / file)
        except FileNotFoundError as error:
            problem = Problem(file, tensor, "incomplete", "the file is missing")
            raise CorruptCheckpoint(str(self.path), [problem]) from error
        except ManifestError as error:
            problem = Problem(file, tensor, error.kind, error.detail)
            raise CorruptCheckpoint(str(self.path), [problem]) from error
        self._files[file] = fd
        size, stated = self._storage.size(fd), self.manifest.files[file].bytes
        if size != stated:
            detail = f"the file has {size} bytes instead of {stated}"
            kind: Kind = "incomplete" if size < stated else "corrupt"
            raise CorruptCheckpoint(str(self.path), [Problem(file, tensor, kind, detail)])
        return fd

    def objects(self, file: str) -> Mapping[str, Any]:
        """The encoded objects in a file, by provider; read once.

        Raises:
            CorruptCheckpoint: the file is absent, damaged or malformed.
            OSError: the disk failed.
        """
        if file not in self._objects:
            self._objects[file] = open_objects(self.path, file, self.manifest, self._storage)
        return self._objects[file]

    def check(self, files: Iterable[str]) -> None:
        """Check all of these files but the bytes of tensors, which are checked as they are read.

        A header that is not the one that follows from the manifest was written by another version,
        or is damaged: then the hash of the whole file decides.

        Raises:
            CorruptCheckpoint: something is wrong.
            OSError: the disk failed.
        """
        shards = self.manifest.shards_by_file()
        encoded = {file for entry in self.manifest.objects.values() for file in entry.files}
        for file in files:
            fd = self.open(file)
            if file in encoded:
                self.objects(file)
                continue
            expected = header_of(self.manifest, file, shards[file])
            found = bytearray(len(expected or b""))
            read_exactly(self._storage, fd, memoryview(found), 0)
            if expected is None or found != expected:
                problems = scan(self._storage, self.path / file, self.manifest, shards[file])
                if problems:
                    raise CorruptCheckpoint(str(self.path), problems)

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._storage.close(self._files.popitem()[1])
        self._lease.close()

    def __enter__(self) -> Reader:
        """Whatever reads a checkpoint's tensors begins here, before its first file is opened."""
        self._lease.enter_context(lease(self.path, self._storage))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _box(shard: Shard) -> Box:
    return Box(shard.offset, shard.shape)


def units(jobs: Sequence[_Job]) -> list[list[_Job]]:
    """What one thread reads at once, largest first: a large shard, or small neighbours in a file.

    Jobs whose sink is `serial` are all in one unit.
    """
    found: list[list[_Job]] = []
    serial = [job for job in jobs if job.sink.serial]
    run: list[_Job] = []
    for job in sorted(jobs, key=lambda job: (job.shard.file, job.shard.begin)):
        begin, end = job.shard.begin, job.shard.end
        if job.sink.serial:
            continue
        if end - begin > SMALL_BYTES:
            found.append([job])
        elif (
            run
            and run[-1].shard.file == job.shard.file
            and run[-1].shard.end == begin
            and end - run[0].shard.begin <= SCRATCH_BYTES
        ):
            run.append(job)
        else:
            run = [job]
            found.append(run)
    found.sort(key=lambda unit: unit[0].shard.begin - unit[-1].shard.end)
    return [serial, *found] if serial else found


class _Pass:
    """One reading of many shards, by several threads; the first failure stops them all."""

    def __init__(
        self, reader: Reader, storage: Storage, files: dict[str, int], todo: list[list[_Job]]
    ) -> None:
        self._path, self._storage, self._files = reader.path, storage, files
        self._bytes = sum(job.shard.end - job.shard.begin for unit in todo for job in unit)
        self._todo = todo[::-1]
        self._stop = threading.Event()
        self._problems: list[Problem] = []

    def run(self) -> None:
        """Read it all."""
        count = min(MAX_THREADS, len(os.sched_getaffinity(0)), len(self._todo))
        if count < 2 or self._bytes < SCRATCH_BYTES:
            self._work()
        else:
            with ThreadPoolExecutor(count, thread_name_prefix="eke-reader") as pool:
                futures = [pool.submit(self._work) for _ in range(count)]
                try:
                    for future in futures:
                        future.result()
                finally:
                    self._stop.set()
        if self._problems:
            found = sorted(self._problems, key=lambda one: (one.file, one.tensor or ""))
            raise CorruptCheckpoint(str(self._path), found)

    def _work(self) -> None:
        # Its own mapping, so that it is gone at the end, whatever the thread's heap keeps.
        scratch: Bytes = np.frombuffer(mmap.mmap(-1, SCRATCH_BYTES), np.uint8)
        try:
            while self._todo and not self._stop.is_set():
                try:
                    unit = self._todo.pop()
                except IndexError:
                    return  # another thread took the last one
                if len(unit) > 1 and not unit[0].sink.serial:
                    self._read_together(unit, scratch)
                else:
                    for job in unit:
                        self._read(job, scratch)
        except BaseException:
            self._stop.set()
            raise

    def _read_together(self, unit: list[_Job], scratch: Bytes) -> None:
        begin, file = unit[0].shard.begin, unit[0].shard.file
        data = scratch[: unit[-1].shard.end - begin]
        count = self._take(file, data, begin)
        for job in unit:
            if job.shard.end - begin > count:
                self._blame(job, "incomplete", "the file ends inside it")
                return
            part = data[job.shard.begin - begin : job.shard.end - begin]
            if xxhash.xxh3_128_hexdigest(part.data) != job.shard.xxh3_128:
                self._blame(job, "corrupt", "its bytes do not match its hash")
                return
            room = job.sink.room(job.box)
            if room is None:
                job.sink.put(job.box, 0, part)
            else:
                room.memory[:] = part[room.begin : room.end]

    def _read(self, job: _Job, scratch: Bytes) -> None:
        shard, size = job.shard, job.shard.end - job.shard.begin
        room = job.sink.room(job.box)
        digest = xxhash.xxh3_128()
        position = 0
        while position < size and not self._stop.is_set():
            end = min(position + SCRATCH_BYTES, size)
            straight = room is not None and room.begin <= position < room.end
            if room is not None and straight:
                end = min(end, room.end)
                window = room.memory[position - room.begin : end - room.begin]
            else:
                if room is not None and position < room.begin:
                    end = min(end, room.begin)
                window = scratch[: end - position]
            if self._take(shard.file, window, shard.begin + position) < end - position:
                self._blame(job, "incomplete", "the file ends inside it")
                return
            digest.update(window.data)
            if room is None:
                job.sink.put(job.box, position, window)
            position = end
        if position == size and digest.hexdigest() != shard.xxh3_128:
            self._blame(job, "corrupt", "its bytes do not match its hash")

    def _take(self, file: str, window: Bytes, begin: int) -> int:
        try:
            return read_exactly(self._storage, self._files[file], window.data, begin)
        except OSError as error:
            error.filename = str(self._path / file)
            raise

    def _blame(self, job: _Job, kind: Kind, detail: str) -> None:
        self._problems.append(Problem(job.shard.file, job.name, kind, detail))
        self._stop.set()

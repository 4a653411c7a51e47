"""Is every byte of a checkpoint the one that was written? Reads it all; needs no torch.

Property: a checkpoint whose report is `ok` has exactly the files its manifest lists, each with
the length and hash it states, each tensor with its own hash; so any changed, lost or added byte
in the directory shows as a problem that names the file, and the tensor if it is in one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from eke.checkpoint.errors import CorruptCheckpoint, Kind, Problem, reading, worst
from eke.checkpoint.layout import checkpoint_of, step_dirs, temporaries
from eke.checkpoint.lease import lease
from eke.checkpoint.manifest import MANIFEST, Manifest, Shard
from eke.checkpoint.opening import open_manifest, open_objects
from eke.checkpoint.references import references
from eke.checkpoint.storage import Storage
from eke.checkpoint.tensorfile import scan

MAX_THREADS = 4
SERIAL_BYTES = 16 << 20
"""Less than this is not worth starting threads for."""


@dataclass(frozen=True)
class Report:
    """What `verify` found.

    Attributes:
        path: the checkpoint's directory.
        step: the step its manifest states, None if the manifest cannot be read.
        problems: what is wrong; empty if nothing is.
        bytes_read: how much was read.
    """

    path: str
    step: int | None
    problems: tuple[Problem, ...]
    bytes_read: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def kind(self) -> Kind | None:
        """The kind that stands for all problems; None if there are none."""
        return worst(self.problems) if self.problems else None

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "path": self.path,
            "step": self.step,
            "ok": self.ok,
            "kind": self.kind,
            "bytes_read": self.bytes_read,
            "problems": [problem.to_json() for problem in self.problems],
        }


def verify(path: str | Path, *, storage: Storage | None = None) -> Report:
    """Check one checkpoint; of a run or a directory of checkpoints, the newest one.

    Raises:
        InputError: there is no such directory.
        EkeError: the disk failed.
    """
    storage = storage or Storage()
    with reading(path):
        directory = checkpoint_of(path)
        with lease(directory, storage):
            return _verify(directory, storage)


def _verify(directory: Path, storage: Storage) -> Report:
    try:
        manifest = open_manifest(directory, storage)
    except CorruptCheckpoint as error:
        problems = tuple(_without_manifest(directory, problem) for problem in error.problems)
        return Report(str(directory), None, problems, 0)
    found = check_files(directory, manifest, sorted(manifest.files), storage)
    listed = {MANIFEST, *manifest.files}
    for extra in sorted(one.name for one in directory.iterdir() if one.name not in listed):
        found.append(Problem(extra, None, "foreign", "the file is not part of the checkpoint"))
    return Report(str(directory), manifest.step, tuple(found), manifest.data_bytes)


def _without_manifest(directory: Path, problem: Problem) -> Problem:
    """A directory without a manifest that does not look like an attempt is somebody else's."""
    ours = directory.name.startswith(("step-", ".tmp-"))
    if problem.kind == "incomplete" and problem.file == MANIFEST and not ours:
        inside = "checkpoints that are all incomplete" if step_dirs(directory) else "no checkpoint"
        if temporaries(directory):
            inside = "only unfinished attempts"
        return Problem(MANIFEST, None, "foreign", f"the directory holds {inside}")
    return problem


def check_files(
    directory: Path, manifest: Manifest, files: list[str], storage: Storage
) -> list[Problem]:
    """Read these files of a checkpoint and compare every byte with the manifest.

    Raises:
        OSError: the disk failed.
    """
    problems: list[Problem] = []
    shards = manifest.shards_by_file()
    threads = min(MAX_THREADS, len(files)) if manifest.data_bytes > SERIAL_BYTES else 1
    with ThreadPoolExecutor(threads, thread_name_prefix="eke-verify") as pool:
        check = partial(_scan, directory, manifest, shards, storage)
        for found in pool.map(check, files) if threads > 1 else map(check, files):
            problems += found
    broken = {problem.file for problem in problems}
    for name, entry in manifest.objects.items():
        for file in entry.files:
            if file in files and file not in broken:
                problems += _check_object(directory, manifest, name, file, storage)
    return problems


def _scan(
    directory: Path,
    manifest: Manifest,
    shards: Mapping[str, Sequence[tuple[str, Shard]]],
    storage: Storage,
    file: str,
) -> list[Problem]:
    return scan(storage, directory / file, manifest, shards[file])


def _check_object(
    directory: Path, manifest: Manifest, name: str, file: str, storage: Storage
) -> list[Problem]:
    try:
        objects = open_objects(directory, file, manifest, storage)
    except CorruptCheckpoint as error:
        return list(error.problems)
    if name not in objects:
        return [Problem(file, None, "corrupt", f"the object {name!r} is not in it")]
    return [
        Problem(file, tensor, "corrupt", f"the object {name!r} names it, but it is not listed")
        for tensor in references(objects[name])
        if manifest.find(tensor) is None
    ]

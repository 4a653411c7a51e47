"""What is in a directory of checkpoints, and in one checkpoint, as plain values. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eke.checkpoint.commit import idle_seconds
from eke.checkpoint.dtypes import tensor_bytes
from eke.checkpoint.errors import reading
from eke.checkpoint.layout import (
    checkpoint_of,
    root_of,
    step_dirs,
    step_of,
    temporaries,
)
from eke.checkpoint.manifest import MANIFEST, TensorEntry
from eke.checkpoint.opening import glance, open_manifest
from eke.checkpoint.owner import me, parse_token, verdict
from eke.checkpoint.storage import Storage
from eke.errors import InputError


def overview(path: str | Path) -> list[dict[str, Any]]:
    """Everything under a run or a directory of checkpoints, oldest step first.

    Each entry has `name`, `step`, `status`, `problem`, `bytes` and `age_s`, the seconds since
    anything in it was changed. The status is `committed`; `damaged` (a manifest that does not hold,
    or a file that is absent or not of its length: `problem` says which; other damage only `verify`
    finds) or `incomplete` (no manifest, ignored when the newest is looked for); `saving` or
    `deleting` (its owner may be alive); or `debris` (its owner is dead: the next save removes it).

    Raises:
        InputError: there is no such directory.
        EkeError: the disk failed.
    """
    root = root_of(path)
    if not root.is_dir():
        raise InputError(
            "there is no such directory",
            value=str(path),
            fix="Name a run or its checkpoints directory",
        )
    with reading(root):
        return [row for row in _rows(root) if row is not None]


def _rows(root: Path) -> Iterator[dict[str, Any] | None]:
    here, storage = me(), Storage()
    itself = step_of(root.name)
    for step, directory in ({itself: root} if itself is not None else step_dirs(root)).items():
        problem = glance(directory, storage)
        status = "committed" if problem is None else "damaged"
        if problem is not None and not (directory / MANIFEST).exists():
            problem, status = None, "incomplete"
        yield _row(directory, step, status, None if problem is None else str(problem))
    for directory, purpose, step, token in temporaries(root):
        state = verdict(parse_token(token), here, idle_seconds(directory))
        at_work = "saving" if purpose == "step" else "deleting"
        yield _row(directory, step, "debris" if state == "dead" else at_work)


def _row(
    directory: Path, step: int, status: str, problem: str | None = None
) -> dict[str, Any] | None:
    try:
        size = sum(one.stat().st_size for one in directory.iterdir() if one.is_file())
    except FileNotFoundError:
        return None  # it was committed or deleted while we looked
    return {
        "name": directory.name,
        "step": step,
        "status": status,
        "problem": problem,
        "bytes": size,
        "age_s": idle_seconds(directory),
    }


def inspect(path: str | Path) -> dict[str, Any]:
    """One checkpoint: what its manifest says, its tensors by provider. Reads no tensor.

    Args:
        path: its directory; of a run or a directory of checkpoints, the newest one.

    Raises:
        InputError: there is no such directory.
        CorruptCheckpoint: the manifest is absent or damaged.
        EkeError: the disk failed.
    """
    with reading(path):
        directory = checkpoint_of(path)
        manifest = open_manifest(directory, Storage())
    providers: dict[str, dict[str, Any]] = {
        name: {"per_rank": entry.per_rank, "objects": list(entry.files), "bytes": 0, "tensors": {}}
        for name, entry in manifest.objects.items()
    }
    for name in manifest.names():
        entry = manifest.find(name)
        if entry is None:
            continue
        provider, _, key = name.partition("/")
        home = providers.setdefault(
            provider, {"per_rank": False, "objects": [], "bytes": 0, "tensors": {}}
        )
        home["tensors"][key] = _tensor(entry, manifest.aliases.get(name))
        home["bytes"] += home["tensors"][key]["bytes"]
    return {
        "path": str(directory),
        "step": manifest.step,
        "world_size": manifest.world_size,
        "mesh": dict(manifest.mesh),
        "created_unix_s": manifest.created_unix_s,
        "eke": manifest.eke,
        "torch": manifest.torch,
        "bytes": manifest.data_bytes,
        "files": {name: dict(vars(entry)) for name, entry in sorted(manifest.files.items())},
        "providers": providers,
    }


def _tensor(entry: TensorEntry, alias_of: str | None) -> dict[str, Any]:
    return {
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "group": entry.group,
        "bytes": 0 if alias_of is not None else tensor_bytes(entry.dtype, entry.shape),
        "alias_of": alias_of,
        "shards": [
            {"file": shard.file, "offset": list(shard.offset), "xxh3_128": shard.xxh3_128}
            for shard in entry.shards
        ],
    }

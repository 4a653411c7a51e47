"""A checkpoint in another tool's format: a transformers folder, torch's DCP, or one `.pt` file.

Properties: the target directory appears whole, by one rename, or not at all; every exported byte
is one whose hash was checked; nothing is unpickled. The formats of `torch` and `dcp` hold pickled
parts, which torch writes from values that it reads back with `weights_only=True`, or itself.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from eke.checkpoint.commit import idle_seconds
from eke.checkpoint.errors import disk_error, reading
from eke.checkpoint.layout import checkpoint_of
from eke.checkpoint.opening import open_manifest
from eke.checkpoint.owner import me, new_token, parse_token, verdict
from eke.checkpoint.reader import Reader
from eke.checkpoint.storage import Storage
from eke.errors import InputError

Format = Literal["hf", "dcp", "torch"]


def export(
    path: str | Path, directory: str | Path, *, to: Format, config: str | Path | None = None
) -> Path:
    """Write a checkpoint's state to a new directory in another format; returns the directory.

    `hf`: the tensors of the provider `model` as a folder that transformers' `from_pretrained`
    loads; one tensor is in memory at a time. `dcp`: all tensors by their names in the manifest, as
    `torch.distributed.checkpoint.load` reads them; one tensor at a time. `torch`: one file
    `checkpoint.pt` that `torch.load(weights_only=True)` reads, with `step`, `tensors` by their
    names and `objects` by provider; it needs as much memory as the checkpoint has bytes.

    Args:
        path: a checkpoint's directory; of a run or a directory of checkpoints, the newest one.
        directory: the target; it must not exist, or be empty.
        to: the format.
        config: for `hf`, the folder with the model's `config.json` and its tokenizer; by default
            the `model/` of the checkpoint's run.

    Raises:
        InputError: there is no checkpoint, the target is taken, or the state has no such form.
        CorruptCheckpoint: bytes are not the ones that were written.
        EkeError: the disk failed.
    """
    if to not in get_args(Format):
        raise InputError(
            "there is no such export format",
            value=to,
            rule="formats are hf, dcp and torch",
            fix="Name one of these",
        )
    if config is not None and to != "hf":
        raise InputError(f"an export to {to} takes no config", fix="Leave config out")
    target = Path(directory)
    check_target(target)
    storage = Storage()
    source = checkpoint_of(path)
    with reading(source):
        manifest = open_manifest(source, storage)
        with Reader(source, manifest, storage) as reader:
            work: Callable[[Path], None]
            if to == "hf":
                from eke.checkpoint.export_hf import config_of, write_hf

                folder = config_of(source, config)
                work = lambda place: write_hf(reader, folder, place)  # noqa: E731
            elif to == "dcp":
                from eke.checkpoint.export_dcp import write_dcp

                work = lambda place: write_dcp(reader, place)  # noqa: E731
            else:
                from eke.checkpoint.export_torch import write_torch

                work = lambda place: write_torch(reader, storage, place)  # noqa: E731
            publish(target, work, storage)
    return target


def check_target(target: Path) -> None:
    """Refuse a directory that holds something, and a place that is no directory.

    Raises:
        InputError: it is not absent or an empty directory.
    """
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise InputError(
            "the export's target is not a directory", value=str(target), fix="Name a new one"
        )
    if target.is_dir() and any(target.iterdir()):
        raise InputError(
            "the export's target is not empty",
            value=str(target),
            fix="Name a directory that does not exist yet",
        )


def publish(target: Path, work: Callable[[Path], None], storage: Storage) -> None:
    """Let `work` fill a directory beside `target`, make it durable, and rename it to `target`.

    What earlier exports to this target left when they were killed is removed first.

    Raises:
        EkeError: the disk refused it; there is no target then.
    """
    here, stem = me(), f".{target.name}.export-"
    beside = target.parent / f"{stem}{new_token(here)}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for old in target.parent.iterdir():
            if old.name.startswith(stem) and not old.is_symlink() and old.is_dir():
                owner = parse_token(old.name.removeprefix(stem))
                if verdict(owner, here, idle_seconds(old)) == "dead":
                    shutil.rmtree(old, ignore_errors=True)
        beside.mkdir()
    except OSError as error:
        raise disk_error(f"exporting to {target}", error) from error
    try:
        work(beside)
        _put(beside, target, storage)
    except (OSError, RuntimeError) as error:
        # Where the disk refuses, torch's writer tries to end its file, and reports only that.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise disk_error(f"exporting to {target}", cause) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # is gone already if it became the target


def _put(beside: Path, target: Path, storage: Storage) -> None:
    for file in beside.iterdir():
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            storage.sync(fd)
        finally:
            storage.close(fd)
    storage.sync_dir(beside)
    beside.rename(target)  # replaces an empty directory, and fails if it is empty no more
    storage.sync_dir(target.parent)

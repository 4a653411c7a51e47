"""From an attempt to a checkpoint in one rename, and the deletion of checkpoints and debris.

The order of a commit is what makes it safe: every file is written and made durable, then the
manifest, then the attempt's own names; one rename gives it its name; and the directory above is
made durable. A crash before the rename leaves the checkpoints as they were; one after it leaves
the new checkpoint whole. A deletion is one rename too, the other way, before anything is removed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path

from eke.checkpoint.errors import reading
from eke.checkpoint.layout import (
    root_of,
    step_name,
    step_of,
    steps,
    temporaries,
    temporary_name,
)
from eke.checkpoint.lease import free
from eke.checkpoint.manifest import MANIFEST
from eke.checkpoint.opening import glance
from eke.checkpoint.owner import me, new_token, parse_token, verdict
from eke.checkpoint.retention import Keep, expired
from eke.checkpoint.storage import Storage
from eke.checkpoint.tensorfile import write_file
from eke.errors import EkeError, InputError

log = logging.getLogger("eke.checkpoint")

_at_work: set[Path] = set()
"""Attempts that this process is working on now; all its others are debris."""


class Attempt:
    """One attempt to save one step."""

    def __init__(
        self, storage: Storage, root: Path, step: int, durable: bool, token: str | None = None
    ) -> None:
        self._storage, self._root, self._durable = storage, root, durable
        self.step = step
        self.path = root / temporary_name("step", step, token or new_token(me()))

    def begin(self) -> None:
        """Create the attempt's directory, and the one above if it is not there.

        Raises:
            OSError: the disk refused.
        """
        absent = [path for path in (self._root, *self._root.parents) if not path.exists()]
        self._storage.make_root(self._root)
        if self._durable:
            for path in absent:
                self._storage.sync_dir(path.parent)
        _at_work.add(self.path)
        self._storage.make_dir(self.path)

    def commit(self, manifest: bytes, decide: Callable[[], None] = lambda: None) -> Path:
        """Write the manifest and give the checkpoint its name; returns its directory.

        A directory that has the name but no manifest that holds is moved out of the way.

        Args:
            decide: called when all but the name is there; what it raises, there is no checkpoint.

        Raises:
            OSError: the disk refused, and there is no new checkpoint.
            EkeError: there is one and it is whole, but its name could not be made durable.
        """
        write_file(self._storage, self.path / MANIFEST, manifest, self._durable)
        if self._durable:
            self._storage.sync_dir(self.path)
        decide()
        target = self._root / step_name(self.step)
        if target.exists():
            delete(self._storage, self._root, self.step, durable=False)
        self._storage.rename(self.path, target)
        _at_work.discard(self.path)
        if self._durable:
            try:
                self._storage.sync_dir(self._root)
            except OSError as error:
                raise EkeError(
                    f"step {self.step} is saved in {target}, but may not outlive a loss of power: "
                    f"{error.strerror or error}",
                    fix="See to the disk, then save a later step",
                ) from error
        return target

    def abort(self) -> None:
        """Remove what there is of it; what cannot be removed is left for the next save."""
        _at_work.discard(self.path)
        if self.path.exists():
            _remove(self._storage, self.path)


def _remove(storage: Storage, path: Path) -> None:
    try:
        storage.remove_tree(path)
    except FileNotFoundError:
        return  # another process was quicker
    except OSError as error:
        log.warning("could not remove %s (%s); the next save tries again", path, error)


def delete(storage: Storage, root: Path, step: int, durable: bool) -> None:
    """Delete one checkpoint: it is gone from the instant of the rename.

    Raises:
        OSError: the rename failed, and the checkpoint is still there.
    """
    doomed = root / temporary_name("delete", step, new_token(me()))
    storage.rename(root / step_name(step), doomed)
    if durable:
        storage.sync_dir(root)
    _remove(storage, doomed)


def expire(
    storage: Storage, root: Path, keep: Keep, *, protected: Collection[int] = (), durable: bool
) -> list[Path]:
    """Apply retention; what is being read stays until the next time. Returns what was removed.

    Raises:
        OSError: the disk refused, and the checkpoint is still there.
    """

    def sound(step: int) -> bool:
        return glance(root / step_name(step), storage) is None

    removed = []
    for step in expired(steps(root), keep, protected, sound):
        path = root / step_name(step)
        with free(path, storage) as unread:
            if unread:
                delete(storage, root, step, durable)
                removed.append(path)
    return removed


def clean(storage: Storage, root: Path) -> list[Path]:
    """Remove the attempts and deletions whose owner is dead; returns what was removed."""
    here, removed = me(), []
    for path, _, _, token in temporaries(root):
        state = verdict(parse_token(token), here, idle_seconds(path))
        if state == "dead" or (state == "mine" and path not in _at_work):
            _remove(storage, path)
            removed.append(path)
    return removed


def collect(root: str | Path, keep: Keep | None = None) -> list[Path]:
    """Remove what crashes left behind, and with `keep` the checkpoints that it does not keep.

    Attempts that may be alive, checkpoints that are being read, and damaged ones of which nothing
    newer is sound stay. Returns what was removed.

    Raises:
        InputError: there is no such directory, or it is one step's.
        EkeError: the disk failed.
    """
    storage, root = Storage(), root_of(root)
    if not root.is_dir():
        raise InputError(
            "there is no such directory",
            value=str(root),
            fix="Name a run or its checkpoints directory",
        )
    if step_of(root.absolute().name) is not None:
        raise InputError(
            "this is the directory of one step",
            value=str(root),
            fix="Name the run or its checkpoints directory",
        )
    with reading(root):
        removed = clean(storage, root)
        if keep is not None:
            removed += expire(storage, root, keep, durable=True)
    return removed


def idle_seconds(path: Path) -> float:
    """How long ago anything in a directory was changed; 0 if it is gone."""
    try:
        newest = max(one.stat().st_mtime for one in [path, *path.iterdir()])
    except FileNotFoundError:
        return 0.0
    return time.time() - newest

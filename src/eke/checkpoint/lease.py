"""Leases: a checkpoint that somebody reads is not deleted under them.

A reader holds a shared lock (`flock`) on the checkpoint's manifest; whoever deletes takes it
exclusively, does not wait for it, and leaves the checkpoint for the next time when it is not to
be had. The kernel keeps the locks: they work between processes, are gone when their process ends
in whatever way, and leave nothing on the disk.

Properties:

* While `lease(path)` is entered, `free(path)` gives False in every process of the machine (on NFS
  and other file systems that share locks: of every machine).
* A lease is of what has its name: one that was deleted meanwhile, or replaced, is not held.
* A child that was forked while a lease was held does not prolong it.
* Where the file system has no locks, reading goes on without a lease, and deletion does not wait
  for readers: a reader may then find a file gone, and says so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eke.checkpoint.manifest import MANIFEST
from eke.checkpoint.storage import Storage

log = logging.getLogger("eke.checkpoint")

_held: set[int] = set()
"""The descriptors of this process's locks."""


def _let_go_in_child() -> None:
    """A lock lives as long as any descriptor of it, so a forked child closes its copies."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go_in_child)


@contextmanager
def lease(path: Path, storage: Storage) -> Iterator[None]:
    """Keep retention from deleting a checkpoint.

    Raises nothing: where there is no manifest there is nothing to keep, and whoever reads finds
    that out.
    """
    fd = _share(path / MANIFEST, storage)
    if fd is not None:
        _held.add(fd)
    try:
        yield
    finally:
        if fd is not None:
            _release(fd, storage)


def _share(file: Path, storage: Storage) -> int | None:
    while True:
        try:
            fd = storage.lock(file, exclusive=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.debug("%s is read without a lease: %s", file.parent, error)
            return None
        try:
            if os.path.samestat(os.fstat(fd), file.stat()):
                return fd
        except OSError:
            pass  # it was deleted while we waited for the lock: the next look says so
        storage.unlock(fd)


@contextmanager
def free(path: Path, storage: Storage) -> Iterator[bool]:
    """Whether nobody reads a checkpoint; whoever would wait until this is left."""
    try:
        fd = storage.lock(path / MANIFEST, exclusive=True)
    except BlockingIOError:
        yield False
        return
    except OSError:
        yield True  # no manifest, or no locks: there is no lease to respect
        return
    _held.add(fd)
    try:
        yield True
    finally:
        _release(fd, storage)


def _release(fd: int, storage: Storage) -> None:
    if fd in _held:  # else this is a forked child, and its copy is closed
        _held.discard(fd)
        storage.unlock(fd)

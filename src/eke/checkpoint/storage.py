"""Every call by which a checkpoint touches a disk, in one small class.

There is one reason for the class: tests replace a method to make a disk fill up, fail, or write
less than it was asked to, at any chosen call.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from pathlib import Path

from eke.checkpoint.checks import ManifestError


class Storage:
    """The local file system. Every method raises `OSError` as the call beneath it does."""

    def make_dir(self, path: Path) -> None:
        """Create one directory; an existing one is an error."""
        path.mkdir()

    def make_root(self, path: Path) -> None:
        """Create the directory that holds all checkpoints, if it is not there."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """Create a file for writing, which must not exist; returns its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def go_around_cache(self, fd: int, wanted: bool) -> bool:
        """Write past the page cache, in whole aligned blocks, or again through it.

        Returns whether the file system can.
        """
        direct = getattr(os, "O_DIRECT", 0)
        if not direct:
            return False
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | direct if wanted else flags & ~direct)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
        return True

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name."""
        os.link(source, target)

    def open(self, path: Path) -> int:
        """Open a plain file for reading; returns its descriptor.

        Raises:
            ManifestError: it is a link, which may lead anywhere, or a pipe or a device, which may
                never end, or a directory.
        """
        if stat.S_ISREG(path.lstat().st_mode):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError as error:
                if error.errno != errno.ELOOP:  # it became a link after it was looked at
                    raise
            else:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    return fd
                os.close(fd)
        raise ManifestError("is not a plain file", path.name, kind="foreign")

    def lock(self, path: Path, *, exclusive: bool) -> int:
        """Lock a file until `unlock` or the process's end; returns the lock's descriptor.

        A shared lock waits for an exclusive one to end; an exclusive lock does not wait:
        `BlockingIOError`. Other errors than that and `FileNotFoundError` mean that there are no
        locks here.
        """
        flags, how = os.O_RDONLY, fcntl.LOCK_SH
        if exclusive:  # NFS wants an exclusive lock's descriptor to be writable
            how = fcntl.LOCK_EX | fcntl.LOCK_NB
            flags = os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY
        # A pipe that somebody put there is not waited for, and a link is not followed.
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, how)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def unlock(self, fd: int) -> None:
        """End a lock, copies of its descriptor in forked children included."""
        try:
            fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def write(self, fd: int, data: memoryview) -> int:
        """Write some of `data`; returns how many bytes were taken."""
        return os.write(fd, data)

    def read_into(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Read from `offset` into `buffer`; returns how many bytes came, 0 at the end."""
        return os.preadv(fd, [buffer], offset)

    def size(self, fd: int) -> int:
        """The open file's length in bytes."""
        return os.fstat(fd).st_size

    def sync(self, fd: int) -> None:
        """Make the open file's contents durable."""
        os.fsync(fd)

    def sync_dir(self, path: Path) -> None:
        """Make a directory's names durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a directory; the target must not exist."""
        source.rename(target)

    def remove_tree(self, path: Path) -> None:
        """Delete a directory and everything in it."""
        shutil.rmtree(path)


def read_exactly(storage: Storage, fd: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from `offset`; returns the bytes read, fewer only at the end of the file."""
    done = 0
    while done < len(buffer):
        count = storage.read_into(fd, buffer[done:], offset + done)
        if count == 0:
            break
        done += count
    return done


def read_file(storage: Storage, path: Path, limit_bytes: int) -> bytes:
    """A whole small file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is longer than `limit_bytes`.
    """
    fd = storage.open(path)
    try:
        size = storage.size(fd)
        if size > limit_bytes:
            raise ValueError(f"{size} bytes long; at most {limit_bytes} are allowed")
        data = bytearray(size)
        return bytes(data[: read_exactly(storage, fd, memoryview(data), 0)])
    finally:
        storage.close(fd)

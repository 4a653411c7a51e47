"""Small files that are either the old ones or the new ones, whatever happens in between."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from eke.errors import EkeError


def fsync_dir(path: Path) -> None:
    """Make a directory's entries durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, text: str) -> None:
    """Replace the file by `text`: written beside it, made durable, renamed over it.

    Raises:
        EkeError: the disk refused it; the file is the old one or the new one, whole.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        fsync_dir(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            beside.unlink()
        raise EkeError(
            f"could not write {path}: {error.strerror}",
            fix="Free some space or choose another [run] dir, then run the same command again",
        ) from error

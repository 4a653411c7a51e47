"""Files that can be made again: written whole or not at all, checked when read.

Properties: a reader never sees half a file, whatever is killed when; processes that write the
same file at the same time do no harm, since the last one wins and all write the same; a file
that is damaged is treated as absent.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

import xxhash

from eke.errors import EkeError

_WRITTEN_NS = 1_000_000_000 * 10**9


def cache_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """`cache_dir`, else `$EKE_CACHE`, else `~/.cache/eke`."""
    chosen = cache_dir or os.environ.get("EKE_CACHE") or Path("~/.cache/eke")
    return Path(chosen).expanduser()


def write_checked(path: Path, header: dict[str, Any], body: bytes) -> None:
    """Write one line of JSON with the body's hash, then the body, and move it into place.

    Raises:
        EkeError: the disk refused it.
    """
    head = json.dumps({**header, "xxh3_128": xxhash.xxh3_128_hexdigest(body)}, sort_keys=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(head.encode() + b"\n" + body)
                file.flush()
                os.fsync(file.fileno())
            # One time for all writers: whoever reads the file while another process puts the
            # same bytes in its place must not take it for changed.
            os.utime(temporary, ns=(_WRITTEN_NS, _WRITTEN_NS))
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise EkeError(
            f"cannot write {path}: {error.strerror}",
            fix="Set the environment variable EKE_CACHE to a folder with space that you may write",
        ) from error


def read_checked(path: Path) -> tuple[dict[str, Any], bytes] | None:
    """Header and body; None when the file is absent or is not what was written."""
    try:
        head, newline, body = path.read_bytes().partition(b"\n")
        header = json.loads(head)
    except (OSError, ValueError, RecursionError):
        return None
    if not (newline and isinstance(header, dict)):
        return None
    return (header, body) if header.get("xxh3_128") == xxhash.xxh3_128_hexdigest(body) else None

"""From what the user wrote under `[data] train` to a source of rows.

Properties: the files of a glob come in sorted order; the same file is never read twice in one
source; whatever cannot be read is refused here, before any model is loaded, except damage
inside a row, which `eke.data.check_rows` finds in one pass.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from eke.data.base import JoinedSource, Row, Source
from eke.data.lines import JsonlSource, TextSource
from eke.data.tables import ParquetSource, open_datasets_folder
from eke.errors import InputError

__all__ = ["Row", "Source", "open_source"]

BUILTIN = "builtin:"
FOLDER = "datasets folder"
KINDS: dict[str, str] = {
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    ".json": "JSON lines",
    ".parquet": "Parquet",
    ".txt": "text",
}
OPENERS: dict[str, Callable[[Path], Source]] = {
    "JSON lines": JsonlSource,
    "Parquet": ParquetSource,
    "text": TextSource,
    FOLDER: open_datasets_folder,
}


def open_source(
    spec: str | Sequence[str], *, cache_dir: str | os.PathLike[str] | None = None
) -> Source:
    """The rows that `spec` names.

    Args:
        spec: `"builtin:pydocs"`; or a path or glob of `.jsonl`, `.parquet` or `.txt` files, or
            of folders written by `datasets`' `save_to_disk`; or a list of these of one kind.
        cache_dir: where the built-in corpus is kept; default `$EKE_CACHE`, else `~/.cache/eke`.

    Raises:
        InputError: nothing is there, or it is empty, of an unknown kind, or of several kinds.
        MissingExtraError: Parquet or a `datasets` folder without pyarrow.
    """
    specs = [spec] if isinstance(spec, str) else list(spec)
    if not specs:
        raise InputError("no training data is named", fix="Give a path, a glob or builtin:pydocs")
    builtin = [s for s in specs if s.startswith(BUILTIN)]
    if builtin:
        from eke.data.pydocs import NAME, open_pydocs

        if builtin[0] != NAME:
            raise InputError(
                "there is no such built-in corpus", value=builtin[0], fix=f"Use {NAME}"
            )
        if len(specs) > 1:
            raise InputError(f"{NAME} cannot be joined with other data", value=specs)
        return open_pydocs(cache_dir=cache_dir)
    paths = [path for s in specs for path in _expand(s)]
    seen: dict[Path, Path] = {}
    for path in paths:
        if path.resolve() in seen:
            raise InputError(
                f"{path} is named twice in the data",
                value=specs,
                fix="Name each file once; to weigh a file more, copy it",
            )
        seen[path.resolve()] = path
    kinds = {_kind(path): path for path in reversed(paths)}
    if len(kinds) > 1:
        raise InputError(
            "the data is of several kinds: " + ", ".join(f"{p} ({k})" for k, p in kinds.items()),
            rule="all files of one source are of one kind",
            fix="Convert them to one kind, .jsonl for example",
        )
    parts = [OPENERS[next(iter(kinds))](path) for path in paths]
    return parts[0] if len(parts) == 1 else JoinedSource(parts, ", ".join(specs))


def _expand(spec: str) -> list[Path]:
    path = Path(spec).expanduser()
    if path.exists():
        return [path]
    if not glob.has_magic(spec):
        raise InputError(
            f"{spec} does not exist",
            rule=f"relative paths start from {Path.cwd()}",
            fix="Check the path",
        )
    matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 (absolute patterns)
    if not matches:
        raise InputError(
            f"no file matches {spec}",
            rule=f"relative paths start from {Path.cwd()}",
            fix="Check the pattern",
        )
    return [Path(match) for match in matches]


def _kind(path: Path) -> str:
    if path.is_dir():
        return FOLDER
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        raise InputError(
            f"{path} has an extension that cannot be read",
            value=path.suffix,
            rule="data files end in .jsonl, .parquet or .txt (not compressed)",
            fix="Unpack or convert the file",
        )
    return kind

"""Reads the files of a run directory; what they mean is for `model`.

A run that crashed leaves files missing and last lines torn, and is reported all the same: what
could not be read becomes a notice. A log that is damaged before its last line is an error,
because a crash does not do that.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eke.budget.jsonl import RESUME, Record, read_records
from eke.budget.trace import Event, read_trace
from eke.errors import EkeError, InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RUN_FILES = ("run.toml", "metrics.jsonl", "ledger.jsonl")
"""A directory with any of these is a run."""


@dataclass(frozen=True)
class RunFiles:
    """The records of a run directory as they were read; empty where a file is absent."""

    name: str
    metrics: tuple[Record, ...] = ()
    ledger: tuple[Record, ...] = ()
    decisions: tuple[Record, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
    proof: Mapping[str, Any] = field(default_factory=dict)
    trace: tuple[Event, ...] = ()
    notices: tuple[str, ...] = ()


def _log(path: Path) -> tuple[Record, ...]:
    try:
        records = read_records(path)
    except EkeError as error:
        raise EkeError(f"{path}: {error.what}", fix=error.fix) from error
    except OSError as error:
        raise EkeError(f"could not read {path}: {error.strerror}") from error
    for record in records:
        cut = record.value.get("from_offset")
        if record.value.get("kind") == RESUME and not isinstance(cut, int):
            raise EkeError(
                f"{path}: a resume mark does not say from where", value=cut,
                fix="Restore the file from a copy",
            )  # fmt: skip
    return tuple(records)


def _table(path: Path, notices: list[str]) -> dict[str, Any]:
    """A JSON or TOML file's table. Absent: empty. Unreadable: empty, with a notice."""
    try:
        text = path.read_bytes().decode()
        value = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        notices.append(f"{path.name} could not be read ({error}); what it says is left out.")
        return {}
    if isinstance(value, dict):
        return value
    notices.append(f"{path.name} does not hold a table; what it says is left out.")
    return {}


def load(run_dir: str | os.PathLike[str]) -> RunFiles:
    """Read a run directory.

    Raises:
        InputError: it is not a directory of a run.
        EkeError: a log is damaged before its last line, or cannot be read.
    """
    root = Path(run_dir)
    if not root.is_dir() or not any((root / name).is_file() for name in RUN_FILES):
        raise InputError(
            "not a run directory" if root.is_dir() else "no such run directory",
            value=str(root),
            rule=f"a run directory holds {', '.join(RUN_FILES)}",
            fix="Give the directory that `eke train` printed, such as runs/NAME",
        )
    notices: list[str] = []
    return RunFiles(
        name=root.resolve().name,
        metrics=_log(root / "metrics.jsonl"),
        ledger=_log(root / "ledger.jsonl"),
        decisions=_log(root / "decisions.jsonl"),
        config=_table(root / "run.toml", notices),
        plan=_table(root / "plan.json", notices),
        status=_table(root / "status.json", notices),
        proof=_table(root / "resume_proof.json", notices),
        trace=tuple(read_trace(root / "trace.json")),
        notices=tuple(notices),
    )

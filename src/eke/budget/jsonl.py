"""Append-only files of JSON lines that survive `kill -9`, and what a resume undoes in them.

Property: whatever prefix of the file's bytes survives a crash, `read_records` returns every
line that was written whole, in order, and nothing else. A writer that opens the file again
first cuts off a torn last line.

JSON has no numbers that are not finite: they are written as the texts "NaN", "Infinity" and
"-Infinity", and come back as numbers; so do the bare words that earlier versions wrote.

A run that resumes from a checkpoint does again what the crash undid, so lines that were
written after the checkpoint no longer describe the run. Nothing is deleted: the writer appends
a *resume mark* that says from which byte the undone lines start, and `effective` splits a
file's records into those that stand and those that were undone.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from eke.errors import EkeError

RESUME = "resume"
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Record(NamedTuple):
    """One whole line: the byte where it starts, and its value."""

    offset: int
    value: dict[str, Any]


def _texts(value: Any) -> Any:
    """A value with texts in place of the numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _texts(one) for key, one in value.items()}
    return [_texts(one) for one in value] if isinstance(value, (list, tuple)) else value


def _numbers(value: Any) -> Any:
    """The inverse of `_texts`."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _numbers(one) for key, one in value.items()}
    return [_numbers(one) for one in value] if isinstance(value, list) else value


def _line(value: Mapping[str, Any]) -> bytes:
    """One line of strict JSON."""
    try:
        text = json.dumps(dict(value), separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_texts(value), separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"


def scan(data: bytes, path: str | os.PathLike[str] | None = None) -> tuple[list[Record], int]:
    """The whole lines of `data`, and the length of the prefix that they make up.

    Args:
        data: a file's bytes.
        path: the file, for the error.

    Raises:
        EkeError: a line *before* the last is not a JSON object: that is damage, not a crash.
    """
    records: list[Record] = []
    start = 0
    while True:
        end = data.find(b"\n", start)
        if end < 0:
            return records, start
        try:
            value = json.loads(data[start:end])
            if not isinstance(value, dict):
                raise ValueError("not an object")
        except ValueError as error:
            # After a power loss the last block may hold zeros or old bytes and a newline.
            if data.find(b"\n", end + 1) < 0:
                return records, start
            raise EkeError(
                f"line {len(records) + 1} of a run's log is damaged ({error})",
                rule=None if path is None else f"the file is {os.fspath(path)}",
                fix="Restore the file from a copy, or delete the run's directory and start anew",
            ) from error
        line = data[start:end]
        if b'"NaN"' in line or b'Infinity"' in line:
            value = _numbers(value)
        records.append(Record(start, value))
        start = end + 1


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """Every whole line of the file; an absent file has none. A torn last line is dropped."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    return scan(data, path)[0]


def effective(records: Iterable[Record]) -> tuple[list[Record], list[Record]]:
    """Split records into those that stand and those that a resume undid.

    A record is undone when a later resume mark's `from_offset` is at or before it. Resume marks
    themselves are in neither list.
    """
    kept: list[Record] = []
    undone: list[Record] = []
    for record in records:
        if record.value.get("kind") != RESUME:
            kept.append(record)
            continue
        cut = record.value["from_offset"]
        undone.extend(r for r in kept if r.offset >= cut)
        kept = [r for r in kept if r.offset < cut]
    return kept, undone


class JsonlFile:
    """The one writer of an append-only JSONL file.

    Each line goes to the kernel in one `write`, so a killed process leaves at most one torn
    line. `sync` makes what was written survive a power loss, which a checkpoint asks for
    before it commits.

    Raises:
        EkeError: the file cannot be opened for writing, or it is damaged before its last line.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise EkeError(
                f"could not open {self.path} for writing: {error.strerror}",
                fix="Mend its permissions, or choose another place",
            ) from error
        try:
            whole = scan(self.path.read_bytes(), self.path)[1]
            os.ftruncate(self._fd, whole)
        except BaseException:
            os.close(self._fd)
            raise
        self._offset = whole

    @property
    def offset(self) -> int:
        """Where the next line starts (bytes)."""
        return self._offset

    def append(self, value: Mapping[str, Any]) -> int:
        """Write one line; returns the byte where it starts.

        Raises:
            EkeError: the disk refused it (full, read-only, failing).
            ValueError: the file was closed.
        """
        if self._fd < 0:
            raise ValueError(f"{self.path} was closed")
        line = _line(value)
        start = self._offset
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            # Where even this fails, the torn line stays, and the next opening cuts it off; nothing
            # may be written behind it.
            try:
                os.ftruncate(self._fd, start)
            except OSError:
                os.close(self._fd)
                self._fd = -1
            raise EkeError(
                f"could not write to {self.path}: {error.strerror}",
                fix="Free some space or choose another [run] dir, then run the same command again",
            ) from error
        self._offset = start + len(line)
        return start

    def mark_resume(self, from_offset: int, **more: Any) -> None:
        """Say that every line from byte `from_offset` on was undone by a resume."""
        self.append({"kind": RESUME, "from_offset": from_offset, **more})

    def sync(self) -> None:
        """Make all lines durable."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Make all lines durable and let the file go; closing twice is harmless."""
        if self._fd >= 0:
            self.sync()
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> JsonlFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

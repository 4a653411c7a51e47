"""What a source of rows is, and how several files become one.

Properties: `source[i]` and `source.origin(i)` speak of the same row; a source may be pickled,
or carried over a fork, and gives the same rows on the other side; the fingerprint depends on
the content alone, never on where the files lie.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import xxhash

from eke.errors import EkeError, InputError

Row = dict[str, Any]
"""One record as it stands in the file: field name to value."""


class Source(ABC):
    """Rows that can be read by number, again and again, in any process.

    It is map-style so that a loader can shuffle by index and resume by index. It knows where
    each row came from, because an error about a row helps only if the row can be found.

    Attributes:
        name: what the user called it.
    """

    name: str

    @abstractmethod
    def __len__(self) -> int:
        """The number of rows; never 0."""

    @abstractmethod
    def _row(self, i: int) -> Row:
        """Row `i`, with 0 <= i < len(self)."""

    @abstractmethod
    def origin(self, i: int) -> str:
        """Where row `i` stands, for error messages: `file.jsonl:17`, `file.parquet row 17`."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """xxh3-128 of the content, 32 hex digits."""

    def __getitem__(self, i: int) -> Row:
        """Row `i`.

        Raises:
            IndexError: there is no row `i`.
            InputError: the row is damaged; the message says where it stands.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        return self._row(i)

    def __iter__(self) -> Iterator[Row]:
        return (self._row(i) for i in range(len(self)))


class FileSource(Source):
    """The rows of one file, which must not change while it is in use."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self.name = str(path) if name is None else name
        self._stamp = _stamp(path)

    @cached_property
    def fingerprint(self) -> str:
        """xxh3-128 of the file's bytes."""
        digest = xxhash.xxh3_128()
        with self.path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
        return digest.hexdigest()

    def _check_unchanged(self) -> None:
        """Called when a process opens the file again: an index of other bytes is worthless.

        Raises:
            EkeError: the file is not what it was when the source was opened.
        """
        if _stamp(self.path) != self._stamp:
            raise EkeError(
                f"{self.path} was changed while it was being read",
                rule="a data file must stay as it is during a run",
                fix="Leave the file alone, or copy it first, and start the run again",
            )

    def _refuse_empty(self) -> None:
        if len(self) == 0:
            raise InputError(
                f"{self.path} holds no rows", fix="Remove it from the list, or write it again"
            )


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", fix="Check the path") from error
    return stat.st_size, stat.st_mtime_ns


class JoinedSource(Source):
    """Several sources, one after the other."""

    def __init__(self, parts: Sequence[Source], name: str) -> None:
        self.parts = list(parts)
        self.name = name
        self._ends = list(accumulate(len(part) for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def _locate(self, i: int) -> tuple[Source, int]:
        part = bisect_right(self._ends, i)
        return self.parts[part], i - (self._ends[part - 1] if part else 0)

    def _row(self, i: int) -> Row:
        part, j = self._locate(i)
        return part[j]

    def origin(self, i: int) -> str:
        part, j = self._locate(i)
        return part.origin(j)

    @cached_property
    def fingerprint(self) -> str:
        """xxh3-128 over the parts' fingerprints, in order."""
        joined = "\n".join(part.fingerprint for part in self.parts)
        return xxhash.xxh3_128(joined.encode()).hexdigest()

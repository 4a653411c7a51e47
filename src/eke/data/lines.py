"""JSON lines and plain text: byte ranges of a file, indexed once and read on demand.

Only the offsets are held in memory (8 bytes a row), so a file larger than memory is fine.
Reads use `pread`, which moves no shared file position: processes that share a descriptor
after a fork, and threads, do not disturb one another.

Properties of `document_spans`: every document has between 1 and `limit` characters; leaving
out white space, the documents together are the file; a paragraph that fits is never divided.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import xxhash

from eke.data.base import FileSource, Row
from eke.errors import InputError

DOCUMENT_CHARS = 1500
"""The most characters in one sample of a text file: 350 to 500 tokens of English, so that it
fits the 512 tokens of the smallest built-in model."""


class RangeSource(FileSource):
    """Rows that are byte ranges of a file."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        super().__init__(path, name)
        self._file: BinaryIO | None = None
        self._starts, self._ends = array("Q"), array("Q")
        self._lines = array("Q")

    def __len__(self) -> int:
        return len(self._starts)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}  # the receiving process opens the file itself

    def __del__(self) -> None:
        file = self.__dict__.get("_file")
        if file is not None:
            file.close()

    def origin(self, i: int) -> str:
        """`file:line`, the line on which row `i` starts, from 1."""
        return f"{self.name}:{self._lines[i]}"

    def _add(self, start: int, end: int, line: int) -> None:
        self._starts.append(start)
        self._ends.append(end)
        self._lines.append(line)

    def _bytes(self, i: int) -> bytes:
        if self._file is None:
            self._check_unchanged()
            self._file = self.path.open("rb", buffering=0)
        start, end = self._starts[i], self._ends[i]
        data = b""
        while len(data) < end - start:
            more = os.pread(self._file.fileno(), end - start - len(data), start + len(data))
            if not more:
                self._check_unchanged()
                break
            data += more
        return data


class JsonlSource(RangeSource):
    """One JSON object a line; blank lines are passed over. Lines are parsed when asked for.

    Raises:
        InputError: the file has no row; or, when a row is read, its line is no JSON object.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        super().__init__(path, name)
        digest, start = xxhash.xxh3_128(), 0
        with path.open("rb", buffering=1 << 20) as file:
            for number, line in enumerate(file, 1):
                digest.update(line)
                if not line.isspace():
                    self._add(start, start + len(line), number)
                start += len(line)
        self.__dict__["fingerprint"] = digest.hexdigest()  # the same pass; fills the cache
        self._refuse_empty()

    def _row(self, i: int) -> Row:
        data = self._bytes(i).rstrip()  # or a cut string would be blamed on its line break
        try:
            value = json.loads(data.decode("utf-8-sig" if self._starts[i] == 0 else "utf-8"))
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{self.origin(i)} is not valid JSON ({_reason(error)})",
                rule="a .jsonl file has one JSON object a line"
                + (", not one array" if data.lstrip()[:1] == b"[" else ""),
                fix="Mend the line; `jq -c '.[]' in.json > out.jsonl` turns an array into lines",
            ) from error
        if not isinstance(value, dict):
            raise InputError(
                f"{self.origin(i)} is not a JSON object but a {type(value).__name__}",
                rule="a .jsonl file has one JSON object a line",
                fix="Mend the line; `jq -c '.[]' in.json > out.jsonl` turns an array into lines",
            )
        return value


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 at byte {error.start}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(error)


class Span(NamedTuple):
    """A stretch of a text file: bytes [start, end), characters [first, last), line from 1."""

    start: int
    end: int
    first: int
    last: int
    line: int


def document_spans(lines: Iterable[str], limit: int = DOCUMENT_CHARS) -> Iterator[Span]:
    """Cut a text into documents at blank lines.

    Paragraphs are joined as long as the document has at most `limit` characters. A paragraph
    longer than that is divided between lines, and a line longer than that after a space, or
    between any two characters where there is none.

    Args:
        lines: the text's lines, each with its line break.
        limit: the most characters in a document, line breaks inside it included; at least 1.
    """
    document: Span | None = None
    for block in _blocks(_units(lines, limit), limit):
        if document is not None and block.last - document.first <= limit:
            document = Span(document.start, block.end, document.first, block.last, document.line)
        else:
            if document is not None:
                yield document
            document = block
    if document is not None:
        yield document


def _units(lines: Iterable[str], limit: int) -> Iterator[Span | None]:
    """Each line as one span of at most `limit` characters, or several; None for a blank line."""
    byte = char = 0
    for number, line in enumerate(lines, 1):
        body = line.rstrip("\r\n")
        if not body.strip():
            yield None
        at, offset = 0, byte
        while body[at:].strip():
            piece = body[at : at + limit]
            if at + limit < len(body) and " " in piece.strip():
                piece = piece[: piece.rindex(" ") + 1]
            size = len(piece.encode())
            if piece.strip():
                yield Span(offset, offset + size, char + at, char + at + len(piece), number)
            at += len(piece)
            offset += size
        byte += len(line.encode())
        char += len(line)


def _blocks(units: Iterable[Span | None], limit: int) -> Iterator[Span]:
    """Paragraphs, those longer than `limit` in pieces."""
    block: Span | None = None
    for unit in units:
        if block is not None and unit is not None and unit.last - block.first <= limit:
            block = Span(block.start, unit.end, block.first, unit.last, block.line)
        else:
            if block is not None:
                yield block
            block = unit
    if block is not None:
        yield block


class TextSource(RangeSource):
    """A UTF-8 text file as rows `{"text": ...}`, one a document (see `document_spans`).

    Raises:
        InputError: the file is empty, or not UTF-8 (with the line).
    """

    def __init__(self, path: Path, name: str | None = None, limit: int = DOCUMENT_CHARS) -> None:
        super().__init__(path, name)
        for span in document_spans(self._text_lines(), limit):
            self._add(span.start, span.end, span.line)
        self._refuse_empty()

    def _text_lines(self) -> Iterator[str]:
        with self.path.open("rb", buffering=1 << 20) as file:
            for number, line in enumerate(file, 1):
                try:
                    yield line.decode()
                except UnicodeDecodeError as error:
                    raise InputError(
                        f"{self.name}:{number} is not UTF-8 at byte {error.start} of the line",
                        fix="Convert the file, for example with `iconv -t UTF-8`",
                    ) from error

    def _row(self, i: int) -> Row:
        text = self._bytes(i).decode()
        return {"text": text.removeprefix("\ufeff") if i == 0 else text}

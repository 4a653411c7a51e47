"""A trace file: an array of Chrome trace events that ui.perfetto.dev opens, appended to for ever.

Property: after every `append` the file is one whole JSON array. The new events and the closing
bracket go out in one write over the old bracket; where a kill cuts that write short, whole lines
still are whole events: `read_trace` reads those, and the next `TraceFile` mends the array.

The file is a picture, not a record: it never grows beyond `most_bytes`, and a disk that refuses it
ends the trace and not the run. Format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger("eke.trace")

MOST_BYTES = 16 * 2**20
_HEAD, _TAIL, _BETWEEN = b"[\n", b"\n]\n", b",\n"

Event = dict[str, Any]


def scan_trace(data: bytes) -> tuple[list[Event], int]:
    """The whole events of a file's bytes, one a line, and the length of the prefix they make up
    (0 if it is no such file at all)."""
    if not data.startswith(_HEAD):
        return [], 0
    events: list[Event] = []
    end = start = len(_HEAD)
    while start < len(data):
        stop = data.find(b"\n", start)
        stop = len(data) if stop < 0 else stop
        try:
            value = json.loads(data[start:stop].removesuffix(b","))
        except ValueError:
            break
        if not isinstance(value, dict):
            break
        events.append(value)
        end = stop - data[start:stop].endswith(b",")
        start = stop + 1
    return events, end


def read_trace(path: str | os.PathLike[str]) -> list[Event]:
    """The whole events of a file; none if it is absent, unreadable or something else."""
    try:
        return scan_trace(Path(path).read_bytes())[0]
    except OSError:
        return []


class TraceFile:
    """The one writer of a trace file. What is there is kept, and mended.

    Attributes:
        found: the events that were there when it was opened.
    """

    def __init__(self, path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> None:
        self.path, self._most_bytes = Path(path), most_bytes
        self._fd = -1
        self.found: list[Event] = []
        self._end = len(_HEAD)
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            data = self.path.read_bytes()
            self.found, end = scan_trace(data)
            if end == 0:
                os.ftruncate(self._fd, 0)
                self._put(_HEAD + _TAIL, 0)
            else:
                self._end = end
                if data[end:] != _TAIL:
                    self._put(_TAIL, end)
                    os.ftruncate(self._fd, end + len(_TAIL))
        except OSError as error:
            self._give_up(error)

    @property
    def full(self) -> bool:
        """Whether nothing more is taken."""
        return self._fd < 0 or self._end >= self._most_bytes

    def append(self, events: Sequence[Mapping[str, Any]]) -> bool:
        """Write some events; False if they were not taken, all of them, because the file is full
        or the disk refused.

        Raises:
            ValueError: an event is not JSON.
        """
        if not events or self.full:
            return False
        lines = [
            json.dumps(dict(e), separators=(",", ":"), allow_nan=False).encode() for e in events
        ]
        data = (_BETWEEN if self._end > len(_HEAD) else b"") + _BETWEEN.join(lines)
        if self._end + len(data) > self._most_bytes:
            self._most_bytes = 0  # full: a smaller event that still fits would only confuse
            return False
        try:
            self._put(data + _TAIL, self._end)
        except OSError as error:
            self._give_up(error)
            return False
        self._end += len(data)
        return True

    def _put(self, data: bytes, at: int) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(self._fd, view, at)
            view, at = view[done:], at + done

    def _give_up(self, error: OSError) -> None:
        log.warning("%s ends here: %s", self.path, error.strerror or error)
        self.close()

    def close(self) -> None:
        """Let the file go; closing twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

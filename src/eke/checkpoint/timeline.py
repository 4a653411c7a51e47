"""Where the time of one save went: spans of what training, capture, writing and commit did.

Marks are taken with the monotonic clock (`time.perf_counter`) at the seams of the engine and cost
about a microsecond each, against milliseconds for the block that each of them is about.

Properties, whatever is marked, by however many threads and in whatever order:

* A lane's spans ascend and never overlap, and there are at most `MOST_SPANS` of them.
* Every span lies inside the time from the first to the last mark of its lane.
* `busy_s` is exact: it counts every second that was marked, merged or not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, get_args

LaneName = Literal["training", "capture", "write", "commit"]
LANES: tuple[LaneName, ...] = get_args(LaneName)
MOST_SPANS = 48
"""So many spans a lane at most, however many blocks a save has: what lies closest is merged."""
GAP_S = 0.0005
"""Spans of one name that lie closer are one."""


class Span(NamedTuple):
    """Something that took from `begin_s` to `end_s` on the monotonic clock."""

    lane: LaneName
    name: str
    begin_s: float
    end_s: float


def include(spans: list[Span], new: Span, most: int = MOST_SPANS) -> None:
    """Add a span to a lane's, in place; see the module for what then holds.

    Where spans of two names overlap, the time that both claim stays with the one that was there.
    """
    while spans:
        last = spans[-1]
        near = last.name == new.name and new.begin_s - last.end_s <= GAP_S
        if new.begin_s >= last.end_s and not near:
            break
        if last.name == new.name:
            spans.pop()
            begin, end = min(last.begin_s, new.begin_s), max(last.end_s, new.end_s)
            new = new._replace(begin_s=begin, end_s=end)
        elif new.end_s > last.end_s:
            new = new._replace(begin_s=last.end_s)
            break
        else:
            return
    spans.append(new)
    if len(spans) > most:
        at = min(range(len(spans) - 1), key=lambda i: spans[i + 1].begin_s - spans[i].end_s)
        a, b = spans[at : at + 2]
        longer = max(a, b, key=lambda span: span.end_s - span.begin_s)
        spans[at : at + 2] = [longer._replace(begin_s=a.begin_s, end_s=b.end_s)]


class Marks:
    """One save's spans. Thread-safe.

    Attributes:
        began_s: when `save` was called (`time.perf_counter`).
        busy_s: (lane, name) -> seconds in all, which merging does not change.
    """

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.busy_s: dict[tuple[LaneName, str], float] = {}
        self._lanes: dict[LaneName, list[Span]] = {lane: [] for lane in LANES}
        self._lock = threading.Lock()
        self._returned = False

    def add(self, lane: LaneName, name: str, begin_s: float, end_s: float | None = None) -> None:
        """Something took from `begin_s` until `end_s`, or until now."""
        end_s = time.perf_counter() if end_s is None else end_s
        with self._lock:
            key = (lane, name)
            self.busy_s[key] = self.busy_s.get(key, 0.0) + end_s - begin_s
            include(self._lanes[lane], Span(lane, name, begin_s, end_s))

    @contextmanager
    def during(self, lane: LaneName, name: str) -> Iterator[None]:
        """Mark what the block takes, whether or not it succeeds."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(lane, name, began)

    def waited(self, seconds: float) -> None:
        """Training has waited so long until now: first in `save`, then at barriers."""
        now = time.perf_counter()
        self.add("training", "barrier" if self._returned else "save", now - seconds, now)
        self._returned = True

    def captured(self, begin_s: float, *, compare: bool) -> None:
        """A block was copied, or a file's tensors were compared with those of the last save."""
        copied = "lazy copy" if self._returned else "eager copy"
        self.add("capture", "compare" if compare else copied, begin_s)

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans, lane after lane, each in ascending order."""
        with self._lock:
            return tuple(span for lane in LANES for span in self._lanes[lane])

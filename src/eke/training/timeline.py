"""The run's timeline: what each rank did when, as lanes for ui.perfetto.dev (`trace.json`).

Each turn of the loop is cut into laps, by the marks that are taken anyway for the bills. Written
are the first turns of each process, what happens outside turns (start, finish), and the saves with
the turns around them. Of many saves a thinning choice is kept (`worth_keeping`), and of a save's
turns at most `FIRST_OF_SAVE + LAST_OF_SAVE`, so a long run's trace stays small. Times are the
host's: work that a GPU does later shows where the host waits for it.

Properties: the events of one lane nest or follow one another; no more than a bounded number of
turns is in memory; rank 0 alone writes, what the others saw comes with the next `gather`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from eke.budget.trace import Event, TraceFile
from eke.checkpoint import Ticket
from eke.checkpoint.timeline import Span
from eke.distributed import gather_objects, world

FIRST_TURNS = 50
"""So many turns of each process are written whatever happens in them."""
EVERY_SAVE = 64
"""Up to this one every save is written, up to twice as many every second one, and so on."""
BEFORE_SAVE, FIRST_OF_SAVE, LAST_OF_SAVE = 2, 24, 4
"""Turns written before a save, from its start on, and up to its end."""
MOST_WAITING = 4000
"""Events that a rank keeps for the next `gather`."""
THREADS = ("training", "capture", "write", "commit")


class Lap(NamedTuple):
    """A phase of a turn, in seconds of the monotonic clock."""

    name: str
    begin_s: float
    end_s: float


@dataclass
class Turn:
    """One turn of the loop, which ended with this many steps done."""

    step: int
    laps: tuple[Lap, ...]
    written: bool = False


@dataclass
class _Open:
    """A save that is not written yet, and the turns around it."""

    number: int
    ticket: Ticket
    first: list[Turn]
    last: deque[Turn] = field(default_factory=lambda: deque(maxlen=LAST_OF_SAVE))
    turns_after: int = 0

    def add(self, turn: Turn) -> None:
        if len(self.first) < BEFORE_SAVE + FIRST_OF_SAVE:
            self.first.append(turn)
        else:
            self.last.append(turn)
        self.turns_after += self.ticket.final


def worth_keeping(number: int, stall_s: float, worst_s: float) -> bool:
    """Whether save `number` (from 0) of a run is written: all of the first, then ever fewer, so
    that their number grows with the logarithm of the saves; and each that stalled more than any
    before."""
    every = 1
    while number >= EVERY_SAVE * every:
        every *= 2
    return number % every == 0 or stall_s > worst_s


class Scribe:
    """Turns times of this process into events of one rank.

    Args:
        rank: becomes the process of the picture.
        base_unix_s: the instant that the picture starts at.
    """

    def __init__(self, rank: int, base_unix_s: float) -> None:
        self._rank = rank
        # Wall clocks are what processes, ranks and resumes have in common.
        self._shift_s = time.time() - time.perf_counter() - base_unix_s

    def us(self, at_s: float) -> float:
        """Microseconds from the start of the picture."""
        return max(0.0, round((at_s + self._shift_s) * 1e6, 3))

    def names(self) -> list[Event]:
        """What the process and its lanes are called."""
        rank = {"ph": "M", "pid": self._rank}
        events: list[Event] = [{**rank, "name": "process_name", "args": {"name": self._title()}}]
        for tid, name in enumerate(THREADS):
            events.append({**rank, "tid": tid, "name": "thread_name", "args": {"name": name}})
            events.append(
                {**rank, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
            )
        return events

    def _title(self) -> str:
        return f"rank {self._rank}"

    def slice(self, lane: str, name: str, begin_s: float, end_s: float, **args: Any) -> Event:
        """Something that took time."""
        begin = self.us(begin_s)
        event = {
            "ph": "X", "pid": self._rank, "tid": THREADS.index(lane), "name": name, "cat": lane,
            "ts": begin, "dur": round(max(0.0, self.us(end_s) - begin), 3),
        }  # fmt: skip
        return {**event, "args": args} if args else event

    def instant(self, lane: str, name: str, at_s: float, **args: Any) -> Event:
        """Something that happened."""
        return {
            "ph": "i", "s": "t", "pid": self._rank, "tid": THREADS.index(lane), "name": name,
            "cat": lane, "ts": self.us(at_s), "args": args,
        }  # fmt: skip

    def turn(self, turn: Turn) -> list[Event]:
        """A turn, and its laps inside it."""
        if not turn.laps:
            return []
        whole = self.slice(
            "training", f"step {turn.step}", turn.laps[0].begin_s, turn.laps[-1].end_s,
            step=turn.step,
        )  # fmt: skip
        return [whole, *(self.slice("training", *lap) for lap in turn.laps)]

    def save(self, ticket: Ticket, spans: Sequence[Span]) -> list[Event]:
        """A save's spans, and how it ended."""
        end_s = ticket.marks.began_s + ticket.seconds.get(ticket.state, 0.0)
        ended = self.instant(
            "commit",
            ticket.state,
            end_s,
            save=ticket.step,
            began_us=self.us(ticket.marks.began_s),
            stall_ms=round(ticket.stall_s * 1e3, 3),
            total_ms=round((end_s - ticket.marks.began_s) * 1e3, 3),
            bytes=ticket.bytes_written,
        )
        return [
            *(self.slice(s.lane, s.name, s.begin_s, s.end_s, save=ticket.step) for s in spans),
            ended,
        ]


class Timeline:
    """Records one rank's part of the timeline. Making one is a collective.

    Args:
        path: the trace file, on the rank that writes it; None elsewhere. A picture that is there
            already goes on.
        began_s: when the first lap began (`time.perf_counter`); now if None.
    """

    def __init__(self, path: Path | None = None, began_s: float | None = None) -> None:
        self._file = None if path is None else TraceFile(path)
        found = self._file.found if self._file is not None else []
        clock = next((e for e in found if e.get("name") == "clock"), None)
        now = time.perf_counter()
        self._last = now if began_s is None else began_s
        base = time.time() - (now - self._last) if clock is None else float(clock["args"]["unix_s"])
        ends = [e["args"] for e in found if e.get("ph") == "i" and "save" in e.get("args", {})]
        saves = len({a["save"] for a in ends})
        base, self._saves = gather_objects((base, saves))[0]
        self._worst_s = max((float(a.get("stall_ms", 0.0)) / 1e3 for a in ends), default=0.0)
        self._scribe = Scribe(world().rank, base)
        self._laps: list[Lap] = []
        self._turns = 0
        self._recent: deque[Turn] = deque(maxlen=BEFORE_SAVE)
        self._open: list[_Open] = []
        self._waiting: list[Event] = []
        if clock is None:
            self._emit([{"ph": "M", "pid": 0, "name": "clock", "args": {"unix_s": base}}])
        self._emit(self._scribe.names())

    def _emit(self, events: list[Event]) -> None:
        if self._file is not None:
            self._file.append(events)
        else:
            self._waiting.extend(events[: MOST_WAITING - len(self._waiting)])

    # ------------------------------------------------------------------ what the loop says

    def lap(self, name: str) -> None:
        """The time since the last lap went into `name`."""
        now = time.perf_counter()
        if self._laps and self._laps[-1].name == name:
            self._laps[-1] = self._laps[-1]._replace(end_s=now)
        else:
            self._laps.append(Lap(name, self._last, now))
        self._last = now

    def outside(self) -> None:
        """The laps so far belong to no turn: they are written as they are."""
        self._emit([self._scribe.slice("training", *lap) for lap in self._laps])
        self._laps.clear()

    def event(self, name: str, **args: Any) -> None:
        """Something happened now, such as a resume."""
        self._emit([self._scribe.instant("training", name, time.perf_counter(), **args)])

    def turn(self, step: int) -> None:
        """A turn of the loop is over; `step` steps are done."""
        turn = Turn(step, tuple(self._laps))
        self._laps.clear()
        self._turns += 1
        for one in self._open:
            one.add(turn)
        if self._turns <= FIRST_TURNS:
            self._write(turn)
        self._recent.append(turn)
        self._close(turns_after=2)

    def saving(self, ticket: Ticket) -> None:
        """A save has begun."""
        self._open.append(_Open(self._saves, ticket, list(self._recent)))
        self._saves += 1

    # ------------------------------------------------------------------ writing

    def _write(self, turn: Turn) -> None:
        if not turn.written:
            turn.written = True
            self._emit(self._scribe.turn(turn))

    def _close(self, turns_after: int) -> None:
        """Write the saves that have ended, and after which so many turns have."""
        done = [o for o in self._open if o.ticket.final and o.turns_after >= turns_after]
        for one in done:
            self._open.remove(one)
            stall_s = one.ticket.stall_s
            if worth_keeping(one.number, stall_s, self._worst_s):
                for turn in (*one.first, *one.last):
                    self._write(turn)
                self._emit(self._scribe.save(one.ticket, one.ticket.spans))
            self._worst_s = max(self._worst_s, stall_s)

    def gather(self) -> None:
        """Bring the other ranks' events to rank 0. A collective."""
        if world().size == 1:
            return
        rows = gather_objects(self._waiting)
        self._waiting = []
        if self._file is not None:
            for row in rows:
                self._file.append(row)

    def settled(self) -> None:
        """No save is in flight: write all of them. A collective."""
        self._close(turns_after=0)
        self.gather()

    def close(self) -> None:
        """Write what is left and let the file go. Not a collective."""
        self._close(turns_after=0)
        self.outside()
        if self._file is not None:
            self._file.close()

"""The saves of a run's trace, as plain data: the typical one, the worst one, and their lanes.

Properties: events that are not what a trace holds are passed over; the worst save is the one that
training waited for longest, the typical one the (lower) median of the others that committed; times
are milliseconds from the call of `save`, and what is shown is cut to the picture's window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eke.report.text import clean, number, whole

LANES = ("training", "capture", "write", "commit")
PHASES = ("data", "forward and backward", "optimizer", "evaluation", "save", "decide and log")
STALLS = ("save", "barrier")


@dataclass(frozen=True)
class Bit:
    """A stretch of one lane, in milliseconds from the call of `save`."""

    name: str
    begin_ms: float
    end_ms: float

    @property
    def ms(self) -> float:
        """How long it is."""
        return self.end_ms - self.begin_ms


@dataclass(frozen=True)
class SaveView:
    """One save of rank 0, and what training did around it.

    Attributes:
        stall_ms: how long training waited for it.
        total_ms: from the call of `save` to the commit.
        steps, phases: turns of the loop ("step 12"), and what they are made of.
        stalls: where training waited.
        lanes: what "capture", "write" and "commit" did.
        begin_ms, end_ms: the picture's window.
    """

    step: int
    state: str
    stall_ms: float
    total_ms: float
    bytes: float | None
    steps: tuple[Bit, ...]
    phases: tuple[Bit, ...]
    stalls: tuple[Bit, ...]
    lanes: Mapping[str, tuple[Bit, ...]]
    begin_ms: float
    end_ms: float

    def busy_ms(self, lane: str) -> float:
        """How long a lane was at work."""
        return sum(bit.ms for bit in self.lanes.get(lane, ()))


@dataclass(frozen=True)
class Saves:
    """What a run's trace says of its saves.

    Attributes:
        stalls_ms: of every save that the trace holds, in order.
    """

    stalls_ms: tuple[float, ...]
    worst: SaveView
    typical: SaveView | None


@dataclass(frozen=True)
class _End:
    step: int
    state: str
    began_us: float
    stall_ms: float
    total_ms: float
    bytes: float | None


def _end(event: Mapping[str, Any]) -> _End | None:
    args = event.get("args")
    if event.get("ph") != "i" or event.get("pid") != 0 or not isinstance(args, Mapping):
        return None
    step, began = whole(args.get("save")), number(args.get("began_us"))
    stall, total = number(args.get("stall_ms")), number(args.get("total_ms"))
    if step is None or began is None or stall is None or total is None:
        return None
    if stall < 0 or total < 0:
        return None
    name = clean(event.get("name") or "", 30)
    return _End(step, name, began, stall, total, number(args.get("bytes")))


def saves_of(events: Sequence[Mapping[str, Any]]) -> Saves | None:
    """What rank 0's events say of its saves; None if none ended."""
    ends = [end for end in map(_end, events) if end is not None]
    if not ends:
        return None
    ranked = sorted(ends, key=lambda end: end.stall_ms)
    worst = ranked[-1]
    rest = [end for end in ranked[:-1] if end.state == "committed"]
    typical = rest[(len(rest) - 1) // 2] if rest else None
    return Saves(
        tuple(end.stall_ms for end in ends),
        _view(worst, events),
        None if typical is None else _view(typical, events),
    )


def _view(end: _End, events: Sequence[Mapping[str, Any]]) -> SaveView:
    # The picture begins a little before the call, and ends a little after the commit.
    low, high = -0.08 * end.total_ms, 1.06 * end.total_ms
    if end.total_ms <= 0:
        low, high = -1.0, 1.0
    steps: list[Bit] = []
    phases: list[Bit] = []
    stalls: list[Bit] = []
    lanes: dict[str, list[Bit]] = {lane: [] for lane in LANES[1:]}
    for event in events:
        begin, length = number(event.get("ts")), number(event.get("dur"))
        if event.get("ph") != "X" or event.get("pid") != 0 or begin is None or length is None:
            continue
        begin_ms = (begin - end.began_us) / 1e3
        cut = max(begin_ms, low), min(begin_ms + max(length, 0.0) / 1e3, high)
        if cut[0] >= cut[1]:
            continue
        bit = Bit(clean(event.get("name") or "", 60), *cut)
        lane, args = event.get("cat"), event.get("args")
        of_save = whole(args.get("save")) if isinstance(args, Mapping) else None
        if of_save is None and lane == "training":
            (steps if bit.name.startswith("step ") else phases).append(bit)
        elif of_save == end.step and lane == "training" and bit.name in STALLS:
            stalls.append(bit)
        elif of_save == end.step and lane in lanes:
            lanes[lane].append(bit)

    def ordered(bits: list[Bit]) -> tuple[Bit, ...]:
        return tuple(sorted(bits, key=lambda bit: bit.begin_ms))

    return SaveView(
        step=end.step,
        state=end.state,
        stall_ms=end.stall_ms,
        total_ms=end.total_ms,
        bytes=end.bytes,
        steps=ordered(steps),
        phases=ordered(phases),
        stalls=ordered(stalls),
        lanes={lane: ordered(bits) for lane, bits in lanes.items()},
        begin_ms=low,
        end_ms=high,
    )

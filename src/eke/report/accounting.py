"""Where the budget went: bills added up by activity, and held against the wall clock.

Properties: every bill of the ledger is counted once, those that a resume undid as `lost`; a
unit of which some bills are unknown says so and is never shown as 0.

Wall clock: each process lasts from the start of its first bill (its time of writing minus its
seconds) to its last bill; the run is the sum of its processes. What the ledger estimates to
have been in flight at a crash is added; the time in which no process ran is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from eke.budget.bill import UNITS
from eke.budget.jsonl import RESUME, Record, effective
from eke.report.text import clean, number

LABELS = {
    "train": "useful training",
    "padding": "padding",
    "eval": "evaluation",
    "checkpoint": "checkpoint stall",
    "wait": "waiting for data",
    "startup": "start-up",
    "lost": "lost work",
    "govern": "governing",
    "finish": "finishing",
}
"""Activity -> what a reader calls it, in the order in which they are shown."""


@dataclass(frozen=True)
class Amount:
    """A sum of bills in one unit: what is known of it, and how many bills are unknown."""

    known: float = 0.0
    bills: int = 0
    unknown: int = 0

    @property
    def value(self) -> float | None:
        """The sum; None when no bill is known in this unit."""
        return None if self.bills and self.unknown == self.bills else self.known

    @property
    def is_exact(self) -> bool:
        """True when every bill is known in this unit."""
        return self.unknown == 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.known + other.known, self.bills + other.bills, self.unknown + other.unknown
        )


@dataclass(frozen=True)
class Spent:
    """What one activity cost, by unit."""

    activity: str
    label: str
    amounts: dict[str, Amount]
    estimates: int = 0


@dataclass(frozen=True)
class Accounts:
    """A run's bills by activity, and its wall clock.

    Attributes:
        wall_s: see the module; None when no bill says when it was written.
        accounted_s: the known seconds of all bills.
        undone_bills: bills that a resume turned into lost work.
    """

    rows: tuple[Spent, ...] = ()
    totals: dict[str, Amount] = field(default_factory=dict)
    wall_s: float | None = None
    accounted_s: float = 0.0
    processes: int = 0
    undone_bills: int = 0

    @property
    def coverage(self) -> float | None:
        """The share of the wall clock that the bills account for."""
        return None if not self.wall_s else self.accounted_s / self.wall_s

    def total(self, unit: str) -> Amount:
        """The sum over all activities."""
        return self.totals.get(unit, Amount())

    def row(self, activity: str) -> Spent | None:
        """One activity's row, if it was ever billed."""
        return next((r for r in self.rows if r.activity == activity), None)


def _amount(records: Sequence[Record], unit: str) -> Amount:
    values = [number(r.value.get(unit)) for r in records]
    known = [v for v in values if v is not None and v >= 0]
    return Amount(math.fsum(known), len(values), len(values) - len(known))


def _processes(records: Sequence[Record]) -> list[list[Record]]:
    """Split the ledger's lines by the process that wrote them.

    A process begins with a start-up bill or, once the one before it has worked, a resume mark;
    the two together begin one, in either order.
    """
    processes: list[list[Record]] = [[]]
    seen: set[str] = set()
    for record in records:
        is_mark = record.value.get("kind") == RESUME
        what = "" if is_mark else str(record.value.get("what"))
        has_worked = bool(seen - {"startup", "lost", ""})
        if has_worked if is_mark else what == "startup" and (has_worked or "startup" in seen):
            processes.append([])
            seen = set()
        processes[-1].append(record)
        seen.add(what)
    return processes


def _wall_s(process: Sequence[Record]) -> tuple[float | None, float]:
    """How long a process lasted by its bills' times, and what it billed for one before it."""
    in_flight_s, starts, ends = 0.0, [], []
    for record in process:
        seconds = max(number(record.value.get("seconds")) or 0.0, 0.0)
        at = number(record.value.get("t"))
        if record.value.get("what") == "lost":
            in_flight_s += seconds
        elif at is not None and record.value.get("kind") != RESUME:
            ends.append(at)
            starts.append(at - seconds)
    return (max(ends) - min(starts) if ends else None), in_flight_s


def add_up(records: Iterable[Record]) -> Accounts:
    """The accounts of a ledger's records (resume marks included)."""
    lines = list(records)
    kept, undone = effective(lines)
    bills = [(r, str(r.value.get("what"))) for r in kept if r.value.get("kind") == "bill"]
    lost = [(r, "lost") for r in undone if r.value.get("kind") == "bill"]

    grouped: dict[str, list[Record]] = {}
    for record, activity in bills + lost:
        grouped.setdefault(activity, []).append(record)
    by_activity = {a: {u: _amount(rows, u) for u in UNITS} for a, rows in grouped.items()}
    estimates = {a: sum(r.value.get("measured") is False for r in g) for a, g in grouped.items()}
    totals = {u: sum((row[u] for row in by_activity.values()), Amount()) for u in UNITS}

    order = [*LABELS, *(a for a in by_activity if a not in LABELS)]
    processes = _processes([r for r in lines if r.value.get("kind") in ("bill", RESUME)])
    lasted = [_wall_s(p) for p in processes]
    known = [wall for wall, _ in lasted if wall is not None]
    return Accounts(
        rows=tuple(
            Spent(a, LABELS.get(a, clean(a, 40)), by_activity[a], estimates[a])
            for a in order
            if a in by_activity
        ),
        totals=totals,
        wall_s=sum(known) + sum(s for _, s in lasted) if known else None,
        accounted_s=totals["seconds"].known,
        processes=sum(wall is not None for wall, _ in lasted),
        undone_bills=len(lost),
    )

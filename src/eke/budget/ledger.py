"""The ledger: the append-only list of a run's bills, and its totals.

Properties: totals do not depend on when the file was closed and opened again; a bill that a
resume undid is still spent, under the activity `lost`; a unit with an unknown bill is unknown
in its total (`None`), never understated.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from eke.budget.bill import UNITS, Bill
from eke.budget.jsonl import JsonlFile, Record, effective, read_records

Totals = dict[str, dict[str, float | None]]
"""Activity -> unit -> total; `None` where any bill of that activity is unknown in that unit."""


def add_up(bills: Iterable[Bill]) -> Totals:
    """Totals by activity and unit."""
    totals: Totals = {}
    for bill in bills:
        row = totals.setdefault(bill.what, dict.fromkeys(UNITS, 0.0))
        for unit in UNITS:
            amount, so_far = getattr(bill, unit), row[unit]
            row[unit] = None if amount is None or so_far is None else so_far + amount
    return totals


def bills_of(records: Iterable[Record]) -> list[Bill]:
    """The bills among a ledger's records; those that a resume undid come back as `lost`."""
    kept, undone = effective(records)
    standing = [Bill.from_json(r.value) for r in kept if r.value.get("kind") == "bill"]
    return standing + _lost(undone)


def _lost(undone: Iterable[Record]) -> list[Bill]:
    bills = (r.value for r in undone if r.value.get("kind") == "bill")
    return [Bill.from_json({**value, "what": "lost"}) for value in bills]


class Ledger:
    """A run's bills, in memory and (with a path) in an append-only file.

    Args:
        path: the file, created when absent and continued when present; None keeps the bills in
            memory only, for use in a loop of your own.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._bills: list[Bill] = [] if path is None else bills_of(read_records(path))
        self._file = None if path is None else JsonlFile(path)
        self._totals = add_up(self._bills)

    @property
    def offset(self) -> int:
        """Where the next line starts in the file (bytes); the number of bills without one."""
        return len(self._bills) if self._file is None else self._file.offset

    @property
    def bills(self) -> tuple[Bill, ...]:
        """All bills so far; those that a resume undid come as `lost`."""
        return tuple(self._bills)

    def add(self, bill: Bill) -> Bill:
        """Append a bill; returns it."""
        if self._file is not None:
            self._file.append({"kind": "bill", **bill.to_json(), "t": time.time()})
        self._bills.append(bill)
        row = self._totals.setdefault(bill.what, dict.fromkeys(UNITS, 0.0))
        for unit in UNITS:
            amount, so_far = getattr(bill, unit), row[unit]
            row[unit] = None if amount is None or so_far is None else so_far + amount
        return bill

    def note(self, kind: str, **more: Any) -> None:
        """Append a line that is no bill, such as who opened the file; nothing without a file."""
        if self._file is not None:
            self._file.append({"kind": kind, **more, "t": time.time()})

    def resume(self, from_offset: int, step: int) -> list[Bill]:
        """Record that the run went back to `step`; returns the bills that this undid, as `lost`."""
        if self._file is None:
            raise ValueError("a ledger without a file has nothing to resume from")
        standing, _ = effective(read_records(self._file.path))
        self._file.mark_resume(from_offset, step=step, t=time.time())
        self._bills = bills_of(read_records(self._file.path))
        self._totals = add_up(self._bills)
        return _lost(r for r in standing if r.offset >= from_offset)

    def totals(self) -> Totals:
        """Totals by activity and unit."""
        return {what: dict(row) for what, row in self._totals.items()}

    def spent(self, unit: str) -> float | None:
        """The sum over all activities; `None` when any of it is unknown."""
        amounts = [row[unit] for row in self._totals.values()]
        return None if any(a is None for a in amounts) else sum(a for a in amounts if a)

    def sync(self) -> None:
        """Make all bills durable."""
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """Make all bills durable and let the file go."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

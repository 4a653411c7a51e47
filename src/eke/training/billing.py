"""The clock behind the bills: every second of the process belongs to exactly one activity.

Property: the seconds of the bills, with what `pending` still holds, add up to the time since the
clock was started.
"""

from __future__ import annotations

import time

from eke.budget import Activity, Bill, Budget, Ledger
from eke.budget.meters import EnergyMeter, peak_resident_bytes, process_age_s

SMALL_S = 0.05
"""Activities that come in crumbs (waiting, deciding) are billed when this much has gathered."""


class Biller:
    """Cuts wall-clock time into laps and bills each lap to one activity.

    Args:
        ledger: where bills go.
        budget: turns seconds into money.
        who: the bills' `who`.
        born: when the first lap began (`time.perf_counter`); None: with the process.
    """

    def __init__(
        self, ledger: Ledger, budget: Budget, who: str = "training", born: float | None = None
    ) -> None:
        self._ledger, self._budget, self._who = ledger, budget, who
        self.recount()
        self._born = time.perf_counter() - process_age_s() if born is None else born
        self._last = self._born
        self._energy = EnergyMeter.open()
        self._last_joules = 0.0
        self._pending: dict[Activity, tuple[float, float | None]] = {}

    @property
    def energy_source(self) -> str:
        """Which counter the joules come from."""
        return self._energy.source

    def recount(self) -> None:
        """Read off the ledger what earlier processes spent; before the first bill of this one."""
        self._seconds_before = self._ledger.spent("seconds") or 0.0
        self._joules_before = self._ledger.spent("joules")

    def spent(self) -> dict[str, float]:
        """What the run has spent, everything and all processes included, up to now."""
        seconds = self._seconds_before + time.perf_counter() - self._born
        spent = {"flops": self._ledger.spent("flops") or 0.0, "seconds": seconds}
        joules = self._energy.read()
        if joules is not None:
            spent["joules"] = (self._joules_before or 0.0) + joules
        if self._budget.price_per_hour is not None:
            spent["money"] = seconds / 3600 * self._budget.price_per_hour
        return spent

    def _lap(self) -> tuple[float, float | None]:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        total = self._energy.read()
        joules = None if total is None else max(0.0, total - self._last_joules)
        self._last_joules = total or 0.0
        return seconds, joules

    def _bill(
        self,
        what: Activity,
        step: int,
        flops: float,
        seconds: float,
        joules: float | None,
        tokens: int = 0,
    ) -> Bill:
        price = self._budget.price_per_hour
        return self._ledger.add(
            Bill(
                who=self._who,
                what=what,
                step=step,
                flops=flops,
                seconds=seconds,
                joules=joules,
                money=None if price is None else seconds / 3600 * price,
                tokens=tokens,
                peak_bytes=peak_resident_bytes(),
            )
        )

    def charge(self, what: Activity, step: int, flops: float = 0.0) -> float:
        """Bill the time since the last lap to `what`; returns its seconds."""
        seconds, joules = self._lap()
        self._bill(what, step, flops, seconds, joules)
        return seconds

    def gather(self, what: Activity, step: int) -> float:
        """The same for crumbs: billed once enough has gathered, or at `flush`."""
        seconds, joules = self._lap()
        self._keep(what, step, seconds, joules)
        return seconds

    def carve(self, what: Activity, step: int, seconds: float) -> None:
        """Gather a part of the lap under way for another activity; the rest stays in the lap.

        Args:
            seconds: how long that part was; its energy is its share of the lap's so far.
        """
        elapsed = time.perf_counter() - self._last
        seconds = min(seconds, elapsed)
        total = self._energy.read()
        joules = None
        if total is not None:
            joules = max(0.0, total - self._last_joules) * (seconds / elapsed if elapsed else 0.0)
            self._last_joules += joules
        self._last += seconds
        self._keep(what, step, seconds, joules)

    def _keep(self, what: Activity, step: int, seconds: float, joules: float | None) -> None:
        before, joules_before = self._pending.get(what, (0.0, 0.0))
        both = None if joules is None or joules_before is None else joules + joules_before
        self._pending[what] = (before + seconds, both)
        if before + seconds >= SMALL_S:
            self._flush_one(what, step)

    def _flush_one(self, what: Activity, step: int) -> None:
        seconds, joules = self._pending.pop(what)
        self._bill(what, step, 0.0, seconds, joules)

    def flush(self, step: int) -> None:
        """Bill all crumbs."""
        for what in list(self._pending):
            self._flush_one(what, step)

    def charge_step(self, step: int, *, useful_flops: float, flops: float, tokens: int) -> float:
        """Bill a training step, split between real tokens and padding by FLOPs."""
        seconds, joules = self._lap()
        share = 1.0 if flops <= 0 else min(1.0, useful_flops / flops)
        parts: list[tuple[Activity, float, int]] = [("train", share, tokens)]
        if share < 1.0:
            parts.append(("padding", 1.0 - share, 0))
        for what, part, real in parts:
            self._bill(
                what,
                step,
                flops * part,
                seconds * part,
                None if joules is None else joules * part,
                real,
            )
        return seconds

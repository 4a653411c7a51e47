"""One claim about one figure, and the verdict on it. All pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.stats import quantile

Values = Mapping[tuple[str, str, str], Sequence[float]]
"""(workload, arm, metric) -> all its values in one run."""


@dataclass(frozen=True)
class Claim:
    """One figure that decides (a part of) one row.

    Attributes:
        row: key of `MUSTS`.
        script: the benchmark that measures it.
        workload: on what.
        metric: the median of which of eke's figures.
        limit: it is at most this, or this many times the baseline.
        against: the baseline is the best median of these arms; none for a plain amount.
        against_metric: the baseline's figure, if it is another one.
        arm: whose figure it is.
        at_least: the more the better: the limit is the least, the best baseline the largest.
    """

    row: str
    script: str
    workload: str
    metric: str
    limit: float
    unit: str = ""
    against: tuple[str, ...] = ()
    against_metric: str = ""
    arm: str = "eke"
    at_least: bool = False

    @property
    def text(self) -> str:
        """In one line."""
        sign = ">=" if self.at_least else "<="
        what = f"{self.workload}: {self.arm} {self.metric} {sign} {self.limit:g}"
        if not self.against:
            return f"{what} {self.unit}".rstrip()
        metric = f" {self.against_metric}" if self.against_metric else ""
        base = self.against[0] if len(self.against) == 1 else "best of " + ", ".join(self.against)
        return f"{what} x {base}{metric}"


@dataclass(frozen=True)
class Verdict:
    """What was measured for a claim. `met` is None where it could not be computed.

    `p95` is the 95th percentile, or the 5th where the more is the better.
    """

    claim: Claim
    measured: float | None
    p95: float | None
    met: bool | None
    why: str = ""

    @property
    def word(self) -> str:
        """In two words."""
        return {True: "met", False: "NOT MET", None: "not measured"}[self.met]

    @property
    def shown(self) -> str:
        """The figure."""
        if self.measured is None:
            return self.why
        return f"measured {self.measured:.4g} (p95 {self.p95:.4g})"

    def row(self, must: str) -> dict[str, Any]:
        """For CSV; `must` is what the table's row says."""
        return {
            "row": self.claim.row,
            "must": must,
            "claim": self.claim.text,
            "limit": self.claim.limit,
            "measured": "" if self.measured is None else f"{self.measured:.6g}",
            "p95": "" if self.p95 is None else f"{self.p95:.6g}",
            "verdict": self.word,
            "why": self.why,
        }


def judge(claim: Claim, values: Values) -> Verdict:
    """The median (and the worse tail's 20-quantile, over the same baseline) against the limit.

    A baseline arm that failed is left out; if all of them did, nothing is decided.
    """
    own = values.get((claim.workload, claim.arm, claim.metric)) or ()
    if not own:
        return Verdict(claim, None, None, None, f"{claim.arm} has no figure")
    base = 1.0
    if claim.against:
        metric = claim.against_metric or claim.metric
        found = [values.get((claim.workload, arm, metric)) or () for arm in claim.against]
        medians = [statistics.median(one) for one in found if one]
        if not medians:
            return Verdict(claim, None, None, None, "no baseline has a figure")
        base = max(medians) if claim.at_least else min(medians)
        if base <= 0:
            return Verdict(claim, None, None, None, "the baseline is lost in noise")
    p95 = quantile(own, 0.05 if claim.at_least else 0.95)
    measured = statistics.median(own) / base
    met = measured >= claim.limit if claim.at_least else measured <= claim.limit
    return Verdict(claim, measured, p95 / base, met)

"""Claim: micro-batches formed in a window are nearly as full, and ranks nearly as even, as if all
lengths had been known; more so than with any other batcher that is given no more than a window.

Exact: schedules of lengths, no tensors and no clock, so a figure is the same on any machine. For
every shape of lengths, number of ranks and window it prints, beside eke's arms, the bound (windows
drain, samples stay on their ranks: what waits can pass it), the offline oracle, fixed batches, and
the peers. `batching_lengths` says what the lengths are, `batching_schedules` what the figures are,
`batching_peers` how each peer is driven.

| environment variable | meaning |
|---|---|
| `EKE_BENCH_SAMPLES` | samples of a rank (4,096) |
| `EKE_BENCH_SEEDS` | seeds (3); one with 64 ranks, where lhotse is left out |
| `EKE_BENCH_RANKS` | numbers of ranks, divided by commas (2,8,64) |
| `EKE_BENCH_ONLY` | only these shapes, or real texts, divided by commas |
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks import batching_peers as peers
from benchmarks.batching_claims import (
    BATCHING_CLAIMS,
    DRAINED,
    EFFICIENCY,
    EVERYWHERE,
    LHOTSE,
    ODB,
    OURS,
    PACKED,
    PADDED,
    PLAIN_STEP,
    REBALANCED,
    RIVALS,
    SAMPLES,
    TRL,
    WAITING,
    cell,
    lead,
    staying,
    uncharged,
)
from benchmarks.batching_lengths import SHAPES, RealText, Shape, real
from benchmarks.batching_schedules import UNITS as FIGURES
from benchmarks.batching_schedules import Schedule, bound, eke, figures, fixed, oracle
from benchmarks.harness import RESULTS, Found, append, provenance, publish_claims
from eke.batching.planner import PerStep

RANKS = tuple(int(x) for x in os.environ.get("EKE_BENCH_RANKS", "2,8,64").split(","))
WINDOWS = (128, 256, 1024)
MANY = 64
SAMPLES_A_RANK = int(os.environ.get("EKE_BENCH_SAMPLES", "4096"))
SEEDS = int(os.environ.get("EKE_BENCH_SEEDS", "3"))
PER_STEP = 2
"""Micro-batches of a rank in an optimizer step of eke's, about."""
FIXED = 4
"""Samples of a rank in a micro-batch that is given a number of samples and no cap."""
UNITS = {**FIGURES, **{lead(metric, rival): "x" for _, metric, rival in RIVALS}}

Arm = Callable[[list[int], int, int, int, int], Schedule]
"""Of lengths, cap, ranks, window and seed."""


def _ours(**settings: Any) -> Arm:
    def arm(lengths: list[int], cap: int, ranks: int, window: int, seed: int) -> Schedule:
        given = dict(settings)
        given.setdefault("per_step", PerStep("tokens", PER_STEP * ranks * cap))
        return eke(lengths, cap, ranks, window, seed=seed, **given)

    return arm


def _one_a_step(lengths: list[int], cap: int, ranks: int, window: int, seed: int) -> Schedule:
    return eke(lengths, cap, ranks, window, seed=seed)


def _in_samples(n: int) -> tuple[Arm, Arm]:
    def rebalanced(lengths: list[int], cap: int, ranks: int, _: int, seed: int) -> Schedule:
        return peers.fitting_rebalanced(lengths, cap, ranks, n, seed)

    return _ours(per_step=PerStep("samples", n)), rebalanced


def _tokens_arms() -> dict[str, Arm]:
    """Steps of so many tokens: padded and packed, draining and waiting, moving and staying."""
    arms: dict[str, Arm] = {}
    for arm, settings in (
        (PADDED, {}),
        (WAITING, {"wait_rounds": 1}),
        (DRAINED, {"packed": True}),
        (PACKED, {"packed": True, "wait_rounds": 1}),
    ):
        arms[arm] = _ours(**settings)
        arms[staying(arm)] = _ours(**settings, move=False)
        if arm in (PADDED, WAITING):
            arms[uncharged(arm)] = _ours(**settings, charge=0)
            arms[uncharged(staying(arm))] = _ours(**settings, charge=0, move=False)
    return arms


WINDOWED: dict[str, Arm] = {**_tokens_arms(), PLAIN_STEP: _one_a_step, ODB: peers.odb}
"""What looks ahead so many samples of each rank."""

WHOLE: dict[str, Arm] = {
    **{SAMPLES[n]: _in_samples(n)[0] for n in SAMPLES},
    **{uncharged(SAMPLES[n]): _ours(per_step=PerStep("samples", n), charge=0) for n in SAMPLES},
    **{staying(SAMPLES[n]): _ours(per_step=PerStep("samples", n), move=False) for n in SAMPLES},
    **{REBALANCED[n]: _in_samples(n)[1] for n in SAMPLES},
    f"fixed, {FIXED} a rank": lambda n, cap, ranks, w, seed: fixed(n, ranks, FIXED, seed),
    "fixed, 1 a rank": lambda n, cap, ranks, w, seed: fixed(n, ranks, 1, seed),
    f"LengthGroupedSampler, {FIXED} a rank": lambda n, cap, ranks, w, seed: peers.length_grouped(
        n, ranks, FIXED, seed
    ),
    LHOTSE: lambda n, cap, ranks, w, seed: peers.lhotse(n, cap, ranks, seed),
    TRL: lambda n, cap, ranks, w, seed: peers.trl(n, cap, ranks, "bfd", seed),
    "TRL wrapped": lambda n, cap, ranks, w, seed: peers.trl(n, cap, ranks, "wrapped", seed),
    "offline oracle": lambda n, cap, ranks, w, seed: oracle(n, cap, ranks),
}
"""What no window changes: all lengths are known, or a step has a fixed number of samples. It is
measured once, with the largest window."""

LEFT_OUT = {LHOTSE}
"""With 64 ranks: one process would do the work of 64, each of which reads all lengths."""


@dataclass
class Table:
    """Every figure by workload and arm: one value a seed."""

    found: dict[tuple[str, str], dict[str, list[float]]] = field(default_factory=dict)
    errors: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, workload: str, arm: str, values: dict[str, float]) -> None:
        """One seed's."""
        row = self.found.setdefault((workload, arm), {})
        for metric, value in values.items():
            row.setdefault(metric, []).append(value)

    def mean(self, workload: str, arm: str, metric: str) -> float | None:
        """Over the seeds; None if it was not measured."""
        values = self.found.get((workload, arm), {}).get(metric)
        return statistics.fmean(values) if values else None

    def results(self) -> dict[tuple[str, str], Found]:
        """As the claims take it: means over the seeds, and the worst of all cells."""
        out = {
            key: Found({metric: [statistics.fmean(v)] for metric, v in row.items()})
            for key, row in self.found.items()
        }
        for arm in OURS:
            mine = [row for (_, name), row in self.found.items() if name == arm]
            if mine:
                worst = {m: [max(abs(v) for row in mine for v in row[m])] for m in ("lost", "over")}
                out[EVERYWHERE, arm] = Found(worst)
        for arm, metric, rival in RIVALS:
            if leads := list(self._leads(arm, metric, rival)):
                out[EVERYWHERE, arm].values[lead(metric, rival)] = [min(leads)]
        return out

    def _leads(self, arm: str, metric: str, rival: str) -> Iterator[float]:
        """Over the seeds that both have, cell by cell."""
        for (workload, name), row in self.found.items():
            other = self.found.get((workload, rival))
            if name == arm and other:
                pairs = list(zip(row[metric], other[metric], strict=False))
                yield sum(a for a, _ in pairs) / sum(b for _, b in pairs)


def measure(table: Table, shape: Shape | RealText, ranks: int, window: int) -> None:
    """Every arm on one workload."""
    workload = cell(shape.name, ranks, window)
    arms = WINDOWED | (WHOLE if window == max(WINDOWS) else {})
    for name, arm in arms.items():
        if ranks >= MANY and name in LEFT_OUT:
            continue
        began = time.perf_counter()
        for seed in _seeds(ranks):
            lengths = _lengths(shape, ranks, seed)
            try:
                schedule = arm(lengths, shape.cap, ranks, window, seed)
            except (RuntimeError, ValueError, AssertionError) as error:
                table.errors[workload, name] = f"{type(error).__name__}: {str(error)[:200]}"
                break
            table.add(workload, name, figures(schedule, lengths, shape.cap))
        _show(table, workload, name, time.perf_counter() - began)
    for seed in _seeds(ranks):
        limit = bound(_lengths(shape, ranks, seed), ranks, window, seed)
        table.add(workload, "bound", {"efficiency": limit})
    print(f"  {workload:<26} {'bound':<51} {table.mean(workload, 'bound', 'efficiency'):7.2%}")


def _seeds(ranks: int) -> range:
    return range(1 if ranks >= MANY else SEEDS)


def _lengths(shape: Shape | RealText, ranks: int, seed: int) -> list[int]:
    if isinstance(shape, RealText):
        return shape.lengths
    return shape.lengths(ranks * SAMPLES_A_RANK, seed)


def _show(table: Table, workload: str, arm: str, took_s: float) -> None:
    if (workload, arm) in table.errors:
        print(f"  {workload:<26} {arm:<51} FAILED {table.errors[workload, arm]}", flush=True)
        return
    values = {metric: table.mean(workload, arm, metric) or 0.0 for metric in FIGURES}
    print(
        f"  {workload:<26} {arm:<51} {values['efficiency']:7.2%}  charged "
        f"{values['charged']:7.2%}  padding {values['padding']:6.2%}"
        f"  fill {values['fill']:6.2%}  steps {values['steps']:7.0f}  dummies "
        f"{values['dummies']:6.2%}  lost {values['lost']:5.0f}  over {values['over']:5.0f}"
        f"  ({took_s:.1f} s)",
        flush=True,
    )


def show_marks(table: Table) -> None:
    """The marks of steps of so many tokens, and beside each what windows that drain and samples
    that stay allow: a mark above it can be met by what waits only."""
    print(f"\n{EFFICIENCY}: marks, samples stay" + " " * 45 + "mark   measured  charged  bound")
    for claim in BATCHING_CLAIMS:
        if claim.row in ("padded", "packed"):
            key = claim.workload, claim.arm
            shown = [table.mean(*key, metric) for metric in ("efficiency", "charged")]
            shown.append(table.mean(claim.workload, "bound", "efficiency"))
            figures = "  ".join("   -   " if x is None else f"{x:7.2%}" for x in shown)
            print(f"  {claim.workload:<26} {claim.arm:<40} {claim.limit:7.2%}  {figures}")


def publish(table: Table) -> bool:
    """One CSV row a workload and arm, then the claims."""
    about = provenance()
    rows = []
    for key in [*table.found, *table.errors]:
        workload, arm = key
        row: dict[str, Any] = {"workload": workload, "arm": arm}
        for metric in FIGURES:
            values = table.found.get(key, {}).get(metric)
            row[metric] = f"{statistics.fmean(values):.6g}" if values else ""
        efficiency = table.found.get(key, {}).get("efficiency", [])
        row["least efficiency"] = f"{min(efficiency):.6g}" if efficiency else ""
        row |= {"seeds": len(efficiency), "error": table.errors.get(key, "")}
        rows.append({**row, "samples_a_rank": SAMPLES_A_RANK, **about})
    append(RESULTS / f"{EFFICIENCY}.csv", rows)
    show_marks(table)
    return publish_claims(EFFICIENCY, table.results(), about)


def main() -> None:
    only = [x.strip() for x in os.environ.get("EKE_BENCH_ONLY", "").split(",") if x.strip()]
    wanted: list[tuple[Shape | RealText, int, int]] = [
        (shape, ranks, window) for shape in SHAPES for ranks in RANKS for window in WINDOWS
    ]
    texts = [name for name in ("pydocs", "chitchat") if not only or name in only]
    if texts:
        # Real texts are too few for 64 ranks of windows.
        wanted += [
            (text, ranks, window)
            for text in real()
            for ranks in RANKS
            if ranks < MANY
            for window in (128, 256, 1024)
        ]
    table = Table()
    for shape, ranks, window in wanted:
        if not only or shape.name in only:
            measure(table, shape, ranks, window)
    publish(table)


if __name__ == "__main__":
    main()

"""What the loader must do, as numbers: the part of `claims` that is about batching. Pure."""

from __future__ import annotations

from benchmarks.batching_lengths import SHAPES
from benchmarks.claim import Claim

BATCHING_MUSTS = {
    "padded": "padded, nothing waits, samples stay, 8 ranks: efficiency >= 92, 94, 88, 81 % with "
    "windows of 256; >= 96, 97.5, 94, 91 % with windows of 1,024",
    "packed": "packed, waiting one round at most, samples stay, 8 ranks: efficiency >= 97, 97, 95, "
    "94 % with windows of 256; >= 98, 98, 96.5, 96 % with windows of 1,024",
    "fill": "packed, waiting one round at most, samples stay, 8 ranks, windows of 1,024: fill >= "
    "97, 97, 96 and 95 %",
    "samples": "a fixed number of samples a step, padded, 8 ranks: efficiency >= 90, 91, 80, 77 % "
    "with 64 a step; >= 95, 96, 92, 89 % with 256",
    "in every cell": "in every cell at least as efficient as the released package's own grouping "
    "and as transformers' BatchRebalanceSampler, a micro-batch charged 256 tokens or nothing",
    "padding": "padding <= 0.5 x the released package's at equal look-ahead (128 and 1,024)",
    "planner": "planning 8 windows of 1,024 takes <= 10 ms padded, <= 15 ms packed; <= 2 us a "
    "sample with 64 ranks",
    "loader": "loader >= 0.9 x a plain DataLoader with batches made beforehand, >= 4 x the "
    "released package's",
    "labels": "labels a second, 2 gloo ranks, made lengths and two real texts: >= 1.3 x fixed "
    "batches of equal peak memory, >= the released package",
    "robust": "10,000 adversarial jobs of simulated ranks and 200 runs of real processes: no hang, "
    "no sample lost or doubled",
    "resume": "resuming costs O(window), not O(position), in a source of 1,000,000 samples",
    "batched once": "no sample lost or doubled, no micro-batch of several samples above its cap",
}
"""Row -> what it says; four figures are of UltraChat-, LLaVA-, ShareGPT4o- and MM-Mix-like."""

EFFICIENCY, PLANNER = "batching_efficiency", "batching_planner"
THROUGHPUT, ROBUSTNESS = "batching_throughput", "batching_robustness"
PADDED, WAITING = "eke, padded", "eke, padded, waits"
DRAINED, PACKED = "eke, packed", "eke, packed, waits"
SAMPLES = {n: f"eke, {n} samples a step" for n in (64, 256)}
PLAIN_STEP = "eke, padded, one a step"


def staying(arm: str) -> str:
    """The arm of which samples do not move between ranks."""
    return f"{arm}, samples stay"


def both(arm: str) -> tuple[str, str]:
    """Samples that move, and that stay."""
    return arm, staying(arm)


def uncharged(arm: str) -> str:
    """The arm that is planned as if a micro-batch cost nothing besides its tokens."""
    return f"{arm}, per_micro_batch=0"


MOVING = (PADDED, WAITING, DRAINED, PACKED, *SAMPLES.values())
_CHARGED = (PADDED, WAITING, staying(PADDED), staying(WAITING), *SAMPLES.values())
"""Those of which the plan depends on what a micro-batch is taken to cost."""
OURS = (*MOVING, *map(staying, MOVING), PLAIN_STEP, *map(uncharged, _CHARGED))
ODB = "online-dynamic-batching"
REBALANCED = {n: f"BatchRebalanceSampler, {n} a step" for n in (64, 256)}
EVERYWHERE = "every cell"

MADE, TEXTS = "training", ("pydocs", "chitchat")
"""What two ranks train on: made lengths, and real text."""
EKE, EKE_PACKED, STAYS = "eke", "eke, packed", "eke, samples stay"
SIMULATED, PROCESSES, JOBS = "simulated ranks", "processes", "random jobs"
MILLION, EARLY, LATE = "1e6 samples", "eke, at 1 %", "eke, at 92 %"
FIXED_BATCHES, GROUPED = "fixed batches", "LengthGroupedSampler"
REBALANCE, LHOTSE, TRL = "BatchRebalanceSampler", "lhotse DynamicBucketing", "TRL bfd"

RIVALS = (
    *((arm, "efficiency", ODB) for moving in MOVING[:4] for arm in both(moving)),
    *((arm, "charged", ODB) for moving in MOVING[:4] for arm in both(moving)),
    *((SAMPLES[n], metric, REBALANCED[n]) for n in SAMPLES for metric in ("efficiency", "charged")),
    *((uncharged(SAMPLES[n]), "efficiency", REBALANCED[n]) for n in SAMPLES),
)
"""(arm, metric, arm that it has no less of in any cell)."""


def lead(metric: str, rival: str) -> str:
    """The figure that says how an arm compares in the cell where it does worst."""
    return f"least {metric} / {rival}'s"


def cell(shape: str, ranks: int, window: int) -> str:
    """The name of a workload."""
    return f"{shape} {ranks}x{window}"


def _exact() -> list[Claim]:
    marks = {
        (staying(PADDED), "efficiency", "padded", 256): (0.92, 0.94, 0.88, 0.81),
        (staying(PADDED), "efficiency", "padded", 1024): (0.96, 0.975, 0.94, 0.91),
        (staying(PACKED), "efficiency", "packed", 256): (0.97, 0.97, 0.95, 0.94),
        (staying(PACKED), "efficiency", "packed", 1024): (0.98, 0.98, 0.965, 0.96),
        (staying(PACKED), "fill", "fill", 1024): (0.97, 0.97, 0.96, 0.95),
        (SAMPLES[64], "efficiency", "samples", 1024): (0.90, 0.91, 0.80, 0.77),
        (SAMPLES[256], "efficiency", "samples", 1024): (0.95, 0.96, 0.92, 0.89),
    }
    found = [
        Claim(row, EFFICIENCY, cell(shape.name, 8, window), metric, limit, arm=arm, at_least=True)
        for (arm, metric, row, window), limits in marks.items()
        for shape, limit in zip(SHAPES, limits, strict=True)
    ]
    found += [
        Claim(
            "in every cell",
            EFFICIENCY,
            EVERYWHERE,
            lead(metric, rival),
            1.0,
            unit="x",
            arm=arm,
            at_least=True,
        )
        for arm, metric, rival in RIVALS
    ]
    found += [
        Claim("padding", EFFICIENCY, cell(s.name, 8, w), "padding", 0.5, against=(ODB,), arm=arm)
        for arm in (PADDED, uncharged(PADDED))
        for w in (128, 1024)
        for s in SHAPES
    ]
    found += [
        Claim("batched once", EFFICIENCY, EVERYWHERE, metric, 0.0, arm=arm)
        for arm in OURS
        for metric in ("lost", "over")
    ]
    return found


def _timed() -> list[Claim]:
    found = [
        Claim("planner", PLANNER, cell(shape.name, ranks, 1024), metric, limit, unit, arm=arm)
        for shape in SHAPES
        for arm, ranks, metric, limit, unit in (
            *((arm, 8, "cpu", 10.0, "ms") for arm in both(PADDED)),
            *((arm, 8, "cpu", 15.0, "ms") for arm in both(PACKED)),
            *((a, 64, "each", 2.0, "us a sample") for arm in (PADDED, PACKED) for a in both(arm)),
        )
    ]
    found += [
        Claim(row, THROUGHPUT, workload, metric, limit, against=(peer,), at_least=True)
        for row, workload, metric, peer, limit in (
            ("loader", "loader", "rate", "DataLoader, offline batches", 0.9),
            ("loader", "loader", "rate", ODB, 4.0),
            *(("labels", workload, "labels", FIXED_BATCHES, 1.3) for workload in (MADE, *TEXTS)),
            *(("labels", workload, "labels", ODB, 1.0) for workload in (MADE, *TEXTS)),
        )
    ]
    return found


def _robust() -> list[Claim]:
    jobs = ((SIMULATED, 10_000.0), (PROCESSES, 200.0))
    found = [
        Claim("robust", ROBUSTNESS, workload, "jobs", least, "jobs", arm=JOBS, at_least=True)
        for workload, least in jobs
    ]
    found.append(Claim("resume", ROBUSTNESS, MILLION, "read", 1024.0, "samples", arm=LATE))
    found.append(Claim("resume", ROBUSTNESS, MILLION, "resume", 1.5, against=(EARLY,), arm=LATE))
    return found


BATCHING_CLAIMS = (*_exact(), *_timed(), *_robust())

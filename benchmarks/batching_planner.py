"""Claim: planning a round of eight windows of 1,024 samples takes milliseconds of one core, and
with 64 ranks a microsecond or two a sample.

CPU time of `plan_round` alone, in this process, the arms interleaved; every repetition plans
another round, after what earlier ones left behind was collected. The exchange is not in it.
"""

from __future__ import annotations

import gc
import time
from typing import Any

from benchmarks.batching_claims import PACKED, PADDED, PLANNER, cell, staying
from benchmarks.batching_lengths import SHAPES, Shape
from benchmarks.batching_schedules import shuffled
from benchmarks.harness import REPETITIONS, SEED, Found, Results, publish
from benchmarks.stats import schedule
from eke.batching.planner import PerStep, Rules, Sample, plan_round

WINDOW, RANKS = 1024, (8, 64)
UNITS = {"cpu": "ms", "each": "us a sample"}
_PACKED = {"packed": True, "wait_rounds": 1}
MANNERS: dict[str, dict[str, Any]] = {
    PADDED: {},
    PACKED: _PACKED,
    staying(PADDED): {"move": False},
    staying(PACKED): {**_PACKED, "move": False},
}


def plan(repetitions: int) -> dict[tuple[str, str], int]:
    """How often each workload and arm is measured."""
    return {
        (cell(shape.name, ranks, WINDOW), arm): repetitions
        for shape in SHAPES
        for ranks in RANKS
        for arm in MANNERS
    }


def planned_s(shape: Shape, ranks: int, arm: str, number: int) -> float:
    """CPU seconds of one round."""
    lengths = shuffled(shape.lengths(ranks * WINDOW, number), number)
    shares = [
        [Sample(i, lengths[i], lengths[i]) for i in range(rank, len(lengths), ranks)]
        for rank in range(ranks)
    ]
    rules = Rules(shape.cap, PerStep("tokens", 2 * ranks * shape.cap), **MANNERS[arm])
    gc.collect()
    began = time.process_time()
    plan_round(shares, rules, rng_seed=number, last=False)
    return time.process_time() - began


def main() -> None:
    places = {cell(s.name, r, WINDOW): (s, r) for s in SHAPES for r in RANKS}
    results: Results = {}
    for number, keys in enumerate(schedule(plan(max(5, REPETITIONS) + 1), SEED)):
        for workload, arm in keys:
            shape, ranks = places[workload]
            seconds = planned_s(shape, ranks, arm, number)
            if number:  # the first warms up
                values = {"cpu": [1e3 * seconds], "each": [1e6 * seconds / (ranks * WINDOW)]}
                results.setdefault((workload, arm), Found()).add(values, quiet=True)
    publish(PLANNER, results, UNITS)


if __name__ == "__main__":
    main()

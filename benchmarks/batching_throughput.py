"""Claims: the loader gives samples nearly as fast as a plain DataLoader whose batches were made
beforehand, and several times as fast as the released package's loader; two ranks train more labels
a second on its micro-batches than on fixed batches of equal peak memory.

`loader`: one process, two workers, one epoch of 10,000 samples, UltraChat-like lengths; samples a
second from the loader's making to the last batch. `training`, `pydocs`, `chitchat`: see
`batching_training`.

| environment variable | meaning |
|---|---|
| `EKE_BENCH_SAMPLES` | samples of the loader's epoch (10,000); those that train are in proportion |
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import batching_training as training
from benchmarks import machine
from benchmarks.batching_claims import ODB, THROUGHPUT
from benchmarks.batching_lengths import SHAPES
from benchmarks.batching_texts import Samples, made, padded
from benchmarks.harness import REPETITIONS, answer, arms_wanted, collect, measuring, publish

LOADER, OFFLINE = "loader", "DataLoader, offline batches"
UNITS = {**training.UNITS, "rate": "samples/s"}
WORKERS, WINDOW = 2, 1024


def plan(repetitions: int) -> dict[tuple[str, str], int]:
    """How often each workload and arm is measured."""
    keys = [(LOADER, arm) for arm in ("eke", OFFLINE, ODB)]
    keys += [(workload, arm) for workload, arms in training.ARMS.items() for arm in arms]
    return dict.fromkeys(keys, repetitions)


def _eke(dataset: Samples, cap: int) -> Any:
    from eke.batching import DynamicLoader

    return DynamicLoader(
        dataset,
        micro_tokens=cap,
        per_step=f"tokens:{cap}",
        window=WINDOW,
        num_workers=WORKERS,
        epochs=1,
    )


def _released(dataset: Samples, cap: int) -> Any:
    import odb

    return odb.ODBDataLoader(
        dataset,
        token_budget=cap,
        batch_size=1,
        shuffle=True,
        num_workers=WORKERS,
        prefetch_factor=WINDOW // WORKERS,
        collate_fn=padded,
        loss_scaling="none",
        join=False,
    )


def sorted_batches(lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Batches of samples of like lengths, made beforehand under the same cap."""
    ordered = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    batches, at = [], 0
    while at < len(ordered):
        size = max(1, cap // lengths[ordered[at]])
        batches.append(ordered[at : at + size])
        at += size
    return batches


def loaded(arm: str) -> dict[str, list[float]]:
    """One epoch of the loader alone."""
    shape = SHAPES[0]
    dataset = made(shape.lengths(training.COUNT, 0))
    began, samples, batches = time.perf_counter(), 0, 0
    if arm == "eke":
        with _eke(dataset, shape.cap) as loader:
            for block in loader.blocks():
                samples += block.samples
                batches += len(block)
            took_s = time.perf_counter() - began
    else:
        if arm == OFFLINE:
            batch_sampler = sorted_batches(dataset.lengths, shape.cap)
            plain: Any = torch.utils.data.DataLoader(
                dataset, batch_sampler=batch_sampler, num_workers=WORKERS, collate_fn=padded
            )
        else:
            plain = _released(dataset, shape.cap)
        for batch in plain:
            samples += len(batch["input_ids"])
            batches += 1
        took_s = time.perf_counter() - began
    return {"rate": [samples / took_s], "batches": [float(batches)]}


def measure(workload: str, arm: str) -> None:
    """The loader's, in a process of its own."""
    before = machine.counters()
    answer(loaded(arm), machine.contamination(before, machine.counters()))


def main() -> None:
    if measuring(measure):
        return
    times = {key: n for key, n in plan(REPETITIONS).items() if key in arms_wanted(plan(1))}
    loader = {key: n for key, n in times.items() if key[0] == LOADER}
    results = collect(THROUGHPUT, loader, dict.fromkeys(loader, 10.0)) if loader else {}
    for workload in training.ARMS:
        if mine := {key: n for key, n in times.items() if key[0] == workload}:
            results |= training.trained(workload, mine)
    publish(THROUGHPUT, results, UNITS)


if __name__ == "__main__":
    main()

"""Claims: the loader gives samples nearly as fast as a plain DataLoader whose batches were made
beforehand, and several times as fast as the released package's loader; two ranks train more labels
a second on its micro-batches than on fixed batches of equal peak memory.

`loader`: one process, two workers, one epoch of 10,000 samples, UltraChat-like lengths; samples a
second from the loader's making to the last batch. `training`, `pydocs`, `chitchat`: see
`batching_training`.

| environment variable | meaning |
|---|---|
| `EKE_BENCH_SAMPLES` | samples of an epoch (10,000 for `loader`; a tenth, of `chitchat` a quarter, in training) |
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from benchmarks import machine
from benchmarks.batching_claims import ODB, THROUGHPUT
from benchmarks.batching_lengths import SHAPES
from benchmarks.batching_schedules import in_batches
from benchmarks.harness import REPETITIONS, answer, arms_wanted, collect, measuring, publish

UNITS = {"rate": "samples/s", "labels": "labels/s", "batches": "micro-batches"}
SAMPLES = int(os.environ.get("EKE_BENCH_SAMPLES", "10000"))
OFFLINE, FIXED = "DataLoader, offline batches", "fixed batches"
WORKERS, WINDOW, WARM = 2, 1024, 3
VOCABULARY, IGNORED, SHRUNK = 1024, -100, 16
RANK = "--rank"


def plan(repetitions: int) -> dict[tuple[str, str], int]:
    """How often each workload and arm is measured."""
    loader = dict.fromkeys((("loader", arm) for arm in ("eke", OFFLINE, ODB)), repetitions)
    training = [(workload, arm) for workload, arms in ARMS.items() for arm in arms]
    return loader | dict.fromkeys(training, repetitions)


# ---------------------------------------------------------------------- the loader alone


def eke_loader(dataset: Samples, cap: int, ranks: int, window: int) -> Any:
    from eke.batching import DynamicLoader

    return DynamicLoader(
        dataset,
        micro_tokens=cap,
        per_step=f"tokens:{ranks * cap}",
        window=window,
        num_workers=WORKERS,
        epochs=1,
    )


def odb_loader(dataset: Samples, cap: int, window: int, sampler: Any = None) -> Any:
    import odb

    return odb.ODBDataLoader(
        dataset,
        token_budget=cap,
        batch_size=1,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=WORKERS,
        prefetch_factor=window // WORKERS,
        collate_fn=collate,
        loss_scaling="none" if sampler is None else "exact",
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
    shape = SHAPES[0]
    dataset = Samples(shape.lengths(SAMPLES, 0))
    began, samples, batches = time.perf_counter(), 0, 0
    if arm == "eke":
        with eke_loader(dataset, shape.cap, 1, WINDOW) as loader:
            for block in loader.blocks():
                samples += block.samples
                batches += len(block)
            took_s = time.perf_counter() - began
    else:
        if arm == OFFLINE:
            batch_sampler = sorted_batches(dataset.lengths, shape.cap)
            plain: Any = torch.utils.data.DataLoader(
                dataset, batch_sampler=batch_sampler, num_workers=WORKERS, collate_fn=collate
            )
        else:
            plain = odb_loader(dataset, shape.cap, WINDOW)
        for batch in plain:
            samples += len(batch["input_ids"])
            batches += 1
        took_s = time.perf_counter() - began
    return {"rate": [samples / took_s], "batches": [float(batches)]}


def measure(workload: str, arm: str) -> None:
    before = machine.counters()
    metrics = loaded(arm) if workload == "loader" else trained(workload, arm)
    answer(metrics, machine.contamination(before, machine.counters()))


def main() -> None:
    if measuring(measure):
        return
    times = {key: n for key, n in plan(REPETITIONS).items() if key in arms_wanted(plan(1))}
    seconds = {key: 15.0 if key[0] == "loader" else 40.0 for key in times}
    publish(THROUGHPUT, collect(THROUGHPUT, times, seconds), UNITS)


if __name__ == "__main__":
    main()

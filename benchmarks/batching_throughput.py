"""Claims: the loader gives samples nearly as fast as a plain DataLoader whose batches were made
beforehand, and several times as fast as the released package's loader; two ranks train more labels
a second on its micro-batches than on fixed batches of equal peak memory.

`loader`: one process, two workers, one epoch of 10,000 samples, UltraChat-like lengths; samples a
second from the loader's making to the last batch. `training`: two gloo ranks of one thread, a
transformer of two layers of 128, ShareGPT4o-like lengths over 16; labels that train, of both ranks,
a second of the slower one, over an epoch without the first steps. A fixed batch has as many samples
as keep the cap whatever their lengths. The released package is driven for one epoch (a second one
fails), in its non-join mode (DDP's `Join` is not needed then), with as many samples of look-ahead.

| environment variable | meaning |
|---|---|
| `EKE_BENCH_SAMPLES` | samples of an epoch (10,000 for `loader`, a tenth for `training`) |
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


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens; the first third of each sample does not train."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self._ids = torch.randint(
            1, VOCABULARY, (max(lengths) + 997,), generator=torch.Generator().manual_seed(0)
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        n, start = self.lengths[index], index % 997
        ids = self._ids[start : start + n].clone()
        labels = ids.clone()
        labels[: n // 3] = IGNORED
        return {"input_ids": ids, "labels": labels}


def collate(items: Any) -> dict[str, torch.Tensor]:
    """Padded on the right, as eke does it."""
    items = items if isinstance(items, list) else [items]
    shape = len(items), max(len(item["input_ids"]) for item in items)
    batch = {
        "input_ids": torch.zeros(shape, dtype=torch.int64),
        "labels": torch.full(shape, IGNORED),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
    }
    for row, item in enumerate(items):
        n = len(item["input_ids"])
        batch["input_ids"][row, :n] = item["input_ids"]
        batch["labels"][row, :n] = item["labels"]
        batch["attention_mask"][row, :n] = 1
    return batch


def plan(repetitions: int) -> dict[tuple[str, str], int]:
    """How often each workload and arm is measured."""
    loader = dict.fromkeys((("loader", arm) for arm in ("eke", OFFLINE, ODB)), repetitions)
    return loader | dict.fromkeys((("training", arm) for arm in ("eke", FIXED, ODB)), repetitions)


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


# ---------------------------------------------------------------------- two ranks that train


def trained(arm: str) -> dict[str, list[float]]:
    """Both ranks, each a process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(2):
        about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        about |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        about["LOCAL_WORLD_SIZE"] = "2"
        command = [sys.executable, "-m", "benchmarks.batching_throughput", RANK, arm]
        ranks.append(
            subprocess.Popen(
                command, env={**os.environ, **about}, stdout=subprocess.PIPE, text=True
            )
        )
    outputs = [process.communicate(timeout=600)[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise RuntimeError(f"ranks ended with {[process.returncode for process in ranks]}")
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    labels = sum(one["labels"] for one in found)
    seconds = max(one["seconds"] for one in found)
    return {"labels": [labels / seconds], "batches": [float(found[0]["batches"])]}


def steps_of(arm: str, dataset: Samples, cap: int, rank: int) -> Iterator[list[tuple[Any, float]]]:
    """The optimizer steps of a rank: micro-batches, each with the factor of its summed loss."""
    window = min(WINDOW, len(dataset) // 4)
    if arm == "eke":
        with eke_loader(dataset, cap, 2, window) as loader:
            for block in loader.blocks():
                yield [(dict(batch), batch.scale) for batch in block]
        return
    sampler = torch.utils.data.DistributedSampler(dataset, 2, rank, seed=0)
    if arm == FIXED:
        size = cap // max(dataset.lengths)
        batches: Any = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=in_batches(list(sampler), size),
            num_workers=WORKERS,
            collate_fn=collate,
        )
    else:
        import odb

        batches = odb_loader(dataset, cap, window // WORKERS * WORKERS, sampler)
    for batch in batches:
        scale = 1.0
        if arm == ODB:
            scale = float(odb.pop_step_info(batch, loss_scaling="exact").loss_scale)
        labels = int((batch["labels"][:, 1:] != IGNORED).sum())
        yield [(batch, scale / max(1, labels))]


def train_rank(arm: str) -> None:
    """One rank's epoch; its labels and seconds, as JSON, on the last line."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from eke import distributed

    torch.set_num_threads(1)
    distributed.init()
    rank = int(os.environ["RANK"])
    shape = SHAPES[2]
    lengths = [max(4, n // SHRUNK) for n in shape.lengths(max(64, SAMPLES // 10), 0)]
    dataset, cap = Samples(lengths), 4 * shape.cap // SHRUNK
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=shape.cap,
    )  # fmt: skip
    model = torch.nn.parallel.DistributedDataParallel(LlamaForCausalLM(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    labels = batches = 0
    began = time.perf_counter()
    for number, step in enumerate(steps_of(arm, dataset, cap, rank)):
        if number == WARM:
            began, labels, batches = time.perf_counter(), 0, 0
        for place, (batch, scale) in enumerate(step):
            with nullcontext() if place == len(step) - 1 else model.no_sync():
                targets = batch.pop("labels")[:, 1:]
                logits = model(**batch).logits[:, :-1]
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), targets.flatten(), reduction="sum"
                )
                (loss * scale).backward()
            labels += int((targets != IGNORED).sum())
            batches += 1
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - began
    print(json.dumps({"labels": labels, "seconds": seconds, "batches": batches}), flush=True)
    for child in machine.descendants():  # the released package leaves some behind
        child.kill()
    os._exit(0)


def measure(workload: str, arm: str) -> None:
    before = machine.counters()
    metrics = loaded(arm) if workload == "loader" else trained(arm)
    answer(metrics, machine.contamination(before, machine.counters()))


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == RANK:
        train_rank(sys.argv[2])
    if measuring(measure):
        return
    times = {key: n for key, n in plan(REPETITIONS).items() if key in arms_wanted(plan(1))}
    seconds = {key: 15.0 if key[0] == "loader" else 40.0 for key in times}
    publish(THROUGHPUT, collect(THROUGHPUT, times, seconds), UNITS)


if __name__ == "__main__":
    main()

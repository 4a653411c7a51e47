"""Two gloo ranks that train: what they train on with each arm, and how many labels a second.

A transformer of two layers of 128, one thread a rank. Labels that train, of both ranks, a second of
the slower one, over an epoch without its first steps. Every arm steps after about as many tokens,
in as many micro-batches as that takes it, so none is charged for more updates; every arm keeps the
same cap (TRL's rows and eke's are as long as the cap, the fixed batches have as many samples as
keep it whatever their lengths).

Arms of the made lengths, `training`, decide claims: eke, fixed batches, and the released package,
driven for one epoch (a second one fails), in its non-join mode (DDP's `Join` is not needed then),
with as many samples of look-ahead. On real text all peers are measured besides: their schedules
(`batching_peers`), made beforehand from all lengths, which eke does not know.
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

from benchmarks import batching_peers as peers
from benchmarks import machine
from benchmarks.batching_claims import ODB
from benchmarks.batching_schedules import Schedule, fixed
from benchmarks.batching_texts import IGNORED, MADE, TEXTS, Samples, packed, padded, workload

EKE, EKE_PACKED, FIXED = "eke", "eke, packed", "fixed batches"
GROUPED, REBALANCED = "LengthGroupedSampler", "BatchRebalanceSampler"
LHOTSE, TRL = "lhotse DynamicBucketing", "TRL bfd"
ARMS = {MADE: (EKE, FIXED, ODB)} | dict.fromkeys(
    TEXTS, (EKE, EKE_PACKED, FIXED, GROUPED, REBALANCED, LHOTSE, TRL, ODB)
)
RANKS, WORKERS, WINDOW, WARM = 2, 2, 1024, 2
MICRO = 2
"""Full micro-batches of a rank in a step, about."""
PER_STEP = 64
"""Samples in a step of BatchRebalanceSampler's."""
RANK = "--rank"
COUNT = int(os.environ.get("EKE_BENCH_SAMPLES", "10000"))
SAMPLES = {MADE: max(64, COUNT // 10), "pydocs": max(64, COUNT // 10), "chitchat": COUNT // 4}

Steps = Iterator[list[dict[str, Any]]]
"""The optimizer steps of a rank: its micro-batches, each with a `scale` for its summed loss."""


def trained(name: str, arm: str) -> dict[str, list[float]]:
    """Both ranks, each a process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(RANKS):
        about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        about |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
        about["LOCAL_WORLD_SIZE"] = str(RANKS)
        command = [sys.executable, "-m", "benchmarks.batching_training", RANK, name, arm]
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


def _eke(samples: Samples, cap: int, packing: bool) -> Steps:
    from eke.batching import DynamicLoader

    with DynamicLoader(
        samples,
        micro_tokens=cap,
        per_step=f"tokens:{RANKS * MICRO * cap}",
        window=min(WINDOW, len(samples) // 4),
        packing=packing,
        num_workers=WORKERS,
        epochs=1,
    ) as loader:
        for block in loader.blocks():
            yield [{**batch, "scale": batch.scale} for batch in block]


def _odb(samples: Samples, cap: int, rank: int) -> Steps:
    import odb

    window = min(WINDOW, len(samples) // 4)
    batches = odb.ODBDataLoader(
        samples,
        token_budget=cap,
        batch_size=1,
        sampler=torch.utils.data.DistributedSampler(samples, RANKS, rank, seed=0),
        num_workers=WORKERS,
        prefetch_factor=window // WORKERS,
        collate_fn=padded,
        loss_scaling="exact",
        join=False,
    )
    step = []
    for batch in batches:
        factor = float(odb.pop_step_info(batch, loss_scaling="exact").loss_scale)
        step.append(_scaled(batch, factor))
        if len(step) == MICRO:
            yield step
            step = []
    if step:
        yield step


def _scaled(batch: dict[str, Any], factor: float = 1.0) -> dict[str, Any]:
    labels = int((batch["labels"][:, 1:] != IGNORED).sum())
    return {**batch, "scale": factor / max(1, labels)}


def schedule_of(arm: str, lengths: Sequence[int], cap: int) -> Schedule:
    """What a peer that knows all lengths makes of them."""
    size = cap // max(lengths)
    if arm == FIXED:
        return fixed(lengths, RANKS, size, 0)
    if arm == GROUPED:
        return peers.length_grouped(lengths, RANKS, size, 0)
    if arm == REBALANCED:
        return peers.fitting_rebalanced(lengths, cap, RANKS, PER_STEP, 0)
    if arm == LHOTSE:
        return peers.lhotse(lengths, cap, RANKS, 0)
    return peers.trl(lengths, cap, RANKS, "bfd", 0)


def indices(schedule: Schedule, lengths: Sequence[int], rank: int) -> list[list[int]]:
    """A rank's micro-batches as samples of the lengths that the schedule has; pure. A length that
    it has more often than there are such samples is one of theirs again."""
    all_of: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        all_of.setdefault(length, []).append(index)
    used = dict.fromkeys(all_of, 0)
    found = []
    for step in schedule.steps:
        for place, group in enumerate(step):
            batch = []
            for length in group:
                batch.append(all_of[length][used[length] % len(all_of[length])])
                used[length] += 1
            if place == rank:
                found.append(batch)
    return found


def _scheduled(arm: str, samples: Samples, cap: int, rank: int) -> Steps:
    schedule = schedule_of(arm, samples.lengths, cap)
    batches = indices(schedule, samples.lengths, rank)
    mean = sum(samples.lengths) / max(1, len(schedule.steps))
    together = max(1, round(RANKS * MICRO * cap / mean))
    loader: Any = torch.utils.data.DataLoader(
        samples,
        batch_sampler=batches,
        num_workers=WORKERS,
        collate_fn=packed if schedule.packed else padded,
    )
    step = []
    for batch in loader:
        step.append(_scaled(batch))
        if len(step) == together:
            yield step
            step = []
    if step:
        yield step


def steps_of(arm: str, samples: Samples, cap: int, rank: int) -> Steps:
    """The optimizer steps of a rank."""
    if arm in (EKE, EKE_PACKED):
        return _eke(samples, cap, packing=arm == EKE_PACKED)
    if arm == ODB:
        return _odb(samples, cap, rank)
    return _scheduled(arm, samples, cap, rank)


def train_rank(name: str, arm: str) -> None:
    """One rank's epoch; its labels and seconds, as JSON, on the last line."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from eke import distributed

    torch.set_num_threads(1)
    distributed.init()
    samples, cap = workload(name, SAMPLES[name])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=samples.vocabulary, hidden_size=128, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=max(samples.lengths),
        use_cache=False,
    )  # fmt: skip
    model = torch.nn.parallel.DistributedDataParallel(LlamaForCausalLM(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    labels = batches = 0
    began = time.perf_counter()
    for number, step in enumerate(steps_of(arm, samples, cap, int(os.environ["RANK"]))):
        if number == WARM:
            began, labels, batches = time.perf_counter(), 0, 0
        for place, batch in enumerate(step):
            scale, targets = batch.pop("scale"), batch.pop("labels")[:, 1:]
            with nullcontext() if place == len(step) - 1 else model.no_sync():
                logits = model(**batch).logits[:, :-1]
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), targets.flatten(), reduction="sum"
                )
                # A dummy's logits are of one token, none of which has a target.
                (loss * scale + logits.sum() * 0).backward()
            labels += int((targets != IGNORED).sum())
            batches += 1
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - began
    print(json.dumps({"labels": labels, "seconds": seconds, "batches": batches}), flush=True)
    for child in machine.descendants():  # the released package leaves some behind
        child.kill()
    os._exit(0)


if __name__ == "__main__":
    train_rank(*sys.argv[sys.argv.index(RANK) + 1 :])

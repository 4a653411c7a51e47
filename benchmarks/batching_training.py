"""Two gloo ranks that train: what they train on with each arm, and how many labels a second.

A transformer of two layers of 64, one thread and one loader worker a rank. Labels that train, of
both ranks, a second of the slower one, over one whole epoch, from when the first step's
micro-batches are there: an arm's start is not measured, and a step on full micro-batches comes
before. Every arm accumulates to about as many tokens a step, so none is charged for more updates,
and has the same cap on the tokens of a micro-batch, padding included; `over` says how often it was
exceeded, `lost` what share of the epoch's labels an arm did not train (below 0, some twice).

Both ranks measure all arms of a round one after another, in an order drawn from the seed; each
round has new processes. Ranks wait for each other at the end of a step only, as DDP does when it
accumulates, so the clock is kinder to uneven micro-steps than `efficiency` is.

* `eke`, `eke, packed`, `eke, samples stay`: the loader with a window of 128 samples a rank, more
  lengths than which it does not know; planning and exchange are on the clock.
* `fixed batches`: four samples, the most that keep the cap whatever their lengths. So has
  `LengthGroupedSampler`, which knows no cap either.
* Peers: their own code's schedules (`batching_peers`) of the same samples, made before the clock
  starts, from all lengths but for the released package's (128 a rank, too); collated by a plain
  DataLoader.
* `online-dynamic-batching` on the made lengths: its loader, for one epoch in new processes (a
  second one fails), in its non-join mode (DDP's `Join` is not needed then).

Packed rows attend sample by sample, which is what varlen kernels do: with the mask that
transformers makes on a CPU a row's cost would grow with its square.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks import batching_peers as peers
from benchmarks import machine
from benchmarks.batching_claims import (
    EKE,
    EKE_PACKED,
    FIXED_BATCHES,
    GROUPED,
    LHOTSE,
    MADE,
    ODB,
    REBALANCE,
    STAYS,
    TEXTS,
    TRL,
)
from benchmarks.batching_schedules import Schedule, fixed
from benchmarks.batching_texts import FIXED, IGNORED, Samples, packed, padded, workload
from benchmarks.harness import MARK, SCALE, SEED, TRIES, Found, Key, Results
from benchmarks.stats import schedule as in_rounds
from eke.batching.planner import DUMMY_TOKENS

ARMS = {MADE: (EKE, FIXED_BATCHES, ODB)} | dict.fromkeys(
    TEXTS, (EKE, EKE_PACKED, STAYS, FIXED_BATCHES, GROUPED, REBALANCE, LHOTSE, TRL, ODB)
)
UNITS = {
    "labels": "labels/s",
    "padding": "share",
    "efficiency": "share",
    "batches": "micro-steps",
    "steps": "optimizer steps",
    "over": "share of micro-batches",
    "lost": "share of labels",
}
RANKS, WORKERS, WINDOW = 2, 1, 128
MICRO = 2
"""Full micro-batches of a rank in a step, about."""
PER_STEP = 64
"""Samples that BatchRebalanceSampler balances together."""
COUNT = int(os.environ.get("EKE_BENCH_SAMPLES", "10000"))
SAMPLES = {
    name: max(64, COUNT * n // 10_000) for name, n in zip(ARMS, (1024, 768, 768), strict=True)
}
LIMIT_S = 300.0
RANK = "--rank"

Steps = Iterator[list[dict[str, Any]]]
"""The optimizer steps of a rank: its micro-batches, each with a `scale` for its summed loss."""
Plan = Mapping[str, Any]
"""A peer's schedule: `groups`, for each rank its micro-batches as indices, and `packed`."""


def is_released_loader(name: str, arm: str) -> bool:
    """Whether the arm is the released package's loader, not its grouping alone."""
    return (name, arm) == (MADE, ODB)


# ---------------------------------------------------------------------- schedules of peers


def schedule_of(arm: str, lengths: Sequence[int], cap: int) -> Schedule:
    """What a peer makes of all lengths."""
    if arm == FIXED_BATCHES:
        return fixed(lengths, RANKS, FIXED, 0)
    if arm == GROUPED:
        return peers.length_grouped(lengths, RANKS, FIXED, 0)
    if arm == REBALANCE:
        return peers.fitting_rebalanced(lengths, cap, RANKS, PER_STEP, 0)
    if arm == LHOTSE:
        return peers.lhotse(lengths, cap, RANKS, 0)
    if arm == TRL:
        return peers.trl(lengths, cap, RANKS, "bfd", 0)
    return peers.odb(lengths, cap, RANKS, WINDOW, 0)


def indices(schedule: Schedule, lengths: Sequence[int]) -> list[list[list[int]]]:
    """Each rank's micro-batches as samples of the lengths that the schedule has; pure. A length
    that it has more often than there are such samples is one of theirs again."""
    all_of: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        all_of.setdefault(length, []).append(index)
    used = dict.fromkeys(all_of, 0)
    found: list[list[list[int]]] = [[] for _ in range(RANKS)]
    for step in schedule.steps:
        for rank, group in enumerate(step):
            batch = []
            for length in group:
                batch.append(all_of[length][used[length] % len(all_of[length])])
                used[length] += 1
            found[rank].append(batch)
    return found


def planned(name: str) -> dict[str, Plan]:
    """Every peer's schedule of a workload."""
    samples, cap = workload(name, SAMPLES[name])
    found: dict[str, Plan] = {}
    for arm in ARMS[name]:
        if arm not in (EKE, EKE_PACKED, STAYS):
            schedule = schedule_of(arm, samples.lengths, cap)
            groups = indices(schedule, samples.lengths)
            found[arm] = {"groups": groups, "packed": schedule.packed}
    return found


def together(plan: Plan, tokens: int, cap: int) -> int:
    """Micro-steps of an optimizer step that consumes about what eke's does; pure."""
    steps = max(map(len, plan["groups"]))
    return max(1, round(RANKS * MICRO * cap * steps / tokens))


# ---------------------------------------------------------------------- one rank


def _eke(samples: Samples, cap: int, arm: str) -> Steps:
    from eke.batching import DynamicLoader

    with DynamicLoader(
        samples,
        micro_tokens=cap,
        per_step=f"tokens:{RANKS * MICRO * cap}",
        window=WINDOW,
        packing=arm == EKE_PACKED,
        move_samples=arm != STAYS,
        num_workers=WORKERS,
        epochs=1,
    ) as loader:
        for block in loader.blocks():
            yield [{**batch, "scale": batch.scale} for batch in block]


def _released(samples: Samples, cap: int, rank: int) -> Iterator[dict[str, Any]]:
    import odb

    batches = odb.ODBDataLoader(
        samples,
        token_budget=cap,
        batch_size=1,
        sampler=torch.utils.data.DistributedSampler(samples, RANKS, rank, seed=0),
        num_workers=WORKERS,
        prefetch_factor=WINDOW // WORKERS,
        collate_fn=padded,
        loss_scaling="exact",
        join=False,
    )
    for batch in batches:
        yield _scaled(batch, float(odb.pop_step_info(batch, loss_scaling="exact").loss_scale))


def _collated(samples: Samples, plan: Plan, rank: int) -> Iterator[dict[str, Any]]:
    loader: Any = torch.utils.data.DataLoader(
        samples,
        batch_sampler=plan["groups"][rank],
        num_workers=WORKERS,
        collate_fn=packed if plan["packed"] else padded,
    )
    for batch in loader:
        yield _scaled(batch)


def _scaled(batch: dict[str, Any], factor: float = 1.0) -> dict[str, Any]:
    labels = int((batch["labels"][:, 1:] != IGNORED).sum())
    return {**batch, "scale": factor / max(1, labels)}


def grouped(batches: Iterator[dict[str, Any]], size: int) -> Steps:
    """So many micro-batches at a time; the last step has what is left."""
    step = []
    for batch in batches:
        step.append(batch)
        if len(step) == size:
            yield step
            step = []
    if step:
        yield step


def steps_of(
    name: str, arm: str, samples: Samples, cap: int, plan: Plan | None, rank: int
) -> Steps:
    """The optimizer steps of a rank."""
    if plan is None:  # eke makes its own
        return _eke(samples, cap, arm)
    if is_released_loader(name, arm):
        batches = _released(samples, cap, rank)
    else:
        batches = _collated(samples, plan, rank)
    return grouped(batches, together(plan, sum(samples.lengths), cap))


def sample_by_sample(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **rest: Any
) -> tuple[torch.Tensor, None]:
    """Attention of a packed row: causal, and each sample to itself alone."""
    ends = (rest["position_ids"][0] == 0).nonzero()[1:, 0].tolist()
    parts = (torch.tensor_split(x, ends, dim=2) for x in (query, key, value))
    attended = [
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        for q, k, v in zip(*parts, strict=True)
    ]
    return torch.cat(attended, dim=2).transpose(1, 2).contiguous(), None


def _model(samples: Samples, cap: int, *, packs: bool) -> Any:
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    AttentionInterface.register("sample_by_sample", sample_by_sample)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=samples.vocabulary, hidden_size=64, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=cap,
        use_cache=False, attn_implementation="sample_by_sample" if packs else "sdpa",
    )  # fmt: skip
    return torch.nn.parallel.DistributedDataParallel(LlamaForCausalLM(config))


def _update(model: Any, optimizer: Any, step: list[dict[str, Any]]) -> int:
    """One optimizer step; how many labels it trained."""
    labels = 0
    for place, batch in enumerate(step):
        scale, targets = batch.pop("scale"), batch.pop("labels")[:, 1:]
        with nullcontext() if place == len(step) - 1 else model.no_sync():
            logits = model(**batch).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), reduction="sum"
            )
            (loss * scale).backward()
        labels += int((targets != IGNORED).sum())
    optimizer.step()
    optimizer.zero_grad()
    return labels


def train(name: str, arm: str, plan: Plan | None, rank: int) -> dict[str, Any]:
    """One rank's epoch."""
    samples, cap = workload(name, SAMPLES[name])
    packs = arm == EKE_PACKED or bool(plan and plan["packed"])
    model = _model(samples, cap, packs=packs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    longest = max(range(len(samples)), key=samples.lengths.__getitem__)
    full = [samples[longest]] * FIXED
    _update(model, optimizer, [_scaled((packed if packs else padded)(full)) for _ in range(2)])
    labels = steps = 0
    real: list[int] = []
    occupied: list[int] = []
    began = 0.0
    for step in steps_of(name, arm, samples, cap, plan, rank):
        began = began or time.perf_counter()
        for batch in step:
            occupied.append(batch["input_ids"].numel())
            mask = batch.get("attention_mask")
            is_dummy = occupied[-1] == DUMMY_TOKENS and bool((batch["labels"] == IGNORED).all())
            real.append(0 if is_dummy else occupied[-1] if mask is None else int(mask.sum()))
        labels += _update(model, optimizer, step)
        steps += 1
    seconds = time.perf_counter() - began
    return {
        "labels": labels,
        "seconds": seconds,
        "steps": steps,
        "real": real,
        "occupied": occupied,
    }


def serve(name: str, plans: str) -> None:
    """One rank: for each arm that comes in, one epoch, its result going out."""
    from eke import distributed

    torch.set_num_threads(1)
    distributed.init()
    schedules = json.loads(Path(plans).read_text())
    for line in sys.stdin:
        arm = line.strip()
        found = train(name, arm, schedules.get(arm), int(os.environ["RANK"]))
        print(MARK + json.dumps(found), flush=True)


# ---------------------------------------------------------------------- both of them


class Pair:
    """Both ranks, each a process, for one epoch of an arm after another."""

    def __init__(self, name: str, where: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [sys.executable, "-m", "benchmarks.batching_training", RANK, name]
        self._errors = [where / f"{rank}.stderr" for rank in range(RANKS)]
        self._ranks: list[subprocess.Popen[str]] = []
        for rank, errors in enumerate(self._errors):
            about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            about |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
            about["LOCAL_WORLD_SIZE"] = str(RANKS)
            with errors.open("w") as file:
                process = subprocess.Popen(
                    [*command, str(where / "plans.json")], env={**os.environ, **about}, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
                )  # fmt: skip
            self._ranks.append(process)

    def train(self, arm: str) -> list[dict[str, Any]]:
        """Each rank's epoch.

        Raises:
            RuntimeError: a rank failed, or took too long.
        """
        late = threading.Timer(LIMIT_S, self.close)
        late.start()
        try:
            for process in self._ranks:
                assert process.stdin is not None
                process.stdin.write(arm + "\n")
                process.stdin.flush()
            return [self._answer(number) for number in range(RANKS)]
        except BrokenPipeError as error:
            raise RuntimeError(self._why()) from error
        finally:
            late.cancel()

    def _answer(self, number: int) -> dict[str, Any]:
        stdout = self._ranks[number].stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith(MARK):
                found: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return found
        raise RuntimeError(self._why())

    def _why(self) -> str:
        last = [(one.read_text().strip().splitlines() or ["nothing"])[-1] for one in self._errors]
        return "a rank ended or was late; the ranks' last words: " + " | ".join(last)[-280:]

    def close(self) -> None:
        """End both, and what they left behind."""
        for process in self._ranks:
            for child in machine.descendants_of(process.pid):
                child.kill()
            process.kill()
        for process in self._ranks:
            process.wait()


def merged(
    ranks: Sequence[Mapping[str, Any]], label_tokens: int, cap: int
) -> dict[str, list[float]]:
    """Both ranks' epoch as figures of `UNITS`; pure."""
    real = sum(sum(one["real"]) for one in ranks)
    occupied = [one["occupied"] for one in ranks]
    paced = sum(len(ranks) * max(step) for step in zip(*occupied, strict=True))
    labels = sum(one["labels"] for one in ranks)
    return {
        "labels": [labels / max(one["seconds"] for one in ranks)],
        "padding": [1 - real / sum(map(sum, occupied))],
        "efficiency": [real / paced],
        "batches": [float(len(occupied[0]))],
        "steps": [float(ranks[0]["steps"])],
        "over": [sum(n > cap for one in occupied for n in one) / sum(map(len, occupied))],
        "lost": [1 - labels / label_tokens],
    }


def trained(name: str, times: Mapping[Key, int]) -> Results:
    """Rounds of every arm of one workload, one epoch of each in a round."""
    results: Results = {key: Found() for key in times}
    samples, cap = workload(name, SAMPLES[name])
    about = samples.label_tokens, cap
    rounds = in_rounds(times, SEED)
    with tempfile.TemporaryDirectory(prefix="eke-bench-") as at:
        where = Path(at)
        (where / "plans.json").write_text(json.dumps(planned(name)))
        for number, keys in enumerate(rounds):
            pair = Pair(name, where)
            for key in keys:
                label = f"  round {number + 1}/{len(rounds)}  {name:<9} {key[1]:<24} "
                if is_released_loader(*key):  # in processes that end with it
                    own = Pair(name, where)
                    _measure(own, key, results[key], about, label, tries=1)
                    own.close()
                elif not _measure(pair, key, results[key], about, label, tries=TRIES):
                    pair.close()
                    pair = Pair(name, where)
            pair.close()
    return results


def _measure(
    pair: Pair, key: Key, found: Found, about: tuple[int, int], label: str, tries: int
) -> bool:
    """Whether it did not fail; repeated while others disturb it."""
    for attempt in range(tries):
        before = machine.counters()
        try:
            metrics = merged(pair.train(key[1]), *about)
        except RuntimeError as error:
            found.errors.append(str(error))
            print(f"{label}FAILED {error}", flush=True)
            return False
        after = machine.counters()
        others = machine.contamination(before, after)
        if others.quiet or attempt == tries - 1 or SCALE != 1:
            found.add(metrics, others.quiet)
            shown = "  ".join(f"{m} {v[0]:.4g}" for m, v in metrics.items())
            took = f"{after.at_s - before.at_s:5.1f} s, {after.own_s - before.own_s:5.1f} of CPU"
            disturbed = "" if others.quiet else "  (disturbed)"
            print(f"{label}{took}  {shown}{disturbed}", flush=True)
            return True
        found.repeated += 1
        print(f"{label}disturbed by {others.foreign_cores:.2f} cores: again", flush=True)
    return True


if __name__ == "__main__":
    serve(*sys.argv[sys.argv.index(RANK) + 1 :])

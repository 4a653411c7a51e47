"""Claim: on a CPU that training fills, a checkpoint costs the loop less than half of what it costs
with any peer, background work included; saving every ten steps inflates the loop by two per cent at
most; and an update hardly ever waits for the capture.

A GPT of 1.25 GB trains on all cores. One process measures five steps without saving, ten that
begin with a save, and five without again: what a checkpoint costs is the ten less twice the five,
so that a machine that slowly gets faster or slower cancels out. The ten end when the save has.
See README.md.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks import machine
from benchmarks.claims import KEPT
from benchmarks.harness import (
    REPETITIONS,
    SCALE,
    THREADS,
    Key,
    answer,
    arms_wanted,
    collect,
    measuring,
    publish,
)

UNITS = {
    "return": "s",
    "barrier": "s",
    "stall": "s",
    "extra": "s",
    "inflation": "of the loop",
    "step": "s",
    "drain": "s",
    "cpu": "CPU s",
    "compute": "s",
    "capture": "s",
}
EVERY = 10
TOKENS = int(os.environ.get("EKE_BENCH_TOKENS", "128"))
"""In a step. Few, which is hard on the saver: the more, the longer it has for its work."""
LONG_TOKENS = 4 * TOKENS
CORE = ("eke", "torch.save", KEPT)
OTHERS = (
    "torch.save, fsync",
    "safetensors",
    "dcp.async_save, process",
    "torch_checkpointing",
    "torchsnapshot, async",
    "lightning, async",
)


def plan(repetitions: int) -> dict[Key, int]:
    """How often each workload and arm is measured."""
    times: dict[Key, int] = {("W1", arm): repetitions for arm in CORE}
    times |= {("W1", arm): min(repetitions, 2) for arm in OTHERS}
    return times | {("W1 long", "eke"): min(repetitions, 3)}


class Loop:
    """A training loop whose waiting for saves is taken apart, by clocks of its own."""

    def __init__(self, name: str, root: Path, tokens: int) -> None:
        from benchmarks.peers import ARMS
        from benchmarks.states import build

        torch.set_num_threads(THREADS)
        self.state, self.root, self.saves = build("W1"), root, 0
        model = self.state.model
        assert model is not None
        assert self.state.optimizer is not None
        self.model, self.optimizer = model, self.state.optimizer
        self.ids_BT = torch.randint(0, 1000, (1, tokens))
        self.clock = [0.0, 0.0]
        self.waited_s = self.compute_s = 0.0
        # Hooks run in the order in which they were registered: an arm's is between these two.
        register_optimizer_step_pre_hook(lambda *_: self._tick(0))
        self.arm = ARMS[name](self.state, root)
        register_optimizer_step_pre_hook(lambda *_: self._tick(1))

    def _tick(self, which: int) -> None:
        self.clock[which] = time.perf_counter()

    def step(self) -> float:
        """One step; returns its seconds."""
        began = time.perf_counter()
        loss = self.model(self.ids_BT)
        loss.backward()
        self.compute_s = time.perf_counter() - began
        asked = time.perf_counter()
        with self.arm.update():
            self.waited_s = time.perf_counter() - asked
            self.optimizer.step()
        self.waited_s += self.clock[1] - self.clock[0]
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - began

    def save(self) -> float:
        """Start a save; returns how long that took."""
        self.path = self.root / f"save{self.saves}"
        began = time.perf_counter()
        self.arm.save(self.path, self.saves)
        self.saves += 1
        return time.perf_counter() - began

    def clear(self) -> None:
        """Delete the checkpoint, and let the disk come to rest."""
        if self.path.exists():
            shutil.rmtree(self.path) if self.path.is_dir() else self.path.unlink()
        os.sync()


def measure(workload: str, name: str) -> None:
    """In a process of its own."""
    root = Path(os.environ["EKE_BENCH_HERE"])
    loop = Loop(name, root, LONG_TOKENS if workload == "W1 long" else TOKENS)
    loop.step()
    loop.save()  # the first, in which arms start processes and take memory, is not the question
    loop.step()
    loop.arm.finish()
    loop.clear()
    loop.step()
    before = machine.counters()
    metrics = barriers(loop) if workload == "W1 long" else segments(loop)
    answer(metrics, machine.contamination(before, machine.counters()))


def segments(loop: Loop) -> dict[str, list[float]]:
    """Five steps, ten steps with a save, five steps."""
    plain = [loop.step() for _ in range(EVERY // 2)]
    cpu = machine.cpu_s()
    began = time.perf_counter()
    returned = loop.save()
    waited = 0.0
    for _ in range(EVERY):
        loop.step()
        waited += loop.waited_s
    drained = time.perf_counter()
    loop.arm.finish()
    ended = time.perf_counter()
    cpu = machine.cpu_s() - cpu
    loop.clear()
    cpu_plain = machine.cpu_s()
    after = [loop.step() for _ in range(EVERY // 2)]
    cpu_plain = machine.cpu_s() - cpu_plain
    without = sum(plain) + sum(after)
    extra = (ended - began) - without
    return {
        "return": [returned],
        "barrier": [waited],
        "stall": [returned + waited],
        "extra": [extra],
        "inflation": [extra / without],
        "drain": [ended - drained],
        "cpu": [cpu - 2 * cpu_plain],
        "step": plain + after,
    }


def barriers(loop: Loop) -> dict[str, list[float]]:
    """Saves, each followed by two steps long enough to capture everything under the first."""
    found: dict[str, list[float]] = {"return": [], "barrier": [], "compute": [], "capture": []}
    for _ in range(3):
        returned = loop.save()
        loop.step()
        ticket: Any = loop.arm.ticket  # type: ignore[attr-defined]
        if loop.compute_s > ticket.seconds["captured"] - loop.waited_s:
            # Only then is the claim about this step: see `compute` and `capture` for the rest.
            found["barrier"].append(loop.waited_s)
        found["return"].append(returned)
        found["compute"].append(loop.compute_s)
        found["capture"].append(ticket.seconds["captured"])
        loop.arm.finish()
        loop.clear()
        loop.step()
    return found


def main() -> None:
    if measuring(measure):
        return
    every = plan(REPETITIONS)
    times = {key: every[key] for key in arms_wanted(every)}
    seconds = {key: 27.0 if key[0] == "W1" else 30.0 for key in times}
    results = collect("checkpoint_training", times, seconds)
    plain = [s for found in results.values() for s in found.values.get("step", [])]
    if plain:
        print(f"\na step without saving takes {statistics.median(plain):.3g} s at scale {SCALE:g}")
    publish("checkpoint_training", results, UNITS)


if __name__ == "__main__":
    main()

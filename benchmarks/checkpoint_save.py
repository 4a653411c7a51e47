"""Claim: `save` returns at once, and what it saves is durable sooner, for less CPU time and less
memory, than with any peer.

Every arm saves the same state several times, in a process of its own: nothing trains meanwhile, so
an arm's figures are its own. See README.md for the figures and the protocol.
"""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path

from benchmarks import machine
from benchmarks.claims import KEPT
from benchmarks.harness import REPETITIONS, Key, answer, arms_wanted, collect, measuring, publish

UNITS = {
    "return": "s",
    "safe": "s",
    "durable": "s",
    "first": "s",
    "cpu": "CPU s/GiB",
    "memory": "of the state",
    "bytes": "of the state",
    "second": "of the state",
}
SAVES = {"W1": 4, "W2": 3, "W2+AdamW": 3, "W3": 3, "W4": 6, "W5": 3}
"""In one process; at least two, as the second is what a figure is about."""
CORE = ("eke", "torch.save", "safetensors", KEPT)
"""The arms that claims are about are measured in every round, the others in the last two."""
OTHERS = (
    "eke, small pool",
    "floor",
    "dcp.save",
    "dcp.async_save, fresh",
    "dcp.async_save, process",
    "torch_checkpointing",
    "torchsnapshot",
    "torchsnapshot, async",
    "lightning, async",
    "accelerate",
)
SECONDS = {"W1": 11.0, "W2": 12.0, "W2+AdamW": 30.0, "W3": 26.0, "W4": 5.0, "W5": 9.0}
"""About how long one process takes."""


def plan(repetitions: int) -> dict[Key, int]:
    """How often each workload and arm is measured."""
    some, few = min(repetitions, 3), min(repetitions, 2)
    times: dict[Key, int] = {("W1", arm): repetitions for arm in CORE}
    times |= {("W1", arm): few for arm in OTHERS}
    times["W1", "eke, small pool"] = some
    times |= {("W2", arm): some for arm in ("eke", "dcp.save", KEPT, "safetensors")}
    times |= {("W2+AdamW", arm): some for arm in ("eke", "dcp.save", KEPT)}
    times |= {("W3", arm): some for arm in ("eke", "eke, small pool", "safetensors", KEPT)}
    times |= {("W4", arm): repetitions for arm in ("eke", "pickle", "torch.save")}
    return times | {("W5", arm): some for arm in ("eke", "torch.save")}


def measure(workload: str, name: str) -> None:
    """In a process of its own. The first save is apart from the later ones."""
    from benchmarks.peers import ARMS
    from benchmarks.states import build

    root = Path(os.environ["EKE_BENCH_HERE"])
    state = build(workload)
    state.change()
    nbytes = state.nbytes or 1
    for module in ARMS[name].needs:
        importlib.import_module(module)
    resident = machine.reset_peak()
    arm = ARMS[name](state, root)
    time.sleep(1.0)  # whatever an arm starts may get ready before training would
    before = machine.counters()
    rows: list[dict[str, float]] = []
    known: dict[int, int] = machine.blocks_of(root)
    for number in range(SAVES[workload]):
        path = root / f"save{number}"
        cpu, written = machine.cpu_s(), machine.written_bytes()
        began = time.perf_counter()
        arm.save(path, number)
        returned = time.perf_counter() - began
        arm.hold()
        safe = time.perf_counter() - began
        arm.finish()
        if not arm.durable:
            machine.sync_tree(path)
        durable = time.perf_counter() - began
        spent = machine.cpu_s() - cpu
        now = machine.blocks_of(root)
        new = sum(size for inode, size in now.items() if inode not in known)
        written = max(new, machine.written_bytes() - written)
        rows.append(
            {
                "return": returned,
                "safe": safe,
                "durable": durable,
                "cpu": spent / (nbytes / 2**30),
                "bytes": written / nbytes,
            }
        )
        known = now
        state.change()
        arm.delete(path)
    extra = (machine.peak_bytes() - resident) / nbytes
    later = {metric: [row[metric] for row in rows[1:]] for metric in rows[0]}
    metrics = {**later, "first": [rows[0]["durable"]], "memory": [max(0.0, extra)]}
    metrics["second"] = [rows[1]["bytes"]]
    if not state.model:
        for metric in ("cpu", "bytes", "second", "memory"):
            metrics.pop(metric)  # shares of a state without tensors
    answer(metrics, machine.contamination(before, machine.counters()))


def main() -> None:
    if measuring(measure):
        return
    every = plan(REPETITIONS)
    times = {key: every[key] for key in arms_wanted(every)}
    results = collect("checkpoint_save", times, {key: SECONDS[key[0]] for key in times})
    publish("checkpoint_save", results, UNITS)


if __name__ == "__main__":
    main()

"""Claim: a restore that checks every byte takes hardly longer than torch's fastest load, which
checks nothing, and takes no second copy of the state's memory.

Every arm saves W1 in a process of its own, changes it, and takes it back into the live model and
optimizer: with the files in the page cache (warm), and read from the disk (cold). See README.md.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.harness import REPETITIONS, Key, answer, arms_wanted, collect, measuring, publish

UNITS = {"warm": "s", "cold": "s", "memory": "of the state"}
SAVED_BY = {
    "eke": "eke",
    "torch.load": "torch.save",
    "torch.load, mmap": "torch.save",
    "torch.load, mmap, lazy": "torch.save",
    "dcp.load": "dcp.save",
    "safetensors": "safetensors",
}
"""Arm -> what saves for it."""
TIMES = 3


def plan(repetitions: int) -> dict[Key, int]:
    """How often each workload and arm is measured."""
    times: dict[Key, int] = {("W1", arm): repetitions for arm in SAVED_BY}
    times["W1", "torch.load, mmap, lazy"] = min(repetitions, 2)
    return times


def by_load_state_dict(state: Any, saved: dict[str, Any]) -> None:
    """As most loops do it. torch's optimizers take the given tensors in place of their own."""
    state.model.load_state_dict(saved["model"])
    state.optimizer.load_state_dict(saved["optimizer"])


def by_copying(state: Any, saved: dict[str, Any]) -> None:
    """Everything into the live tensors."""
    state.model.load_state_dict(saved["model"])
    live, given = state.optimizer.state_dict()["state"], saved["optimizer"]["state"]
    with torch.no_grad():
        for number, values in live.items():
            torch._foreach_copy_(list(values.values()), [given[number][key] for key in values])


def dcp_load(state: Any, path: Path) -> None:
    """Into the live tensors."""
    import torch.distributed.checkpoint as dcp

    dcp.load(state.state_dict(), checkpoint_id=path, no_dist=True)


def safetensors_load(state: Any, path: Path) -> None:
    """`load_file`, and a copy into the live tensors."""
    from safetensors.torch import load_file

    saved = load_file(path)
    with torch.no_grad():
        for name, tensor in state.named():
            tensor.copy_(saved[name])


LOADS: dict[str, Callable[[Any, Path], None]] = {
    "torch.load": lambda state, path: by_load_state_dict(state, torch.load(path)),
    "torch.load, mmap": lambda state, path: by_copying(state, torch.load(path, mmap=True)),
    # What it leaves in the optimizer is still on the disk: read when the first step needs it.
    "torch.load, mmap, lazy": lambda state, path: by_load_state_dict(
        state, torch.load(path, mmap=True)
    ),
    "dcp.load": dcp_load,
    "safetensors": safetensors_load,
}


def measure(workload: str, name: str) -> None:
    """In a process of its own."""
    from benchmarks.peers import ARMS
    from benchmarks.states import build

    root = Path(os.environ["EKE_BENCH_HERE"])
    state = build(workload)
    for module in ARMS[SAVED_BY[name]].needs:
        importlib.import_module(module)
    saver = ARMS[SAVED_BY[name]](state, root)
    saver.save(root / "saved", 0)
    saver.finish()
    if name == "eke":
        saver.saver.close()  # type: ignore[attr-defined]
    machine.sync_tree(root)
    kept = {key: tensor.flatten()[:64].clone() for key, tensor in state.named()}

    def load() -> None:
        if name == "eke":
            # A new one each time, as in a program that starts again.
            found = ARMS["eke"](state, root)
            found.saver.restore()  # type: ignore[attr-defined]
            closing.append(found.saver)  # type: ignore[attr-defined]
        else:
            LOADS[name](state, root / "saved")

    metrics: dict[str, list[float]] = {"warm": [], "cold": [], "memory": []}
    closing: list[Any] = []
    before = machine.counters()
    for number in range(2 * TIMES):
        state.change()
        (machine.evict if number % 2 else machine.read_through)(root)
        resident = machine.reset_peak()
        began = time.perf_counter()
        load()
        metrics["cold" if number % 2 else "warm"].append(time.perf_counter() - began)
        extra = (machine.peak_bytes() - resident) / state.nbytes
        metrics["memory"].append(max(0.0, extra))
        while closing:
            closing.pop().close()
        for key, tensor in state.named():
            if not torch.equal(tensor.flatten()[:64], kept[key]):
                raise RuntimeError(f"{name} did not bring {key} back")
    answer(metrics, machine.contamination(before, machine.counters()))


def main() -> None:
    if measuring(measure):
        return
    every = plan(REPETITIONS)
    times = {key: every[key] for key in arms_wanted(every)}
    results = collect("checkpoint_restore", times, dict.fromkeys(times, 14.0))
    publish("checkpoint_restore", results, UNITS)


if __name__ == "__main__":
    main()

"""Claim: a save costs training less time, less CPU and is durable sooner than any peer's, because
nothing is copied before `save` returns, memory is used again, and writes go around the page cache.

Every arm saves the same state (weights and AdamW of a plain MLP) in a process of its own, the first
save apart from the later ones, in interleaved order. Figures: `stall` (how long the caller is
blocked; for eke with the wait at the next update), `durable` (until files and directory are
fsynced), `CPU` (user and system seconds of the process tree for a save), `memory` (peak resident
memory above the state's). `EKE_BENCH_MIB` sets the state's size (default 1280).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.harness import interleaved, report

MIB = int(os.environ.get("EKE_BENCH_MIB", "1280"))
SAVES = 4
REPETITIONS = int(os.environ.get("EKE_BENCH_REPETITIONS", "10"))
METRICS = {"stall": "s", "durable": "s", "first": "s", "cpu": "CPU s/GiB", "memory": "MiB"}


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose weights and AdamW state take about MIB."""
    torch.manual_seed(0)
    layers = max(1, round(MIB / (3 * 16)))
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    update(model, optimizer)
    return model, optimizer


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def sync(path: Path) -> None:
    """Make a file, or a directory with all its files, durable."""
    for one in [*(path.rglob("*") if path.is_dir() else ()), path, path.parent]:
        fd = os.open(one, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


Save = Callable[[Path, int], tuple[Callable[[], None], Callable[[], None]]]
"""Starts a save; returns what the next update waits for, and what makes it durable."""


def nothing() -> None:
    pass


def eke_saver(model: torch.nn.Module, optimizer: torch.optim.Optimizer, root: Path) -> Save:
    from eke import Checkpointer, Keep

    saver = Checkpointer(root / "eke", pool="512MiB", keep=Keep(last=1))
    saver.attach(model=model, optimizer=optimizer, rng=True)

    def save(_: Path, number: int) -> tuple[Callable[[], None], Callable[[], None]]:
        ticket = saver.save(number)
        # The hook of the next update would wait; the benchmark has no forward pass to hide it in.
        return nothing, lambda: ticket.wait() and None

    return save


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def torch_saver(model: torch.nn.Module, optimizer: torch.optim.Optimizer, root: Path) -> Save:
    def save(path: Path, _: int) -> tuple[Callable[[], None], Callable[[], None]]:
        torch.save(state_of(model, optimizer), path)
        return nothing, lambda: sync(path)

    return save


def safetensors_saver(model: torch.nn.Module, optimizer: torch.optim.Optimizer, root: Path) -> Save:
    from safetensors.torch import save_file

    def save(path: Path, _: int) -> tuple[Callable[[], None], Callable[[], None]]:
        tensors = {f"model/{k}": v for k, v in model.state_dict().items()}
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{index}/{k}": v for k, v in state.items()}
        save_file(tensors, path)
        return nothing, lambda: sync(path)

    return save


def dcp_saver(model: torch.nn.Module, optimizer: torch.optim.Optimizer, root: Path) -> Save:
    import torch.distributed.checkpoint as dcp

    def save(path: Path, _: int) -> tuple[Callable[[], None], Callable[[], None]]:
        dcp.save(state_of(model, optimizer), checkpoint_id=path, no_dist=True)
        return nothing, lambda: sync(path)

    return save


def dcp_async_saver(model: torch.nn.Module, optimizer: torch.optim.Optimizer, root: Path) -> Save:
    """With a stager that is kept, which is DCP at its best on a CPU."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )

    def save(path: Path, _: int) -> tuple[Callable[[], None], Callable[[], None]]:
        future: Any = dcp.async_save(
            state_of(model, optimizer), checkpoint_id=path, async_stager=stager
        )

        def durable() -> None:
            getattr(future, "upload_completion", future).result()
            sync(path)

        return nothing, durable

    return save


ARMS = {
    "eke": eke_saver,
    "torch.save": torch_saver,
    "safetensors": safetensors_saver,
    "dcp.save": dcp_saver,
    "dcp.async_save, kept": dcp_async_saver,
}


def measure(arm: str) -> dict[str, float]:
    """In a process of its own: the medians of the saves after the first, and the first."""
    process = psutil.Process()
    with tempfile.TemporaryDirectory(dir=os.environ.get("EKE_BENCH_DIR")) as where:
        root = Path(where)
        model, optimizer = training()
        save = ARMS[arm](model, optimizer, root)
        time.sleep(1.0)  # pools are made ready before training starts
        base = process.memory_info().rss
        rows = []
        for number in range(SAVES):
            path = root / f"save{number}"
            before = sum(process.cpu_times()[:4])
            began = time.perf_counter()
            held, durable = save(path, number)
            held()
            stall = time.perf_counter() - began
            durable()
            total = time.perf_counter() - began
            rows.append((stall, total, sum(process.cpu_times()[:4]) - before))
            update(model, optimizer)
            if path.exists():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        peak = _peak_bytes()
    later = sorted(rows[1:], key=lambda row: row[1])[len(rows[1:]) // 2]
    gib = sum(p.numel() for p in model.parameters()) * 12 / 2**30
    return {
        "stall": later[0],
        "durable": later[1],
        "first": rows[0][1],
        "cpu": later[2] / gib,
        "memory": max(0.0, (peak - base) / 2**20),
    }


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(x.split()[1]) for x in status.splitlines() if x.startswith("VmHWM")) * 1024


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] == "--arm":
        print(json.dumps(measure(sys.argv[2])))
        return
    found: dict[str, dict[str, list[float]]] = {metric: {} for metric in METRICS}

    def run(arm: str) -> float:
        command = [sys.executable, "-m", "benchmarks.checkpoint_save", "--arm", arm]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        for metric, value in row.items():
            found[metric].setdefault(arm, []).append(value)
        return float(row["durable"])

    arms = {arm: (lambda arm=arm: run(arm)) for arm in ARMS}
    interleaved(arms, repetitions=REPETITIONS)
    for metric, unit in METRICS.items():
        workload = f"{metric}: AdamW state of {MIB} MiB, save {SAVES - 1} of {SAVES}"
        report("checkpoint_save", workload, unit, found[metric], baseline="eke")


if __name__ == "__main__":
    main()

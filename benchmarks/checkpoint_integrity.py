"""Claim: no changed bit of a checkpoint goes unseen; no kill loses a committed step; and a resumed
run's losses are those of a run that never stopped, bit for bit.

Every single bit of a small checkpoint is flipped in turn. A small run that saves after every step
is killed with SIGKILL at random moments, started again, and goes on, two hundred times; whatever
it was told to be committed must be there, and its losses must be those of the reference.
"""

from __future__ import annotations

import os
import random
import select
import signal
import time
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.harness import SCALE, SEED, answer, collect, measuring, publish

UNITS = dict.fromkeys(("flips", "flips missed", "kills"), "") | dict.fromkeys(
    ("steps lost", "losses differing", "losses compared"), ""
)
KILLS = max(10, round(200 * min(1.0, SCALE)))
STRIDE = max(1, round(1 / SCALE))
"""Every bit at full size; every so many bits in a try-out."""
STEPS = 25


class Run:
    """A small model with dropout, AdamW, and a schedule: a state in which every part matters."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.9)

    def step(self) -> str:
        """One step; returns its loss, exactly."""
        loss = (self.model(torch.randn(4, 8)) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return float(loss).hex()


def flips(root: Path) -> tuple[int, int]:
    """How many bits were flipped, and how many of these flips `verify` did not see."""
    from eke import Checkpointer
    from eke.checkpoint import verify

    run = Run()
    with Checkpointer(root, pool="64KiB") as saver:
        saver.attach(model=run.model, optimizer=run.optimizer, scheduler=run.schedule)
        run.step()
        path = saver.save(1).wait().path
    tried = missed = 0
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        with file.open("r+b", buffering=0) as raw:
            for bit in range(0, 8 * len(whole), STRIDE):
                place = bit // 8
                os.pwrite(raw.fileno(), bytes([whole[place] ^ 1 << bit % 8]), place)
                tried += 1
                missed += verify(path).ok
                os.pwrite(raw.fileno(), whole[place : place + 1], place)
    assert verify(path).ok
    return tried, missed


def victim(root: Path, out: int) -> None:
    """In a forked process: go on from the newest checkpoint, and tell every step and commit."""
    from eke import Checkpointer, Keep

    run = Run()
    saver = Checkpointer(root, pool="64KiB", keep=Keep(last=2))
    saver.attach(model=run.model, optimizer=run.optimizer, scheduler=run.schedule, rng=True)
    found = saver.restore()
    step = found.step if found else 0
    os.write(out, f"restored {step}\n".encode())
    last = None
    while step < STEPS:
        loss = run.step()
        step += 1
        os.write(out, f"loss {step} {loss}\n".encode())
        ticket = saver.save(step)
        if last is not None:
            last.wait()
            os.write(out, f"committed {last.step}\n".encode())
        last = ticket
    saver.close()
    os.write(out, f"committed {step}\n".encode())


def live(root: Path, limit_s: float) -> tuple[list[list[str]], bool]:
    """Start a victim, and kill it after a time; what it told, and whether it was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = 1
        try:
            victim(root, writing)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    told, until = b"", time.monotonic() + limit_s
    while (left := until - time.monotonic()) > 0:
        if select.select([reading], [], [], left)[0]:
            more = os.read(reading, 65536)
            if not more:
                break
            told += more
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    while more := os.read(reading, 65536):
        told += more
    os.close(reading)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        raise RuntimeError(f"a run failed after {told.decode().splitlines()[-1:]}")
    return [line.split() for line in told.decode().split("\n")[:-1]], os.WIFSIGNALED(status)


def kills(root: Path) -> dict[str, int]:
    """How many kills, and what they cost."""
    reference = Run()
    truth = {str(step): reference.step() for step in range(1, STEPS + 1)}
    began = time.monotonic()
    live(root / "whole", 60.0)
    whole_s = time.monotonic() - began
    rng, number, committed = random.Random(SEED), 0, 0
    count = {"kills": 0, "steps lost": 0, "losses differing": 0, "losses compared": 0}
    while count["kills"] < KILLS:
        told, killed = live(root / f"run{number}", rng.uniform(0, 0.7 * whole_s))
        count["kills"] += killed
        for what, step, *rest in told:
            if what == "restored":
                count["steps lost"] += int(step) < committed
                committed = int(step)
            elif what == "committed":
                committed = int(step)
            else:
                count["losses compared"] += 1
                count["losses differing"] += rest[0] != truth[step]
        if committed == STEPS:
            number, committed = number + 1, 0
    return count


def measure(workload: str, name: str) -> None:
    """In a process of its own, on one thread, because it forks."""
    torch.set_num_threads(1)
    root = Path(os.environ["EKE_BENCH_HERE"])
    before = machine.counters()
    count = kills(root)
    tried, missed = flips(root / "flips")
    metrics = {key: [float(value)] for key, value in count.items()}
    metrics |= {"flips": [float(tried)], "flips missed": [float(missed)]}
    answer(metrics, machine.contamination(before, machine.counters()))


def main() -> None:
    if measuring(measure):
        return
    key = ("small", "eke")
    results = collect("checkpoint_integrity", {key: 1}, {key: 120.0}, tries=1)
    publish("checkpoint_integrity", results, UNITS)


if __name__ == "__main__":
    main()

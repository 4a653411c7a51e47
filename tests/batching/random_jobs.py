"""One rank of a real gloo job that goes through random runs; run by test_loader_processes.py.

Arguments: numbers of runs, each all of what it is; `kill:STEP:RANK` behind a number ends that rank
there; `from:FILE` goes on from the state in a file. Prints one JSON line for every step, with what
this rank saw in it and the loader's state after it, and one at the end of every run.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eke.batching import DynamicLoader
from eke.distributed import barrier, init, shutdown, world
from eke.errors import EkeError

CAP = 24


class Dataset:
    """Item i has `lengths[i]` tokens; some take their time, on each rank others."""

    def __init__(self, lengths: Sequence[int], rank: int) -> None:
        self.lengths, self._rank = lengths, rank

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if (index * 7 + self._rank * 3) % 23 == 0:
            time.sleep(0.002)
        ids = [index % 30] * self.lengths[index]
        return {"input_ids": ids, "labels": ids}


def plan_of(number: int) -> dict[str, Any]:
    """What run `number` is, the same on every rank."""
    rng = random.Random(number)
    n = rng.randint(20, 120)
    lengths = [rng.choice([0, 1, 2, rng.randint(1, 24), rng.randint(1, 40)]) for _ in range(n)]
    lengths[0] = 5
    if rng.random() < 0.3:
        for i in range(1, n, 2):
            lengths[i] = 0
    return {
        "lengths": lengths,
        "epochs": rng.choice([1, 2, 5]),
        "break_at": rng.choice([None, rng.randint(1, 9)]),
        "second": rng.random() < 0.4,
        "settings": {
            "micro_tokens": CAP, "overlength": rng.choice(["truncate", "skip", "solo"]),
            "per_step": rng.choice(["tokens:48", "tokens:200", "samples:7", "samples:16"]),
            "window": rng.randint(2, 16), "seed": number, "packing": rng.random() < 0.4,
            # One start method each, in turn, and two in five without workers.
            "num_workers": (0, 1, 1, 0, 2)[number % 5],
            "start_method": (None, "fork", "forkserver", None, "spawn")[number % 5],
            "move_samples": number % 3 > 0,
        },
    }  # fmt: skip


def go(number: int, kill: tuple[int, int] | None, state: Any) -> None:
    plan, rank = plan_of(number), world().rank
    dataset = Dataset(plan["lengths"], rank)
    tell: dict[str, Any] = {"run": number, "error": "", "beside": []}

    def loader() -> DynamicLoader:
        patience = 60.0 if kill is None else 20.0
        return DynamicLoader(dataset, epochs=plan["epochs"], patience=patience, **plan["settings"])

    one = loader()
    if state is not None:
        one.load_state_dict(state)
    two = loader() if plan["second"] else None
    beside = iter(()) if two is None else two.blocks()
    try:
        first = itertools.islice(one.blocks(), plan["break_at"])
        for step, block in enumerate(itertools.chain(first, one.blocks())):
            uids = [uid for mb in block for uid in mb.uids]
            line = {"run": number, "step": step, "uids": uids, "length": len(block)}
            print(json.dumps(line | {"state": block.position}), flush=True)
            other = next(beside, None)
            if other is not None:
                tell["beside"] += [uid for mb in other for uid in mb.uids]
            if kill == (step, rank):
                os.kill(os.getpid(), signal.SIGKILL)
    except EkeError as error:
        tell["error"] = str(error)
    began = time.monotonic()
    for each in (one, two):
        if each is not None:
            each.close()
    tell["closed_soon"] = time.monotonic() - began < 30
    # A thread that holds a group ends when the others have let go of it.
    if kill is None:
        barrier()
    deadline = time.monotonic() + 30
    while left() and time.monotonic() < deadline:
        time.sleep(0.02)
    print(json.dumps(tell | {"left": left()}), flush=True)


def left() -> list[str]:
    threads = [t.name for t in threading.enumerate() if t.name.startswith("eke-")]
    return threads + [str(p.pid) for p in multiprocessing.active_children()]


if __name__ == "__main__":
    init()
    wanted, state = sys.argv[1:], None
    if wanted[0].startswith("from:"):
        state = json.loads(Path(wanted.pop(0)[5:]).read_text())
    for argument in wanted:
        number, _, kill = argument.partition(":kill:")
        step, _, victim = kill.partition(":")
        go(int(number), (int(step), int(victim)) if kill else None, state)
        if kill:
            os._exit(0)  # the job's own group has lost a rank
    shutdown()

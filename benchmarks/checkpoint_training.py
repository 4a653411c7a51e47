"""Claim: saving every ten steps inflates a training loop that fills the CPU by a few per cent only,
background work included, and by less than half of what the peers do.

A GPT-like loop (forward, backward, AdamW) runs the same steps without saving and with each saver;
the figure is the wall clock of the whole loop, the last save's end included, over that of the
loop without saves. Each arm has a process of its own, in interleaved order.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.checkpoint_save import ARMS
from benchmarks.harness import interleaved, report

LAYERS = int(os.environ.get("EKE_BENCH_LAYERS", "12"))
WIDTH = int(os.environ.get("EKE_BENCH_WIDTH", "768"))
STEPS = int(os.environ.get("EKE_BENCH_STEPS", "60"))
EVERY = 10
REPETITIONS = int(os.environ.get("EKE_BENCH_REPETITIONS", "10"))


def measure(arm: str) -> float:
    """Seconds of the loop."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, WIDTH // 64, 4 * WIDTH, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = torch.randn(2, 128, WIDTH)
    with tempfile.TemporaryDirectory(dir=os.environ.get("EKE_BENCH_DIR")) as where:
        save = None if arm == "no saves" else ARMS[arm](model, optimizer, Path(where))
        began, finish, last = 0.0, None, None
        for step in range(-2, STEPS):
            if step == 0:
                began = time.perf_counter()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if save is not None and step >= 0 and step % EVERY == EVERY - 1:
                if finish is not None:
                    finish()  # peers take one save at a time
                if last is not None and last.exists():
                    shutil.rmtree(last) if last.is_dir() else last.unlink()
                last = Path(where) / f"save{step}"
                _, finish = save(last, step)
        if finish is not None:
            finish()
        return time.perf_counter() - began


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] == "--arm":
        print(json.dumps(measure(sys.argv[2])))
        return

    def run(arm: str) -> float:
        command = [sys.executable, "-m", "benchmarks.checkpoint_training", "--arm", arm]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return float(json.loads(done.stdout.splitlines()[-1]))

    arms = {arm: (lambda arm=arm: run(arm)) for arm in ("no saves", *ARMS)}
    results = interleaved(arms, repetitions=REPETITIONS)
    workload = f"transformer {LAYERS}x{WIDTH}, {STEPS} steps, a save every {EVERY}"
    report("checkpoint_training", workload, "s", results, baseline="no saves")


if __name__ == "__main__":
    main()

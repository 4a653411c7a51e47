"""Real processes killed with SIGKILL at random moments: the end is the same, bit by bit."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eke.budget import Ledger
from eke.checkpoint import verify

BUDGET = "steps = 48"


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def identical(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a
    )


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_at_random(process: Any, rng: random.Random, run: Path) -> bool:
    """Let it get somewhere, then kill it; False when it ended first."""
    start, wanted = lines(run), rng.choice([0, 1, 2, 5, 9, 14])
    deadline = time.monotonic() + 60
    while process.is_alive() and lines(run) < start + wanted and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(rng.random() * 0.05)
    process.kill()
    process.join(20)
    return bool(process.exitcode not in (0, 3))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kills", "workers"),
    [
        (6, 0),
        pytest.param(20, 0, marks=pytest.mark.slow),
        pytest.param(20, 1, marks=pytest.mark.slow),
    ],
)
def test_killed_at_random_moments_a_run_ends_with_the_same_weights(
    tmp_path: Path,
    write_toml: Any,
    run_training: Any,
    start_training: Any,
    standing: Any,
    kills: int,
    workers: int,
) -> None:
    calm = write_toml(tmp_path / "calm", budget=BUDGET, workers=workers)
    assert run_training(calm) == 0
    hurt = write_toml(tmp_path / "hurt", budget=BUDGET, workers=workers)
    run, rng, killed = tmp_path / "hurt" / "runs" / "run", random.Random(kills + workers), 0
    while killed < kills:
        killed += kill_at_random(start_training(hurt), rng, run)
        for step in sorted((run / "checkpoints").glob("step-*")):
            assert verify(step).ok
        if (run / "model").exists():
            break
    assert run_training(hurt) == 0
    reference = tmp_path / "calm" / "runs" / "run"
    assert identical(weights(run), weights(reference))
    for kind in ("step", "eval"):
        ours, theirs = standing(run, kind), standing(reference, kind)
        assert [(r["step"], r["loss"]) for r in ours] == [(r["step"], r["loss"]) for r in theirs]
    with Ledger(run / "ledger.jsonl") as ledger:
        lost = ledger.totals()["lost"]["flops"]
        spent, calm_spent = ledger.spent("flops"), None
    with Ledger(reference / "ledger.jsonl") as ledger:
        calm_spent = ledger.spent("flops")
    assert lost is not None
    assert lost > 0
    assert spent == pytest.approx(calm_spent + lost, rel=1e-9)


@pytest.mark.timeout(120)
def test_a_flop_limit_holds_over_kills(
    tmp_path: Path, write_toml: Any, start_training: Any, run_training: Any
) -> None:
    toml = write_toml(tmp_path, budget='flops = "4e9"')
    run, rng = tmp_path / "runs" / "run", random.Random(1)
    for _ in range(3):
        kill_at_random(start_training(toml), rng, run)
    assert run_training(toml) == 3
    with Ledger(run / "ledger.jsonl") as ledger:
        spent = ledger.spent("flops")
    assert spent is not None
    assert spent <= 4e9
    assert (run / "model" / "config.json").exists()

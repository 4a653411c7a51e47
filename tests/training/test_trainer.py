"""Whole runs of the small model, in real processes."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors import safe_open

from eke.budget import Ledger
from eke.errors import EkeError
from eke.governor import Governor
from eke.training import RunConfig, Trainer, stepping


def read_status(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "status.json").read_text()))


def test_a_run_ends_in_a_model_that_transformers_loads(
    tmp_path: Path, write_toml: Any, run_training: Any, standing: Any
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    code = run_training(write_toml(tmp_path, budget="epochs = 2"))
    run = tmp_path / "runs" / "run"
    assert code == 0
    assert read_status(run)["state"] == "finished"
    evals = standing(run, "eval")
    assert evals[-1]["finished"]
    assert evals[-1]["loss"] < evals[0]["loss"] - 0.5
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert len(tokenizer) <= model.get_input_embeddings().weight.shape[0]
    newest = max((run / "checkpoints").glob("step-*"))
    seen: dict[str, torch.Tensor] = {}
    for file in newest.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - safe_open is not a mapping
                seen[key] = tensors.get_tensor(key)
    for name, value in model.state_dict().items():
        key = f"model/{name}"
        if key in seen:  # tied weights are written under one of their names
            assert torch.equal(seen[key], value)
    assert any(key.startswith("optimizer/") for key in seen)


def test_every_sample_is_seen_once_an_epoch(
    tmp_path: Path, write_toml: Any, run_training: Any, standing: Any
) -> None:
    run_training(write_toml(tmp_path, budget="epochs = 2"))
    run = tmp_path / "runs" / "run"
    steps = standing(run, "step")
    plan = json.loads((run / "plan.json").read_text())
    for epoch in (0, 1):
        assert sum(s["samples"] for s in steps if s["epoch"] == epoch) == plan["corpus"]["train"]


@pytest.mark.parametrize(
    ("budget", "unit", "limit"),
    [('flops = "3e9"', "flops", 3e9), ('tokens = "4000"', "tokens", 4000)],
)
def test_a_limit_is_approached_and_never_passed(
    tmp_path: Path, write_toml: Any, run_training: Any, budget: str, unit: str, limit: float
) -> None:
    assert run_training(write_toml(tmp_path, budget=budget)) == 3
    run = tmp_path / "runs" / "run"
    with Ledger(run / "ledger.jsonl") as ledger:
        spent = ledger.spent(unit)
    assert spent is not None
    assert 0.8 * limit < spent <= limit
    assert (run / "model" / "config.json").exists()


def test_wall_time_is_never_passed_and_bills_add_up_to_it(
    tmp_path: Path, write_toml: Any, start_training: Any
) -> None:
    limit_s = 25.0
    toml = write_toml(
        tmp_path, budget=f'wall_time = "{limit_s}s"', eval_every="50 steps", save_every="100 steps"
    )
    process = start_training(toml, "governor.actions=[]")
    started = psutil.Process(process.pid).create_time()
    process.join(100)
    wall_s = time.time() - started
    assert process.exitcode == 3
    run = tmp_path / "runs" / "run"
    with Ledger(run / "ledger.jsonl") as ledger:
        billed_s = ledger.spent("seconds")
    assert billed_s is not None
    assert billed_s <= limit_s
    assert billed_s >= 0.6 * limit_s
    assert abs(billed_s - wall_s) <= 0.05 * wall_s
    assert (run / "model" / "config.json").exists()


def test_the_decay_ends_at_a_small_rate(
    tmp_path: Path, write_toml: Any, run_training: Any, standing: Any
) -> None:
    run_training(write_toml(tmp_path, budget="steps = 60"), "governor.actions=[]")
    steps = standing(tmp_path / "runs" / "run", "step")
    assert [s["step"] for s in steps] == list(range(1, 61))
    assert [s["phase"] for s in steps[:2]] == ["warmup", "warmup"]
    decay = [s for s in steps if s["phase"] == "decay"]
    assert len(decay) == 6
    assert all(a["lr"] > b["lr"] for a, b in pairwise(decay))
    assert decay[-1]["lr"] < 0.2 * 0.003


def test_every_decision_can_be_derived_again(
    tmp_path: Path, write_toml: Any, run_training: Any, standing: Any
) -> None:
    run_training(write_toml(tmp_path, budget="steps = 120", eval_every="4 steps"))
    run = tmp_path / "runs" / "run"
    report = Governor.replay(run)
    assert report.differences == ()
    assert report.compared == sum(d["by"] == "governor" for d in standing(run, "decision"))
    assert report.compared > 5


def test_sigterm_ends_in_a_checkpoint_and_the_same_command_goes_on(
    tmp_path: Path, write_toml: Any, start_training: Any, run_training: Any, standing: Any
) -> None:
    toml = write_toml(
        tmp_path, budget="steps = 40", save_every="1000 steps", eval_every="1000 steps"
    )
    run = tmp_path / "runs" / "run"
    process = start_training(toml)
    wait_until(lambda: len(_lines(run / "metrics.jsonl")) >= 8)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 130
    status = read_status(run)
    assert status["state"] == "interrupted"
    assert (run / "checkpoints" / f"step-{status['step']:09d}" / "MANIFEST.json").exists()
    assert run_training(toml) == 0
    assert [s["step"] for s in standing(run, "step")] == list(range(1, 41))
    with Ledger(run / "ledger.jsonl") as ledger:
        assert "lost" not in ledger.totals()


def test_a_finished_run_is_left_as_it_is(
    tmp_path: Path, write_toml: Any, run_training: Any
) -> None:
    toml = write_toml(tmp_path, budget="steps = 5")
    assert run_training(toml) == 0
    before = (tmp_path / "runs" / "run" / "metrics.jsonl").read_bytes()
    assert run_training(toml) == 0
    assert (tmp_path / "runs" / "run" / "metrics.jsonl").read_bytes() == before


def test_the_resolved_configuration_gives_the_same_run(
    tmp_path: Path, write_toml: Any, run_training: Any, standing: Any
) -> None:
    run_training(write_toml(tmp_path / "a", budget="steps = 12"))
    first = tmp_path / "a" / "runs" / "run"
    run_training(first / "run.toml", f"run.dir={tmp_path / 'b'}")
    second = tmp_path / "b" / "run"
    losses = [[s["loss"] for s in standing(r, "step")] for r in (first, second)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("bad_steps", [{9}, {9, 15}])
def test_a_step_that_is_not_finite_goes_back_once_at_half_the_rate(
    tmp_path: Path,
    write_toml: Any,
    standing: Any,
    monkeypatch: pytest.MonkeyPatch,
    bad_steps: set[int],
) -> None:
    micro_losses, real_step = stepping.token_losses, stepping.Stepper.step
    now = {"step": 0}

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        now["step"] += 1
        return real_step(self, *args, **kwargs)

    def poisoned(model: Any, batch: Any) -> torch.Tensor:
        factor = float("nan") if now["step"] in bad_steps else 1.0
        return micro_losses(model, batch) * factor

    monkeypatch.setattr(stepping.Stepper, "step", step)
    monkeypatch.setattr(stepping, "token_losses", poisoned)
    config = RunConfig.load(write_toml(tmp_path, budget="steps = 20"), ["governor.actions=[]"])
    run = tmp_path / "runs" / "run"
    if len(bad_steps) == 1:
        assert Trainer(config).train().exit_code == 0
        steps = standing(run, "step")
        assert [s["step"] for s in steps if s["skipped"]] == [9]
        assert steps[9]["lr"] == pytest.approx(0.5 * steps[7]["lr"])
        assert all(math.isfinite(s["loss"]) for s in steps[9:])
    else:
        with pytest.raises(EkeError, match="not finite at step 15"):
            Trainer(config).train()
        assert read_status(run)["state"] == "failed"
        assert list((run / "checkpoints").glob("step-*"))
    guards = [d for d in standing(run, "decision") if d["by"] == "guard"]
    assert [(g["step"], g["evidence"]["to_step"]) for g in guards] == [(9, 8)]


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []

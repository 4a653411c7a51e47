"""Two ranks under torchrun: the same job, killed and resumed, and on another number of ranks."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from eke.checkpoint import verify

BUDGET = "steps = 24"


def torchrun(toml: Path, *overrides: str) -> subprocess.Popen[str]:
    sets = [part for o in overrides for part in ("--set", o)]
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--standalone",
            "-m",
            "eke",
            "train",
            str(toml),
            *sets,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(job: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = job.communicate(timeout=100)
    return job.returncode, output


def finish_ranks(start_ranks: Any, toml: Path, *overrides: str) -> tuple[list[int], str]:
    """The same job to its end, without an agent: exit codes and what was printed."""
    sets = [part for o in overrides for part in ("--set", o)]
    ranks = start_ranks(2, "-m", "eke", "train", toml, *sets)
    output = "".join(text for rank in ranks for text in rank.communicate(timeout=100))
    return [rank.returncode for rank in ranks], output


def end_all(job: subprocess.Popen[str], *, first: list[psutil.Process]) -> None:
    """SIGKILL to `first`, then to whatever of the job is left."""
    family = psutil.Process(job.pid).children(recursive=True)
    for process in [*first, *family]:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    job.kill()
    job.communicate(timeout=30)
    psutil.wait_procs(family, timeout=20)


def ranks_of(job: subprocess.Popen[str]) -> list[psutil.Process]:
    return [p for p in psutil.Process(job.pid).children() if "eke" in " ".join(p.cmdline())]


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_two_ranks_killed_and_resumed_end_with_the_same_weights(
    tmp_path: Path, write_toml: Any, start_ranks: Any, standing: Any, kills: int
) -> None:
    calm = write_toml(tmp_path / "calm", budget=BUDGET)
    codes, output = finish_ranks(start_ranks, calm)
    assert codes == [0, 0], output
    reference = tmp_path / "calm" / "runs" / "run"
    hurt = write_toml(tmp_path / "hurt", budget=BUDGET)
    run, rng, killed = tmp_path / "hurt" / "runs" / "run", random.Random(kills), 0
    while killed < kills and not (run / "model").exists():
        job, start = torchrun(hurt), lines(run)
        wanted, deadline = rng.choice([1, 3, 6]), time.monotonic() + 60
        while job.poll() is None and lines(run) < start + wanted:
            assert time.monotonic() < deadline, "no step within a minute"
            time.sleep(0.002)
        time.sleep(rng.random() * 0.1)
        killed += job.poll() is None
        end_all(job, first=rng.sample(ranks_of(job), 1) if job.poll() is None else [])
        for step in sorted((run / "checkpoints").glob("step-*")):
            assert verify(step).ok
    codes, output = finish_ranks(start_ranks, hurt)
    assert codes == [0, 0], output
    ours, theirs = weights(run), weights(reference)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    losses = [[(s["step"], s["loss"]) for s in standing(r, "step")] for r in (run, reference)]
    assert losses[0] == losses[1]


@pytest.mark.timeout(120)
def test_a_rank_that_dies_ends_the_job_with_an_error_and_loses_nothing(
    tmp_path: Path, write_toml: Any
) -> None:
    toml = write_toml(tmp_path, budget="steps = 4000")
    run, job = tmp_path / "runs" / "run", torchrun(toml)
    deadline = time.monotonic() + 60
    while lines(run) < 8:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ranks_of(job)[1].kill()
    code, output = finish(job)
    assert code != 0, output
    newest = max((run / "checkpoints").glob("step-*"))
    assert verify(newest).ok


@pytest.mark.timeout(120)
def test_two_ranks_train_the_same_samples_as_one_and_almost_the_same_numbers(
    tmp_path: Path, write_toml: Any, run_training: Any, start_ranks: Any, standing: Any
) -> None:
    two = write_toml(tmp_path / "two", budget="steps = 12")
    one = write_toml(tmp_path / "one", budget="steps = 12")
    sets = ("batch.per_step=samples:16", "batch.window=64")
    codes, output = finish_ranks(start_ranks, two, *sets)
    assert codes == [0, 0], output
    assert run_training(one, "batch.per_step=samples:16", "batch.window=128") == 0
    runs = [tmp_path / name / "runs" / "run" for name in ("two", "one")]
    ours, theirs = (standing(r, "step") for r in runs)
    assert [s["tokens"] for s in ours] == [s["tokens"] for s in theirs]
    assert [s["label_tokens"] for s in ours] == [s["label_tokens"] for s in theirs]
    first_evals = [standing(r, "eval")[0]["losses"] for r in runs]
    assert first_evals[0] == pytest.approx(first_evals[1], abs=1e-5)


@pytest.mark.timeout(120)
def test_bad_input_is_one_error_on_every_rank(tmp_path: Path, write_toml: Any) -> None:
    toml = write_toml(tmp_path, budget="steps = 2", data=tmp_path / "nowhere.jsonl")
    code, output = finish(torchrun(toml))
    assert code != 0
    assert "nowhere.jsonl" in output
    # torchrun prints a traceback of its own; none goes through eke's files.
    assert f"{os.sep}eke{os.sep}training{os.sep}" not in output

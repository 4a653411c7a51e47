"""`eke train` as a process: what it leaves behind, what it prints, and how it exits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from eke.budget import Ledger


def test_a_budget_that_stops_the_run_leaves_a_finished_model(trained: Any) -> None:
    outcome, run = trained.outcome, trained.run
    assert outcome.code == 3, outcome
    assert outcome.err == ""
    lines = outcome.out.splitlines()
    assert lines[0] == "· reading the data"
    assert any(line.startswith("finished model  held-out loss ") for line in lines)
    assert "the FLOP budget is used up" in lines[-3]
    assert lines[-3].startswith("Done after ")
    assert lines[-2:] == ["model   small/model", "report  small/report.html"]
    assert (run / "model" / "config.json").is_file()
    assert (run / "report.html").is_file()
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("finished", 3)
    with Ledger(run / "ledger.jsonl") as ledger:
        assert 0 < (ledger.spent("flops") or 0) <= 3e10


def test_a_finished_run_is_not_trained_again(trained: Any, eke_process: Callable[..., Any]) -> None:
    metrics = (trained.run / "metrics.jsonl").read_bytes()
    ended = eke_process("train", "run.toml", cwd=trained.folder)
    assert ended.code == 3
    assert ended.out.splitlines() == [
        "This run is finished already (the FLOP budget is used up).",
        "model   small/model",
        "report  small/report.html",
    ]
    assert (trained.run / "metrics.jsonl").read_bytes() == metrics


def test_another_configuration_does_not_continue_it(
    trained: Any, eke_process: Callable[..., Any]
) -> None:
    ended = eke_process("train", "run.toml", "--set", "run.seed=7", cwd=trained.folder)
    assert ended.code == 2
    assert "run.seed was 0, is now 7" in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.slow
def test_steps_that_are_done_are_done(trained: Any, eke_process: Callable[..., Any]) -> None:
    ended = eke_process(
        *("train", "run.toml", "--set", "run.name=steps"),
        *("--set", "budget.steps=2", "--set", "budget.flops=1e12", "--set", "log.every=1"),
        cwd=trained.folder,
    )
    assert ended.code == 0, ended
    assert "\nstep      1  loss " in ended.out
    assert "\nstep      2  loss " in ended.out
    assert "Done after 2 steps" in ended.out

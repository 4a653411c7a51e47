from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eke.report.model import build
from eke.report.records import load
from eke.report.view import RunView


def view_of(root: Path) -> RunView:
    return build(load(root))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def test_a_whole_run_reads_as_it_was_played(full_run: Path) -> None:
    view = view_of(full_run)
    assert view.name == "pydocs-tiny"
    assert view.state == "finished"
    assert view.exit_code == 0
    assert view.model == "builtin:tiny"
    assert view.corpus == view.eval_corpus == "builtin:pydocs"
    assert view.x_unit == "flops"
    assert [s.step for s in view.steps] == list(range(1, 241))
    assert [s.x for s in view.steps] == sorted(s.x for s in view.steps)
    assert view.last_step == 240
    assert [p.name for p in view.phases] == ["warmup", "stable", "decay"]
    assert view.phases[0].end == view.phases[1].start
    assert view.notices == ()
    assert dict(view.plan)["data.fingerprint"] == "9f2c1ab4d07e6655"


def test_the_crash_shows_as_a_restart_and_lost_work(full_run: Path) -> None:
    view = view_of(full_run)
    assert len(view.restarts) == 1
    restart = view.restarts[0]
    assert (restart.step, restart.undone_steps) == (105, 7)
    assert restart.x == next(s.x for s in view.steps if s.step == 105)
    assert [s.step for s in view.undone] == list(range(106, 113))
    lost = view.accounts.row("lost")
    assert lost is not None
    undone = lines(full_run / "ledger.jsonl")
    at = next(i for i, r in enumerate(undone) if r["kind"] == "resume")
    flops = sum(r["flops"] for r in undone[:at] if r["step"] > 105)
    assert lost.amounts["flops"].value == pytest.approx(flops + 1e12)  # and what was in flight


def test_lengths_are_the_sum_of_the_standing_steps(full_run: Path) -> None:
    view = view_of(full_run)
    assert view.lengths is not None
    assert view.lengths.samples == 240 * 48
    assert view.lengths.cap == 512
    assert len(view.lengths.counts) == 24
    assert view.lengths.left_out == 0
    record = next(r for r in lines(full_run / "metrics.jsonl") if r["kind"] == "step")
    expected = 1 - record["tokens"] / record["padded_tokens"]
    assert view.steps[0].padding == pytest.approx(expected)


def test_limits_count_lost_work_too(full_run: Path) -> None:
    view = view_of(full_run)
    by_unit = {limit.unit: limit for limit in view.limits}
    assert set(by_unit) == {"flops", "seconds"}
    assert by_unit["flops"].used == pytest.approx(view.accounts.total("flops").known)
    assert by_unit["seconds"].total == 1800
    assert view.budget_used == max(limit.share or 0 for limit in view.limits)
    left = by_unit["flops"].total - (by_unit["flops"].used or 0)
    assert view.budget_end_x is not None
    assert view.budget_end_x <= view.steps[-1].x + left * 1.0001


def test_decisions_keep_their_evidence_and_alternatives(full_run: Path) -> None:
    view = view_of(full_run)
    decay = [d for d in view.decisions if d.action == "decay"]
    assert len(decay) == 1
    assert decay[0].step == 196
    assert dict(decay[0].evidence)["epsilon"] == "0.015"
    assert decay[0].alternatives[0][0] == "stop"
    assert len([d for d in view.decisions if d.action == "continue"]) == 16
    assert dict(dict(view.config)["governor, as constructed"]) == {"epsilon": "0.015", "twice": "2"}


def test_the_final_loss_is_that_of_the_finished_model(full_run: Path) -> None:
    view = view_of(full_run)
    assert view.final is not None
    assert view.final.finished
    assert view.final == view.evals[-1]
    assert len(view.last_losses) == len(view.weights) == 64


def test_without_a_finished_model_the_last_evaluation_with_a_number_counts(
    make_run: Callable[..., Any],
) -> None:
    run = make_run()
    for record in (
        {"kind": "eval", "step": 1, "flops_total": 5.0, "loss": 3.0, "se": 0.1},
        {"kind": "eval", "step": 2, "flops_total": 9.0, "loss": float("nan"), "se": None},
    ):
        run.metrics.append(record)
    view = view_of(run.root)
    assert view.final is not None
    assert (view.final.step, view.final.finished) == (1, False)
    assert view.evals[1].loss is None


def test_the_proof_is_read(full_run: Path) -> None:
    proof = view_of(full_run).proof
    assert proof is not None
    assert proof.bit_identical is True
    assert proof.largest_difference == 0.0
    assert (proof.killed_at, proof.resumed_from) == (22, 15)
    assert len(proof.steps) == 40


def test_an_empty_run_has_a_view(make_run: Callable[..., Any]) -> None:
    view = view_of(make_run().root)
    assert view.steps == view.evals == view.decisions == view.limits == ()
    assert view.final is view.lengths is view.proof is view.budget_end_x is None
    assert view.state == "unknown"
    assert view.last_step == 0


def test_only_nan_losses_leave_steps_without_a_loss(make_run: Callable[..., Any]) -> None:
    run = make_run(steps=5)
    for step in range(1, 6):
        run.step(step, float("nan"))
    view = view_of(run.root)
    assert view.bad_losses == 5
    assert all(s.loss is None for s in view.steps)
    assert view.final is None


def test_records_of_the_wrong_shape_are_gaps_not_crashes(make_run: Callable[..., Any]) -> None:
    run = make_run()
    hostile: list[Any] = [None, "x", [], {}, -1, 1e300, True, 10**40, "\ud800<script>"]
    keys = (
        "step", "phase", "loss", "tokens", "padded_tokens", "lengths", "length_cap", "t",
        "flops_total", "tokens_total", "tokens_per_s", "budget_used", "se", "examples", "losses",
        "ranks", "fixed", "micro_batches", "weights", "finished", "action",
        "reason", "evidence", "alternatives", "config",
    )  # fmt: skip
    for value in hostile:
        for kind in ("step", "eval"):
            run.metrics.append({"kind": kind, **dict.fromkeys(keys, value)})
        for kind in ("decision", "governor"):
            run.decisions.append({"kind": kind, **dict.fromkeys(keys, value)})
        run.metrics.append({"kind": value})
        run.ledger.append({"kind": "bill", "what": value, **dict.fromkeys(keys, value)})
    run.json("plan.json", limits={"flops": "many", "tokens": -1}, parameters=None)
    run.json("status.json", state=7, reason=["x"])
    run.json("resume_proof.json", steps=[1, "x"], reference_losses=[None, 2], resumed_losses=[1, 2])
    view = view_of(run.root)
    assert len(view.steps) == len(view.evals) == len(hostile)
    assert view.limits == ()


def test_limits_fall_back_to_the_configuration(make_run: Callable[..., Any]) -> None:
    run = make_run(steps=3)
    run.config(budget={"tokens": "1M", "steps": 10, "wall_time": "10m", "memory": "1GiB"})
    (run.root / "plan.json").unlink()
    for step in (1, 2, 3):
        run.step(step)
    by_unit = {limit.unit: limit for limit in view_of(run.root).limits}
    assert by_unit["seconds"].total == 600
    assert by_unit["steps"].share == pytest.approx(0.3)
    assert by_unit["tokens"].used == run.tokens
    run.config(budget={"wall_time": "soon"})
    (run.root / "plan.json").unlink()
    view = view_of(run.root)
    assert view.limits == ()
    assert "budget in run.toml could not be read" in view.notices[0]


def test_a_run_without_flops_is_shown_by_step(make_run: Callable[..., Any]) -> None:
    run = make_run()
    for step in (1, 2):
        run.metrics.append({"kind": "step", "step": step, "loss": 2.0})
    view = view_of(run.root)
    assert view.x_unit == "step"
    assert [s.x for s in view.steps] == [1.0, 2.0]


def test_histograms_with_other_bins_are_left_out(make_run: Callable[..., Any]) -> None:
    run = make_run()
    for step, cap in enumerate((100, 100, 200), 1):
        run.metrics.append({"kind": "step", "step": step, "lengths": [1, 2], "length_cap": cap})
    lengths = view_of(run.root).lengths
    assert lengths is not None
    assert (lengths.counts, lengths.cap, lengths.left_out) == ((2.0, 4.0), 100.0, 1)


def test_two_crashes_undo_what_each_of_them_lost(make_run: Callable[..., Any]) -> None:
    run = make_run(steps=30)
    run.checkpoint(0)
    for step in (1, 2, 3):
        run.step(step)
    run.checkpoint(3)
    for step in (4, 5):
        run.step(step)
    run.kill_and_resume(3)
    run.step(4)
    run.kill_and_resume(0)
    run.step(1)
    view = view_of(run.root)
    assert [s.step for s in view.steps] == [1]
    assert [(r.step, r.undone_steps) for r in view.restarts] == [(3, 2), (0, 4)]
    assert sorted(s.step for s in view.undone) == [1, 2, 3, 4, 4, 5]

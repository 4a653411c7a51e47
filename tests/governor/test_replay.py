"""Replay: a run's files give its decisions again, and a changed file is found out."""

from __future__ import annotations

import json
import math

import pytest

from eke.budget.jsonl import JsonlFile
from eke.errors import EkeError, InputError
from eke.governor import Evaluation, Governor


def write(path, curve, *, evaluations=None, governor=None, resume_at=None):
    """Write a run's records as training does; with `resume_at`, crash there and resume earlier."""
    governor = governor or Governor(
        horizon=curve.horizon,
        bigram_loss=curve.bigram_loss,
        from_scratch=curve.from_scratch,
        scheduled_changes=curve.scheduled_changes,
    )
    restarts = list(curve.restarts)
    with JsonlFile(path / "metrics.jsonl") as metrics, JsonlFile(path / "decisions.jsonl") as log:
        log.append({"kind": "governor", "config": governor.config()})
        saved = None
        queue = list(evaluations or curve.evaluations)
        while queue:
            evaluation = queue.pop(0)
            if resume_at is not None and evaluation.step == resume_at[1]:
                saved = governor.state_dict(), metrics.offset, log.offset, [evaluation, *queue]
            if resume_at is not None and evaluation.step == resume_at[0]:
                assert saved is not None
                state, metrics_offset, log_offset, queue = saved
                governor = Governor.from_config(governor.config())
                governor.load_state_dict(json.loads(json.dumps(state)))
                metrics.mark_resume(metrics_offset, step=resume_at[1])
                log.mark_resume(log_offset, step=resume_at[1])
                resume_at = None
                continue
            while restarts and evaluation.cost >= restarts[0]:
                governor.note_event("restart", restarts.pop(0))
            metrics.append({"kind": "step", "step": evaluation.step, "loss": 1.0})
            metrics.append(
                {
                    "kind": "eval",
                    "step": evaluation.step,
                    "cost": evaluation.cost,
                    "losses": list(evaluation.losses),
                    "finished": False,
                }
            )
            decision = governor.observe(
                step=evaluation.step, cost=evaluation.cost, losses=evaluation.losses
            )
            log.append({"kind": "decision", **decision.to_json(), "t": 0.0})
            if decision.action != "continue":
                break
        metrics.append({"kind": "eval", "step": 10**6, "losses": [1.0] * 64, "finished": True})
    return evaluation


def edit(path, change):
    """Rewrite a file's lines through `change(value) -> value | None`."""
    values = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(v) + "\n" for v in values if v is not None))


def test_every_recorded_curve_replays_bit_by_bit(curves, tmp_path):
    for curve in curves:
        run = tmp_path / curve.name
        write(run, curve)
        report = Governor.replay(run)
        assert report.ok, report.differences
        lines = (run / "decisions.jsonl").read_text().count("\n")
        assert report.compared == lines - 1 > 5


def test_a_changed_loss_is_found_out_from_there_on(curves, tmp_path):
    curve = curves[0]
    write(tmp_path, curve)
    target = curve.evaluations[10].step

    def change(value):
        if value["kind"] == "eval" and value["step"] == target:
            value["losses"][3] += 1e-9
        return value

    edit(tmp_path / "metrics.jsonl", change)
    report = Governor.replay(tmp_path)
    assert not report.ok
    assert any(d.startswith(f"step {target}: ") for d in report.differences)
    assert not any(
        d.startswith(f"step {e.step}: ") for d in report.differences for e in curve.evaluations[:10]
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: {**d, "action": "continue"}, "the run chose 'continue', the rule chooses"),
        (lambda d: {**d, "evidence": {**d["evidence"], "slope": 0.0}}, "slope was 0.0"),
        (lambda d: {**d, "evidence": {**d["evidence"], "more": 1}}, "more is recorded but not"),
        (
            lambda d: {
                **d,
                "evidence": {k: v for k, v in d["evidence"].items() if k != "se_paired"},
            },
            "se_paired is missing",
        ),
        (lambda d: {**d, "evidence": {**d["evidence"], "horizon": 1e6}}, "is derived as"),
        (lambda d: {**d, "evidence": {}}, "cannot be derived again"),
        (lambda d: {**d, "step": d["step"] + 1}, "no evaluation for this decision"),
    ],
)
def test_a_changed_decision_is_found_out(curves, tmp_path, change, says):
    last = write(tmp_path, curves[8]).step
    edit(
        tmp_path / "decisions.jsonl",
        lambda v: change(v) if v.get("step") == last else v,
    )
    report = Governor.replay(tmp_path)
    assert not report.ok
    assert any(says in text for text in report.differences), report.differences


def test_a_missing_evaluation_or_decision_is_found_out(curves, tmp_path):
    curve = curves[8]
    write(tmp_path, curve)
    gone = curve.evaluations[9].step
    decisions = (tmp_path / "decisions.jsonl").read_text()
    edit(
        tmp_path / "decisions.jsonl",
        lambda v: None if v.get("kind") == "decision" and v["step"] == gone else v,
    )
    report = Governor.replay(tmp_path)
    assert any("evaluations was" in d for d in report.differences)
    (tmp_path / "decisions.jsonl").write_text(decisions)
    assert Governor.replay(tmp_path).ok
    edit(
        tmp_path / "metrics.jsonl",
        lambda v: None if v.get("kind") == "eval" and v["step"] == gone else v,
    )
    report = Governor.replay(tmp_path)
    assert f"step {gone}: metrics.jsonl has no evaluation for this decision" in report.differences


def test_what_a_resume_undid_is_left_out(curves, tmp_path):
    curve = curves[8]
    steps = [e.step for e in curve.evaluations]
    write(tmp_path, curve, resume_at=(steps[20], steps[14]))
    raw = (tmp_path / "decisions.jsonl").read_text()
    assert raw.count(f'"action":"continue","step":{steps[16]},') == 2
    report = Governor.replay(tmp_path)
    assert report.ok, report.differences
    assert report.compared == len({json.loads(x)["step"] for x in raw.splitlines()[1:]})


def test_a_torn_last_line_is_dropped(curves, tmp_path):
    write(tmp_path, curves[8])
    with (tmp_path / "decisions.jsonl").open("a") as file:
        file.write('{"kind":"decision","st')
    assert Governor.replay(tmp_path).ok


def test_a_changing_horizon_and_events_replay(curves, tmp_path):
    curve = next(c for c in curves if c.name == "warm_ft_A")

    class Growing(Governor):
        def observe(self, *, step, cost, losses):
            if step == curve.evaluations[12].step:
                self.set_horizon(self.horizon * 2)
                self.note_event("switch", cost)
            return super().observe(step=step, cost=cost, losses=losses)

    write(tmp_path, curve, governor=Growing(horizon=curve.horizon, actions={"rollback"}))
    report = Governor.replay(tmp_path)
    assert report.ok, report.differences
    assert report.compared == len(curve.evaluations)


def test_a_loss_that_is_not_finite_replays(curves, tmp_path):
    curve = curves[8]
    dead = Evaluation(240, 240.0, (math.nan, math.inf, *curve.evaluations[10].losses[2:]))
    write(tmp_path, curve, evaluations=[*curve.evaluations[:10], dead])
    report = Governor.replay(tmp_path)
    assert report.ok, report.differences
    last = json.loads((tmp_path / "decisions.jsonl").read_text().splitlines()[-1])
    assert (last["action"], last["evidence"]["not_finite_examples"]) == ("rollback", 2)


def test_without_a_cost_in_the_metrics_the_evidence_has_it(curves, tmp_path):
    write(tmp_path, curves[8])
    edit(tmp_path / "metrics.jsonl", lambda v: {key: x for key, x in v.items() if key != "cost"})
    assert Governor.replay(tmp_path).ok


def test_what_cannot_be_replayed_is_refused(curves, tmp_path):
    with pytest.raises(InputError, match="no decisions to replay"):
        Governor.replay(tmp_path / "nowhere")
    write(tmp_path, curves[8])
    lines = (tmp_path / "decisions.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "decisions.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(InputError, match="does not begin with the governor's configuration"):
        Governor.replay(tmp_path)
    (tmp_path / "decisions.jsonl").write_text(lines[0] + "{not json}\n" + lines[1])
    with pytest.raises(EkeError, match="damaged"):
        Governor.replay(tmp_path)

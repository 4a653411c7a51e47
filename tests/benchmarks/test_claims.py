"""Every row of the table of measures is decided by figures that the benchmarks really take."""

import importlib
from pathlib import Path

import pytest
from benchmarks.__main__ import NAMES
from benchmarks.claims import CLAIMS, KEPT, MUSTS, Claim, judge, verdicts

from benchmarks import (
    batching_efficiency,
    batching_planner,
    batching_robustness,
    batching_throughput,
    checkpoint_integrity,
    checkpoint_restore,
    checkpoint_save,
)
from benchmarks import checkpoint_training as training

SCRIPTS = {
    "checkpoint_save": checkpoint_save,
    "checkpoint_training": training,
    "checkpoint_restore": checkpoint_restore,
    "checkpoint_integrity": checkpoint_integrity,
    "batching_planner": batching_planner,
    "batching_throughput": batching_throughput,
    "batching_robustness": batching_robustness,
}
ALL = {**SCRIPTS, "batching_efficiency": batching_efficiency}
RATIO = Claim("cpu", "checkpoint_save", "W1", "cpu", 0.3, against=(KEPT, "floor"))
PLAIN = Claim("return", "checkpoint_save", "W1", "return", 0.005, "s")


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_imports_and_there_is_no_other(name):
    assert callable(importlib.import_module(f"benchmarks.{name}").main)


def test_every_benchmark_is_listed():
    claims = {
        p.stem for p in Path(training.__file__).parent.glob("*.py") if "main()" in p.read_text()
    }
    assert claims - {"__main__", "chart"} == set(NAMES)


def test_every_row_has_claims_and_every_claim_a_row():
    assert {claim.row for claim in CLAIMS} == set(MUSTS)
    assert len({claim.text for claim in CLAIMS}) == len(CLAIMS)


def test_every_workload_of_a_row_is_judged():
    judged = {row: {c.workload for c in CLAIMS if c.row == row} for row in MUSTS}
    assert judged["return"] == {"W1", "W2", "W2+AdamW", "W3", "W5"}
    assert judged["small"] == {"W2", "W2+AdamW"}
    for row in ("cpu", "durable", "memory"):
        assert judged[row] == {"W1", "W3"}


@pytest.mark.parametrize("claim", [c for c in CLAIMS if c.script in SCRIPTS], ids=lambda c: c.text)
def test_what_a_claim_needs_is_measured(claim):
    script = SCRIPTS[claim.script]
    plan = getattr(script, "plan", lambda _: {("small", "eke"): 1})(5)
    for arm in (claim.arm, *claim.against):
        assert plan.get((claim.workload, arm), 0) >= 1, (claim.workload, arm)
    assert claim.metric in script.UNITS
    assert (claim.against_metric or claim.metric) in script.UNITS


@pytest.mark.parametrize("script", ["checkpoint_save", "checkpoint_training", "checkpoint_restore"])
def test_what_decides_is_repeated_as_often_as_was_asked_for(script):
    plan = SCRIPTS[script].plan(7)
    deciding = [c for c in CLAIMS if c.script == script and c.workload == "W1" and c.arm == "eke"]
    for claim in deciding:
        for arm in (claim.arm, *claim.against):
            assert plan[claim.workload, arm] == 7


def test_a_ratio_is_to_the_lowest_median_of_the_baselines():
    values = {
        ("W1", "eke", "cpu"): [1.0, 2.0, 9.0],
        ("W1", KEPT, "cpu"): [8.0, 8.0, 8.0],
        ("W1", "floor", "cpu"): [100.0, 10.0, 0.0],
    }
    found = judge(RATIO, values)
    assert found.measured == pytest.approx(2 / 8)
    assert found.p95 == pytest.approx(8.3 / 8)
    assert found.met is True
    assert judge(RATIO, values | {("W1", "floor", "cpu"): [4.0]}).met is False
    assert found.row("")["verdict"] == "met"


def test_where_more_is_better_the_best_baseline_is_the_largest():
    claim = Claim("padded", "x", "w", "efficiency", 1.0, against=("a", "b"), arm="e", at_least=True)
    values = {("w", "a", "efficiency"): [0.5], ("w", "b", "efficiency"): [0.8]}
    assert judge(claim, values | {("w", "e", "efficiency"): [0.8, 0.9, 0.7]}).met is True
    assert judge(claim, values | {("w", "e", "efficiency"): [0.79]}).met is False
    assert claim.text == "w: e efficiency >= 1 x best of a, b"


def test_a_plain_amount_and_its_limit():
    key = ("W1", "eke", "return")
    assert judge(PLAIN, {key: [0.004, 0.005, 0.9]}).met is True
    assert judge(PLAIN, {key: [0.0051]}).met is False
    assert judge(PLAIN, {key: [0.0051]}).row("")["verdict"] == "NOT MET"


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "eke has no figure"),
        ({("W1", "eke", "cpu"): []}, "eke has no figure"),
        ({("W1", "eke", "cpu"): [1.0]}, "no baseline has a figure"),
        ({("W1", "eke", "cpu"): [1.0], ("W1", KEPT, "cpu"): [0.0]}, "lost in noise"),
    ],
)
def test_what_cannot_be_decided_is_neither_met_nor_not(values, why):
    found = judge(RATIO, values)
    assert found.met is None
    assert why in found.why
    assert found.row("")["verdict"] == "not measured"


def test_a_peer_that_failed_does_not_decide_for_the_others():
    values = {("W1", "eke", "cpu"): [1.0], ("W1", "floor", "cpu"): [5.0]}
    assert judge(RATIO, values).met is True


def test_each_script_gives_a_verdict_on_each_of_its_claims():
    texts = [v.claim.text for script in ALL for v in verdicts(script, {})]
    assert sorted(texts) == sorted(claim.text for claim in CLAIMS)

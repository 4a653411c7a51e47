"""Going on under other limits: the rules, and a real run that is given more steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.budget.jsonl import Record, read_records
from eke.errors import InputError
from eke.training.config import RunConfig
from eke.training.raising import check_limits, decay_under, goes_on, progress_of
from eke.training.rundir import continued, differences
from eke.training.schedule import Decay

UNITS = ["seconds", "flops", "tokens", "steps", "epochs", "joules", "money"]
amounts = st.dictionaries(st.sampled_from(UNITS), st.floats(1, 1e12))


@given(amounts, amounts)
def test_no_limit_may_be_below_what_is_spent(
    limits: dict[str, float], spent: dict[str, float]
) -> None:
    below = [u for u in limits if u in spent and spent[u] > limits[u] * (1 + 1e-9)]
    if below:
        with pytest.raises(InputError, match="is below what this run has spent"):
            check_limits(limits, spent)
    else:
        check_limits(limits, spent)


@given(st.dictionaries(st.sampled_from(UNITS), st.floats(1, 1e12), min_size=1), st.data())
def test_only_the_limit_that_ended_a_run_lets_it_go_on(
    before: dict[str, float], data: st.DataObject
) -> None:
    now = {unit: data.draw(st.sampled_from([total, total * 2])) for unit, total in before.items()}
    unit = data.draw(st.sampled_from([None, *before]))
    status = {"unit": unit, "limits": before, "reason": "why"}
    if now == before:
        assert not goes_on(status, now)
    elif unit is not None and now[unit] > before[unit]:
        assert goes_on(status, now)
    else:
        with pytest.raises(InputError):
            goes_on(status, now)


def test_a_run_of_an_earlier_release_stays_finished() -> None:
    assert not goes_on({"state": "finished"}, {"steps": 9.0})


def test_a_decay_ends_with_the_limit_that_asked_for_it() -> None:
    by_limit = Decay({"steps": 1.0}, {"steps": 2.0}, "why", "steps")
    by_governor = Decay({"steps": 1.0}, {"steps": 2.0}, "why")
    old, new = {"steps": 2.0}, {"steps": 4.0}
    assert decay_under(by_limit, old, new) is None
    assert decay_under(by_limit, old, old) is by_limit
    assert decay_under(by_limit, {}, new) is by_limit  # an old checkpoint does not say
    assert decay_under(by_governor, old, new) is by_governor


def test_progress_is_that_of_the_steps_that_stand() -> None:
    def step(offset: int, number: int) -> Record:
        value = {"kind": "step", "step": number, "tokens_total": 10 * number, "epoch": 0}
        return Record(offset, value)

    undone = Record(30, {"kind": "resume", "from_offset": 20})
    assert progress_of([step(0, 1), step(10, 2), step(20, 3), undone])["steps"] == 2
    assert progress_of([]) == {}


def test_limits_change_and_neither_come_nor_go() -> None:
    stored = RunConfig.from_mapping({"budget": {"steps": 5}})

    def differing(**budget: Any) -> list[str]:
        found = differences(stored, RunConfig.from_mapping({"budget": budget}))
        return [key for key, _, _ in found]

    assert differing(steps=9) == differing(steps=4) == []
    assert differing() == ["budget.steps"]
    assert differing(steps=5, tokens=10) == ["budget.tokens"]
    assert differing(steps=5, memory="1GiB") == ["budget.memory"]
    given_now = RunConfig.from_mapping({"budget": {"steps": 9}})
    assert continued(stored, given_now).budget.steps == 9


def test_a_run_that_a_limit_ended_goes_on_under_a_larger_one(
    tmp_path: Path, write_toml: Any, run_training: Any, standing: Any
) -> None:
    toml = write_toml(tmp_path, budget="steps = 6")
    run = tmp_path / "runs" / "run"
    more = "governor.reserve=0.4"
    assert run_training(toml, more) == 0
    assert run_training(toml, more, "budget.steps=12") == 0
    steps = standing(run, "step")
    assert [s["step"] for s in steps] == list(range(1, 13))
    rates = [s["lr"] for s in steps]
    assert rates[5] < rates[6]  # the first decay is over
    assert rates[11] < max(rates[6:])  # and there is another
    # The step that was too much for the first limit is the first one of the second.
    assert run_training(write_toml(tmp_path / "whole", budget="steps = 12"), more) == 0
    whole = standing(tmp_path / "whole" / "runs" / "run", "step")
    assert [s["lengths"] for s in steps] == [s["lengths"] for s in whole]
    status = json.loads((run / "status.json").read_text())
    assert (status["step"], status["limits"], status["unit"]) == (12, {"steps": 12.0}, "steps")
    ledger = [r.value for r in read_records(run / "ledger.jsonl")]
    (note,) = (v for v in ledger if v["kind"] == "limits")
    assert (note["before"], note["now"], note["step"]) == ({"steps": 6.0}, {"steps": 12.0}, 6)
    # Below what is spent nothing is touched; the same again is left as it is.
    before = (run / "metrics.jsonl").read_bytes()
    assert run_training(toml, more, "budget.steps=9") == 2
    assert run_training(toml, more, "budget.steps=12") == 0
    assert (run / "metrics.jsonl").read_bytes() == before
    assert json.loads((run / "status.json").read_text()) == status
    trace = json.loads((run / "trace.json").read_text())
    assert [e["args"]["step"] for e in trace if e["name"] == "resumed"] == [6]

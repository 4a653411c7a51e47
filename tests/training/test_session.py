"""What the loop's helpers share: costs in every limited unit, bills, and records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eke.budget import Budget, Decision
from eke.budget.jsonl import read_records
from eke.training.billing import Biller
from eke.training.config import RunConfig
from eke.training.rundir import RunDir
from eke.training.session import Session, agreed, steadfast
from eke.training.setup import Prepared, prepare
from eke.training.state import RunState


@pytest.fixture(scope="module")
def prepared(model_dir: Path, corpus: Path) -> Prepared:
    raw = {
        "model": {"source": str(model_dir)},
        "data": {"train": str(corpus), "overlength": "truncate", "workers": 0},
        "batch": {"per_step": "tokens:256", "micro_tokens": 128},
        "run": {"device": "cpu"},
    }
    return prepare(RunConfig.from_mapping(raw))


@pytest.fixture
def session(prepared: Prepared, tmp_path: Path) -> Iterator[Session]:
    run = RunDir(tmp_path / "run")
    run.open()
    budget, seen = Budget(steps=100), list[Any]()
    made = Session(prepared, budget, RunState(), run, Biller(run.ledger, budget), seen.append, 0.5)
    made.seen = seen  # type: ignore[attr-defined]
    yield made
    run.close()


def test_a_step_in_tokens_and_in_samples(session: Session) -> None:
    lengths = session.prepared.lengths
    assert session.mean_length == round(sum(lengths) / len(lengths))
    assert session.step_tokens == 256
    config = session.config.with_values({"batch": {"per_step": "samples:10"}})
    session.prepared = replace(session.prepared, config=config)
    assert session.step_tokens == 10 * session.mean_length


def test_spent_joins_the_clock_and_the_progress(session: Session) -> None:
    session.state.step, session.state.tokens = 3, 700
    session.state.samples = len(session.prepared.train) // 2
    session.charge("train", flops=5e6)
    spent = session.spent()
    assert {"flops", "seconds", "tokens", "steps", "epochs"} <= spent.keys()
    assert (spent["flops"], spent["tokens"], spent["steps"]) == (5e6, 700, 3)
    assert spent["epochs"] == pytest.approx(0.5, abs=0.01)
    session.biller = None  # on another rank
    assert session.spent().keys() == {"tokens", "steps", "epochs"}


def test_dropped_samples_are_part_of_the_epoch(session: Session) -> None:
    """Else a run over data of which much is skipped would end before its decay."""
    session.state.samples = len(session.prepared.train) - 100
    session.state.dropped = 100
    assert session.spent()["epochs"] == 1


def test_finishing_costs_in_every_limited_unit(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = session.prepared
    session.eval_s = 2.0
    cost = session.finish_cost()
    assert cost == {"flops": p.holdout.flops(p.shape), "seconds": 1.3 * 2 + 2.6 * 0.5 + 1}
    assert session.eval_cost() == {"flops": cost["flops"], "seconds": 2.6}
    session.budget = Budget(price_per_hour=7200.0, money=9.0, joules=100.0, currency="USD")
    monkeypatch.setattr(Session, "spent", lambda _: {"seconds": 10.0, "joules": 300.0})
    priced = session.finish_cost()
    assert priced["money"] == pytest.approx(2 * priced["seconds"])
    assert priced["joules"] == pytest.approx(30 * priced["seconds"])
    assert set(session.budget.limits()) <= priced.keys()


def test_money_needs_seconds_and_a_price(session: Session) -> None:
    assert session.with_money({"seconds": 3600.0}) == {"seconds": 3600.0}
    session.budget = Budget(price_per_hour=2.0)
    assert session.with_money({"seconds": 3600.0}) == {"seconds": 3600.0, "money": 2.0}
    assert session.with_money({"flops": 1.0}) == {"flops": 1.0}


def test_bills_carry_the_step(session: Session) -> None:
    session.state.step = 4
    session.gather("govern")
    session.charge("eval", flops=7.0)
    session.flush()
    assert {(b.what, b.step) for b in session.run.ledger.bills} == {("govern", 4), ("eval", 4)}


def test_without_a_clock_nothing_is_billed(session: Session) -> None:
    session.biller = None
    assert session.charge("eval", flops=7.0) == 0
    session.gather("wait")
    session.flush()
    assert session.run.ledger.bills == ()


def test_records_go_to_the_file_and_to_the_observer(session: Session) -> None:
    session.log("metrics", {"kind": "step", "step": 1})
    session.record(Decision("decay", 2, "Enough.", {"a": 1}), by="governor")
    session.say("hello")
    (metric,) = (r.value for r in read_records(session.run.path / "metrics.jsonl"))
    (decision,) = (r.value for r in read_records(session.run.path / "decisions.jsonl"))
    assert (metric["kind"], metric["step"]) == ("step", 1)
    assert decision["kind"] == "decision"
    assert (decision["by"], decision["ledger_offset"]) == ("governor", session.run.ledger.offset)
    assert Decision.from_json(decision) == Decision("decay", 2, "Enough.", {"a": 1})
    seen = session.seen  # type: ignore[attr-defined]
    assert seen == [metric, decision, {"kind": "say", "text": "hello"}]


def test_alone_a_rank_agrees_with_itself() -> None:
    assert agreed({"a": [1, 2.5, None]}) == {"a": [1, 2.5, None]}


def test_an_observer_whose_output_is_gone_falls_silent() -> None:
    seen: list[Any] = []

    def observer(record: Any) -> None:
        seen.append(record)
        if len(seen) == 2:
            raise SystemExit(1)  # what rich does at a closed pipe

    tell = steadfast(observer)
    for n in range(4):
        tell({"n": n})
    assert seen == [{"n": 0}, {"n": 1}]
    with pytest.raises(ValueError, match="a mistake"):
        steadfast(lambda _: raise_a_mistake())({})


def raise_a_mistake() -> None:
    raise ValueError("a mistake")

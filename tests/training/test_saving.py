"""When to save, what a save holds, and the ways back."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eke.budget import Bill, Budget
from eke.budget.jsonl import Record, effective, read_records
from eke.checkpoint import Checkpointer, Keep
from eke.errors import EkeError, InputError
from eke.training import saving as saving_module
from eke.training.billing import Biller
from eke.training.config import RunConfig
from eke.training.rundir import RunDir
from eke.training.saving import Saving, first_lost
from eke.training.session import Session
from eke.training.setup import Prepared, prepare
from eke.training.state import RunState
from eke.training.stepping import build_optimizer

# ---------------------------------------------------------------------- the cadence


class Hand:
    """A clock moved by hand."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    clock = Hand()
    monkeypatch.setattr(saving_module, "time", clock)
    return clock


@pytest.fixture(scope="module")
def base(model_dir: Path, corpus: Path) -> Prepared:
    raw = {
        "model": {"source": str(model_dir)},
        "data": {"train": str(corpus), "overlength": "truncate", "workers": 0},
        "run": {"device": "cpu"},
        "optimizer": {"lr": 0.01},
    }
    return prepare(RunConfig.from_mapping(raw))


Make = Callable[..., tuple[Saving, Session]]


@pytest.fixture
def make(base: Prepared, tmp_path: Path) -> Iterator[Make]:
    """A run with a model of its own, its checkpointer and its logs, opened (again)."""
    opened: list[tuple[Saving, RunDir]] = []

    def close() -> None:
        while opened:
            saving, run = opened.pop()
            saving.close()
            run.close()

    def made(budget: Budget | None = None, **checkpoint: Any) -> tuple[Saving, Session]:
        close()
        config = base.config.with_values({"checkpoint": checkpoint})
        prepared = replace(base, config=config, model=copy.deepcopy(base.model))
        run = RunDir(tmp_path / "run")
        run.open()
        budget = budget or Budget(steps=100)
        state = RunState()
        session = Session(
            prepared, budget, state, run, Biller(run.ledger, budget), lambda _: None, 0.5
        )
        keep = Keep(config.checkpoint.keep_last)
        saver = Checkpointer(run.checkpoints, keep=keep, durability="none")
        optimizer = build_optimizer(prepared.model, config, prepared.device)
        session.optimizer = optimizer  # type: ignore[attr-defined]
        saver.attach(model=prepared.model, optimizer=optimizer, extra={"run": state})
        saving = Saving(session, saver)
        opened.append((saving, run))
        return saving, session

    yield made
    close()


def train(session: Session, steps: int = 1) -> None:
    """Real updates on a fixed batch, and the bill of each."""
    model, optimizer = session.prepared.model, session.optimizer  # type: ignore[attr-defined]
    ids_BT = torch.arange(24).view(2, 12)
    for _ in range(steps):
        model(input_ids=ids_BT, labels=ids_BT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.state.step += 1
        session.charge("train", flops=1e6)


def weights(session: Session) -> list[torch.Tensor]:
    return [p.detach().clone() for p in session.prepared.model.parameters()]


def moments(session: Session) -> list[torch.Tensor]:
    states = session.optimizer.state.values()  # type: ignore[attr-defined]
    return [s["exp_avg"].clone() for s in states]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_due_by_steps(make: Make) -> None:
    saving, session = make(every="4 steps")
    due = []
    for _ in range(9):
        due.append(saving.due())  # asked before the step that it is about
        session.state.step += 1
    assert due == [False, False, False, True] * 2 + [False]


def test_due_by_time(make: Make, hand: Hand) -> None:
    saving, session = make(every="2m")
    hand.now_s += 119
    assert not saving.due()
    hand.now_s += 1
    assert saving.due()
    train(session)
    saving.save()
    assert not saving.due()


def test_due_by_what_saves_and_failures_cost(make: Make, hand: Hand) -> None:
    saving, session = make(every="auto", mtbf="1h")
    session.save_s = 0.5
    interval_s = math.sqrt(2 * 0.5 * 3600)
    hand.now_s += interval_s - 0.01
    assert not saving.due()
    hand.now_s += 0.02
    assert saving.due()
    session.save_s = 2.0  # dearer saves come half as often
    assert not saving.due()
    hand.now_s += interval_s
    assert saving.due()


def test_what_auto_decides_is_logged_with_its_reason_once(make: Make, hand: Hand) -> None:
    saving, session = make(every="auto", mtbf="1h")
    session.stall_s, session.save_s = 0.02, 0.5
    for _ in range(3):
        saving.due()
    session.stall_s = 1.0
    saving.due()
    records = [r.value for r in read_records(session.run.path / "decisions.jsonl")]
    assert [r["kind"] for r in records] == ["cadence", "cadence"]
    first, second = records
    assert (first["seconds"], first["why"]) == (math.sqrt(2 * 0.02 * 3600), "failures")
    assert (second["seconds"], second["why"], second["share"]) == (
        math.sqrt(2 * 1.0 * 3600), "failures", pytest.approx(1 / math.sqrt(7200))
    )  # fmt: skip
    assert first["reason"].startswith("this loses least")


def test_steps_that_a_save_slows_are_part_of_its_cost(make: Make, hand: Hand) -> None:
    saving, session = make(every="auto", mtbf="1h")
    for _ in range(4):
        session.slow_down.step(1.0, 1e6)
    train(session)
    saving.save()
    session.slow_down.step(1.5, 1e6)
    session.slow_down.step(1.25, 1e6)
    assert saving.newest() == 1  # waits for it, and learns what it cost
    assert session.slow_down.background_s == pytest.approx(0.75)
    session.slow_down.step(9.0, 1e6)  # a slow step without a save is not a save's
    assert session.slow_down.background_s == pytest.approx(0.75)


# ---------------------------------------------------------------------- a save


def test_a_save_is_billed_and_remembers_the_logs(make: Make) -> None:
    saving, session = make()
    train(session, 3)
    session.log("metrics", {"kind": "step", "step": 3})
    assert saving.newest() is None
    saving.save()
    assert saving.newest() == 3
    assert session.run.ledger.bills[-1].what == "checkpoint"
    assert session.stall_s is not None
    assert 0 < session.stall_s <= session.save_s  # the rest was done in the background
    assert session.state.offsets["metrics"] == session.run.metrics.offset
    assert session.state.offsets["ledger"] < session.run.ledger.offset


def test_a_step_is_saved_once(make: Make) -> None:
    saving, session = make()
    train(session)
    saving.save()
    bills = len(session.run.ledger.bills)
    saving.save()
    assert len(session.run.ledger.bills) == bills


def test_the_best_step_outlives_the_retention(make: Make) -> None:
    saving, session = make(keep_last=1)
    for step in range(1, 5):
        train(session)
        if step == 2:
            session.state.best_step = 2
        saving.save()
    assert saving.newest() == 4
    saving.back_to(2)
    with pytest.raises(InputError, match="no checkpoint of step 3"):
        saving.back_to(3)


# ---------------------------------------------------------------------- going back


def test_a_new_process_goes_on_from_the_newest(make: Make, base: Prepared) -> None:
    saving, session = make()
    assert not saving.restore_newest()
    assert session.state.corpus == base.corpus["fingerprint"]
    train(session, 3)
    session.state.tokens = 99
    saving.save()
    wanted = weights(session), moments(session)
    saving, session = make()
    assert not same(weights(session), wanted[0])
    assert saving.restore_newest()
    assert same(weights(session), wanted[0])
    assert same(moments(session), wanted[1])
    assert (session.state.step, session.state.tokens) == (3, 99)


def test_other_data_is_refused(make: Make) -> None:
    saving, session = make()
    saving.restore_newest()
    train(session)
    saving.save()
    saving, session = make()
    session.prepared = replace(
        session.prepared, corpus={**session.prepared.corpus, "fingerprint": "other"}
    )
    with pytest.raises(InputError, match=r"not what this run was started on; got 'other'"):
        saving.restore_newest()


def test_going_back_takes_weights_and_leaves_progress(make: Make) -> None:
    saving, session = make()
    train(session, 2)
    saving.save()
    then = weights(session), moments(session)
    train(session, 2)
    now = moments(session)
    saving.back_to(2, only=("model",))
    assert same(weights(session), then[0])
    assert same(moments(session), now)
    saving.back_to(2)
    assert same(moments(session), then[1])
    assert session.state.step == 4


def test_a_bad_step_goes_back_once_at_half_the_rate(make: Make) -> None:
    saving, session = make()
    train(session, 2)
    saving.save()
    then = weights(session)
    train(session)
    assert saving.recover(math.nan, math.inf) == 2
    assert same(weights(session), then)
    assert (session.state.lr_scale, session.state.bad_steps, session.state.step) == (0.5, 1, 3)
    with pytest.raises(EkeError, match=r"not finite at step 3; got 'loss nan.*; once, a run goes"):
        saving.recover(math.nan, math.inf)


def test_a_bad_step_before_any_save_is_an_error(make: Make) -> None:
    saving, session = make()
    train(session)
    with pytest.raises(EkeError, match=r"at step 1; .*; nothing was saved yet to go back to"):
        saving.recover(math.inf, 1.0)


# ---------------------------------------------------------------------- lost work


def reopen_after_a_crash(make: Make, *, crashed: bool, budget: Budget | None = None) -> Session:
    saving, session = make(budget)
    assert not saving.restore_newest()
    session.charge("startup")
    train(session, 2)
    session.log("metrics", {"kind": "step", "step": 2})
    saving.save()
    train(session)
    dearest = Bill("t", "train", 3, flops=9e6, seconds=1000.0, joules=700.0, money=1.0)
    session.run.ledger.add(dearest)
    session.log("metrics", {"kind": "step", "step": 3})
    saving, session = make(budget)
    assert saving.restore_newest()
    assert session.state.step == 2
    saving.account_for_lost_work(crashed=crashed)
    return session


@pytest.mark.parametrize("crashed", [True, False])
def test_what_came_after_the_save_is_lost_but_spent(make: Make, crashed: bool) -> None:
    session = reopen_after_a_crash(make, crashed=crashed)
    totals = session.run.ledger.totals()
    # 1 and 9 million were undone; what was under way at a crash is charged like the dearest.
    assert totals["train"]["flops"] == 2e6
    assert totals["lost"]["flops"] == (19e6 if crashed else 10e6)
    assert totals["checkpoint"]["seconds"]  # the save itself stands
    estimated = [b for b in session.run.ledger.bills if not b.measured]
    assert len(estimated) == crashed
    kept, undone = effective(read_records(session.run.path / "metrics.jsonl"))
    assert [r.value["step"] for r in kept] == [2]
    assert [r.value["step"] for r in undone] == [3]
    assert session.spent()["flops"] == session.run.ledger.spent("flops")
    # The clock knows of the estimate as well.
    assert session.spent()["seconds"] >= (2000 if crashed else 1000)


def test_a_crash_leaves_money_and_energy_known(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown bill would make the total unknown, and a limit on it would forget the past."""
    readings = itertools.count(1)
    meter = type("Meter", (), {"source": "test", "read": lambda _: 5.0 * next(readings)})()
    monkeypatch.setattr("eke.training.billing.EnergyMeter.open", lambda: meter)
    session = reopen_after_a_crash(
        make, crashed=True, budget=Budget(joules=1e9, price_per_hour=3.6, currency="USD")
    )
    ledger = session.run.ledger
    (estimated,) = (b for b in ledger.bills if not b.measured)
    assert (estimated.seconds, estimated.joules, estimated.money) == (1000, 700, 1)
    assert ledger.spent("money") == pytest.approx((ledger.spent("seconds") or 0.0) / 1000)
    billed = ledger.spent("joules")
    assert billed is not None
    assert session.spent()["joules"] > billed


def test_a_crash_before_the_first_save_loses_everything(make: Make) -> None:
    _, session = make()
    train(session, 2)
    saving, session = make()
    assert not saving.restore_newest()
    saving.account_for_lost_work(crashed=True)
    totals = session.run.ledger.totals()
    assert "train" not in totals
    assert totals["lost"]["flops"] == 3e6


bills = st.builds(
    Bill,
    who=st.just("t"),
    what=st.sampled_from(["train", "padding", "eval", "checkpoint", "govern", "startup"]),
    step=st.integers(4, 7),
)


@given(st.lists(bills, max_size=12), st.integers(0, 12), st.integers(4, 7))
def test_first_lost_is_the_first_bill_of_undone_work(
    drawn: list[Bill], saved: int, step: int
) -> None:
    records = [Record(100 * i, {"kind": "bill", **b.to_json()}) for i, b in enumerate(drawn)]
    end = 100 * len(drawn)
    found = first_lost(records, 100 * saved, step, end)
    stands = [
        b.step <= step and b.what in ("checkpoint", "govern", "startup") for b in drawn[saved:]
    ]
    expected = stands.index(False) + saved if False in stands else len(drawn)
    assert found == 100 * expected

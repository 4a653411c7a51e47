"""Evaluating, deciding and acting, on a real model with a real governor.

Only the saver is a stand-in, which records what it is asked to do.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eke.budget import Budget
from eke.budget.flops import forward_flops, train_flops
from eke.budget.jsonl import read_records
from eke.errors import EkeError, InputError
from eke.training import evaluate
from eke.training.billing import Biller
from eke.training.config import RunConfig
from eke.training.limits import start_decay
from eke.training.oversight import Oversight
from eke.training.rundir import RunDir
from eke.training.session import Session
from eke.training.setup import Prepared, prepare
from eke.training.state import RunState


class RecordingSaver:
    """Stands in for `Saving`: remembers what it was asked for."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.calls: list[Any] = []

    def save(self) -> None:
        self.calls.append(("save", self._session.state.step))

    def back_to(self, step: int, *, only: tuple[str, ...] = ("model", "optimizer")) -> None:
        self.calls.append(("back_to", step, only))


@pytest.fixture(scope="module")
def base(model_dir: Path, corpus: Path) -> Prepared:
    raw = {
        "model": {"source": str(model_dir)},
        "data": {
            "train": str(corpus),
            "overlength": "truncate",
            "workers": 0,
            "eval_examples": 16,
        },
        "batch": {"per_step": "tokens:256", "micro_tokens": 256},
        "run": {"device": "cpu"},
    }
    return prepare(RunConfig.from_mapping(raw))


Made = tuple[Oversight, Session, RecordingSaver]
Make = Callable[..., Made]


@pytest.fixture
def make(base: Prepared, tmp_path: Path) -> Iterator[Make]:
    run = RunDir(tmp_path / "run")
    run.open()

    def made(
        budget: Budget | None = None,
        state: RunState | None = None,
        spent: dict[str, float] | None = None,
        from_scratch: bool = False,
        **governor: Any,
    ) -> Made:
        config = base.config.with_values({"governor": governor})
        prepared = replace(
            base,
            config=config,
            model=copy.deepcopy(base.model),
            from_scratch=from_scratch,
            holdout=copy.copy(base.holdout),  # its cap may be lowered
        )
        budget = budget or Budget(steps=100)
        session = Session(
            prepared,
            budget,
            state or RunState(),
            run,
            Biller(run.ledger, budget),
            lambda _: None,
            0.0,
        )
        if spent is not None:
            session.spent = lambda: dict(spent)  # type: ignore[method-assign]
        saver = RecordingSaver(session)
        return Oversight(session, saver), session, saver  # type: ignore[arg-type]

    yield made
    run.close()


def records(session: Session, file: str) -> list[dict[str, Any]]:
    return [r.value for r in read_records(session.run.path / f"{file}.jsonl")]


# ---------------------------------------------------------------------- horizon


def test_the_horizon_of_each_limit_before_the_first_step(make: Make) -> None:
    _, session, _ = make()
    p, mean = session.prepared, session.mean_length
    per_token = train_flops(p.shape, 1, mean) / mean

    def horizon(spent: dict[str, float], **limits: Any) -> float:
        return make(Budget(**limits), spent=spent)[0].horizon()

    assert horizon({"flops": 1e9}, flops=5e9) == 4e9
    assert horizon({}, tokens=1000.0) == pytest.approx(1000 * per_token)
    assert horizon({}, steps=10) == pytest.approx(10 * 256 * per_token)
    assert horizon({}, epochs=2) == pytest.approx(2 * len(p.train) * mean * per_token)
    assert horizon({"flops": 1e9, "seconds": 10.0}, seconds=60.0) == 50 * 1e8
    assert horizon({"flops": 1e9, "joules": 10.0}, joules=60.0) == 50 * 1e8
    money = {"flops": 1e9, "money": 2.0}
    assert horizon(money, money=3.0, price_per_hour=1.0, currency="USD") == 5e8


def test_the_horizon_follows_the_pace_of_the_run(make: Make) -> None:
    def horizon(spent: dict[str, float], **limits: Any) -> float:
        state = RunState(step=10, tokens=3000, flops=6e9)
        return make(Budget(**limits), state, spent)[0].horizon()

    # 2e6 a token, 300 tokens a step.
    assert horizon({"tokens": 3000.0}, tokens=4000.0) == 6e9 + 1000 * 2e6
    assert horizon({"steps": 10.0}, steps=15) == 6e9 + 5 * 300 * 2e6
    # The nearest limit decides, and one that is used up leaves nothing.
    spent = {"tokens": 3000.0, "steps": 10.0}
    assert horizon(spent, tokens=3001.0, steps=99) == 6e9 + 2e6
    assert horizon(spent, steps=10) == 6e9


def test_lost_work_does_not_move_the_horizon_of_a_limit_on_progress(make: Make) -> None:
    state = RunState(step=10, tokens=3000, flops=6e9)
    spent = {"tokens": 3000.0, "flops": 6e9, "seconds": 5.0}
    crashed = {**spent, "flops": 9e9, "seconds": 50.0}
    budget = Budget(tokens=9000.0)
    assert make(budget, state, spent)[0].horizon() == make(budget, state, crashed)[0].horizon()


def test_the_probed_speed_counts_until_there_is_a_pace(base: Prepared, make: Make) -> None:
    """Before the first step the clock has seen little but imports and loading."""
    spent = {"flops": 1e6, "seconds": 10.0, "money": 1.0}
    for limits in ({"seconds": 20.0}, {"money": 2.0, "price_per_hour": 360.0, "currency": "USD"}):
        budget = Budget(**limits)  # type: ignore[arg-type]
        oversight, session, _ = make(budget, spent=spent)
        assert oversight.horizon() == pytest.approx(1e6)
        facts = replace(base.facts, flops_per_s=1e9, world_size=2)
        session.prepared = replace(session.prepared, facts=facts)
        assert oversight.horizon() == pytest.approx(10 * 2e9)
        session.state.step = 1
        assert oversight.horizon() == pytest.approx(1e6)


# ---------------------------------------------------------------------- before the first step


@pytest.mark.parametrize(
    ("limits", "spent", "text"),
    [
        (
            {"flops": 1e6},
            {},
            r"the FLOP budget is smaller than one step; got 1000000\.0; .*need about",
        ),
        (
            {"tokens": 10.0},
            {},
            r"the token budget .*Raise budget\.tokens, or lower batch\.per_step",
        ),
        (
            {"seconds": 2.0},
            {"seconds": 3.0},
            r"the wall-time .*nothing is left for it, on top of 3",
        ),
        ({"joules": 2.0}, {"joules": 3.0}, r"the energy budget .* Raise budget\.energy"),
    ],
)
def test_a_budget_smaller_than_a_step_is_refused(
    make: Make, limits: dict[str, float], spent: dict[str, float], text: str
) -> None:
    oversight, _, _ = make(Budget(**limits), spent=spent)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=text):
        oversight.check_one_step_fits()


def test_a_budget_of_one_step_is_taken(make: Make) -> None:
    make(Budget(steps=1))[0].check_one_step_fits()
    make(Budget(flops=1e12, tokens=300.0))[0].check_one_step_fits()


def test_the_pace_is_set_once(make: Make) -> None:
    oversight, session, _ = make(eval_every="7 steps")
    session.state.step = 3
    oversight.pace()
    assert (session.state.eval_interval, session.state.next_eval) == (7, 10)
    session.state.step = 5
    oversight.pace()
    assert session.state.next_eval == 10


def test_the_automatic_pace_keeps_to_its_share(make: Make) -> None:
    oversight, session, _ = make(Budget(steps=1000), eval_share=0.05)
    oversight.pace()
    p = session.prepared
    count = 1000 / session.state.eval_interval + 2
    step = 256 / session.mean_length * train_flops(p.shape, 1, session.mean_length)
    assert 1 <= session.state.eval_interval < 1000
    assert count * p.holdout.flops(p.shape) <= 0.06 * 1000 * step


def test_the_governor_comes_back_from_the_state(make: Make) -> None:
    oversight, session, _ = make(from_scratch=True)
    oversight.evaluate_and_govern(save_due=False)
    (first, _decision) = records(session, "decisions")
    assert first["kind"] == "governor"
    assert first["config"]["from_scratch"]
    assert first["config"]["bigram_loss"] > 0
    again, _, _ = make(state=copy.deepcopy(session.state), from_scratch=True)
    assert again._governor.config() == oversight._governor.config()
    assert again._governor.state_dict() == oversight._governor.state_dict()
    assert len(records(session, "decisions")) == 2  # it is not announced twice


# ---------------------------------------------------------------------- on the way


def test_an_evaluation_is_logged_and_billed(make: Make) -> None:
    oversight, session, _ = make()
    scores = oversight.evaluate()
    assert scores is not None
    p = session.prepared
    flops = p.holdout.flops(p.shape)
    assert session.state.flops == flops
    bill = session.run.ledger.bills[-1]
    assert (bill.what, bill.flops) == ("eval", flops)
    assert session.eval_s == bill.seconds
    (record,) = records(session, "metrics")
    assert (record["kind"], record["step"], record["examples"]) == ("eval", 0, 16)
    assert tuple(record["losses"]) == scores.losses
    assert (record["loss"], record["se"]) == (scores.loss, scores.se)
    assert record["weights"] == p.holdout.weights
    session.state.step = 5
    oversight.evaluate(finished=True)
    last = records(session, "metrics")[-1]
    assert last["finished"]
    assert "weights" not in last


def short_of_memory(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """A pass over more tokens than this runs out of memory."""
    whole = evaluate.token_losses

    def losses(model: Any, batch: Any) -> torch.Tensor:
        if batch["input_ids"].numel() > most:
            raise MemoryError
        return whole(model, batch)

    monkeypatch.setattr(evaluate, "token_losses", losses)


def test_an_evaluation_that_does_not_fit_is_done_again_in_smaller_batches(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    oversight, session, _ = make()
    whole = oversight.evaluate()
    holdout = session.prepared.holdout
    before = holdout.micro_tokens
    shape = session.prepared.shape
    first = forward_flops(shape, *holdout.shapes()[0])  # no more of it was begun
    short_of_memory(monkeypatch, 100)
    found = oversight.evaluate()
    assert whole is not None
    assert found is not None
    assert found.losses == pytest.approx(whole.losses, rel=1e-5)
    shortages = [r for r in records(session, "metrics") if r["kind"] == "out_of_memory"]
    assert {r["during"] for r in shortages} == {"evaluation"}
    assert [shortages[0]["before"], shortages[-1]["after"]] == [before, holdout.micro_tokens]
    assert holdout.micro_tokens == session.state.eval_micro_tokens <= 100 < shortages[-1]["before"]
    notes = [r.value for r in read_records(session.run.path / "ledger.jsonl")]
    assert [n["after"] for n in notes if n.get("kind") == "out_of_memory"] == [
        r["after"] for r in shortages
    ]
    lost = [bill for bill in session.run.ledger.bills if bill.what == "lost"]
    assert len(lost) == len(shortages)
    assert lost[0].flops == first < holdout.flops(shape)
    # A run that goes on does not try again what did not fit.
    again, resumed, _ = make(state=RunState(eval_micro_tokens=session.state.eval_micro_tokens))
    assert resumed.prepared.holdout.micro_tokens == holdout.micro_tokens
    assert again.evaluate() == found


def test_one_example_that_does_not_fit_is_an_error(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    oversight, session, _ = make()
    longest = max(len(s["input_ids"]) for s in session.prepared.holdout.samples)
    short_of_memory(monkeypatch, longest - 1)
    with pytest.raises(EkeError, match=r"on a single sample of .* tokens: MemoryError"):
        oversight.evaluate()


def test_a_lost_evaluation_does_not_pass_the_budget(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, session, _ = make()
    holdout, shape = session.prepared.holdout, session.prepared.shape
    flops, lost = holdout.flops(shape), forward_flops(shape, *holdout.shapes()[0])
    oversight, session, saver = make(
        Budget(flops=2 * flops + lost / 9), RunState(step=3, eval_interval=5)
    )
    short_of_memory(monkeypatch, 100)
    oversight.evaluate_and_govern(save_due=True)
    assert [r["kind"] for r in records(session, "metrics")] == ["out_of_memory"]
    assert saver.calls == [("save", 3)]
    spent = session.run.ledger.spent("flops")  # the directory, and so the ledger, is shared
    oversight, session, _ = make(Budget(flops=spent + flops + lost / 9), RunState(step=3))
    assert oversight.last_evaluation("the FLOP budget is used up", "flops") is None


def test_the_best_so_far_is_saved(make: Make) -> None:
    oversight, session, saver = make(Budget(steps=10_000))
    state = session.state
    state.step, state.eval_interval = 3, 5
    oversight.evaluate_and_govern(save_due=False)
    assert (state.best_step, state.next_eval) == (3, 8)
    assert saver.calls == [("save", 3)]
    state.step = 8
    with torch.no_grad():
        session.prepared.model.lm_head.weight *= -3  # worse
    oversight.evaluate_and_govern(save_due=False)
    assert saver.calls == [("save", 3)]
    state.step = 13
    oversight.evaluate_and_govern(save_due=True)
    assert saver.calls == [("save", 3), ("save", 13)]
    assert state.best_step == 3


def test_without_actions_nobody_decides(make: Make) -> None:
    oversight, session, saver = make(actions=[], from_scratch=True)
    session.state.step = 3
    oversight.evaluate_and_govern(save_due=False)
    assert session.state.governor is None
    assert [r["kind"] for r in records(session, "decisions")] == ["governor"]
    assert saver.calls == [("save", 3)]


def test_an_evaluation_that_would_cost_the_last_one_is_left_out(make: Make) -> None:
    _, session, _ = make()
    flops = session.prepared.holdout.flops(session.prepared.shape)
    for left, evaluated in ((2.5, True), (1.5, False)):
        state = RunState(step=3, eval_interval=5)
        spent = {"flops": 1e12, "steps": 3.0}
        oversight, session, saver = make(Budget(flops=1e12 + left * flops), state, spent)
        before = len(records(session, "metrics"))
        oversight.evaluate_and_govern(save_due=True)
        assert len(records(session, "metrics")) - before == evaluated
        assert state.next_eval == 8
        assert saver.calls == [("save", 3)]


def test_the_reserve_starts_the_decay(make: Make) -> None:
    """The governor's own clause; its reason becomes the reason for which the run ends."""
    state = RunState(step=92, tokens=92 * 256, flops=9.2e9, eval_interval=5)
    oversight, session, saver = make(Budget(steps=100), state, {"steps": 92.0, "flops": 9.2e9})
    oversight.evaluate_and_govern(save_due=False)
    decision = records(session, "decisions")[-1]
    assert (decision["action"], decision["by"]) == ("decay", "governor")
    assert state.decay is not None
    assert (state.decay.reason, state.decay.unit) == (decision["reason"], None)
    assert (state.decay.start, state.decay.end) == ({"steps": 92.0}, {"steps": 100.0})
    assert saver.calls == [("save", 92)]


def test_a_decay_by_a_limit_is_recorded_with_its_evidence(make: Make) -> None:
    oversight, session, _ = make(Budget(flops=1e9))
    session.state.step = 9
    spent, finish = {"flops": 9e8}, {"flops": 1e6}
    oversight.start_decay(spent, finish, "the FLOP budget is down to its reserve", "flops")
    decision = records(session, "decisions")[-1]
    assert (decision["action"], decision["by"], decision["step"]) == ("decay", "limits", 9)
    assert decision["evidence"] == {"spent": spent, "finish_cost": finish, "unit": "flops"}
    assert session.state.decay == start_decay(
        session.budget, spent, finish, 0.1, "the FLOP budget is down to its reserve", "flops"
    )


def test_a_model_that_is_lost_goes_back_to_the_best(make: Make) -> None:
    state = RunState(step=20, tokens=5000, flops=1e9, eval_interval=5, best_step=12, best_loss=2.0)
    oversight, session, saver = make(Budget(steps=1000), state)
    with torch.no_grad():
        session.prepared.model.lm_head.weight.fill_(math.nan)
    oversight.evaluate_and_govern(save_due=False)
    decision = records(session, "decisions")[-1]
    assert (decision["action"], decision["evidence"]["clause"]) == ("rollback", "not_finite")
    assert saver.calls == [("back_to", 12, ("model", "optimizer")), ("save", 20)]
    assert (state.rolled_back_to, state.best_step, state.step) == (12, 12, 20)
    assert state.decay is not None


def test_nowhere_to_go_back_to_is_an_error(make: Make) -> None:
    oversight, session, saver = make()
    session.state.step = 5
    with torch.no_grad():
        session.prepared.model.lm_head.weight.fill_(math.nan)
    with pytest.raises(EkeError, match=r"no better checkpoint to go back to.*optimizer\.lr"):
        oversight.evaluate_and_govern(save_due=False)
    assert saver.calls == []


# ---------------------------------------------------------------------- the end


def test_the_finished_model_is_scored(make: Make) -> None:
    oversight, session, saver = make()
    session.state.step = 100
    loss = oversight.last_evaluation("the step budget is used up", "steps")
    assert loss == records(session, "metrics")[-1]["loss"]
    (_, decision) = records(session, "decisions")
    assert decision["reason"] == "The run is over: the step budget is used up."
    assert decision["evidence"] == {"loss": loss, "unit": "steps"}
    assert saver.calls == []
    # A governor's reason is a sentence already.
    oversight.last_evaluation("Nothing is left to gain.", None)
    assert (
        records(session, "decisions")[-1]["reason"] == "The run is over: Nothing is left to gain."
    )


def test_what_cannot_be_paid_for_is_not_scored(make: Make) -> None:
    oversight, session, _ = make(Budget(flops=1e9), spent={"flops": 1e9})
    assert oversight.last_evaluation("the FLOP budget is used up", "flops") is None
    assert records(session, "metrics") == []
    assert records(session, "decisions")[-1]["evidence"] == {"loss": None, "unit": "flops"}


@pytest.mark.parametrize(("best_loss", "helped"), [(0.01, False), (99.0, True)])
def test_a_decay_after_a_rollback_must_have_helped(
    make: Make, best_loss: float, helped: bool
) -> None:
    state = RunState(step=50, best_step=12, best_loss=best_loss, rolled_back_to=12)
    oversight, session, saver = make(state=state)
    loss = oversight.last_evaluation("It got worse.", None)
    assert saver.calls == ([] if helped else [("back_to", 12, ("model",))])
    assert loss == (records(session, "metrics")[-1]["loss"] if helped else best_loss)

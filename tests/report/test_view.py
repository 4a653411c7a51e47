from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.report.accounting import Accounts
from eke.report.model import build
from eke.report.records import load
from eke.report.view import EvalPoint, Lengths, Limit, Proof, RunView, StepPoint

number = st.none() | st.floats(-1e100, 1e100)
steps = st.lists(
    st.builds(
        StepPoint, st.integers(0, 10**6), st.floats(0, 1e25), number, st.just("stable"),
        st.none(), st.none(), st.none(),
    )
).map(tuple)  # fmt: skip
evals = st.lists(
    st.builds(
        EvalPoint, st.integers(0, 10**6), st.floats(0, 1e25), number, number, st.none(),
        st.booleans(),
    )
).map(tuple)  # fmt: skip


def view(**values: Any) -> RunView:
    """A run of which nothing is known but what is given."""
    empty = dict.fromkeys(
        ("steps", "undone", "evals", "decisions", "restarts", "phases", "limits", "config", "plan"),
        (),
    )
    unknown = dict.fromkeys(
        ("exit_code", "budget_used", "budget_end_x", "lengths", "proof", "began", "ended")
    )
    names = dict.fromkeys(
        ("name", "state", "reason", "model", "corpus", "eval_corpus", "currency"), ""
    )
    given: dict[str, Any] = {**empty, **unknown, **names, "x_unit": "flops", **values}
    return RunView(accounts=Accounts(), **given)


@given(st.floats(1e-3, 1e100), st.none() | st.just(0.0) | st.floats(1e-100, 1e100))
def test_the_share_of_a_limit(total: float, used: float | None) -> None:
    share = Limit("flops", "FLOPs", total, used).share
    if used is None:
        assert share is None
    else:
        assert share is not None
        assert share * total == pytest.approx(used, rel=1e-12, abs=0)
        assert (share > 1) <= (used > total)
        assert (share < 1) <= (used < total)


@given(st.lists(st.integers(0, 10**9).map(float), max_size=40))
def test_the_samples_are_those_of_all_bins(counts: list[float]) -> None:
    assert Lengths(tuple(counts), 512.0, 3, 0).samples == sum(int(c) for c in counts)


@given(st.lists(st.tuples(number, number)))
def test_the_largest_difference_is_the_largest_that_can_be_taken(
    rows: list[tuple[float | None, float | None]],
) -> None:
    one, two = tuple(a for a, _ in rows), tuple(b for _, b in rows)
    shown = Proof(tuple(range(len(rows))), one, two, None, None, None, "")
    found = shown.largest_difference
    taken = [abs(a - b) for a, b in rows if a is not None and b is not None]
    if not taken:
        assert found is None
    else:
        assert found in taken
        assert all(found >= each for each in taken)
    other_way = Proof(shown.steps, two, one, None, None, None, "")
    assert other_way.largest_difference == found


def test_a_proof_of_two_lengths_is_a_defect_and_not_cut() -> None:
    shown = Proof((1, 2), (3.0, 2.0), (3.0,), None, None, None, "")
    with pytest.raises(ValueError):
        _ = shown.largest_difference


def loss_of(step: int, loss: float | None, finished: bool) -> EvalPoint:
    return EvalPoint(step, float(step), loss, 0.1, 8, finished)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], None),
        ([(1, None, False), (2, None, True)], None),
        ([(1, 3.0, False), (2, 2.0, False), (3, None, False)], 2),
        ([(1, 3.0, True), (2, 2.0, False)], 1),
        ([(1, 3.0, True), (2, 2.0, True), (3, 1.0, False)], 2),
        ([(1, 3.0, False), (2, None, True)], 1),
    ],
)
def test_the_evaluation_that_counts(
    rows: list[tuple[int, float | None, bool]], expected: int | None
) -> None:
    final = view(evals=tuple(loss_of(*row) for row in rows)).final
    assert (None if final is None else final.step) == expected


@given(evals)
def test_the_final_evaluation_is_the_finished_models_else_the_last(
    points: tuple[EvalPoint, ...],
) -> None:
    final = view(evals=points).final
    usable = [p for p in points if p.loss is not None]
    finished = [p for p in usable if p.finished]
    candidates = finished or usable
    assert final is (candidates[-1] if candidates else None)


@given(steps)
def test_the_last_step_and_the_losses_that_are_no_numbers(points: tuple[StepPoint, ...]) -> None:
    run = view(steps=points)
    assert run.last_step == (points[-1].step if points else 0)
    assert run.bad_losses == len(points) - len([p for p in points if p.loss is not None])


def test_a_view_does_not_change() -> None:
    run = view(evals=(loss_of(1, 2.0, True),))
    for thing, name in ((run, "steps"), (run.evals[0], "loss"), (Limit("s", "s", 1, 2), "used")):
        with pytest.raises(FrozenInstanceError):
            setattr(thing, name, None)
    assert replace(run, name="other").final is run.final


def test_what_no_record_says_is_none_or_empty(make_run: Callable[..., Any]) -> None:
    run = make_run(name="new")
    run.config(budget={})
    run.json("plan.json")
    view = build(load(run.root))
    assert view.name == "new"
    assert (view.steps, view.undone, view.evals, view.decisions) == ((), (), (), ())
    assert (view.restarts, view.phases, view.limits, view.plan) == ((), (), (), ())
    assert (view.last_losses, view.weights, view.notices) == ((), (), ())
    assert (view.lengths, view.proof, view.exit_code, view.began, view.ended) == (None,) * 5
    assert (view.budget_used, view.budget_end_x, view.final) == (None, None, None)
    assert (view.last_step, view.bad_losses) == (0, 0)


def test_the_properties_of_a_whole_run(full_run: Path) -> None:
    view = build(load(full_run))
    assert view.final is not None
    assert view.final.finished
    assert view.last_step == view.final.step == 240
    assert view.bad_losses == 0
    assert view.proof is not None
    assert view.proof.largest_difference == 0
    assert view.lengths is not None
    assert view.lengths.samples == 240 * 48

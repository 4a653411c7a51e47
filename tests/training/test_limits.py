"""Whole runs against random budgets: no limit is passed, and a run ends in a decay."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

from hypothesis import assume, given
from hypothesis import strategies as st

from eke.budget import Budget
from eke.training.limits import NAMES, Move, add, next_move, start_decay
from eke.training.schedule import Decay, lr_factor

Cost = dict[str, float]


@dataclass
class Simulated:
    """A run without a model: what was spent, how the rate went, and why it ended."""

    spent: Cost = field(default_factory=dict)
    factors: list[float] = field(default_factory=list)
    decay: Decay | None = None
    decay_steps: int = 0
    end: Move = field(default_factory=lambda: Move("train"))


def simulate(
    budget: Budget,
    costs: list[Cost],
    finish: Cost,
    reserve: float,
    *,
    govern_at: int | None = None,
    most: int = 5000,
) -> Simulated:
    """Do what the trainer does, step by step; the costs come round again and again."""
    run = Simulated()
    for step in range(most):
        cost = costs[step % len(costs)]
        if step == govern_at and run.decay is None:
            run.decay = start_decay(budget, run.spent, finish, reserve, "it no longer pays")
        move = next_move(budget, run.spent, cost, finish, run.decay, reserve)
        if move.kind == "finish":
            run.end = move
            return run
        if move.kind == "decay":
            assert run.decay is None
            run.decay = start_decay(budget, run.spent, finish, reserve, move.reason, move.unit)
        progress = None if run.decay is None else run.decay.progress(run.spent)
        run.factors.append(lr_factor(step, 0, progress))
        run.decay_steps += run.decay is not None
        run.spent = add(run.spent, cost)
    raise AssertionError(f"not over after {most} steps")


UNITS = ("flops", "seconds", "money", "joules", "tokens", "steps", "epochs")


@st.composite
def runs(draw: st.DrawFn) -> tuple[Budget, list[Cost], Cost, float]:
    units = draw(st.lists(st.sampled_from(UNITS), min_size=1, max_size=4, unique=True))
    scale = {u: 10.0 ** draw(st.integers(-3, 15)) if u != "steps" else 1.0 for u in units}
    limits = {u: draw(st.integers(5, 200)) * scale[u] for u in units}
    costs = [
        {u: draw(st.floats(0.2, 9.0)) * scale[u] if u != "steps" else 1.0 for u in units}
        for _ in range(draw(st.integers(1, 6)))
    ]
    spent_units = [u for u in units if u in ("flops", "seconds", "money", "joules")]
    finish = {u: draw(st.floats(0, 40)) * scale[u] for u in spent_units}
    budget = Budget(price_per_hour=1.0, **limits)
    return budget, costs, finish, draw(st.floats(0, 0.5))


@given(runs(), st.none() | st.integers(0, 60))
def test_no_limit_is_passed(
    drawn: tuple[Budget, list[Cost], Cost, float], govern_at: int | None
) -> None:
    budget, costs, finish, reserve = drawn
    run = simulate(budget, costs, finish, reserve, govern_at=govern_at)
    if not run.factors:  # not even the first step fitted
        assert run.spent == {}
        return
    for unit, limit in budget.limits().items():
        assert run.spent[unit] + finish.get(unit, 0.0) <= limit * (1 + 1e-9)


@given(runs(), st.none() | st.integers(0, 60))
def test_the_rate_is_full_and_then_falls(
    drawn: tuple[Budget, list[Cost], Cost, float], govern_at: int | None
) -> None:
    run = simulate(*drawn, govern_at=govern_at)
    assert all(0 <= f <= 1 for f in run.factors)
    stable = run.factors[: len(run.factors) - run.decay_steps]
    assert all(f == 1 for f in stable)
    assert all(a >= b for a, b in pairwise(run.factors))


def largest_share(budget: Budget, costs: list[Cost]) -> float:
    """The largest step, as a share of a limit."""
    return max(cost[u] / total for u, total in budget.limits().items() for cost in costs)


@given(runs())
def test_the_decay_starts_before_the_end_where_the_reserve_holds_two_steps(
    drawn: tuple[Budget, list[Cost], Cost, float],
) -> None:
    budget, costs, finish, reserve = drawn
    assume(2 * largest_share(budget, costs) < reserve)
    run = simulate(budget, costs, finish, reserve)
    assert (run.decay is not None) == bool(run.factors)


@given(runs(), st.none() | st.integers(0, 60))
def test_the_rate_ends_near_0(
    drawn: tuple[Budget, list[Cost], Cost, float], govern_at: int | None
) -> None:
    """Within the two steps that the end and the last rate may lie off, as shares of the decay."""
    budget, costs, finish, reserve = drawn
    run = simulate(budget, costs, finish, reserve, govern_at=govern_at)
    assume(run.decay_steps > 0)
    assert run.decay is not None
    spans = {u: run.decay.end[u] - run.decay.start[u] for u in run.decay.end}
    assume(min(spans.values()) > 0)
    step = max(cost[u] / span for u, span in spans.items() for cost in costs)
    assert run.factors[-1] <= 2 * step + 1e-9


@given(runs(), st.integers(0, 60))
def test_a_decay_that_the_governor_started_ends_the_run_within_the_reserve(
    drawn: tuple[Budget, list[Cost], Cost, float], govern_at: int
) -> None:
    budget, costs, finish, reserve = drawn
    run = simulate(budget, costs, finish, reserve, govern_at=govern_at)
    assume(run.decay is not None and run.decay.unit is None)
    assert run.decay is not None
    for unit, limit in budget.limits().items():
        step = max(cost[unit] for cost in costs)
        before = run.decay.start[unit]
        assert run.spent.get(unit, 0.0) <= before + reserve * limit + step * (1 + 1e-9)
    if run.end.unit is None:
        assert run.end.reason == "it no longer pays"
    else:
        assert run.end.reason == f"the {NAMES[run.end.unit]} budget is used up"


@given(
    st.dictionaries(
        st.sampled_from(["flops", "seconds", "tokens"]),
        st.tuples(st.integers(1, 300), st.integers(1, 30), st.integers(0, 50)),
        min_size=1,
    )
)
def test_without_a_reserve_every_step_that_fits_is_taken(
    drawn: dict[str, tuple[int, int, int]],
) -> None:
    """Against a count in whole numbers: the most steps that leave enough to finish."""
    budget = Budget(**{u: float(total) for u, (total, _, _) in drawn.items()})
    cost = {u: float(c) for u, (_, c, _) in drawn.items()}
    finish = {u: float(f) for u, (_, _, f) in drawn.items()}
    fits = 0
    while all((fits + 1) * c + f <= total for total, c, f in drawn.values()):
        fits += 1
    run = simulate(budget, [cost], finish, 0.0)
    assert len(run.factors) == fits
    ended_by = drawn[str(run.end.unit)]
    assert (fits + 1) * ended_by[1] + ended_by[2] > ended_by[0]


@given(
    total=st.integers(1, 400),
    cost=st.integers(1, 20),
    finish=st.integers(0, 100),
    quarters=st.integers(0, 2),
    govern_at=st.none() | st.integers(0, 40),
)
def test_the_decay_takes_the_steps_that_whole_numbers_say(
    total: int, cost: int, finish: int, quarters: int, govern_at: int | None
) -> None:
    reserve = Fraction(quarters, 4)
    now, expected, started = 0, 0, None
    while now + cost + finish <= total:
        if started is None and govern_at is not None and now == govern_at * cost:
            started = now
        just_due = started is None and now + finish >= total * (1 - reserve)
        if just_due:
            started = now
        if started is not None:
            end = max(Fraction(started), min(started + reserve * total, Fraction(total - finish)))
            if now >= end and not just_due:
                break
            expected += 1
        now += cost
    budget = Budget(flops=float(total))
    run = simulate(
        budget,
        [{"flops": float(cost)}],
        {"flops": float(finish)},
        float(reserve),
        govern_at=govern_at,
    )
    assert run.spent.get("flops", 0.0) == now
    assert run.decay_steps == expected


def test_a_limit_says_what_ended_the_run() -> None:
    budget = Budget(steps=10, flops=1e9)
    run = simulate(budget, [{"steps": 1.0, "flops": 1e6}], {"flops": 1e6}, 0.25)
    assert run.end == Move("finish", "the step budget is used up", "steps")
    assert run.decay is not None
    assert (run.decay.unit, run.decay.reason) == (
        "steps",
        "the step budget is down to its reserve",
    )
    assert run.factors == [1.0] * 8 + [1.0, 0.5]


def test_every_unit_has_a_name() -> None:
    assert NAMES.keys() == Budget(1, *[1.0] * 5, 1, 1, price_per_hour=1.0).limits().keys()


def test_adding_is_by_unit() -> None:
    assert add({"a": 1.0, "b": 2.0}, {"b": 3.0, "c": 4.0}) == {"a": 1.0, "b": 5.0, "c": 4.0}

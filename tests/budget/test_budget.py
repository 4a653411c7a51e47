"""Limits: `passes`, `share` and `remaining` against their definitions, and limits refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.budget import PROGRESS_UNITS, SPENT_UNITS, Budget
from eke.errors import InputError

UNITS = (*SPENT_UNITS, *PROGRESS_UNITS)
LIMITS = st.dictionaries(st.sampled_from(UNITS), st.integers(1, 1000))
AMOUNTS = st.dictionaries(st.sampled_from(UNITS), st.floats(0, 2000))


def budget_of(limits: dict[str, Any]) -> Budget:
    return Budget(price_per_hour=1.0, **limits)


@given(LIMITS, AMOUNTS, AMOUNTS)
def test_passes_is_none_exactly_when_every_limit_holds(
    limits: dict[str, int], spent: dict[str, float], cost: dict[str, float]
) -> None:
    over = [
        unit
        for unit in UNITS
        if unit in limits and spent.get(unit, 0) + cost.get(unit, 0) > limits[unit] * (1 + 1e-12)
    ]
    assert budget_of(limits).passes(spent, cost) == (over[0] if over else None)


@given(LIMITS, AMOUNTS, AMOUNTS)
def test_share_is_the_largest_and_grows_with_spending(
    limits: dict[str, int], spent: dict[str, float], more: dict[str, float]
) -> None:
    budget = budget_of(limits)
    share, unit = budget.share(spent)
    assert (unit is None) == (not limits)
    if unit is not None:
        assert share == max(spent.get(u, 0) / limits[u] for u in limits)
        assert share == spent.get(unit, 0) / limits[unit]
    later = {u: spent.get(u, 0) + more.get(u, 0) for u in UNITS}
    assert budget.share(later)[0] >= share


@given(LIMITS, AMOUNTS)
def test_remaining_is_what_may_still_be_spent(
    limits: dict[str, int], spent: dict[str, float]
) -> None:
    budget = budget_of(limits)
    rest = budget.remaining(spent)
    assert rest == {u: max(0.0, limits[u] - spent.get(u, 0)) for u in limits}
    within = {u: min(spent.get(u, 0), limits[u]) for u in limits}
    assert budget.passes(within, budget.remaining(within)) is None


def test_sums_of_floats_in_another_order_do_not_pass_a_limit() -> None:
    budget = Budget(flops=0.6)
    assert 0.1 + 0.2 + 0.3 > 0.6
    assert budget.passes({"flops": 0.1 + 0.2}, {"flops": 0.3}) is None
    assert budget.passes({"flops": 0.6}, {"flops": 1e-9}) == "flops"


def test_parse_takes_amounts_as_people_write_them() -> None:
    budget = Budget.parse(
        memory="20GiB",
        wall_time="1h30m",
        flops="200 PFLOP",
        tokens="10B",
        steps="2k",
        epochs=3,
        energy="1MJ",
        cost="$5",
        price_per_hour="2 USD",
    )
    assert budget == Budget(
        memory_bytes=20 * 2**30,
        seconds=5400.0,
        flops=2e17,
        joules=1e6,
        money=5.0,
        tokens=1e10,
        steps=2000,
        epochs=3,
        currency="USD",
        price_per_hour=2.0,
    )
    assert isinstance(budget.steps, int)
    assert set(budget.limits()) == {*SPENT_UNITS, *PROGRESS_UNITS}


def test_no_limits() -> None:
    budget = Budget.parse()
    assert budget == Budget()
    assert budget.limits() == {}
    assert budget.passes({"flops": 1e99}, {"flops": 1e99}) is None
    assert budget.share({"flops": 1e99}) == (0.0, None)


@pytest.mark.parametrize(
    ("given_values", "words"),
    [
        ({"flops": 0}, "budget.flops is zero"),
        ({"memory": "0.2 B"}, "budget.memory is zero"),
        ({"steps": "0"}, "budget.steps is zero"),
        ({"steps": 1.5}, "budget.steps is not a whole number"),
        ({"epochs": 0.5}, "budget.epochs is not a whole number"),
        ({"wall_time": "soon"}, "budget.wall_time"),
        ({"flops": "1e400"}, "budget.flops"),
        ({"cost": "5 USD"}, "price"),
        ({"cost": "5 USD", "price_per_hour": "2 EUR"}, "USD and EUR"),
        ({"cost": "0 USD", "price_per_hour": "2 USD"}, "budget.cost is zero"),
        ({"cost": "5 USD", "price_per_hour": "0 USD"}, "budget.price_per_hour is zero"),
        ({"price_per_hour": "2"}, "budget.price_per_hour"),
    ],
)
def test_bad_limits_are_input_errors(given_values: dict[str, object], words: str) -> None:
    with pytest.raises(InputError) as caught:
        Budget.parse(**given_values)
    assert words in str(caught.value)


@pytest.mark.parametrize("amount", [0, -1, float("nan")])
def test_a_limit_that_is_not_positive_is_refused_in_code_too(amount: float) -> None:
    with pytest.raises(InputError, match="flops"):
        Budget(flops=amount)


def test_money_without_a_price_is_refused_in_code_too() -> None:
    with pytest.raises(InputError, match="price"):
        Budget(money=5.0, currency="USD")

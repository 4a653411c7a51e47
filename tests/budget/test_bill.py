"""Bills: what they refuse, and JSON there and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.budget import ACTIVITIES, UNITS, Bill

AMOUNT = st.none() | st.floats(0, 1e300)
BILLS = st.builds(
    Bill,
    who=st.text(max_size=8),
    what=st.sampled_from(ACTIVITIES),
    step=st.integers(0, 10**9),
    flops=AMOUNT,
    seconds=AMOUNT,
    joules=AMOUNT,
    money=AMOUNT,
    tokens=st.none() | st.integers(0, 10**15),
    peak_bytes=st.none() | st.integers(0, 2**50),
    measured=st.booleans(),
)


@given(BILLS)
def test_a_bill_comes_back_from_json(bill: Bill) -> None:
    record = json.loads(json.dumps(bill.to_json()))
    assert Bill.from_json(record) == bill
    assert Bill.from_json({**record, "kind": "bill", "t": 1.5, "of a later version": {}}) == bill


def test_unknown_is_not_zero() -> None:
    record = Bill("training", "train", 1, flops=0.0, joules=None).to_json()
    assert record["flops"] == 0.0
    assert record["joules"] is None
    assert set(UNITS) < set(record)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("amount", [-1, float("nan")])
def test_a_bill_is_never_negative_or_nan(unit: str, amount: Any) -> None:
    with pytest.raises(ValueError, match=unit):
        Bill("training", "train", 1, **{unit: amount})


def test_an_activity_is_one_of_a_few() -> None:
    unheard_of: Any = "lunch"
    with pytest.raises(ValueError, match=r"startup.*finish.*'lunch'"):
        Bill("training", unheard_of, 1)

"""What parts tell one another: intervals that make sense, decisions there and back."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.budget import Alternative, Bill, Decision, Interval, Offer

ACTIONS = st.sampled_from(["continue", "decay", "stop", "rollback"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3),
    max_leaves=8,
)


@given(
    st.builds(
        Decision,
        action=ACTIONS,
        step=st.integers(0),
        reason=st.text(),
        evidence=st.dictionaries(st.text(max_size=5), JSON, max_size=4),
        alternatives=st.lists(st.builds(Alternative, ACTIONS, st.text()), max_size=3).map(tuple),
    )
)
def test_a_decision_comes_back_from_json(decision: Decision) -> None:
    record = json.loads(json.dumps(decision.to_json()))
    assert Decision.from_json(record) == decision
    assert Decision.from_json({**record, "kind": "decision", "by": "governor"}) == decision


@given(st.floats(), st.floats())
def test_an_interval_has_its_ends_in_order(low: float, high: float) -> None:
    if low <= high:
        assert Interval(low, high).high >= Interval(low, high).low
    else:
        with pytest.raises(ValueError, match="low <= high"):
            Interval(low, high)


def test_messages_cannot_be_changed_on_the_way() -> None:
    offer = Offer("selection", "score", Bill("selection", "govern", 3), Interval(0.0, 0.1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        offer.who = "somebody else"  # type: ignore[misc]

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.batching.order import Order, Place
from eke.batching.state import Counts, Progress, progress_of
from eke.errors import InputError

CONFIG = {"seed": 3, "window": 8, "per_step": "samples:4"}
PROGRESS = Progress(
    Place(2, 20, (1, 5)), 17, 2, 64, Counts(1, 2, 3, 4), ((6,), (2, 3)), 12, (7, 8), (9,)
)


def test_a_state_survives_json() -> None:
    state = json.loads(json.dumps(PROGRESS.to_json(CONFIG)))
    assert progress_of(state, CONFIG, 30) == PROGRESS


@pytest.mark.parametrize("key", list(CONFIG))
def test_other_settings_are_refused_by_name(key: str) -> None:
    state = PROGRESS.to_json(CONFIG)
    with pytest.raises(InputError, match=rf"other settings: {key}; got .*99.*; the state has"):
        progress_of(state, {**CONFIG, key: 99}, 30)


@pytest.mark.parametrize(
    "damage",
    [
        {"version": 1},
        {"version": None},
        {"epoch": -1},
        {"cursor": 31},
        {"cursor": "x"},
        {"delivered": [30]},
        {"dropped": [-1]},
        {"pending": None},
        {"counts": {}},
        {"world_size": 0},
    ],
)
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        progress_of({**PROGRESS.to_json(CONFIG), **damage}, CONFIG, 30)


def test_a_state_without_a_key_is_refused() -> None:
    for key in PROGRESS.to_json(CONFIG):
        state = PROGRESS.to_json(CONFIG)
        del state[key]
        with pytest.raises(InputError):
            progress_of(state, CONFIG, 30)


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_another_number_of_ranks_is_left_exactly_the_rest(
    n: int, cursor: int, taken: int, done: int
) -> None:
    order = Order(n, 1, shuffle=True)
    whole = order.window(Place(0), n)[0]
    place = Place(0, min(cursor, n), tuple(whole[: min(cursor, n) : 3]))
    before = order.window(place, n)[0]
    gone = order.window(place, taken)[0][:done]
    progress = Progress(place, 5, 2, 64, Counts(), (), taken, tuple(gone[1:]), tuple(gone[:1]))
    assert progress.move_to(order, 2, 64) == progress
    other = progress.move_to(order, 3, 64)
    assert (other.world_size, other.taken, other.block) == (3, 0, 5)
    assert order.window(other.place, n)[0] == [i for i in before if i not in gone]

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.batching.order import Order, Place
from eke.batching.state import Counts, Progress, progress_of
from eke.errors import InputError

CONFIG = {"seed": 3, "window": 8, "per_step": "samples:4", "dataset_parts": 3}
PROGRESS = Progress(
    Place(2, 20, (1, 5), (0, 2)),
    17,
    2,
    64,
    Counts(1, 2, 3, 4),
    ((6,), (2, 3)),
    12,
    (7, 8),
    (9,),
    begins="3f",
    planner="1",
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
        {"version": 2},
        {"version": None},
        {"epoch": -1},
        {"cursor": 31},
        {"cursor": "x"},
        {"delivered": [30]},
        {"dropped": [-1]},
        {"pending": None},
        {"counts": {}},
        {"world_size": 0},
        {"micro_tokens": 1},
        {"block": -1},
        {"taken": -1},
        {"taken": 0},
        {"waiting": [[6]]},
        {"waiting": [[6], [6]]},
        {"waiting": [[6], [5]]},
        {"pending": [4, 4]},
        {"ended": [3]},
        {"ended": [-1]},
        {"ended": [2, 0]},
        {"ended": [1, 1]},
        {"ended": None},
        {"delivered": [9]},
        {"block": float("inf")},
        {"config": None},
        {"config": ["seed"]},
    ],
)
def test_a_damaged_state_is_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        progress_of({**PROGRESS.to_json(CONFIG), **damage}, CONFIG, 30)


@pytest.mark.parametrize("state", [None, [], "state", {}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(InputError, match="the loader's state"):
        progress_of(state, CONFIG, 30)


def test_places_that_differ_in_any_sample_differ() -> None:
    changes: list[dict[str, Any]] = [
        {}, {"place": Place(2, 20, (1, 4), (0, 2))}, {"place": Place(2, 21, (1, 5), (0, 2))},
        {"place": Place(2, 20, (1, 5), (0, 1))}, {"block": 18},
        {"waiting": ((), (2, 3))}, {"waiting": ((2,), (6, 3))}, {"taken": 11},
        {"delivered": (8, 7)}, {"dropped": ()},
    ]  # fmt: skip
    positions = [json.dumps(replace(PROGRESS, **change).position()) for change in changes]
    assert len(set(positions)) == len(changes)


def test_a_state_without_a_key_is_refused() -> None:
    for key in PROGRESS.to_json(CONFIG):
        state = PROGRESS.to_json(CONFIG)
        del state[key]
        with pytest.raises(InputError):
            progress_of(state, CONFIG, 30)


@given(
    st.integers(1, 40), st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.data()
)  # fmt: skip
def test_another_number_of_ranks_or_cap_is_left_exactly_the_rest(
    n: int, cursor: int, taken: int, done: int, data: st.DataObject
) -> None:
    order = Order(n, 1, shuffle=True)
    whole = order.window(Place(0), n)[0]
    early = whole[: min(cursor, n)]
    waiting = tuple(early[1::3]), tuple(early[2::3])
    place = Place(0, len(early), tuple(early[::3]))
    before = [*waiting[0], *waiting[1], *order.window(place, n)[0]]
    of_round = [*waiting[0], *waiting[1], *order.window(place, taken)[0]]
    gone = data.draw(st.permutations(of_round))[: done if taken else 0]
    progress = Progress(
        place, 5, 2, 64, Counts(), waiting, taken, tuple(gone[1:]), tuple(gone[:1]), planner="1"
    )  # fmt: skip
    assert progress.move_to(order, 2, 64, "1") == progress
    for size, cap, planner in ((3, 64, "1"), (2, 32, "1"), (2, 64, "2")):
        other = progress.move_to(order, size, cap, planner)
        assert other.planner == planner
        assert (other.world_size, other.micro_tokens) == (size, cap)
        assert (other.taken, other.block, other.waiting) == (0, 5, ())
        assert order.window(other.place, n)[0] == [i for i in before if i not in gone]
        assert progress_of(json.loads(json.dumps(other.to_json(CONFIG))), CONFIG, n) == other

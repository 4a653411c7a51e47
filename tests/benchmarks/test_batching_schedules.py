"""The figures of schedules, by hand; and that every arm of ours gives every sample once."""

from collections import Counter

import pytest
from benchmarks.batching_schedules import (
    CHARGE,
    UNITS,
    Schedule,
    bound,
    dealt,
    eke,
    figures,
    fixed,
    in_batches,
    oracle,
    shuffled,
)

from eke.batching.planner import DUMMY_TOKENS, PerStep

LENGTHS = [1 + (i * 29) % 31 for i in range(200)]


def test_figures_of_a_schedule_by_hand():
    schedule = Schedule([[[9, 4], [5]], [[3], []]])
    found = figures(schedule, [9, 4, 5, 3], cap=17)
    assert found.keys() == UNITS.keys()
    assert found["efficiency"] == 21 / (2 * 18 + 2 * 3)
    assert found["charged"] == 21 / (2 * (18 + CHARGE) + 2 * (3 + CHARGE))
    assert found["padding"] == 1 - 21 / (18 + 5 + 3 + DUMMY_TOKENS)
    assert found["fill"] == 21 / (2 * 2 * 17)
    assert (found["steps"], found["dummies"], found["lost"], found["over"]) == (2, 0.25, 0, 1)
    assert (
        figures(Schedule([[[9, 4], [5]]], packed=True), [9, 4, 5, 3], 17)["efficiency"] == 18 / 26
    )
    assert figures(Schedule([[[9, 4], [5]]], whole=1), [9, 4, 5, 3], 17)["lost"] == 3


def test_dealing():
    assert in_batches([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
    assert dealt([[1], [2], [3]], 2) == [[[1], [2]], [[3], []]]
    assert dealt([], 2) == []


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"wait_rounds": 1},
        {"packed": True},
        {"packed": True, "wait_rounds": 1},
        {"per_step": PerStep("samples", 7)},
        {"per_step": PerStep("samples", 7), "move": False},
        {"move": False, "wait_rounds": 1, "charge": 0},
    ],
    ids=str,
)
def test_every_sample_is_in_a_schedule_once(settings):
    schedule = eke(LENGTHS, 64, 3, 16, **settings)
    seen = Counter(n for step in schedule.steps for group in step for n in group)
    assert seen == Counter(LENGTHS)
    assert figures(schedule, LENGTHS, 64)["over"] == 0


def test_what_stays_and_drains_never_passes_the_bound():
    for window in (4, 16, 64):
        for packed in (False, True):
            one = eke(LENGTHS, 64, 3, window, packed=packed, move=False)
            limit = bound(LENGTHS, 3, window, 0)
            assert figures(one, LENGTHS, 64)["efficiency"] <= limit <= 1


def test_arms_that_leave_the_order_to_chance_share_it():
    assert sorted(shuffled(LENGTHS, 3)) == sorted(LENGTHS) != shuffled(LENGTHS, 3)
    assert fixed(LENGTHS, 2, 1, 3).steps == dealt([[n] for n in shuffled(LENGTHS, 3)], 2)
    best = figures(oracle(LENGTHS, 64, 3), LENGTHS, 64)
    assert best["lost"] == 0
    assert best["efficiency"] > figures(fixed(LENGTHS, 3, 2, 0), LENGTHS, 64)["efficiency"]

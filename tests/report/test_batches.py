"""What the records of steps say of ranks: added up by a plain loop, left out where wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.report.batches import MOST_COLUMNS, MOST_ROWS, batching_of, shares, sums, total

parts = st.lists(st.integers(0, 10**6), min_size=4, max_size=4)


def record(step: int, before: list[Any], after: list[Any], **more: Any) -> dict[str, Any]:
    fixed = {"samples": 4, "micro_batches": 6, "ranks": before}
    return {
        "kind": "step",
        "step": step,
        "micro_batches": 3,
        "ranks": after,
        "fixed": fixed,
        **more,
    }


@st.composite
def runs(draw: Any) -> list[dict[str, Any]]:
    """Steps in ascending order, some numbers missing; the number of ranks may change."""
    steps = sorted(draw(st.sets(st.integers(1, 400), min_size=1, max_size=30)))
    found = []
    for step in steps:
        ranks = draw(st.sampled_from([1, 2, 40]))
        rows = st.lists(parts, min_size=ranks, max_size=ranks)
        found.append(record(step, draw(rows), draw(rows)))
    return found


@given(runs())
def test_columns_and_rows_add_up(records: list[dict[str, Any]]) -> None:
    shown = batching_of(records)
    assert shown is not None
    assert shown.columns <= MOST_COLUMNS
    assert len(shown.after) == len(shown.before) <= MOST_ROWS
    assert (shown.steps, shown.left_out) == (len(records), 0)
    assert shown.passes == (6 * len(records), 3 * len(records))
    for side, key in ((shown.before, "fixed"), (shown.after, "")):
        expected: dict[tuple[int, int], list[int]] = {}
        for one in records:
            for rank, row in enumerate(one[key]["ranks"] if key else one["ranks"]):
                column = (one["step"] - shown.first) // shown.per_column
                cell = expected.setdefault((rank // shown.per_row, column), [0, 0, 0, 0])
                for index, tokens in enumerate(row):
                    cell[index] += tokens
        for number, row in enumerate(side):
            assert len(row) == shown.columns
            for column, found in enumerate(row):
                wanted = expected.get((number, column))
                assert found == (None if wanted is None else tuple(wanted))
    assert shown.first + shown.columns * shown.per_column > records[-1]["step"]


@given(parts, parts)
def test_shares_are_of_the_whole(a: list[int], b: list[int]) -> None:
    shown = batching_of([record(1, [a, b], [b, a])])
    assert shown is not None
    assert sum(total(shown.before)) == pytest.approx(1)
    assert total(shown.before) == shares(sums([tuple(a), tuple(b)]))  # type: ignore[list-item]
    if sum(a) + sum(b):
        assert total(shown.after)[1] == pytest.approx((a[1] + b[1]) / (sum(a) + sum(b)))


def test_logs_of_earlier_versions_say_nothing() -> None:
    assert batching_of([]) is None
    assert batching_of([{"kind": "step", "step": 1, "tokens": 5, "micro_batches": 2}]) is None


GOOD = record(1, [[1, 2, 3, 4]], [[4, 3, 2, 1]])


@pytest.mark.parametrize(
    "bad",
    [
        {"ranks": None},
        {"ranks": []},
        {"ranks": [[1, 2, 3]]},
        {"ranks": [[1, 2, 3, -4]]},
        {"ranks": [[1, 2, 3, "4"]]},
        {"ranks": [[1, 2, 3, 4], [1, 2, 3, 4]]},  # as many as in `fixed`
        {"fixed": 7},
        {"fixed": {**GOOD["fixed"], "samples": "many"}},
        {"fixed": {**GOOD["fixed"], "ranks": [{}]}},
        {"step": None},
        {"step": -1},
        {"micro_batches": 2.5},
    ],
    ids=json.dumps,
)
def test_a_step_that_does_not_say_what_it_should_is_left_out(bad: dict[str, Any]) -> None:
    assert batching_of([{**GOOD, **bad}]) is None
    shown = batching_of([GOOD, {**GOOD, "step": 2, **bad}])
    assert shown is not None
    assert (shown.steps, shown.left_out, shown.columns) == (1, 1, 1)
    assert shown.after == (((4, 3, 2, 1),),)

from __future__ import annotations

import random
from collections import Counter

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eke.data import content_hash, split_by_content
from eke.errors import InputError

keys = st.lists(st.integers(0, 40) | st.integers(0, 2**128 - 1), max_size=120)
fractions = st.floats(0, 0.9)
bounds = st.tuples(st.integers(0, 30), st.integers(0, 60)).map(sorted)
seeds = st.integers(-5, 2**70)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(keys=keys, fraction=fractions, bounds=bounds, seed=seeds)
def test_every_row_once_no_duplicate_straddles_bounds_hold(
    keys: list[int], fraction: float, bounds: list[int], seed: int
) -> None:
    train, held_out = split_by_content(keys, fraction, *bounds, seed=seed)
    assert sorted(train + held_out) == list(range(len(keys)))
    assert train == sorted(train)
    assert held_out == sorted(held_out)
    assert not {keys[i] for i in train} & {keys[i] for i in held_out}
    room = min(bounds[1], len(keys) // 2)
    assert len(held_out) <= room
    # Whatever is missing to the lower bound would not have fitted.
    if len(held_out) < min(bounds[0], room):
        left = Counter(keys[i] for i in train)
        assert all(len(held_out) + n > room for n in left.values())


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(keys=keys, fraction=fractions, bounds=bounds, seed=seeds, data=st.data())
def test_the_order_of_rows_does_not_matter(
    keys: list[int], fraction: float, bounds: list[int], seed: int, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(keys))
    a = split_by_content(keys, fraction, *bounds, seed=seed)[1]
    b = split_by_content(shuffled, fraction, *bounds, seed=seed)[1]
    assert {keys[i] for i in a} == {shuffled[i] for i in b}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(keys=keys, more=keys, fraction=st.floats(0, 0.2), seed=seeds)
def test_appended_rows_move_no_other_while_no_bound_binds(
    keys: list[int], more: list[int], fraction: float, seed: int
) -> None:
    keys = [*keys, *range(1000, 1400)]  # so that half of the rows is out of reach
    before = split_by_content(keys, fraction, 0, 10_000, seed)[1]
    after = split_by_content(keys + more, fraction, 0, 10_000, seed)[1]
    assert before == [i for i in after if i < len(keys)]


def test_the_upper_bound_gives_back_the_highest_places() -> None:
    keys = list(range(5000))
    wide = set(split_by_content(keys, 0.2, 1, 5000)[1])
    narrow = set(split_by_content(keys, 0.2, 1, 100)[1])
    assert len(narrow) == 100
    assert narrow < wide


def test_the_share_and_the_seed() -> None:
    keys = list(range(20_000))
    held_out = split_by_content(keys, 0.05, 1, 20_000, seed=1)[1]
    # Binomial: 1,000 with a standard deviation of 31.
    assert 850 < len(held_out) < 1150
    other = split_by_content(keys, 0.05, 1, 20_000, seed=2)[1]
    assert len(set(held_out) & set(other)) < 120
    # Held-out rows come from everywhere.
    assert 8000 < sum(held_out) / len(held_out) < 12_000


@pytest.mark.parametrize(("n", "expected"), [(0, 0), (1, 0), (2, 1), (3, 1), (9, 1)])
def test_few_rows(n: int, expected: int) -> None:
    assert len(split_by_content(range(n), 0.0, 1, 512)[1]) == expected


def test_equal_rows_only_leave_nothing_to_hold_out() -> None:
    assert split_by_content([7] * 10) == (list(range(10)), [])


def test_rows_are_hashed_by_content_whatever_the_order_of_fields() -> None:
    rows = [{"text": f"t{i % 50}", "n": i % 50} for i in range(100)]
    turned = [dict(reversed(row.items())) for row in rows]
    assert split_by_content(rows, 0.3) == split_by_content(turned, 0.3)
    assert split_by_content(rows, 0.3) == split_by_content(map(content_hash, rows), 0.3)
    random.Random(0).shuffle(rows)
    held_out = split_by_content(rows, 0.3)[1]
    assert len(held_out) == 2 * len({rows[i]["text"] for i in held_out})


def test_content_hash_is_fixed() -> None:
    """The same rows are held out by every version of eke."""
    canonical = b'{"a":"\\u00e9","b":[1,null]}'
    assert content_hash({"b": [1, None], "a": "é"}) == xxhash.xxh3_128_intdigest(canonical)
    places = [xxhash.xxh3_64_intdigest(b"%d" % key, seed=3) / 2**64 for key in range(40)]
    expected = [key for key in range(40) if places[key] < 0.2]
    assert 0 < len(expected) <= 20
    assert split_by_content(range(40), 0.2, seed=3)[1] == expected


@pytest.mark.parametrize(
    "arguments", [(1.0, 1, 2), (-0.1, 1, 2), (float("nan"), 1, 2), (0.1, 3, 2), (0.1, -1, 2)]
)
def test_impossible_bounds(arguments: tuple[float, int, int]) -> None:
    with pytest.raises(InputError):
        split_by_content([1, 2, 3], *arguments)

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.batching.order import Order, Place, StreamOrder
from eke.errors import EkeError


@given(
    n=st.integers(1, 60),
    seed=st.integers(0, 2**32),
    epoch=st.integers(0, 5),
    counts=st.lists(st.integers(1, 20), min_size=1),
    data=st.data(),
)
def test_windows_cover_what_is_left_once(
    n: int, seed: int, epoch: int, counts: list[int], data: st.DataObject
) -> None:
    order = Order(n, seed, shuffle=True)
    whole, end = order.window(Place(epoch), n)
    assert sorted(whole) == list(range(n))
    assert order.is_exhausted(end)
    cursor = data.draw(st.integers(0, n))
    pending = data.draw(st.permutations(whole[:cursor]).map(lambda p: tuple(p[: cursor // 2])))
    place, seen = Place(epoch, cursor, pending), []
    i = 0
    while not order.is_exhausted(place):
        indices, place = order.window(place, counts[i % len(counts)])
        seen += indices
        i += 1
    assert seen == [*pending, *whole[cursor:]]


def test_epochs_and_seeds_differ_and_places_do_not_depend_on_history() -> None:
    order = Order(100, 3, shuffle=True)
    first, second = order.window(Place(0), 100)[0], order.window(Place(1), 100)[0]
    assert first != second
    assert Order(100, 3, shuffle=True).window(Place(1), 100)[0] == second
    assert order.window(Place(0), 100)[0] == first
    assert Order(100, 4, shuffle=True).window(Place(0), 100)[0] != first


def test_without_shuffling_every_epoch_has_the_datasets_order() -> None:
    order = Order(10, 3, shuffle=False)
    assert order.window(Place(5), 10)[0] == list(range(10))


def test_the_order_of_a_seed_never_changes() -> None:
    """A run saved under one release must resume under the next."""
    assert Order(10, 0, shuffle=True).window(Place(0), 10)[0] == [
        0, 8, 9, 3, 7, 5, 1, 2, 6, 4,
    ]  # fmt: skip


@given(
    parts=st.integers(1, 5),
    cursor=st.integers(0, 30),
    pending=st.lists(st.integers(0, 29), unique=True, max_size=6),
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    ranks=st.integers(1, 4),
    data=st.data(),
)
def test_windows_of_an_iterable_are_its_numbers_but_for_parts_that_ended(
    parts: int, cursor: int, pending: list[int], counts: list[int], ranks: int, data: st.DataObject
) -> None:
    order = StreamOrder(parts, shuffle=True)
    ended = tuple(sorted(data.draw(st.sets(st.integers(0, parts - 1), max_size=parts - 1))))
    start = place = Place(2, cursor, tuple(pending), ended)
    seen: list[int] = []
    for count in counts:
        window, place = order.window(place, count)
        assert len(window) == count
        seen += window
        shares = [[i for i in window if i % ranks == rank] for rank in range(ranks)]
        assert order.deal(window, ranks) == shares
    beyond = [i for i in range(cursor, cursor + 400) if i % parts not in ended]
    assert [*seen, *place.pending] == (pending + beyond)[: len(seen) + len(place.pending)]
    assert order.window(start, len(seen)) == (seen, place), "many windows are one of as many"
    assert (place.epoch, place.ended) == (2, ended)
    assert not order.is_exhausted(place)


def test_an_iterable_is_over_when_each_part_was_found_to_end() -> None:
    order = StreamOrder(3, shuffle=False)
    place = Place(0, 12)
    assert order.ended(place, [], [0, 1, 2]) == place
    place = order.ended(place, [9, 4, 7], [1, 3, 6, 11])
    assert place == Place(0, 12, (), (0, 1))
    assert order.window(place, 2) == ([14, 17], Place(0, 18, (), (0, 1)))
    assert not order.is_exhausted(place)
    over = order.ended(place, [14], [])
    assert over.ended == (0, 1, 2)
    assert order.window(over, 5) == ([], over)
    assert order.is_exhausted(over)
    assert not order.is_exhausted(Place(0, 12, (3,), (0, 1, 2)))
    assert order.window(Place(0, 12, (3,), (0, 1, 2)), 5)[0] == [3]


def test_a_part_that_ends_at_two_places_is_refused() -> None:
    with pytest.raises(EkeError, match="sample 3 of its part 1 is there, sample 2 is not"):
        StreamOrder(3, shuffle=False).ended(Place(), [7], [10])

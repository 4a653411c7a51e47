from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eke.batching.order import Order, Place


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

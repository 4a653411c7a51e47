from hypothesis import given
from hypothesis import strategies as st

from eke.checkpoint.sharing import Item, holders, share_out

SIZES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 50)), max_size=12)


@given(SIZES, st.integers(1, 6), st.integers(1, 400))
def test_every_row_goes_to_exactly_one_rank_and_shares_are_even(sizes, ranks, split_bytes):
    items = [Item(f"t{i}", rows, size) for i, (rows, size) in enumerate(sizes)]
    parts = share_out(items, ranks, split_bytes)
    assert len(parts) == ranks
    for item in items:
        mine = [part for rank in parts for part in rank if part.name == item.name]
        assert mine, "every tensor has at least one shard, also an empty one"
        covered = [row for part in mine for row in range(part.begin, part.end)]
        assert covered == list(range(item.rows))
    total = sum(item.rows * item.row_bytes for item in items)
    pieces = [
        item.row_bytes if item.rows * item.row_bytes >= split_bytes else item.rows * item.row_bytes
        for item in items
    ]
    row = {item.name: item.row_bytes for item in items}
    for rank in parts:
        load = sum((part.end - part.begin) * row[part.name] for part in rank)
        assert load <= total / ranks + max(pieces, default=0) + 1


def test_one_rank_gets_everything_whole():
    items = [Item("a", 1000, 4096), Item("b", 1, 4), Item("c", 0, 0)]
    assert share_out(items, 1) == [[("a", 0, 1000), ("b", 0, 1), ("c", 0, 0)]]


def test_a_large_tensor_is_cut_at_rows():
    [first, second] = share_out([Item("big", 10, 1 << 20)], 2)
    assert first == [("big", 0, 5)]
    assert second == [("big", 5, 10)]


def test_holders_are_the_ranks_with_the_same_box():
    boxes = [[[0], [2]], [[2], [2]], [[0], [2]], None, None]
    assert [holders(boxes, rank) for rank in range(5)] == [(0, 2), (1,), (0, 2), (3, 4), (3, 4)]

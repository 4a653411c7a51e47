import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eke.checkpoint.boxes import overlap, pieces, span
from eke.distributed import Box

sizes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def a_box(draw, shape):
    bounds = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))


@st.composite
def two_boxes(draw):
    shape = draw(sizes)
    return shape, draw(a_box(shape)), draw(a_box(shape))


def cut_out(whole, box):
    return whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]


def numbered(shape):
    return np.arange(1, 1 + int(np.prod(shape, dtype=int))).reshape(shape)


@given(two_boxes())
def test_an_overlap_is_the_same_elements_in_both(given_):
    shape, a, b = given_
    whole = numbered(shape)
    of_a, of_b = cut_out(whole, a), cut_out(whole, b)
    common = overlap(a, b)
    expected = np.intersect1d(of_a, of_b)
    if common is None:
        assert expected.size == 0
    else:
        assert np.array_equal(of_a[common[0]], of_b[common[1]])
        assert np.array_equal(np.sort(of_a[common[0]], axis=None), expected)


@given(two_boxes())
def test_a_span_is_one_range_or_none(given_):
    shape, part, _ = given_
    if not all(part.shape):
        return
    whole = numbered(shape) - 1
    slices = tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))
    elements = whole[slices].reshape(-1)
    without_gaps = np.array_equal(elements, np.arange(elements[0], elements[0] + elements.size))
    expected = (int(elements[0]), int(elements[0]) + elements.size) if without_gaps else None
    assert span(shape, slices) == expected


@given(two_boxes(), st.data())
def test_pieces_of_any_stretches_fill_the_box_once(given_, data):
    shape, shard, wanted = given_
    whole = numbered(shape)
    flat = cut_out(whole, shard).reshape(-1)
    cuts = data.draw(st.lists(st.integers(0, flat.size), max_size=5).map(sorted))
    target, times = np.zeros(wanted.shape, int), np.zeros(wanted.shape, int)
    for begin, end in zip([0, *cuts], [*cuts, flat.size], strict=True):
        stretch = flat[begin:end]
        found = list(pieces(shard, wanted, begin, end))
        assert len(found) <= 2 * max(1, len(shape))
        for piece in found:
            size = int(np.prod(piece.shape, dtype=int))
            part = stretch[piece.at : piece.at + size].reshape(piece.shape)
            target[piece.place] = part[piece.taken]
            times[piece.place] += 1
    inside = np.isin(cut_out(whole, wanted), flat)
    assert np.array_equal(times, inside.astype(int))
    assert np.array_equal(target, cut_out(whole, wanted) * inside)

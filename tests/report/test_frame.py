from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from eke.report.frame import SMALL, in_lanes, placed, tick_text
from eke.report.scales import linear_ticks
from eke.report.text import text_width

label = st.tuples(st.floats(0, 1000), st.text("abcXYZ 0123456789", min_size=1, max_size=60))


@given(st.lists(label, max_size=30))
def test_placed_labels_are_inside_and_never_overlap(labels: list[tuple[float, str]]) -> None:
    spans = []
    for centre, text in placed(labels, 0, 1000):
        half = text_width(text, SMALL) / 2
        spans.append((centre - half, centre + half))
    assert all(a >= -1e-6 and b <= 1000 + 1e-6 for a, b in spans)
    assert all(a[1] < b[0] for a, b in pairwise(spans))


@given(st.lists(label, max_size=30).map(sorted), st.integers(1, 4))
def test_lanes_never_overlap(items: list[tuple[float, str]], lanes: int) -> None:
    taken: dict[int, list[tuple[float, float]]] = {}
    found = in_lanes(items, 0, 1000, 380, lanes)
    assert len(found) == len(items)
    for place in found:
        if place is None:
            continue
        lane, start, text = place
        end = start + text_width(text, SMALL)
        assert 0 <= lane < lanes
        assert start >= 0
        assert end <= 1000 + 1e-6
        assert all(end < a or start > b for a, b in taken.get(lane, []))
        taken.setdefault(lane, []).append((start, end))
    assert not items or found[0] is not None


@given(st.floats(-1e9, 1e9), st.floats(1e-3, 1e9))
def test_ticks_of_one_axis_read_differently(low: float, width: float) -> None:
    if width < 1e-4 * abs(low):
        return
    ticks = linear_ticks(low, low + width, 5)
    texts = [tick_text(ticks)(t) for t in ticks]
    if max((abs(t) for t in ticks), default=0) < 1e6:
        assert len(set(texts)) == len(texts)

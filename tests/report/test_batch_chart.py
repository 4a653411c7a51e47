"""The picture of ranks and steps: lanes filled to the last pixel, in the right shares, in words."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.report.batch_chart import batch_chart, row_name, spoken
from eke.report.batches import PARTS, Batching, batching_of

SVG = "{http://www.w3.org/2000/svg}"
Check = Callable[[str], ET.Element]
parts = st.lists(st.integers(0, 999), min_size=4, max_size=4)


def run_of(rows: list[tuple[int, list[list[int]], list[list[int]]]]) -> Batching:
    shown = batching_of(
        [
            {
                "step": step,
                "micro_batches": 3,
                "ranks": after,
                "fixed": {"samples": 4, "micro_batches": 6, "ranks": before},
            }
            for step, before, after in rows
        ]
    )
    assert shown is not None
    return shown


def areas(root: ET.Element) -> list[tuple[str, list[tuple[float, float]]]]:
    """The part that each area is of, and its corners."""
    found = []
    for element in root.iter(f"{SVG}path"):
        classes = element.attrib.get("class", "").split()
        if "b-area" in classes:
            pairs = [p.split() for p in element.attrib["d"].lstrip("M").split("L")]
            found.append((classes[1].removeprefix("b-"), [(float(x), float(y)) for x, y in pairs]))
    return found


def surface(corners: list[tuple[float, float]]) -> float:
    """By the shoelace formula."""
    following = [*corners[1:], corners[0]]
    return abs(sum(a * d - c * b for (a, b), (c, d) in zip(corners, following, strict=True))) / 2


def lanes_of(root: ET.Element) -> list[tuple[float, float, float, float]]:
    """x, y, width and height."""
    keys = ("x", "y", "width", "height")
    found = [e for e in root.iter(f"{SVG}rect") if e.attrib.get("class") == "g-lane"]
    return [tuple(float(e.attrib[key]) for key in keys) for e in found]  # type: ignore[misc]


@pytest.mark.parametrize("width", [340, 1040])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_surfaces_are_the_shares(check_svg: Check, ranks: int, width: int) -> None:
    before = [[50, 30, 20, 0], [60, 0, 0, 40]] * 4
    after = [[90, 4, 6, 0], [95, 5, 0, 0]] * 4
    shown = run_of([(step, before[:ranks], after[:ranks]) for step in range(1, 31)])
    root = check_svg(batch_chart(shown, width=width, name="b"))
    lanes, drawn = lanes_of(root), areas(root)
    assert len(lanes) == 2 * ranks
    for (left, top, wide, high), row in zip(lanes, before[:ranks] + after[:ranks], strict=True):
        inside = {
            part: surface(corners) / (wide * high)
            for part, corners in drawn
            if all(top - 0.01 <= y <= top + high + 0.01 for _, y in corners)
        }
        # Each reaches from the bottom to where the next begins.
        expected = {
            part: sum(row[: index + 1]) / 100 for index, part in enumerate(PARTS) if row[index]
        }
        assert inside == pytest.approx(expected, abs=0.01)
        xs = [x for part, corners in drawn for x, _ in corners]
        assert min(xs) == pytest.approx(left, abs=0.01)
        assert max(xs) == pytest.approx(left + wide, abs=0.01)
    text = " ".join("".join(t.itertext()) for t in root.iter(f"{SVG}text"))
    assert "rank 0" in text
    assert "50.0 %" in text
    assert "95.0 %" in text or ranks == 1


def test_a_step_is_where_it_belongs(check_svg: Check) -> None:
    good, bad = [[100, 0, 0, 0]], [[50, 50, 0, 0]]
    shown = run_of([(step, good, bad if step == 8 else good) for step in range(1, 11)])
    root = check_svg(batch_chart(shown, width=1040, name="b"))
    (left, _, wide, _), _ = lanes_of(root)
    (lowered,) = (
        corners
        for part, corners in areas(root)
        if part == "real" and len({y for _, y in corners}) == 3
    )
    middle = sorted({y for _, y in lowered})[1]
    at = sorted(x for x, y in lowered if y == middle)
    assert at == pytest.approx([left + wide * 0.7, left + wide * 0.8], abs=0.02)


def test_where_a_rank_took_no_part_nothing_is_drawn(check_svg: Check) -> None:
    one, two = [[10, 0, 0, 0]], [[10, 0, 0, 0], [5, 0, 5, 0]]
    shown = run_of([(step, two, two) if step <= 5 else (step, one, one) for step in range(1, 11)])
    root = check_svg(batch_chart(shown, width=1040, name="b"))
    (left, top, wide, high) = lanes_of(root)[1]
    xs = [
        x
        for _, corners in areas(root)
        for x, y in corners
        if all(top - 0.01 <= b <= top + high + 0.01 for _, b in corners)
    ]
    assert max(xs) == pytest.approx(left + wide / 2, abs=0.02)


@st.composite
def anything(draw: Any) -> Batching:
    steps = sorted(draw(st.sets(st.integers(0, 10**13), min_size=1, max_size=12)))
    rows = []
    for step in steps:
        ranks = draw(st.sampled_from([1, 3, 16, 100]))
        some = st.lists(parts, min_size=ranks, max_size=ranks)
        rows.append((step, draw(some), draw(some)))
    return run_of(rows)


@given(anything(), st.sampled_from([340, 1040]))
def test_any_run_stays_inside(check_svg: Check, shown: Batching, width: int) -> None:
    root = check_svg(batch_chart(shown, width=width, name="a"))
    lanes = lanes_of(root)
    for _, corners in areas(root):
        assert any(
            all(top - 0.01 <= y <= top + high + 0.01 for _, y in corners)
            for _, top, _, high in lanes
        )
    description = root.find(f"{SVG}desc")
    assert description is not None
    assert description.text is not None
    assert "Before, fixed batches: real " in description.text
    assert f"{row_name(shown, 0)}: real " in description.text


def test_words() -> None:
    assert spoken((75, 25, 0, 0)) == "real 75.0 %, padding 25.0 %"
    assert spoken((0, 0, 1, 1)) == "real 0.0 %, waiting 50.0 %, dummies 50.0 %"
    many = run_of([(1, [[1, 0, 0, 0]] * 40, [[1, 0, 0, 0]] * 40)])
    assert [row_name(many, row) for row in (0, 13)] == ["ranks 0–2", "rank 39"]


@pytest.mark.parametrize(("steps", "ranks"), [(1, 1), (2, 1), (3, 2), (7, 2)])
def test_no_step_after_the_last_is_named_and_one_is_not_several(steps: int, ranks: int) -> None:
    parts_of = [[10, 2, 1, 0]] * ranks
    shown = run_of([(step, parts_of, parts_of) for step in range(1, steps + 1)])
    root = ET.fromstring(batch_chart(shown, width=900, name="picture"))
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert not {str(step) for step in range(steps + 1, 3 * steps + 2)} & set(texts)
    said = " ".join(element.text or "" for element in root.iter(f"{SVG}desc"))
    assert f"{steps} step{'s' * (steps > 1)}, {ranks} rank{'s' * (ranks > 1)}. " in said

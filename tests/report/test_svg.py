from __future__ import annotations

import math
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.report.svg import el, figure, line, path, px, rect, title, words
from eke.report.text import clean

Check = Callable[[str], ET.Element]
SVG = "{http://www.w3.org/2000/svg}"
finite = st.floats(allow_nan=False, allow_infinity=False)
near = st.floats(-1e5, 1e5)
# Every character that Python can hold, and the ones that markup is made of more often.
any_text = st.text(st.characters() | st.sampled_from("<>&'\"\r\n\t]\x00\ud800\ufffe"), max_size=40)
NOT_FINITE = (math.nan, math.inf, -math.inf)


def read(text: str) -> str:
    """A text as an XML parser hands it on: line ends are all alike (XML 1.0, 2.11)."""
    return clean(text).replace("\r\n", "\n").replace("\r", "\n")


def vertices(root: ET.Element) -> list[tuple[float, float]]:
    pairs = [p.split() for p in root.attrib["d"].lstrip("M").split("L")]
    return [(float(x), float(y)) for x, y in pairs]


@given(finite | near)
def test_a_coordinate_has_two_decimals_at_most(value: float) -> None:
    text = px(value)
    assert re.fullmatch(r"-?\d+(\.\d?[1-9])?", text)
    assert text != "-0"
    assert float(text) == pytest.approx(value, rel=1e-15, abs=0.00501)


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_what_is_not_finite_is_refused_wherever_it_stands(bad: float) -> None:
    for draw in (
        lambda: px(bad),
        lambda: el("circle", cx=bad),
        lambda: words(bad, 0, "x"),
        lambda: words(0, bad, "x"),
        lambda: rect(bad, 0, 1, 1, "c"),
        lambda: line(0, 0, 1, bad, "c"),
        lambda: path([(0.0, bad)], "c"),
        lambda: path([(0.0, 0.0), (bad, 1.0)], "c"),
    ):
        with pytest.raises(ValueError, match="a coordinate is finite"):
            draw()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_size_that_is_not_finite_is_refused_too(bad: float) -> None:
    for width, height in ((bad, 1.0), (1.0, bad)):
        with pytest.raises(ValueError, match="a coordinate is finite"):
            rect(0, 0, width, height, "c")


@given(any_text, any_text, st.integers(), near)
def test_any_element_is_well_formed_and_keeps_its_attributes(
    one: str, two: str, whole: int, place: float
) -> None:
    inner = el("g", data=two)
    root = ET.fromstring(el("g", inner, title(one), class_=one, data_x=whole, x=place, gone=None))
    assert root.attrib == {"class": clean(one), "data-x": str(whole), "x": px(place)}
    assert [child.tag for child in root] == ["g", "title"]
    assert root[0].attrib["data"] == clean(two)
    assert (root[1].text or "") == read(one)


def test_names_of_attributes_and_elements_without_children() -> None:
    assert el("g", class_="a", text_anchor="end", viewBox="0") == (
        '<g class="a" text-anchor="end" viewBox="0"/>'
    )
    assert el("g", el("a"), "", el("b")) == "<g><a/><b/></g>"


def test_no_attribute_is_ever_cut() -> None:
    long = "ab " * 70_000
    assert ET.fromstring(el("g", class_=long)).attrib["class"] == clean(long, sys.maxsize) == long


@given(near, near, any_text, any_text)
def test_any_text_is_read_back_at_its_place(x: float, y: float, text: str, tip: str) -> None:
    root = ET.fromstring(words(x, y, text, "t", "end", title(tip)))
    assert root.tag == "text"
    assert root.attrib == {"x": px(x), "y": px(y), "class": "t", "text-anchor": "end"}
    assert root[0].tag == "title"
    assert (root[0].tail or "") == read(text)


def test_text_starts_at_its_point_unless_told_otherwise() -> None:
    assert "text-anchor" not in ET.fromstring(words(1, 2, "x")).attrib


@given(near, near, near, near)
def test_a_rectangle_is_never_of_negative_size(x: float, y: float, w: float, h: float) -> None:
    got = ET.fromstring(rect(x, y, w, h, "c")).attrib
    assert got["width"] == px(max(w, 0.0))
    assert got["height"] == px(max(h, 0.0))
    assert (got["x"], got["y"], got["class"]) == (px(x), px(y), "c")


@given(near, near, near, near)
def test_a_straight_line_joins_its_ends(a: float, b: float, c: float, d: float) -> None:
    root = ET.fromstring(line(a, b, c, d, "axis", title("tip")))
    assert [root.attrib[k] for k in ("x1", "y1", "x2", "y2")] == [px(v) for v in (a, b, c, d)]
    assert root[0].text == "tip"


@given(st.lists(st.tuples(near, near), min_size=2, max_size=30))
def test_a_path_goes_through_its_points_in_order(points: list[tuple[float, float]]) -> None:
    root = ET.fromstring(path(points, "series"))
    assert root.tag == "path"
    assert vertices(root) == [(float(px(x)), float(px(y))) for x, y in points]


def test_a_long_path_goes_through_all_its_points() -> None:
    points = [(i + 0.25, i % 97 + 0.75) for i in range(20_000)]
    assert vertices(ET.fromstring(path(points, "series"))) == points


def test_a_path_of_one_point_is_a_dot_and_of_none_nothing() -> None:
    assert path([], "series") == ""
    dot = ET.fromstring(path([(3.0, 4.5)], "series", title("tip")))
    assert dot.tag == "circle"
    assert (dot.attrib["cx"], dot.attrib["cy"]) == ("3", "4.5")
    assert dot.attrib["class"].split() == ["dot", "series"]
    assert dot[0].text == "tip"


@given(any_text, any_text, any_text)
def test_a_picture_says_what_it_is(heading: str, description: str, text: str) -> None:
    root = ET.fromstring(figure("loss-w", 340, 210, heading, description, words(1, 2, text)))
    assert root.tag == f"{SVG}svg"
    assert root.attrib["viewBox"] == "0 0 340 210"
    assert root.attrib["role"] == "img"
    said = {e.attrib["id"]: e.text or "" for e in root if "id" in e.attrib}
    assert said == {"loss-w-title": read(heading), "loss-w-desc": read(description)}
    assert root.attrib["aria-labelledby"].split() == list(said)
    assert [e.tag for e in root] == [f"{SVG}title", f"{SVG}desc", f"{SVG}text"]


def test_a_real_picture_passes_the_check_that_the_charts_are_held_to(check_svg: Check) -> None:
    drawn = rect(10, 10, 80, 30, "bin"), path([(0.0, 0.0), (100.0, 50.0)], "series")
    check_svg(figure("a", 100, 50, "heading", "description", *drawn))
    with pytest.raises(AssertionError):
        check_svg(figure("a", 100, 50, "h", "d", rect(10, 10, 95, 30, "bin")))


def test_two_pictures_of_other_names_share_no_id() -> None:
    ids = [
        set(re.findall(r'\bid="([^"]+)"', figure(name, 10, 10, "h", "d"))) for name in ("a", "b")
    ]
    assert all(len(found) == 2 for found in ids)
    assert not ids[0] & ids[1]

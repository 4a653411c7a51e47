from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.report import text
from eke.report.svg import el, words

anything = st.text(st.characters(exclude_categories=()), max_size=60)
json_value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | anything,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(anything, inner, max_size=4),
    max_leaves=12,
)


@given(anything)
def test_cleaned_text_is_legal_in_xml_and_utf8(raw: str) -> None:
    cleaned = text.clean(raw)
    cleaned.encode("utf-8")
    root = ET.fromstring(el("svg", words(1, 2, raw), data_name=raw))
    shown = root[0].text or ""
    assert shown.split() == cleaned.split()


@given(anything, st.floats(0, 500), st.sampled_from([11.0, 12.0]))
def test_fitted_text_is_never_wider_than_asked(raw: str, width: float, size: float) -> None:
    assert text.text_width(text.fit(raw, width, size), size) <= width


@given(json_value)
def test_any_value_has_a_text(value: Any) -> None:
    text.plain(value).encode("utf-8")
    text.number(value)
    text.whole(value)
    for _, shown in text.flatten({"key": value}):
        shown.encode("utf-8")


@given(st.none() | st.floats(allow_nan=False))
def test_no_number_makes_a_formatter_fail(value: float | None) -> None:
    finite = value if value is None or math.isfinite(value) else None
    for unit in ("seconds", "flops", "joules", "money", "tokens"):
        assert text.amount(unit, finite, "USD")
    for format_ in (text.power, text.share, text.moment, text.duration):
        assert format_(value)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (text.power(2.1e15), "2.10×10¹⁵"),
        (text.power(0.0), "0"),
        (text.power(-3.25e-7), "-3.25×10⁻⁷"),
        (text.power(1234.0), "1234"),
        (text.decade(1e15), "10¹⁵"),
        (text.decade(2e6), "2×10⁶"),
        (text.count(12345), "12,345"),
        (text.count(None), "unknown"),
        (text.share(0.0004), "< 0.1 %"),
        (text.share(0.0), "0.0 %"),
        (text.share(0.123), "12.3 %"),
        (text.share(None), "unknown"),
        (text.loss(2.64921), "2.6492"),
        (text.loss(None), "not a number"),
        (text.duration(0), "0s"),
        (text.amount("joules", None), "unknown"),
        (text.amount("money", 1.5, "USD"), "1.5 USD"),
        (text.moment(0), "unknown"),
        (text.moment(1e18), "unknown"),
        (text.moment(1_790_000_000), "2026-09-21 14:13 UTC"),
        (text.plain(["a", "b"]), "a, b"),
        (text.plain(list(range(20))), "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, … (20 in all)"),
    ],
)
def test_amounts_read_as_people_write_them(shown: str, expected: str) -> None:
    assert shown == expected


def test_numbers_are_finite_floats_or_nothing() -> None:
    assert text.number(3) == 3.0
    for bad in (float("nan"), float("inf"), 10**400, 1e200, "3", True, None, [1]):
        assert text.number(bad) is None
    assert text.whole(4.0) == 4
    assert text.whole(4.5) is None


def test_nested_tables_become_dotted_keys_in_order() -> None:
    assert text.flatten({"b": {"x": 1, "y": {"z": "q"}}, "a": True}) == [
        ("b.x", "1"),
        ("b.y.z", "q"),
        ("a", "true"),
    ]

"""The picture of a save: everything inside it, stalls visible and in words."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.budget.trace import read_trace
from eke.report.save_chart import CLASSES, headline, milliseconds, save_chart
from eke.report.saves import Bit, SaveView, saves_of

SVG = "{http://www.w3.org/2000/svg}"
Check = Callable[[str], ET.Element]


def texts(root: ET.Element) -> list[str]:
    return ["".join(t.itertext()) for t in root.iter(f"{SVG}text")]


def of_class(root: ET.Element, name: str) -> list[ET.Element]:
    return [e for e in root.iter(f"{SVG}rect") if name in e.attrib.get("class", "").split()]


@pytest.mark.parametrize("width", [340, 1040])
def test_the_worst_save_of_a_run(full_run: Path, check_svg: Check, width: int) -> None:
    saves = saves_of(read_trace(full_run / "trace.json"))
    assert saves is not None
    root = check_svg(save_chart(saves.worst, heading="The worst save", width=width, name="w"))
    said = texts(root)
    assert {"training", "capture", "write", "commit", "The worst save"} <= set(said)
    assert any("61 ms" in text for text in said)
    first, second = of_class(root, "g-stall")
    ratio = float(first.attrib["width"]) / float(second.attrib["width"])
    assert ratio == pytest.approx(1, abs=0.02)
    writes = of_class(root, "g-write")
    assert len(writes) == 4
    copies = of_class(root, "g-lazy")
    # 165 ms against 80 ms, on one scale.
    assert float(copies[0].attrib["width"]) / float(writes[0].attrib["width"]) == pytest.approx(
        165 / 80, rel=0.02
    )
    description = root.find(f"{SVG}desc")
    assert description is not None
    assert description.text is not None
    assert description.text.startswith(headline(saves.worst))
    assert "Write was at work for 370 ms." in description.text


spans = st.lists(st.tuples(st.sampled_from(sorted(CLASSES)), st.floats(0, 1), st.floats(0, 1)))


@given(spans, spans, spans, st.floats(0, 1e7), st.sampled_from([340, 1040]))
def test_any_save_stays_inside(
    check_svg: Check,
    phases: list[tuple[str, float, float]],
    stalls: list[tuple[str, float, float]],
    writes: list[tuple[str, float, float]],
    total_ms: float,
    width: int,
) -> None:
    low, high = (-0.08 * total_ms, 1.06 * total_ms) if total_ms else (-1.0, 1.0)

    def bits(drawn: list[tuple[str, float, float]]) -> tuple[Bit, ...]:
        return tuple(
            Bit(name, low + min(a, b) * (high - low), low + max(a, b) * (high - low))
            for name, a, b in drawn
        )

    save = SaveView(
        10, "committed", total_ms / 3, total_ms, None, bits(phases[:9]), bits(phases),
        bits(stalls), {"write": bits(writes)}, low, high,
    )  # fmt: skip
    root = check_svg(save_chart(save, heading="Any", width=width, name="a"))
    assert all(float(r.attrib["width"]) >= 2 - 0.01 for r in of_class(root, "g-stall"))


def test_milliseconds_read_well() -> None:
    assert [milliseconds(ms) for ms in (0.0, 0.42, 9.4, 12.3, 1234.4, 65_000)] == [
        "0 ms", "0.42 ms", "9.4 ms", "12 ms", "1,234 ms", "65.0 s"
    ]  # fmt: skip

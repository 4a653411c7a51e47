from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.report import charts
from eke.report.view import Lengths, Proof

SVG = "{http://www.w3.org/2000/svg}"
Check = Callable[[str], ET.Element]
amount = st.none() | st.floats(0, 1e100)
WIDTHS = (340, 510, 1040)


def texts(root: ET.Element) -> list[str]:
    return ["".join(t.itertext()) for t in root.iter(f"{SVG}text")]


def of_class(root: ET.Element, name: str) -> list[ET.Element]:
    return [e for e in root.iter() if name in e.attrib.get("class", "").split()]


def test_waterfall_bars_follow_one_another(check_svg: Check) -> None:
    bars = [
        charts.Bar("train", "useful training", 60.0, "1m00s"),
        charts.Bar("wait", "waiting for data", 30.0, "30s"),
        charts.Bar("lost", "lost work", 10.0, "10s"),
    ]
    root = check_svg(charts.waterfall(bars, "1m40s", heading="Seconds", width=510, name="w"))
    drawn = [e.attrib for e in of_class(root, "bar")]
    total = drawn.pop()
    assert total["class"] == "bar total"
    at = float(total["x"])
    for bar, share in zip(drawn, (0.6, 0.3, 0.1), strict=True):
        assert float(bar["x"]) == pytest.approx(at, abs=0.02)
        assert float(bar["width"]) == pytest.approx(share * float(total["width"]), abs=0.02)
        at += float(bar["width"])
    assert at == pytest.approx(float(total["x"]) + float(total["width"]), abs=0.05)


def test_unknown_amounts_are_a_word_and_no_bar(check_svg: Check) -> None:
    bars = [charts.Bar("train", "useful training", None, "unknown")]
    root = check_svg(charts.waterfall(bars, "unknown", heading="FLOPs", width=340, name="w"))
    assert of_class(root, "train") == []
    assert len(of_class(root, "unknown")) == 1
    assert texts(root).count("unknown") == 2


@given(st.lists(amount, max_size=9), st.sampled_from(WIDTHS))
def test_any_waterfall_stays_inside(check_svg: Check, values: list[float | None], w: int) -> None:
    bars = [charts.Bar("eval", f"row {i}", v, str(v)) for i, v in enumerate(values)]
    check_svg(charts.waterfall(bars, "sum", heading="Seconds", width=w, name="w"))


@given(
    st.lists(st.floats(0, 1e100), min_size=1, max_size=40),
    st.floats(1e-3, 1e100),
    st.sampled_from(WIDTHS),
)
def test_any_histogram_stays_inside(
    check_svg: Check, counts: list[float], cap: float, width: int
) -> None:
    markup = charts.histogram(Lengths(tuple(counts), cap, 1, 0), width=width, name="h")
    assert len(of_class(check_svg(markup), "bin")) == len(counts)


def test_histogram_bins_are_as_high_as_their_counts(check_svg: Check) -> None:
    root = check_svg(charts.histogram(Lengths((1, 4, 2), 300, 1, 0), width=340, name="h"))
    heights = [float(e.attrib["height"]) for e in of_class(root, "bin")]
    assert heights[1] == pytest.approx(4 * heights[0], abs=0.05)
    assert heights[2] == pytest.approx(2 * heights[0], abs=0.05)
    assert "100 to 200 tokens: 4 samples" in "".join(root.itertext())


@given(
    st.lists(
        st.tuples(st.integers(0, 10**9).map(float), st.floats(0, 1e100)), min_size=1, max_size=50
    ).map(sorted),
    st.sampled_from(WIDTHS),
)
def test_any_series_stays_inside(
    check_svg: Check, points: list[tuple[float, float]], width: int
) -> None:
    check_svg(
        charts.series(points, heading="h", description="d", class_="rate", width=width, name="s")
    )


def test_a_long_series_is_thinned(check_svg: Check) -> None:
    points = [(float(i), float(i % 17)) for i in range(50_000)]
    markup = charts.series(points, heading="h", description="d", class_="rate", width=340, name="s")
    line = of_class(check_svg(markup), "series")[0]
    assert line.attrib["d"].count("L") < 2000


loss = st.none() | st.floats(-1e100, 1e100)


@given(st.lists(st.tuples(st.integers(0, 10**6), loss, loss), min_size=1, max_size=30))
def test_any_proof_stays_inside(
    check_svg: Check, rows: list[tuple[int, float | None, float | None]]
) -> None:
    steps, a, b = zip(*sorted(rows, key=lambda r: r[0]), strict=True)
    shown = Proof(steps, a, b, None, steps[0], steps[-1], "")
    for width in (340, 1040):
        check_svg(charts.proof(shown, width=width, name="p"))


def test_the_difference_of_a_proof_is_flat_at_zero_only_if_it_is(check_svg: Check) -> None:
    same = Proof((1, 2, 3), (3.0, 2.0, 1.0), (3.0, 2.0, 1.0), True, 2, 1, "")
    path = of_class(check_svg(charts.proof(same, width=1040, name="p")), "proof-gap")[0]
    assert len({p.split()[1] for p in path.attrib["d"].lstrip("M").split("L")}) == 1
    other = Proof((1, 2, 3), (3.0, 2.0, 1.0), (3.0, 2.0, 1.1), False, 2, 1, "")
    path = of_class(check_svg(charts.proof(other, width=1040, name="p")), "proof-gap")[0]
    assert len({p.split()[1] for p in path.attrib["d"].lstrip("M").split("L")}) == 2


@pytest.mark.parametrize(
    ("share", "class_", "width"),
    [(None, "meter-used", 0), (0.25, "meter-used", 25), (1.0, "meter-used", 100)],
)
def test_a_meter_fills_with_its_share(share: float | None, class_: str, width: float) -> None:
    root = ET.fromstring(charts.meter(share, "m", "FLOPs <&> used"))
    assert float(of_class(root, class_)[0].attrib["width"]) == width


def test_a_passed_limit_is_marked() -> None:
    root = ET.fromstring(charts.meter(1.5, "m", "time"))
    assert float(of_class(root, "meter-over")[0].attrib["width"]) == 100

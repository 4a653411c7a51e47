"""The picture of the results is well-formed, and its bars are as long as the figures."""

import xml.etree.ElementTree as ET

import pytest
from benchmarks.chart import (
    ARMS,
    PANELS,
    WIDTH,
    drawn,
    last_run,
    medians,
)

SVG = "{http://www.w3.org/2000/svg}"
FOUND = {
    panel: {arm: 0.01 * (n + 1) * (number + 1) for n, arm in enumerate(ARMS)}
    for number, panel in enumerate(PANELS)
}


def bars(svg):
    tree = ET.fromstring(svg)
    return [r for r in tree.iter(f"{SVG}rect") if r.get("class", "").startswith("bar")]


def test_bars_are_proportional_and_inside():
    found = bars(drawn(FOUND, "a <machine> & its disk"))
    assert len(found) == len(ARMS) * len(PANELS)
    widths = [float(bar.get("width")) for bar in found[: len(ARMS)]]
    # Coordinates have two decimals.
    assert widths == pytest.approx([widths[0] * (n + 1) for n in range(len(ARMS))], abs=0.1)
    assert all(float(b.get("x")) + float(b.get("width")) < WIDTH for b in found)


def test_an_arm_without_a_figure_has_no_bar_and_noise_below_zero_none_to_speak_of():
    found = {panel: dict(values) for panel, values in FOUND.items()}
    del found[PANELS[0]]["torch.save"]
    found[PANELS[3]]["eke"] = -0.01
    svg = drawn(found, "")
    assert len(bars(svg)) == len(ARMS) * len(PANELS) - 1
    assert ">–<" in svg
    assert min(float(bar.get("width")) for bar in bars(svg)) == 0.5


def test_only_the_last_run_is_drawn():
    def row(date, arm, median, workload="W1"):
        return {
            "date": date, "arm": arm, "median": str(median), "workload": workload, "metric": "cpu"
        }  # fmt: skip

    rows = [row("1", "eke", 9), row("1", "old", 9), row("2", "eke", 3), row("2", "eke", 8, "W3")]
    assert medians(last_run(rows), "cpu") == {"eke": 3.0}
    assert last_run([]) == []

"""The picture of the results is well-formed, and its bars are as long as the figures."""

import xml.etree.ElementTree as ET

import pytest
from benchmarks.chart import (
    ARMS,
    BATCHED_AS,
    PANELS,
    WIDTH,
    batched,
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


def test_batching_is_drawn_from_both_benchmarks():
    workload = "ShareGPT4o-like 8x1024"
    exact = [
        {
            "workload": workload,
            "arm": "eke, padded, waits",
            "padding": "0.01",
            "efficiency": "0.95",
        },
        {"workload": workload, "arm": "fixed, 4 a rank", "padding": "0.7", "efficiency": "0.24"},
        {"workload": workload, "arm": "lhotse DynamicBucketing", "padding": "", "efficiency": ""},
        {"workload": "other", "arm": "fixed, 4 a rank", "padding": "0.9", "efficiency": "0.9"},
    ]
    timed = [
        {"workload": "training", "arm": "eke", "metric": "labels", "median": "2100"},
        {"workload": "training", "arm": "eke", "metric": "batches", "median": "7"},
        {"workload": "loader", "arm": "eke", "metric": "labels", "median": "1"},
    ]
    found = batched(exact, timed)
    assert [dict(values) for values in found.values()] == [
        {"eke, padded": 0.01, "fixed batches": 0.7},
        {"eke, padded": 0.95, "fixed batches": 0.24},
        {"eke, padded": 2100.0},
    ]
    picture = drawn(found, "foot", heading="H", arms=tuple(BATCHED_AS.values()))
    ET.fromstring(picture)
    assert "95" in picture
    assert "2,100" in picture
    assert "lhotse DynamicBucketing" in picture

"""The picture of batching is well-formed, has a bar for each figure, and nothing overlaps."""

import re
import xml.etree.ElementTree as ET

import pytest
from benchmarks.batching_chart import ARMS, PANELS, batched, paired
from benchmarks.batching_claims import EKE, FIXED_BATCHES, TEXTS, TRL
from benchmarks.chart import WIDTH

SVG = "{http://www.w3.org/2000/svg}"
PADDING, EFFICIENCY, LABELS = PANELS


def rows(**changed):
    """A run: every arm's figures differ; `changed` replaces medians by arm."""
    found = []
    for text, name in enumerate(TEXTS):
        for number, arm in enumerate(ARMS):
            medians = {"padding": 0.05 * number, "efficiency": 1 - 0.05 * number}
            medians["labels"] = 1000.0 * (text + 1) * (len(ARMS) - number)
            found += [
                {"workload": name, "arm": arm, "metric": m, "median": str(changed.get(arm, v))}
                for m, v in medians.items()
            ]
    return found


def elements(svg, kind):
    return list(ET.fromstring(svg).iter(SVG + kind))


def test_labels_are_relative_to_the_fixed_batches_of_the_same_text():
    found = batched(rows())
    assert found[LABELS]["pydocs"][FIXED_BATCHES] == found[LABELS]["chitchat"][FIXED_BATCHES] == 1
    assert found[LABELS]["chitchat"][EKE] == pytest.approx(len(ARMS))
    assert found[PADDING]["pydocs"][EKE] == 0


def test_other_workloads_and_failures_are_left_out():
    other = [
        {"workload": "training", "arm": EKE, "metric": "labels", "median": "7"},
        {"workload": "pydocs", "arm": TRL, "metric": "failed", "median": ""},
    ]
    assert batched(other) == {panel: {name: {} for name in TEXTS} for panel in PANELS}
    paired(batched(other), "")


def test_a_bar_for_each_figure_as_long_as_it_is_and_inside():
    svg = paired(batched(rows()), "<foot> & more")
    bars = [
        r
        for r in elements(svg, "rect")
        if r.get("class", "").startswith("bar") and r.find(SVG + "title") is not None
    ]
    assert len(bars) == len(ARMS) * len(TEXTS) * len(PANELS)
    assert all(float(bar.get("x")) + float(bar.get("width")) < WIDTH for bar in bars)
    widths = [float(bar.get("width")) for bar in bars[-2 * len(ARMS) :: 2]]
    # Coordinates have two decimals.
    assert widths == pytest.approx([widths[-1] * n for n in range(len(ARMS), 0, -1)], abs=0.1)


def test_no_text_runs_into_another():
    svg = paired(batched(rows()), "foot")
    boxes = []
    for text in elements(svg, "text"):
        x, y = float(text.get("x")), float(text.get("y"))
        # As wide as in DejaVu Sans, the widest of the fonts that are asked for.
        kind = text.get("class")
        each = 7.6 if "strong" in kind else 6.2 if "small" in kind else 6.8
        wide = each * len("".join(text.itertext()))
        x -= wide if text.get("text-anchor") == "end" else 0
        boxes.append((x, y - 9, x + wide, y + 2, text.text))
    for number, (left, top, right, bottom, text) in enumerate(boxes):
        assert left >= 0, text
        assert right <= WIDTH, text
        for other in boxes[:number]:
            apart = left >= other[2] or other[0] >= right or top >= other[3] or other[1] >= bottom
            assert apart, (text, other[4])


def test_an_arm_without_a_figure_gets_a_dash():
    some = [row for row in rows() if row["arm"] != TRL]
    assert len(re.findall(">–<", paired(batched(some), ""))) == len(PANELS) * len(TEXTS)

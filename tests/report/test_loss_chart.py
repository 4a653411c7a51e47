from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.report.accounting import Accounts
from eke.report.loss_chart import cut_points, loss_chart
from eke.report.model import build
from eke.report.records import load
from eke.report.view import DecisionRow, EvalPoint, Phase, Restart, RunView, StepPoint

SVG = "{http://www.w3.org/2000/svg}"
Check = Callable[[str], ET.Element]


def of_class(root: ET.Element, name: str) -> list[ET.Element]:
    return [e for e in root.iter() if name in e.attrib.get("class", "").split()]


def texts(root: ET.Element) -> list[str]:
    return [(t.text or "") + "".join(c.tail or "" for c in t) for t in root.iter(f"{SVG}text")]


def view(steps: list[tuple[float, float | None]], **more: Any) -> RunView:
    points = tuple(
        StepPoint(i + 1, x, y, "stable", None, None, None) for i, (x, y) in enumerate(steps)
    )
    values: dict[str, Any] = {
        "name": "r", "state": "finished", "reason": "", "exit_code": 0, "model": "m",
        "corpus": "c", "eval_corpus": "c", "currency": "", "x_unit": "flops", "steps": points,
        "undone": (), "evals": (), "decisions": (), "restarts": (), "phases": (), "limits": (),
        "budget_used": None, "budget_end_x": None, "accounts": Accounts(), "lengths": None,
        "proof": None, "began": None, "ended": None, "config": (), "plan": (),
    }  # fmt: skip
    return RunView(**{**values, **more})


@pytest.mark.parametrize("width", [340, 860, 1040])
def test_a_whole_run_is_drawn_with_all_that_happened(
    full_run: Path, check_svg: Check, width: int
) -> None:
    run = build(load(full_run))
    root = check_svg(loss_chart(run, width=width, name="l", footer="tiny on pydocs"))
    assert len(of_class(root, "eval-dot")) == len(run.evals)
    assert len(of_class(root, "eval-bar")) == len(run.evals)
    assert len(of_class(root, "mark-continue")) == 16
    # One line each, and one swatch in the legend for the governor.
    assert len(of_class(root, "mark-governor")) == 2
    assert len(of_class(root, "mark-restart")) == 1
    shown = texts(root)
    assert any(t.startswith("decay: what is left to gain") for t in shown)
    assert "resumed at step 105, 7 steps done again" in shown
    assert "tiny on pydocs" in shown
    assert f"{run.final.loss:.4f}" in shown if run.final and run.final.loss else False
    assert len(of_class(root, "strip")) == 4  # three phases, and the budget that is left
    assert of_class(root, "left")


def test_the_curve_descends_where_the_loss_does(check_svg: Check) -> None:
    falling = view([(10.0**i, 5.0 - i) for i in range(5)])
    path = of_class(check_svg(loss_chart(falling, width=1040, name="l")), "raw-line")[1]
    points = [tuple(map(float, p.split())) for p in path.attrib["d"].lstrip("M").split("L")]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    assert ys == sorted(ys)  # pixels grow downwards
    gaps = [b - a for a, b in pairwise(xs)]
    assert max(gaps) - min(gaps) < 0.05  # a decade is as wide as the next


def test_a_spike_does_not_flatten_the_curve(check_svg: Check) -> None:
    points = [(1e12 + 1e10 * i, 3.0 - i / 1000) for i in range(1000)]
    spiky = view([*points[:500], (points[500][0], 1e30), *points[501:]])
    assert cut_points(spiky) == 1
    path = of_class(check_svg(loss_chart(spiky, width=1040, name="l")), "raw-line")[1]
    ys = [float(p.split()[1]) for p in path.attrib["d"].lstrip("M").split("L")]
    assert ys[-1] - ys[0] > 100


def test_a_very_long_run_is_thinned(check_svg: Check) -> None:
    run = view([(1e12 * (i + 1), 5.0 - i / 1e5 + (i % 7) / 10) for i in range(30_000)])
    markup = loss_chart(run, width=1040, name="l")
    root = check_svg(markup)
    for name in ("raw-line", "train-line"):
        assert of_class(root, name)[1].attrib["d"].count("L") < 2000
    assert len(markup) < 200_000


def test_nothing_recorded_says_so(check_svg: Check) -> None:
    for empty in (view([]), view([(1.0, None), (2.0, None)])):
        root = check_svg(loss_chart(empty, width=340, name="l"))
        assert "no losses were recorded" in texts(root)
        assert of_class(root, "train-line")[1:] == []


def test_hostile_names_stay_text(check_svg: Check) -> None:
    evil = '"><script>alert(1)</script>\x00\ud800'
    run = view(
        [(1.0, 2.0), (2.0, 1.0)],
        name=evil,
        decisions=(DecisionRow(1, 1.0, evil, evil, (), ()),),
        phases=(Phase(evil, 1.0, 2.0),),
    )
    root = check_svg(loss_chart(run, width=1040, name="l", footer=evil))
    assert not list(root.iter(f"{SVG}script"))
    assert not list(root.iter("script"))


def test_many_marks_do_not_overlap_and_some_go_unnamed(check_svg: Check) -> None:
    marks = tuple(Restart(i, 10.0**i, 0, None) for i in range(12))
    run = view([(10.0**i, 3.0) for i in range(12)], restarts=marks)
    root = check_svg(loss_chart(run, width=340, name="l"))
    assert len(of_class(root, "mark-restart")) == 12
    assert 3 <= len(of_class(root, "mark-text")) < 12


value = st.floats(-1e100, 1e100)
place = st.floats(0, 1e100)


@given(
    st.lists(st.tuples(place, st.none() | value), max_size=30).map(
        lambda rows: sorted(rows, key=lambda r: r[0])
    ),
    st.lists(st.tuples(place, st.none() | value, st.none() | st.floats(0, 1e99)), max_size=6),
    st.none() | place,
    st.none() | st.floats(0, 10),
    st.sampled_from([340, 1040]),
    st.sampled_from(["flops", "step"]),
)
def test_any_run_stays_inside_its_picture(
    check_svg: Check,
    steps: list[tuple[float, float | None]],
    evals: list[tuple[float, float | None, float | None]],
    end: float | None,
    used: float | None,
    width: int,
    unit: str,
) -> None:
    run = view(steps, x_unit=unit, budget_end_x=end, budget_used=used)
    rows = sorted(evals, key=lambda e: e[0])
    points = tuple(EvalPoint(i, x, y, se, 9, i == 2) for i, (x, y, se) in enumerate(rows))
    decisions = tuple(DecisionRow(i, x, "stop", "why", (), ()) for i, (x, _) in enumerate(steps))
    restarts = tuple(Restart(i, x, 1, None) for i, (x, _) in enumerate(steps[:4]))
    phases = tuple(Phase("warmup", x, x * 2) for x, _ in steps[:3])
    check_svg(
        loss_chart(
            replace(run, evals=points, decisions=decisions, restarts=restarts, phases=phases),
            width=width,
            name="l",
            footer="f",
        )
    )

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.errors import InputError
from eke.report import compare
from eke.report.compare import Difference, difference, overlay, paired_difference, say
from eke.report.model import build
from eke.report.records import load

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def two_runs(make_run: Callable[..., Any]) -> tuple[Path, Path]:
    first = make_run("a", steps=60).play()
    second = make_run("b", steps=80, seed=1, lr=1e-3, name="slower").play(crash=False)
    return first, second


def test_the_paired_difference_is_the_weighted_mean_with_its_error() -> None:
    rng = np.random.default_rng(0)
    weights = rng.integers(10, 400, 300).astype(float)
    hard = rng.normal(3, 1, 300)
    a, b = hard + rng.normal(0, 0.05, 300), hard - 0.1 + rng.normal(0, 0.05, 300)
    found = paired_difference(list(a), list(b), list(weights))
    assert found is not None
    mean, se = found
    assert mean == pytest.approx(np.average(b - a, weights=weights))
    draws = [rng.integers(0, 300, 300) for _ in range(3000)]
    bootstrap = np.std([np.average((b - a)[i], weights=weights[i]) for i in draws])
    assert se == pytest.approx(bootstrap, rel=0.08)
    # Pairing must pay: the losses themselves are spread a hundred times wider.
    unpaired = math.sqrt(2) * np.std(hard) / math.sqrt(300)
    assert se < unpaired / 5


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(0.1, 9)), min_size=2, max_size=30))
def test_equal_runs_differ_by_nothing(rows: list[tuple[float, float]]) -> None:
    losses, weights = [x for x, _ in rows], [w for _, w in rows]
    assert paired_difference(losses, losses, weights) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("a", "b", "weights"),
    [
        ([], [], []),
        ([1.0], [2.0], [1.0]),
        ([1.0, 2.0], [1.0], [1.0, 1.0]),
        ([1.0, None], [1.0, 2.0], [1.0, 1.0]),
        ([1.0, 2.0], [1.0, 2.0], [0.0, 0.0]),
    ],
)
def test_what_cannot_be_paired_is_not(a: Any, b: Any, weights: Any) -> None:
    assert paired_difference(a, b, weights) is None


def test_runs_on_the_same_examples_are_paired(two_runs: tuple[Path, Path]) -> None:
    a, b = (build(load(p)) for p in two_runs)
    found = difference(a, b)
    assert found is not None
    assert found.paired
    assert a.final is not None
    assert b.final is not None
    assert found.nats == pytest.approx((b.final.loss or 0) - (a.final.loss or 0))
    assert found.se is not None
    assert found.se < (a.final.se or 0) / 2


def test_verdicts_say_what_may_be_chance() -> None:
    assert "may be chance" in say(Difference(-0.01, 0.02, True), "A", "B")
    assert "lower than A" in say(Difference(-0.1, 0.02, True), "A", "B")
    assert "more than two standard errors" in say(Difference(0.1, 0.02, False), "A", "B")
    assert "unpaired" in say(Difference(0.1, 0.02, False), "A", "B")
    assert say(Difference(0.1, None, False), "A", "B") == (
        "B is 0.1000 nats per token higher than A."
    )
    assert "cannot be compared" in say(None, "A", "B")
    sums = Difference(-3.0, None, False, "nats per sample")
    assert say(sums, "A", "B") == "B is 3.0000 nats per sample lower than A."


def test_means_of_different_things_are_compared_by_their_examples_alone(
    two_runs: tuple[Path, Path],
) -> None:
    a, b = (build(load(p)) for p in two_runs)
    other = replace(b, loss_of="sequence")
    found = difference(a, other)
    assert found == difference(a, b)  # per token, example by example
    assert difference(a, replace(other, weights=())) is None
    both = difference(replace(a, loss_of="sequence"), replace(other, weights=()))
    assert both is not None
    assert (both.paired, both.unit) == (False, "nats per sample")


def test_both_curves_are_in_the_picture(
    two_runs: tuple[Path, Path], check_svg: Callable[[str], ET.Element]
) -> None:
    views = [build(load(p)) for p in two_runs]
    for width in (340, 1040):
        root = check_svg(overlay(views, ["A", "B"], width=width, name="o"))
        for i in (0, 1):
            paths = [p for p in root.iter(f"{SVG}path") if f"run-{i}" in p.attrib["class"].split()]
            assert len(paths) == 3  # legend, training, held-out


def test_the_page_shows_what_differs(two_runs: tuple[Path, Path], tmp_path: Path) -> None:
    out = compare(list(two_runs), tmp_path / "compared.html")
    page = out.read_text(encoding="utf-8")
    assert "A: pydocs-tiny" in page
    assert "B: slower" in page
    assert "optimizer.lr" in page
    assert "paired over the same examples" in page
    assert "lost work" in page
    differs = page[page.index("Configuration that differs") :]
    assert "optimizer.schedule" not in differs
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_runs_without_losses_can_still_be_compared(
    make_run: Callable[..., Any], tmp_path: Path
) -> None:
    roots = [make_run(n).root for n in ("a", "b")]
    page = compare(roots, tmp_path / "c.html").read_text(encoding="utf-8")
    assert "no losses were recorded" in page
    assert "cannot be compared" in page
    assert "The configurations are the same" in page


def test_a_comparison_needs_two_to_four_runs_that_share_an_axis(
    make_run: Callable[..., Any], tmp_path: Path
) -> None:
    run, other = make_run("a", steps=3), make_run("b")
    run.step(1)
    other.metrics.append({"kind": "step", "step": 1, "loss": 2.0})
    for roots in ([run.root], [run.root] * 5):
        with pytest.raises(InputError, match="2 to 4 run directories"):
            compare(roots, tmp_path / "c.html")
    with pytest.raises(InputError, match="cannot share an axis"):
        compare([run.root, other.root], tmp_path / "c.html")
    with pytest.raises(InputError, match="no such run directory"):
        compare([run.root, tmp_path / "absent"], tmp_path / "c.html")
    assert not (tmp_path / "c.html").exists()

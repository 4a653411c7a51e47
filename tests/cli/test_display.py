"""What a run shows, from its records: plain lines, and a panel on a terminal."""

from __future__ import annotations

import math
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from eke.cli.display import SPARKS, Display, sparkline

STEP: dict[str, Any] = {
    "kind": "step",
    "step": 20,
    "epoch": 1,
    "phase": "stable",
    "loss": 3.14159,
    "lr": 0.003,
    "tokens": 1500,
    "padded_tokens": 2000,
    "tokens_per_s": 12_345.0,
    "rss_bytes": 1.5 * 2**30,
    "budget_used": 0.421,
}
EVAL: dict[str, Any] = {
    "kind": "eval", "step": 20, "loss": 3.2, "se": 0.01, "finished": False
}  # fmt: skip


def shown(*records: dict[str, Any], every: int = 10, quiet: bool = False) -> str:
    out = StringIO()
    console = Console(file=out, width=200, highlight=False)
    with Display(every=every, quiet=quiet, console=console) as display:
        for record in records:
            display(record)
    return out.getvalue()


def test_a_step_is_a_line() -> None:
    assert shown(STEP) == (
        "step     20  loss  3.1416  lr 3.00e-03  12.3 k tokens/s  padding 25%  "
        "memory 1.5 GiB  budget 42%\n"
    )


def test_a_step_whose_loss_was_not_finite_says_so() -> None:
    assert "loss    none" in shown({**STEP, "loss": None})


@given(st.integers(1, 30), st.integers(0, 100))
def test_one_step_in_so_many_is_shown(every: int, steps: int) -> None:
    lines = shown(*({**STEP, "step": s} for s in range(1, steps + 1)), every=every).splitlines()
    assert [int(line.split()[1]) for line in lines] == list(range(every, steps + 1, every))


def test_other_records() -> None:
    text = shown(
        {"kind": "say", "text": "reading [the] data :smile"},
        EVAL,
        {**EVAL, "finished": True, "loss": 2.5},
        {"kind": "decision", "action": "continue", "step": 20, "reason": "no need"},
        {"kind": "decision", "action": "decay", "step": 25, "reason": "it no longer pays"},
        {"kind": "governor", "config": {}},
    )
    assert text.splitlines() == [
        "· reading [the] data :smile",
        "step     20  held-out loss 3.2000 ± 0.0100",
        "finished model  held-out loss 2.5000 ± 0.0100",
        "step     25  decay: it no longer pays",
    ]


def test_a_quiet_display_says_nothing() -> None:
    assert shown(STEP, EVAL, {"kind": "say", "text": "x"}, quiet=True) == ""


def test_long_lines_are_not_broken_where_they_can_be_piped() -> None:
    out = StringIO()
    display = Display(console=Console(file=out, width=20, highlight=False))
    display({"kind": "say", "text": "word " * 30})
    assert out.getvalue().count("\n") == 1


def test_a_terminal_shows_a_panel() -> None:
    out = StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    with Display(console=console) as display:
        assert "starting" in panel(display)
        for loss in (4.0, None, 3.0, 2.0):
            display({**STEP, "loss": loss, "budget_used": 1.2})
        display(EVAL)
        text = panel(display)
    for words in ("step 20", "epoch 1", "stable", "loss 2.0000", "held out 3.2000", "padding 25%"):
        assert words in text
    assert "█▅▁" in text
    assert "120.0%" in text
    assert "█" * 40 in text
    assert "held-out loss 3.2000" in out.getvalue()
    assert "loss  2.0000" not in out.getvalue()  # the panel shows it; no line does


def panel(display: Display) -> str:
    out = StringIO()
    Console(file=out, width=100).print(display._panel())
    return out.getvalue()


FINITE = st.floats(-1e6, 1e6)


@given(st.lists(FINITE | st.sampled_from([math.nan, math.inf]), max_size=60), st.integers(1, 50))
def test_sparks(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    tail = [v for v in values[-width:] if math.isfinite(v)]
    assert len(line) == len(tail)
    heights = [SPARKS.index(c) for c in line]
    for (a, x), (b, y) in zip(
        zip(tail, heights, strict=True), list(zip(tail, heights, strict=True))[1:], strict=False
    ):
        assert (a <= b) <= (x <= y)
    if tail and max(tail) > min(tail):
        assert heights[tail.index(min(tail))] == 0
        assert heights[tail.index(max(tail))] == 7


@pytest.mark.parametrize(
    ("result", "lines"),
    [
        (
            {"state": "finished", "loss": 2.5, "reason": "the FLOP budget is used up"},
            [
                "Done after 7 steps, held-out loss 2.5000: the FLOP budget is used up",
                "model",
                "repo",
            ],
        ),
        (
            {"state": "finished", "loss": None, "reason": "the end"},
            ["Done after 7 steps: the end", "model", "report"],
        ),
        (
            {"state": "finished", "trained": False, "reason": "the end"},
            ["This run is finished already (the end).", "model", "report"],
        ),
        (
            {"state": "interrupted", "reason": "SIGTERM at step 7"},
            ["Interrupted: SIGTERM at step 7. The same command goes on from here."],
        ),
    ],
)
def test_the_last_lines(result: dict[str, Any], lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "report.html").touch()
    out = StringIO()
    display = Display(console=Console(file=out, width=400))
    defaults = {"trained": True, "loss": None, "step": 7, "run_dir": tmp_path}
    display.outcome(SimpleNamespace(**{**defaults, **result}))
    printed = out.getvalue().splitlines()
    assert len(printed) == len(lines)
    for line, start in zip(printed, lines, strict=True):
        assert line.startswith(start)
    if len(lines) == 3:
        where = [f"model   {tmp_path / 'model'}", f"report  {tmp_path / 'report.html'}"]
        assert printed[1:] == where

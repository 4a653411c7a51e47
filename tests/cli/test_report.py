"""`eke report` on a run that was really trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_it_writes_the_report_again(trained: Any, eke: Callable[..., Any]) -> None:
    page = trained.run / "report.html"
    page.unlink()
    ended = eke("report", trained.run)
    assert (ended.code, ended.out, ended.err) == (0, f"{page}\n", "")
    assert "</html>" in page.read_text()


def test_it_writes_elsewhere(trained: Any, eke: Callable[..., Any], tmp_path: Path) -> None:
    before = (trained.run / "report.html").read_bytes() if trained.run.exists() else b""
    ended = eke("report", trained.run, "--out", tmp_path / "page.html")
    assert (ended.code, ended.out) == (0, f"{tmp_path / 'page.html'}\n")
    assert "</html>" in (tmp_path / "page.html").read_text()
    assert (trained.run / "report.html").read_bytes() == before


def test_several_runs_are_compared_on_one_page(
    trained: Any, eke: Callable[..., Any], tmp_path: Path
) -> None:
    ended = eke("report", trained.run, trained.run, "--out", tmp_path / "both.html")
    assert (ended.code, ended.out) == (0, f"{tmp_path / 'both.html'}\n")
    assert "</html>" in (tmp_path / "both.html").read_text()


def test_what_is_not_a_run(eke: Callable[..., Any], tmp_path: Path) -> None:
    for place, words in ((tmp_path, "not a run directory"), (tmp_path / "x", "no such run")):
        ended = eke("report", place)
        assert ended.code == 2
        assert words in ended.err
        assert str(place) in ended.err


def test_a_place_that_cannot_be_written(
    trained: Any, eke: Callable[..., Any], tmp_path: Path
) -> None:
    ended = eke("report", trained.run, "--out", tmp_path)
    assert ended.code in (1, 2)
    assert str(tmp_path) in ended.err
    assert ended.err.startswith("error: ")

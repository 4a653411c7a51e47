from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eke.errors import EkeError, InputError, MissingExtraError
from eke.report import loss_svg, write_report
from eke.report.render import write_whole

VOID = {"meta", "link", "br", "img", "input", "hr"}
SECTIONS = [
    "headline", "loss", "budget", "lengths", "batching", "saves", "proof", "decisions",
    "configuration",
]  # fmt: skip


class Page(HTMLParser):
    """Collects what the tests ask about, and fails on tags that do not nest."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.words: list[str] = []
        self.feed(markup)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for key, value in attrs:
            if key == "id":
                self.ids.append(value or "")
            if key in ("src", "href", "srcset", "action", "data", "poster", "xlink:href"):
                self.addresses.append(value or "")
            if key.startswith("on"):
                self.handlers.append(key)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return " ".join(w for w in self.words if w)


def check_page(path: Path) -> Page:
    markup = path.read_text(encoding="utf-8")
    page = Page(markup)
    assert len(page.ids) == len(set(page.ids))
    # Nothing is asked of a network, and nothing can run.
    assert all(a.startswith("#") or a == "data:," for a in page.addresses)
    assert re.findall(r"url\(|@import", markup) == []
    foreign = set(re.findall(r"https?://[^\"'<\s]+", markup)) - {"http://www.w3.org/2000/svg"}
    assert foreign == set()
    assert not {"script", "iframe", "object", "embed", "img"} & set(page.tags)
    assert page.handlers == []
    assert "default-src 'none'" in markup
    pictures = re.findall(r"<svg\b.*?</svg>", markup, re.S)
    for picture in pictures:
        ET.fromstring(picture)
    return page


def test_the_report_is_one_file_that_needs_nothing(full_run: Path) -> None:
    path = write_report(full_run)
    assert path == full_run / "report.html"
    page = check_page(path)
    assert [i for i in page.ids if i in SECTIONS] == SECTIONS
    assert path.stat().st_size < 1_000_000
    for said in (
        "pydocs-tiny", "finished", "more compute would gain less than 1.5 % of the loss",
        "held-out loss of the finished model", "builtin:tiny", "builtin:pydocs",
        "2 processes, 1 restart", "bit-identical: yes", "killed at step 22",
        "of the wall clock", "Lost work includes", "9f2c1ab4d07e6655", "max_length",
        "10 earlier decisions to continue",
    ):  # fmt: skip
        assert said in page.text, said
    # No counter measured energy: that is unknown, not 0.
    assert "unknown" in page.text


def test_the_report_goes_where_it_is_told(full_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "pages" / "mine.html"
    assert write_report(full_run, out=out) == out
    check_page(out)
    assert not (full_run / "report.html").exists()
    assert list(out.parent.iterdir()) == [out]
    first = out.read_bytes()
    write_report(full_run, out=out)
    assert out.read_bytes() == first


def test_measured_energy_is_shown(make_run: Callable[..., Any]) -> None:
    root = make_run(steps=20, joules=65.0).play(crash=False, proof=False)
    page = check_page(write_report(root))
    assert re.search(r"\d kJ", page.text)


def test_a_long_run_is_drawn_thin_and_says_so(make_run: Callable[..., Any]) -> None:
    run = make_run(steps=2500)
    for step in range(1, 2501):
        run.step(step)
    run.config()
    path = write_report(run.root)
    page = check_page(path)
    assert "2,500 steps are drawn as the lowest and highest loss" in page.text
    assert "Training steps (200 at most of 2,500)" in page.text
    assert path.stat().st_size < 1_500_000


def test_hostile_strings_stay_strings(make_run: Callable[..., Any]) -> None:
    evil = "</style></title><script>alert('x')</script>\"' onload=x \x00 \u202e" + "W" * 400
    run = make_run(steps=16, name=evil)
    run.play(crash=False)
    run.config(
        model={"source": evil}, data={"train": [evil, evil], "eval": evil},
        **{evil[:40]: {"k": evil}},
    )  # fmt: skip
    run.json("status.json", state=evil, reason=evil)
    run.json("plan.json", limits={"flops": 1e15}, note=evil, **{evil: evil})
    run.json(
        "resume_proof.json", steps=[1], reference_losses=[1], resumed_losses=[2], what=evil,
        bit_identical=False,
    )  # fmt: skip
    run.open()
    run.decide(3, evil, evil, **{evil: evil})
    page = check_page(write_report(run.root))
    assert "<script>alert('x')</script>" in page.text
    assert "bit-identical: no" in page.text
    ET.fromstring(loss_svg(run.root))


@pytest.mark.parametrize(
    "files",
    [
        {"metrics.jsonl": ""},
        {"run.toml": "[run"},
        {"ledger.jsonl": '{"kind":"bill","what":"train","seconds":null,"flops":null}\n'},
        {"metrics.jsonl": '{"kind":"step","step":1,"loss":NaN,"flops_total":5}\n'},
        {"metrics.jsonl": '{"kind":"eval","step":0,"flops_total":0,"loss":5.5}\n'},
        {"metrics.jsonl": '{"kind":"step","step":1,"loss":2,"flops_total":1e99,"tokens":1e99,'
         '"padded_tokens":1e100,"tokens_per_s":1e99,"tokens_total":1e99,"t":1e99}\n{"kind":'},
        {"metrics.jsonl": '{"kind":"step","step":1}\n', "status.json": '{"state":"running"}'},
    ],
)  # fmt: skip
def test_whatever_a_crash_leaves_has_a_report(
    tmp_path: Path, files: dict[str, str], check_svg: Callable[[str], Any]
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    page = check_page(write_report(tmp_path))
    assert [i for i in page.ids if i in SECTIONS] == [
        s for s in SECTIONS if s not in ("batching", "saves", "proof")
    ]
    check_svg(loss_svg(tmp_path))


def test_unknown_amounts_are_never_shown_as_zero(tmp_path: Path) -> None:
    line = '{"kind":"bill","what":"train","seconds":2,"flops":null,"t":9}\n'
    (tmp_path / "ledger.jsonl").write_text(line)
    page = check_page(write_report(tmp_path))
    assert "useful training unknown" in page.text
    assert "FLOPs of all activities" in page.text


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for function in (write_report, loss_svg):
        with pytest.raises(InputError, match="not a run directory"):
            function(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_cannot_be_written_is_one_clear_error(full_run: Path) -> None:
    (full_run / "blocked").write_text("a file, not a directory")
    with pytest.raises(EkeError, match="could not write"):
        write_report(full_run, out=full_run / "blocked" / "report.html")


def test_a_failed_write_leaves_the_old_report(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.mkdir()
    (target / "kept").write_text("x")
    with pytest.raises(EkeError, match="could not write"):
        write_whole(target, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert (target / "kept").exists()


def test_without_jinja_the_error_names_the_extra(
    full_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"eke\[train\]"):
        write_report(full_run)
    assert "<svg" in loss_svg(full_run)


def test_the_picture_alone_carries_its_style_and_workload(
    full_run: Path, check_svg: Callable[[str], ET.Element]
) -> None:
    markup = loss_svg(full_run)
    root = check_svg(markup)
    assert root.attrib["width"] == "860"
    assert "prefers-color-scheme: dark" in markup
    said = "".join(root.itertext())
    assert "builtin:tiny on builtin:pydocs · 240 steps · " in said
    assert "2026-09-21" in said
    assert "url(" not in markup

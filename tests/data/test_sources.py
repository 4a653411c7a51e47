from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eke.data import open_source
from eke.errors import InputError, MissingExtraError


@pytest.fixture
def folder(tmp_path: Path, write_jsonl: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("b.jsonl", "a.jsonl", "c.jsonl"):
        write_jsonl([{"text": name}], name)
    (tmp_path / "t.txt").write_text("words\n")
    pq.write_table(pa.Table.from_pylist([{"text": "p"}]), tmp_path / "p.parquet")
    (tmp_path / "x.csv").write_text("text\n1\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def texts(spec: Any) -> list[str]:
    return [row["text"] for row in open_source(spec)]


def test_one_of_each_kind(folder: Path) -> None:
    assert texts("a.jsonl") == ["a.jsonl"]
    assert texts(str(folder / "t.txt")) == ["words"]
    assert texts(["p.parquet"]) == ["p"]
    assert open_source("a.jsonl").origin(0) == "a.jsonl:1"


def test_globs_are_sorted_and_lists_keep_their_order(folder: Path) -> None:
    assert texts("*.jsonl") == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert texts("**/[ab].jsonl") == ["a.jsonl", "b.jsonl"]
    assert texts(["c.jsonl", "a.jsonl"]) == ["c.jsonl", "a.jsonl"]
    assert open_source("*.jsonl").name == "*.jsonl"


def test_a_name_that_looks_like_a_pattern_is_a_name_first(folder: Path) -> None:
    (folder / "a[1].jsonl").write_text('{"text": "itself"}\n')
    assert texts("a[1].jsonl") == ["itself"]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("none.jsonl", "none.jsonl does not exist"),
        ("none*.jsonl", r"no file matches none\*.jsonl"),
        ([], "no training data is named"),
        ("x.csv", r"extension that cannot be read; got '.csv'"),
        (["a.jsonl", "t.txt"], r"several kinds: .*a.jsonl \(JSON lines\)"),
        (["a.jsonl", "*.jsonl"], "a.jsonl is named twice"),
        ("builtin:poems", "no such built-in corpus; got 'builtin:poems'. Use builtin:pydocs"),
        (["builtin:pydocs", "a.jsonl"], "cannot be joined"),
        (".", "is a folder, but not one"),
    ],
)
def test_what_is_refused(folder: Path, spec: Any, says: str) -> None:
    with pytest.raises(InputError, match=says) as error:
        open_source(spec)
    assert error.value.exit_code == 2


def test_an_empty_file_among_others_is_refused(folder: Path) -> None:
    (folder / "d.jsonl").write_text("")
    with pytest.raises(InputError, match=r"d\.jsonl holds no rows"):
        open_source("*.jsonl")


def test_an_unreadable_file_is_refused(folder: Path) -> None:
    (folder / "loop.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(InputError, match=r"cannot read loop\.jsonl|does not exist"):
        open_source("loop.json*")


def test_parquet_without_pyarrow_names_the_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'eke\[train\]'"):
        open_source("p.parquet")


def test_opening_files_imports_nothing_heavy(folder: Path) -> None:
    program = (
        "import sys\n"
        "import eke.data.sources, eke.data.split, eke.data.formats, eke.data.bpe\n"
        "eke.data.open_source('a.jsonl')[0]\n"
        "heavy = ['torch', 'transformers', 'tokenizers', 'pyarrow', 'numpy', 'datasets']\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == json.dumps([])

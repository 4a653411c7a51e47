from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eke.data.lines import JsonlSource, TextSource, document_spans
from eke.errors import InputError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(suppress_health_check=list(HealthCheck), deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.text(), json_values, max_size=3), min_size=1, max_size=8),
    blanks=st.lists(st.sampled_from(["", "\n", "  \n", "\r\n", "\n\n"]), min_size=9, max_size=9),
    ascii=st.booleans(),
    ends=st.booleans(),
)
def test_jsonl_gives_back_what_was_written(
    tmp_path: Path, rows: list[Any], blanks: list[str], ascii: bool, ends: bool
) -> None:
    text, lines = "", []
    for row, blank in zip(rows, blanks, strict=False):
        text += blank
        lines.append(text.count("\n") + 1)
        text += json.dumps(row, ensure_ascii=ascii) + "\n"
    data = (text if ends else text.removesuffix("\n")).encode("utf-8", "surrogatepass")
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)
    source = JsonlSource(path)
    assert [source[i] for i in reversed(range(len(source)))] == rows[::-1]
    assert [int(source.origin(i).rsplit(":", 1)[1]) for i in range(len(source))] == lines
    assert source.fingerprint == xxhash.xxh3_128_hexdigest(data)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "cut', "is not valid JSON (Unterminated string"),
        (b"[1, 2]", "is not a JSON object but a list"),
        (b"3", "is not a JSON object but a int"),
        (b'{"text": "\xff"}', "not UTF-8 at byte 10"),
        (b'{"text": 1} {"text": 2}', "Extra data, column 13"),
        (b'{"a":' * 100_000, "is not valid JSON"),
        (b"[", "not one array"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    source = JsonlSource(path)
    assert source[0] == {"text": "good"}
    with pytest.raises(InputError) as error:
        source[1]
    assert f"{path}:3 " in str(error.value)
    assert says in str(error.value)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"text": "a"}\n')
    assert JsonlSource(path)[0] == {"text": "a"}
    path = tmp_path / "bom.txt"
    path.write_bytes(b"\xef\xbb\xbfhello\n")
    assert TextSource(path)[0] == {"text": "hello"}


@pytest.mark.parametrize("content", ["", "\n\n", "  \n\t\n"])
@pytest.mark.parametrize("kind", [JsonlSource, TextSource])
def test_empty_files_are_refused(tmp_path: Path, content: str, kind: Any) -> None:
    path = tmp_path / "empty"
    path.write_text(content)
    with pytest.raises(InputError, match="holds no rows"):
        kind(path)


def test_threads_and_forks_share_a_source(write_jsonl: Any) -> None:
    rows = [{"text": f"{i} " * (i % 50 + 1)} for i in range(400)]
    source = JsonlSource(write_jsonl(rows))
    assert source[0] == rows[0]  # open before the fork: parent and child share a descriptor
    wrong: list[int] = []

    def read_all() -> None:
        wrong.extend(i for i in range(len(rows)) if source[i] != rows[i])

    child = os.fork()
    if child == 0:
        read_all()
        os._exit(bool(wrong))
    threads = [threading.Thread(target=read_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert wrong == []


def test_rows_are_not_held_in_memory(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "big.jsonl"
    path.write_text(('{"text": "' + "x" * 1000 + '"}\n') * 20_000)  # 20 MB
    tracemalloc.start()
    source = JsonlSource(path)
    assert source[len(source) - 1]["text"] == "x" * 1000
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(source) == 20_000
    assert peak_bytes < 4_000_000


texts = st.lists(st.text(st.sampled_from("ab é数 \t"), max_size=25) | st.just(""), max_size=20).map(
    "\n".join
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=texts, limit=st.integers(1, 30), crlf=st.booleans())
def test_documents_hold_the_whole_text_and_respect_the_limit(
    text: str, limit: int, crlf: bool
) -> None:
    text = text.replace("\n", "\r\n") if crlf else text
    spans = list(document_spans(text.splitlines(keepends=True), limit))
    data = text.encode()
    documents = [data[s.start : s.end].decode() for s in spans]
    assert documents == [text[s.first : s.last] for s in spans]
    assert all(document.strip() and len(document) <= limit for document in documents)
    assert "".join("".join(documents).split()) == "".join(text.split())
    assert [s.line for s in spans] == [text[: s.first].count("\n") + 1 for s in spans]
    # A paragraph that fits is whole in one document.
    paragraphs = [
        p for p in "\n".join(x.rstrip() and x for x in text.splitlines()).split("\n\n") if p.strip()
    ]
    for paragraph in paragraphs:
        whole = paragraph.strip("\n")
        if len(whole.replace("\n", "\r\n") if crlf else whole) <= limit:
            assert any(whole in document.replace("\r\n", "\n") for document in documents)


def test_text_is_cut_at_blank_lines_and_spaces(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one two\nthree\n\nfour\n\n" + "long words here and more\n")
    source = TextSource(path, limit=16)
    assert [row["text"] for row in source] == [
        "one two\nthree",
        "four",
        "long words here ",
        "and more",
    ]
    assert source.origin(2) == f"{path}:6"


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"fine\ncaf\xe9\n")
    with pytest.raises(InputError, match=r"latin\.txt:2 is not UTF-8 at byte 3"):
        TextSource(path)

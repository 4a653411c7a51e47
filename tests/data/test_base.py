from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from eke.data.base import JoinedSource
from eke.data.lines import JsonlSource
from eke.errors import EkeError


@pytest.fixture
def joined(write_jsonl: Any) -> JoinedSource:
    a = write_jsonl([{"text": "a0"}, {"text": "a1"}], "a.jsonl")
    b = write_jsonl([{"text": "b0"}], "b.jsonl")
    c = write_jsonl([{"text": "c0"}, {"text": "c1"}], "c.jsonl")
    return JoinedSource([JsonlSource(p) for p in (a, b, c)], "all")


def test_parts_follow_one_another_and_origins_match_rows(joined: JoinedSource) -> None:
    assert [row["text"] for row in joined] == ["a0", "a1", "b0", "c0", "c1"]
    origins = [joined.origin(i) for i in range(len(joined))]
    assert [Path(o).name for o in origins] == [
        "a.jsonl:1",
        "a.jsonl:2",
        "b.jsonl:1",
        "c.jsonl:1",
        "c.jsonl:2",
    ]


@pytest.mark.parametrize("i", [-1, 5, 100])
def test_no_row_outside(joined: JoinedSource, i: int) -> None:
    with pytest.raises(IndexError):
        joined[i]


def test_fingerprint_is_of_the_content_and_its_order(write_jsonl: Any) -> None:
    a, b = write_jsonl([{"text": "a"}], "a.jsonl"), write_jsonl([{"text": "b"}], "b.jsonl")
    moved = write_jsonl([{"text": "a"}], "moved.jsonl")
    one = JsonlSource(a)
    assert one.fingerprint == JsonlSource(moved).fingerprint
    assert len(one.fingerprint) == 32
    first = JoinedSource([one, JsonlSource(b)], "x").fingerprint
    assert first == JoinedSource([JsonlSource(moved), JsonlSource(b)], "y").fingerprint
    assert first != JoinedSource([JsonlSource(b), one], "x").fingerprint


def test_pickled_source_gives_the_same_rows(joined: JoinedSource) -> None:
    before = list(joined)  # its files are open now
    copy = pickle.loads(pickle.dumps(joined))  # noqa: S301 (our own bytes)
    assert list(copy) == before
    assert copy.fingerprint == joined.fingerprint


def test_a_file_that_changed_is_not_read_with_the_old_index(write_jsonl: Any) -> None:
    path = write_jsonl([{"text": "first"}, {"text": "second"}])
    source = JsonlSource(path)
    path.write_text('{"text": "something else"}\n' * 2)
    os.utime(path, ns=(1, 1))
    with pytest.raises(EkeError, match="was changed while it was being read"):
        source[1]


def test_a_file_cut_short_while_open_is_reported(write_jsonl: Any) -> None:
    path = write_jsonl([{"text": "first"}, {"text": "second"}])
    source = JsonlSource(path)
    assert source[0] == {"text": "first"}
    os.truncate(path, 3)
    with pytest.raises(EkeError, match="was changed while it was being read"):
        source[1]

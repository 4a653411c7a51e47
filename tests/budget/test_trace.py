"""The trace file: whole after every write, mended after every cut, bounded."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.budget.trace import TraceFile, read_trace

events = st.lists(
    st.fixed_dictionaries(
        {"name": st.text(max_size=8), "ts": st.floats(0, 1e12), "args": st.just({"a": [1, "]\n"]})}
    ),
    max_size=4,
)


@given(st.lists(events, max_size=4), st.data())
def test_whole_after_every_append_and_mended_after_any_cut(
    batches: list[list[dict[str, Any]]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace, so_far = TraceFile(path), []
        for batch in batches:
            assert trace.append(batch) == bool(batch)
            so_far += batch
            assert json.loads(path.read_text()) == so_far
        trace.close()
        cut = data.draw(st.integers(0, path.stat().st_size))
        os.truncate(path, cut)
        left = read_trace(path)
        assert left == so_far[: len(left)]
        again = TraceFile(path)
        assert again.found == left
        assert json.loads(path.read_text()) == left
        again.append([{"name": "more"}])
        assert json.loads(path.read_text()) == [*left, {"name": "more"}]
        again.close()


def test_a_write_cut_short_over_the_old_end_is_mended(tmp_path: Path) -> None:
    """The bytes that a kill leaves: new events over the bracket, and half of the last one."""
    path = tmp_path / "trace.json"
    first = TraceFile(path)
    first.append([{"name": "a"}])
    first.close()
    path.write_bytes(path.read_bytes()[: -len("\n]\n")] + b',\n{"name":"b"},\n{"na')
    assert [e["name"] for e in read_trace(path)] == ["a", "b"]
    TraceFile(path).close()
    assert json.loads(path.read_text()) == [{"name": "a"}, {"name": "b"}]


def test_it_never_grows_beyond_its_bound(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json", most_bytes=1000)
    taken = [trace.append([{"name": f"event {i}"}]) for i in range(200)]
    assert taken == sorted(taken, reverse=True)  # the first ones, and then none
    assert 0 < sum(taken) < 200
    assert trace.full
    assert (tmp_path / "trace.json").stat().st_size <= 1000 + 3
    assert len(json.loads((tmp_path / "trace.json").read_text())) == sum(taken)


def test_what_is_no_trace_is_started_anew(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b"\0" * 100)
    assert read_trace(path) == []
    trace = TraceFile(path)
    trace.append([{"name": "a"}])
    assert json.loads(path.read_text()) == [{"name": "a"}]


def test_a_disk_that_refuses_ends_the_trace_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = TraceFile(tmp_path / "absent" / "trace.json")
    assert trace.full
    assert not trace.append([{"name": "a"}])
    assert "trace.json ends here: No such file" in caplog.text
    assert read_trace(tmp_path / "absent" / "trace.json") == []

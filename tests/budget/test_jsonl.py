"""Append-only files: every crash leaves the whole lines, and resumes undo what they say."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eke.budget.jsonl import RESUME, JsonlFile, Record, effective, read_records, scan
from eke.errors import EkeError

VALUES = st.dictionaries(
    st.text(max_size=4),
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    max_size=3,
)
FILES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)


def bytes_of(values: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(v).encode() + b"\n" for v in values)


def whole_lines(data: bytes, values: list[dict[str, Any]]) -> list[Record]:
    """The definition: a value's line is whole when its newline is there."""
    found, start = [], 0
    for value in values:
        end = start + len(json.dumps(value).encode()) + 1
        if end > len(data):
            break
        found.append(Record(start, value))
        start = end
    return found


@given(st.lists(VALUES, max_size=6), st.data())
def test_any_prefix_gives_exactly_its_whole_lines(
    values: list[dict[str, Any]], data: st.DataObject
) -> None:
    whole = bytes_of(values)
    torn = whole[: data.draw(st.integers(0, len(whole)))]
    records, length = scan(torn)
    assert records == whole_lines(torn, values)
    assert length == torn.rfind(b"\n") + 1


@FILES
@given(st.lists(VALUES, max_size=5), st.lists(VALUES, max_size=3), st.data())
def test_opening_again_cuts_the_torn_line_and_goes_on(
    tmp_path: Path, values: list[dict[str, Any]], more: list[dict[str, Any]], data: st.DataObject
) -> None:
    path = tmp_path / "log.jsonl"
    whole = bytes_of(values)
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    kept = read_records(path)
    with JsonlFile(path) as file:
        assert path.read_bytes() == bytes_of([r.value for r in kept])
        assert file.offset == path.stat().st_size
        starts = [file.append(v) for v in more]
    assert read_records(path) == kept + [Record(at, v) for at, v in zip(starts, more, strict=True)]


@given(
    st.lists(VALUES, min_size=2, max_size=5),
    st.sampled_from([b"", b"\0\0\0", b"\xff\xfe", b"{oops", b"[1]", b"3", b'{"a":1}{"b":2}']),
    st.data(),
)
def test_damage_in_the_middle_is_an_error_and_at_the_end_a_torn_line(
    values: list[dict[str, Any]], damage: bytes, data: st.DataObject
) -> None:
    lines = bytes_of(values).splitlines(keepends=True)
    at = data.draw(st.integers(0, len(lines)))
    damaged = b"".join([*lines[:at], damage + b"\n", *lines[at:]])
    if at == len(lines):
        assert scan(damaged) == scan(b"".join(lines))
        return
    with pytest.raises(EkeError, match=f"line {at + 1} of a run's log is damaged"):
        scan(damaged)


def test_the_error_names_the_file_and_the_file_is_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"a":1}\noops\n{"b":2}\n{"to')
    for use in (read_records, JsonlFile):
        with pytest.raises(EkeError) as caught:
            use(path)
        assert str(path) in str(caught.value)
    assert path.read_bytes() == b'{"a":1}\noops\n{"b":2}\n{"to'


def test_an_absent_file_has_no_records(tmp_path: Path) -> None:
    assert read_records(tmp_path / "absent.jsonl") == []


class Timeline:
    """The brute-force model: a run that goes back to an earlier moment, again and again."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.alive: dict[int, bool] = {}

    def write(self) -> None:
        offset = 10 * len(self.records)
        self.records.append(Record(offset, {"kind": "step", "n": offset}))
        self.alive[offset] = True

    def resume(self, cut: int) -> None:
        self.records.append(Record(10 * len(self.records), {"kind": RESUME, "from_offset": cut}))
        for offset in self.alive:
            if offset >= cut:
                self.alive[offset] = False


@given(st.lists(st.none() | st.integers(0, 400), max_size=40))
def test_effective_is_what_stands_after_all_resumes(moves: list[int | None]) -> None:
    run = Timeline()
    for cut in moves:
        if cut is None:
            run.write()
        else:
            run.resume(min(cut, 10 * len(run.records)))
    kept, undone = effective(run.records)
    assert [r.offset for r in kept] == [o for o, alive in run.alive.items() if alive]
    assert sorted(r.offset for r in undone) == [o for o, alive in run.alive.items() if not alive]


def test_resume_marks_undo_what_was_written_since(tmp_path: Path) -> None:
    with JsonlFile(tmp_path / "m.jsonl") as file:
        file.append({"kind": "step", "step": 1})
        saved = file.offset
        file.append({"kind": "step", "step": 2})
    with JsonlFile(tmp_path / "m.jsonl") as file:
        file.mark_resume(saved, step=1)
        file.append({"kind": "step", "step": 2, "again": True})
    kept, undone = effective(read_records(tmp_path / "m.jsonl"))
    assert [r.value for r in kept] == [
        {"kind": "step", "step": 1},
        {"kind": "step", "step": 2, "again": True},
    ]
    assert [r.value for r in undone] == [{"kind": "step", "step": 2}]


WRITER = """
import sys
import tempfile
from eke.budget.jsonl import JsonlFile, read_records
n = len(read_records(sys.argv[1]))
with JsonlFile(sys.argv[1]) as file:
    while True:
        file.append({"n": n, "text": "x" * (n * 7919 % 9000)})
        n += 1
"""


def test_a_writer_can_be_killed_at_any_moment(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rng, count = random.Random(1), 0
    for _ in range(10):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
        try:
            before = path.stat().st_size if path.exists() else 0
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                if path.exists() and path.stat().st_size > before + 9000:
                    break
                time.sleep(0.001)
            time.sleep(rng.random() * 0.03)
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        assert writer.returncode == -signal.SIGKILL
        values = [r.value for r in read_records(path)]
        assert [v["n"] for v in values] == list(range(len(values)))
        assert all(v["text"] == "x" * (v["n"] * 7919 % 9000) for v in values)
        assert len(values) > count
        count = len(values)


def test_a_full_disk_is_an_error_and_the_lines_before_it_stay(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    script = """
import resource, sys
from eke.budget.jsonl import JsonlFile
from eke.errors import EkeError
file = JsonlFile(sys.argv[1])
file.append({"n": 0})
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    file.append({"n": 1, "text": "x" * 9000})
except EkeError as error:
    print(error)
file.append({"n": 2})
file.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"could not write to {path}" in done.stdout
    assert "Free some space" in done.stdout
    assert [r.value for r in read_records(path)] == [{"n": 0}, {"n": 2}]


def test_nothing_is_written_behind_a_line_that_could_not_be_taken_back(tmp_path: Path) -> None:
    reader, writer = os.pipe()  # a pipe accepts lines, and cannot be shortened
    file = JsonlFile(tmp_path / "log.jsonl")
    os.dup2(writer, file._fd)
    os.close(writer)
    os.close(reader)
    with pytest.raises(EkeError, match="could not write"):
        file.append({"n": 0})
    with pytest.raises(ValueError, match="was closed"):
        file.append({"n": 1})


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for place in ("folder", "file/log.jsonl"):
        with pytest.raises(EkeError, match="could not open") as caught:
            JsonlFile(tmp_path / place)
        assert str(tmp_path / place) in str(caught.value)


def test_closing_twice_is_harmless_and_a_closed_file_takes_nothing(tmp_path: Path) -> None:
    file = JsonlFile(tmp_path / "deep" / "er" / "log.jsonl")
    file.append({"n": 0})
    file.close()
    file.close()
    with pytest.raises(ValueError, match="was closed"):
        file.append({"n": 1})
    assert [r.value for r in read_records(file.path)] == [{"n": 0}]


@given(st.dictionaries(st.text(max_size=3), st.recursive(
    st.floats() | st.text(max_size=4).filter(lambda t: t not in ("NaN", "Infinity", "-Infinity")),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3),
    max_leaves=6,
), max_size=4))  # fmt: skip
def test_every_line_is_strict_json_and_every_number_comes_back(value: dict[str, Any]) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        with JsonlFile(path) as file:
            file.append(value)
        json.loads(path.read_text(), parse_constant=refuse)
        (record,) = read_records(path)
        assert repr(record.value) == repr(value)  # nan is not equal to itself


def test_the_bare_words_of_earlier_versions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"loss":NaN,"norm":-Infinity}\n')
    (record,) = read_records(path)
    assert repr(record.value) == "{'loss': nan, 'norm': -inf}"

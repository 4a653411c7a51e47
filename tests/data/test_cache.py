from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eke.data.cache import cache_folder, read_checked, write_checked
from eke.errors import EkeError


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EKE_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "eke"
    monkeypatch.setenv("EKE_CACHE", str(tmp_path / "other"))
    assert cache_folder() == tmp_path / "other"
    assert cache_folder(tmp_path / "mine") == tmp_path / "mine"


@settings(suppress_health_check=list(HealthCheck), deadline=None)
@given(body=st.binary(max_size=60), data=st.data())
def test_whole_or_absent(tmp_path: Path, body: bytes, data: st.DataObject) -> None:
    path = tmp_path / "deep" / "er" / "file"
    write_checked(path, {"a": 1}, body)
    header, got = read_checked(path) or pytest.fail("absent")
    assert (header["a"], got) == (1, body)
    assert [p.name for p in path.parent.iterdir()] == ["file"]
    written = path.read_bytes()
    at = data.draw(st.integers(0, len(written) - 1))
    path.write_bytes(written[:at])
    assert read_checked(path) is None
    start = written.index(b"\n") + 1
    if body:
        at = data.draw(st.integers(start, len(written) - 1))
        flipped = written[:at] + bytes([written[at] ^ 1]) + written[at + 1 :]
        path.write_bytes(flipped)
        assert read_checked(path) is None


def test_absent(tmp_path: Path) -> None:
    assert read_checked(tmp_path / "none") is None
    assert read_checked(tmp_path) is None


def _write_again_and_again(path: Path) -> None:
    while True:
        write_checked(path, {}, b"x" * 2_000_000)


def test_readers_never_see_half_a_file_whatever_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_checked(path, {}, b"x" * 2_000_000)
    stamp = (path.stat().st_size, path.stat().st_mtime_ns)
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_again_and_again, args=(path,)) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(30):
            assert read_checked(path) is not None
            assert (path.stat().st_size, path.stat().st_mtime_ns) == stamp
            time.sleep(0.005)
    finally:
        for writer in writers:
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
    assert read_checked(path) is not None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EkeError, match=r"cannot write .*EKE_CACHE"):
        write_checked(tmp_path / "file" / "x", {}, b"")

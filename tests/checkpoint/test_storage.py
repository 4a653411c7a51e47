import os
from pathlib import Path

import pytest

from eke.checkpoint.checks import ManifestError
from eke.checkpoint.storage import Storage, read_exactly, read_file


def test_short_reads_are_continued(tmp_path, faulty):
    faulty.short = True
    data = bytes(range(200))
    (tmp_path / "f").write_bytes(data)
    assert read_file(faulty, tmp_path / "f", 1000) == data
    assert faulty.calls["read_into"] > 2


def test_reading_past_the_end_says_how_much_came(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    storage = Storage()
    fd = storage.open(tmp_path / "f")
    buffer = bytearray(10)
    assert read_exactly(storage, fd, memoryview(buffer), 1) == 2
    storage.close(fd)
    assert buffer[:2] == b"bc"


def test_a_file_over_the_limit_is_not_read(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    with pytest.raises(ValueError, match="at most 2"):
        read_file(Storage(), tmp_path / "f", 2)


def test_directories(tmp_path):
    storage = Storage()
    storage.make_root(tmp_path / "a" / "b")
    storage.make_root(tmp_path / "a" / "b")
    storage.make_dir(tmp_path / "a" / "c")
    with pytest.raises(FileExistsError):
        storage.make_dir(tmp_path / "a" / "c")
    storage.rename(tmp_path / "a" / "c", tmp_path / "a" / "d")
    storage.sync_dir(tmp_path / "a")
    storage.remove_tree(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_only_plain_files_are_opened(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "f")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "link", tmp_path / "folder", tmp_path / "pipe", os.devnull):
        with pytest.raises(ManifestError, match="not a plain file"):
            Storage().open(tmp_path / path)
    with pytest.raises(FileNotFoundError):
        Storage().open(tmp_path / "absent")


def test_a_file_that_becomes_something_else_meanwhile(tmp_path, monkeypatch):
    """It is a plain file when it is looked at, and is not when it is opened."""
    (tmp_path / "f").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "f")
    os.mkfifo(tmp_path / "pipe")
    plain, before = (tmp_path / "f").lstat(), len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr("pathlib.Path.lstat", lambda self: plain)
    for name in ("link", "pipe"):
        with pytest.raises(ManifestError, match="not a plain file"):
            Storage().open(tmp_path / name)
    assert len(list(Path("/proc/self/fd").iterdir())) == before

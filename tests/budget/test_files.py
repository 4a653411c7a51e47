"""A file that is replaced is the old one or the new one, also when the writer is killed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eke.budget.files import fsync_dir, write_atomic
from eke.errors import EkeError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    for text in ("one\n", "zwei ½\n", ""):
        write_atomic(path, text)
        assert path.read_bytes() == text.encode()
    assert names(tmp_path) == ["status.json"]
    fsync_dir(tmp_path)


@pytest.mark.parametrize("place", ["absent/status.json", "file/status.json", "full"])
def test_a_disk_that_refuses_is_an_error_and_the_old_content_stays(
    tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "full" / "inside").mkdir(parents=True)
    with pytest.raises(EkeError, match="could not write") as caught:
        write_atomic(tmp_path / place, "new")
    assert str(tmp_path / place) in str(caught.value)
    assert names(tmp_path) == ["file", "full"]
    assert (tmp_path / "file").read_text() == "old"
    assert (tmp_path / "full" / "inside").is_dir()


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "status.json", "old")
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from eke.budget.files import write_atomic; from eke.errors import EkeError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "try: write_atomic(Path(sys.argv[1]), 'new' * 10_000)\n"
        "except EkeError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "status.json")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "could not write" in done.stdout
    assert "too large" in done.stdout
    assert (tmp_path / "status.json").read_text() == "old"
    assert names(tmp_path) == ["status.json"]


def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    script = (
        "import sys; from pathlib import Path; from eke.budget.files import write_atomic\n"
        "n = int(sys.argv[2])\n"
        "while True: write_atomic(Path(sys.argv[1]), f'{n}\\n' * 50_000); n += 1"
    )
    write_atomic(path, "0\n" * 50_000)
    rng, n = random.Random(0), 0
    for _ in range(5):
        writer = subprocess.Popen([sys.executable, "-c", script, str(path), str(n + 1)])
        try:
            deadline = time.monotonic() + 60
            while path.read_text() == f"{n}\n" * 50_000 and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(rng.random() * 0.02)
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        lines = path.read_text().splitlines()
        assert len(lines) == 50_000
        assert len(set(lines)) == 1
        assert int(lines[0]) > n
        n = int(lines[0])

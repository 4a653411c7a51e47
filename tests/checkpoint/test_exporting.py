"""Exports: whole or absent, checked, and read by the tools that they are made for."""

import resource
import shutil
import signal
import subprocess
import sys

import pytest

from eke.checkpoint import CorruptCheckpoint, export
from eke.checkpoint.exporting import check_target, publish
from eke.checkpoint.storage import Storage
from eke.errors import EkeError, InputError

FORMATS = ("hf", "dcp", "torch")


def flip_last_byte_of_every_tensor_file(path):
    for file in path.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        for place in range(4096, len(data), 64):
            data[place] ^= 1
        file.write_bytes(data)


@pytest.mark.parametrize("to", FORMATS)
def test_a_damaged_checkpoint_leaves_nothing_behind(llamas, tmp_path, to):
    path = shutil.copytree(llamas[1] / "checkpoints" / "step-000000002", tmp_path / "copy")
    flip_last_byte_of_every_tensor_file(path)
    config = llamas[1] / "config" if to == "hf" else None
    with pytest.raises(CorruptCheckpoint, match="do not match its hash"):
        export(path, tmp_path / "out" / "it", to=to, config=config)
    assert list((tmp_path / "out").iterdir()) == []


def test_targets_that_are_taken(llamas, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for target in (tmp_path / "full", tmp_path / "full" / "file", tmp_path / "link"):
        with pytest.raises(InputError, match="the export's target is not"):
            export(llamas[1], target, to="torch")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "link"]


def test_an_empty_directory_becomes_the_export(llamas, tmp_path):
    (tmp_path / "it").mkdir()
    assert export(llamas[1], tmp_path / "it", to="torch") == tmp_path / "it"
    assert [p.name for p in (tmp_path / "it").iterdir()] == ["checkpoint.pt"]
    assert [p.name for p in tmp_path.iterdir()] == ["it"]


def test_what_cannot_be_asked_for(llamas, tmp_path):
    with pytest.raises(InputError, match="no such export format; got 'onnx'"):
        export(llamas[1], tmp_path / "it", to="onnx")
    with pytest.raises(InputError, match="takes no config"):
        export(llamas[1], tmp_path / "it", to="dcp", config=tmp_path)
    with pytest.raises(InputError, match="no such directory"):
        export(tmp_path / "absent", tmp_path / "it", to="torch")


def test_a_target_that_fills_up_meanwhile_is_left_alone(tmp_path):
    target = tmp_path / "it"

    def work(place):
        (place / "new").touch()
        target.mkdir()
        (target / "theirs").touch()

    with pytest.raises(EkeError, match="not empty"):
        publish(target, work, Storage())
    assert [p.name for p in tmp_path.iterdir()] == ["it"]
    assert [p.name for p in target.iterdir()] == ["theirs"]


def test_a_full_disk_leaves_nothing(llamas, tmp_path, faulty):
    faulty.fail("sync")
    with pytest.raises(EkeError, match=r"exporting to .* failed"):
        publish(tmp_path / "it", lambda place: (place / "new").touch(), faulty)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_export_leaves_no_target_and_the_next_one_cleans_up(llamas, tmp_path):
    target = tmp_path / "out" / "it"
    script = (
        "import os, signal, sys\n"
        "from eke.checkpoint import Storage, export\n"
        "Storage.sync = lambda self, fd: os.kill(os.getpid(), signal.SIGKILL)\n"
        "export(sys.argv[1], sys.argv[2], to='torch')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, llamas[1], target], timeout=100)
    assert done.returncode == -signal.SIGKILL
    (left,) = target.parent.iterdir()
    assert left.name.startswith(".it.export-")
    check_target(target)
    (target.parent / ".it.export-alive").mkdir()  # not a token: it may be anybody's
    export(llamas[1], target, to="torch")
    assert sorted(p.name for p in target.parent.iterdir()) == [".it.export-alive", "it"]


@pytest.mark.parametrize("to", FORMATS)
def test_a_disk_that_is_full_is_one_clear_error(llamas, tmp_path, to):
    run, out = llamas[1], tmp_path / "out" / "it"
    config = run / "config" if to == "hf" else None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(EkeError) as caught:
            export(run, out, to=to, config=config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value).startswith(f"exporting to {out} failed: ")
    assert "File too large" in str(caught.value)
    assert list(out.parent.iterdir()) == []

import numpy as np
import pytest
import torch

from eke.checkpoint import latest, steps
from eke.checkpoint.layout import (
    checkpoint_of,
    is_committed,
    require_step,
    root_of,
    step_dirs,
    step_name,
    step_of,
    temporaries,
    temporary_name,
)
from eke.checkpoint.manifest import MANIFEST
from eke.errors import InputError


def test_names_and_back():
    assert step_name(1200) == "step-000001200"
    for step in (0, 1, 999_999_999, 1_000_000_000, 2**53 - 1):
        assert step_of(step_name(step)) == step


@pytest.mark.parametrize(
    "name",
    ["step-12", "step-0000000001", "step-00000000x", "step-000000001.bak", ".tmp-step-1", "x"],
)
def test_other_names_are_no_checkpoints(name):
    assert step_of(name) is None


@pytest.mark.parametrize("step", [0, 7, 2**53 - 1, np.int64(7), np.array(7), torch.tensor(7)])
def test_steps(step):
    assert require_step(step) == step
    assert type(require_step(step)) is int


NO_STEPS = [-1, 2**53, 1.0, True, "3", None, np.float64(1), np.array([1, 2]), np.bool_(True)]
NO_STEPS += [np.array(True), torch.tensor(1.5), torch.tensor(True), torch.tensor([1, 2])]
NO_STEPS += [torch.tensor(1, device="meta")]


@pytest.mark.parametrize("step", NO_STEPS)
def test_what_is_no_step(step):
    with pytest.raises(InputError, match="a whole number from 0"):
        require_step(step)


def test_temporaries(tmp_path):
    name = temporary_name("step", 5, "ab.cd.1.2.ef")
    (tmp_path / name).mkdir()
    (tmp_path / ".tmp-other").mkdir()
    [found] = temporaries(tmp_path)
    assert found == (tmp_path / name, "step", 5, "ab.cd.1.2.ef")
    assert temporaries(tmp_path / "absent") == []


def test_only_whole_checkpoints_count(saved):
    _, path = saved
    root = path.parent
    (root / "step-000000009").mkdir()
    (root / "step-000000008").mkdir()
    (root / "step-000000008" / MANIFEST).write_text("{}")
    (root / "step-000000007").write_text("a file")
    (root / "step-000000006").symlink_to(path)
    (root / ".tmp-step-000000010-a.b.1.2.c").mkdir()
    assert steps(root) == [3]
    assert latest(root) == 3
    assert list(step_dirs(root)) == [3, 8, 9]
    assert is_committed(path)


def test_nothing_there(tmp_path):
    assert steps(tmp_path / "absent") == []
    assert latest(tmp_path) is None


def test_paths_that_mean_a_checkpoint(saved, tmp_path):
    _, path = saved
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(path.parent)
    assert checkpoint_of(path) == path
    assert checkpoint_of(path.parent) == path
    assert checkpoint_of(run) == run / "checkpoints" / path.name
    assert root_of(run) == run / "checkpoints"
    moved = path.rename(path.parent / "copied-elsewhere")
    assert checkpoint_of(moved) == moved
    with pytest.raises(InputError, match="no such directory"):
        checkpoint_of(tmp_path / "absent")


def test_a_file_in_the_place_of_a_directory_of_checkpoints(tmp_path):
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "inside"):
        for look in (steps, latest, step_dirs, temporaries):
            with pytest.raises(InputError, match="is not a directory"):
                look(root)

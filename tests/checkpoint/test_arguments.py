"""Wrong arguments get one clear error each, and change nothing."""

import pytest
import torch
from torch import nn

from eke import Checkpointer
from eke.checkpoint.arguments import chosen, extras_of, root_of, steps_of, tensors_in
from eke.errors import InputError


@pytest.mark.parametrize("root", [None, 5, "", b""])
def test_a_root_that_is_no_path(root):
    with pytest.raises(InputError, match="the checkpoints' root is wrong"):
        Checkpointer(root)


def test_a_root_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="not a directory"):
        root_of(tmp_path / "file")
    assert root_of(str(tmp_path / "new")) == tmp_path / "new"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("extra", [[1], "ema", {1: {}}, {"a/b": {}}, {"rng": {}}, {"": {}}])
def test_extras_that_are_not_named(extra):
    with pytest.raises(InputError, match=r"extra|what else"):
        extras_of(extra, ["model", "rng"])


def test_what_is_refused_attaches_nothing(tmp_path):
    """One bad part, and the good ones beside it are not attached either."""
    model = nn.Linear(2, 2)
    with Checkpointer(tmp_path) as saver:
        with pytest.raises(InputError):
            saver.attach(model=model, extra={"bad": object()})
        saver.attach(model=model, extra={"good": {"n": 1}})
        saver.save(1).wait()
        report = saver.restore()
        assert not report.missing
        assert not report.unexpected


@pytest.mark.parametrize("steps", [5, "12", None, [1.5], [-1], ["3"], [True]])
def test_steps_to_protect_that_are_none(steps):
    with pytest.raises(InputError, match="step"):
        steps_of(steps)


def test_steps_of_any_row():
    assert steps_of(range(2)) == steps_of({0, 1}) == frozenset({0, 1})
    assert steps_of([]) == frozenset()


@pytest.mark.parametrize("params", [5, [1], "all", dict(nn.Linear(1, 1).named_parameters())])
def test_a_barrier_for_what_is_no_tensor(params, tmp_path):
    with Checkpointer(tmp_path) as saver, pytest.raises(InputError, match="a barrier is for"):
        saver.barrier(params)


def test_a_barrier_for_one_tensor_is_for_it():
    one = torch.ones(3)
    assert tensors_in(one)[0] is one
    assert len(tensors_in(one)) == 1
    assert len(tensors_in(nn.Linear(2, 2).parameters())) == 2


@pytest.mark.parametrize("only", [[], (), 5, ["model", "other"], "other", [["model"]]])
def test_only_names_what_is_attached(only):
    with pytest.raises(InputError, match="attached: model, rng"):
        chosen(only, ["model", "rng"])


def test_only_is_all_by_default():
    assert chosen(None, ["model", "rng"]) == {"model", "rng"}
    assert chosen("rng", ["model", "rng"]) == chosen(iter(["rng"]), ["model", "rng"]) == {"rng"}


@pytest.mark.parametrize("timeout", ["5 days ago", -1, float("nan"), True, [1]])
def test_a_timeout_that_is_no_duration(timeout, tmp_path):
    with Checkpointer(tmp_path) as saver:
        saver.attach(model=nn.Linear(2, 2))
        ticket = saver.save(1)
        with pytest.raises(InputError, match="cannot read how long to wait"):
            ticket.wait(timeout=timeout)
        ticket.wait(timeout="1m")

"""Wrong arguments get one clear error each, and change nothing."""

import os
import re

import pytest
import torch
from torch import nn

from eke import Checkpointer
from eke.checkpoint import Keep, ObjectProvider
from eke.checkpoint.arguments import (
    check_choice,
    check_parts,
    check_switches,
    chosen,
    extras_of,
    root_given,
    steps_of,
    storage_given,
    tensors_in,
)
from eke.errors import EkeError, InputError


class BytesPath:
    def __fspath__(self):
        return b"there"


@pytest.mark.parametrize("root", [None, 5, "", b"", b"x", "a\0b", [], BytesPath()])
def test_a_root_that_is_no_path(root):
    said = f"the checkpoints' root is wrong; got {root!r}; it is the path of a directory"
    with pytest.raises(InputError, match=re.escape(said)):
        Checkpointer(root)


def test_a_root_that_no_directory_can_have(tmp_path):
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "a", tmp_path / "file" / "a" / "b"):
        with pytest.raises(InputError, match="not a directory"):
            root_given(root)
    with pytest.raises(InputError, match="cannot be used: File name too long"):
        root_given("x" * 300)
    with pytest.raises(InputError, match=r"cannot be used: .* surrogates not allowed"):
        root_given("\ud800")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match="cannot be used: Too many levels"):
        root_given(tmp_path / "loop")
    assert root_given(str(tmp_path / "new")) == tmp_path / "new"
    assert not (tmp_path / "new").exists()


def test_a_root_that_cannot_be_reached(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    root, me = tmp_path / "closed" / "in" / "there", os.geteuid()
    try:
        if me == 0:
            os.seteuid(65534)  # nothing is closed to root
        with pytest.raises(InputError, match="cannot be used: Permission denied"):
            root_given(root)
    finally:
        os.seteuid(me)
        closed.chmod(0o700)


def test_a_root_that_a_file_took_the_place_of(tmp_path):
    root = tmp_path / "ck"
    with Checkpointer(root) as saver:
        saver.attach(model=nn.Linear(2, 2))
        saver.save(1).wait()
        root.rename(tmp_path / "moved")
        assert saver.steps() == []
        root.touch()
        for call in (saver.steps, saver.restore, lambda: saver.discard_after(0)):
            with pytest.raises(InputError, match="is not a directory"):
                call()
        with pytest.raises(EkeError, match=r"not a directory|Not a directory|File exists"):
            saver.save(2).wait()


def test_a_storage_that_is_none():
    with pytest.raises(InputError, match=r"storage is wrong; got 5; it is an eke\.checkpoint\.Sto"):
        Checkpointer("x", storage=5)
    assert storage_given(None).size


def linear():
    return nn.Linear(2, 2)


def sgd():
    return torch.optim.SGD(linear().parameters())


WRONG_PARTS = {
    "a class as model": {"model": nn.Linear},
    "an optimizer as model": {"model": sgd()},
    "a dict as model": {"model": {}},
    "a class as optimizer": {"optimizer": torch.optim.SGD},
    "a model as optimizer": {"optimizer": linear()},
    "a list as loader": {"loader": []},
    "a number as scheduler": {"scheduler": 5},
    "a class as loader": {"loader": torch.optim.lr_scheduler.StepLR},
    "a provider's class": {"model": ObjectProvider},
}


@pytest.mark.parametrize("parts", WRONG_PARTS.values(), ids=WRONG_PARTS)
def test_a_part_of_another_kind_than_its_name_says(parts, tmp_path):
    [name] = parts
    with (
        Checkpointer(tmp_path) as saver,
        pytest.raises(
            InputError, match=f"'{name}' cannot be attached: it is .*; it takes .* StateP"
        ),
    ):
        saver.attach(**parts)


def test_parts_of_the_right_kind():
    provider = ObjectProvider(dict, print)
    optimizer = sgd()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    check_parts({"model": linear(), "optimizer": optimizer, "scheduler": scheduler, "loader": None})
    check_parts(dict.fromkeys(("model", "optimizer", "scheduler", "loader"), provider))


@pytest.mark.parametrize("value", ["none", None, ["fsync"], {}])
def test_a_word_that_is_none_of_the_few(value):
    check_choice("durability", "durability", "fsync", ("fsync", "off"))
    said = 'it is "fsync" or "off". Write durability="fsync".'
    with pytest.raises(InputError, match=f"durability is wrong; got .*; {said}"):
        check_choice("durability", "durability", value, ("fsync", "off"))


@pytest.mark.parametrize("value", ["no", 0, 1, None, torch.tensor(True)])
def test_what_is_true_or_false_is_not_guessed(value, tmp_path):
    check_switches(rng=True, strict=False)
    with Checkpointer(tmp_path) as saver:
        with pytest.raises(
            InputError, match=r"`rng` is wrong; got .*; it is True or False\. Write"
        ):
            saver.attach(rng=value)
        for name in ("strict", "fallback", "cast", "check_first"):
            with pytest.raises(InputError, match=f"`{name}` is wrong"):
                saver.restore(**{name: value})


@pytest.mark.parametrize(
    "extra", [[1], "ema", {1: {}}, {"a/b": {}}, {"rng": {}}, {"": {}}, {"x" * 101: {}}]
)
def test_extras_that_are_not_named(extra):
    with pytest.raises(InputError, match=r"extra|what else"):
        extras_of(extra, ["model", "rng"])
    assert extras_of({"x" * 100: {}}, ["model"])


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


@pytest.mark.parametrize("only", [[], (), 5, ["model", "other"], "other", [["model"]], b"model"])
def test_only_names_what_is_attached(only):
    with pytest.raises(InputError, match="attached: model, rng") as caught:
        chosen(only, ["model", "rng"])
    assert "109" not in str(caught.value)
    with pytest.raises(InputError, match="attached: nothing"):
        chosen(only, [])


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


def wrong_calls(root):
    model = linear()
    saver = Checkpointer(root)
    saver.attach(model=model)
    ticket = saver.save(1).wait()
    yield from (lambda k=k: Checkpointer(root, **{k: []}) for k in ("durability", "on_error"))
    yield from (lambda k=k: Checkpointer(root, **{k: 5}) for k in ("keep", "storage"))
    yield from (lambda k=k: Checkpointer(root, **{k: 0}) for k in ("patience", "pool"))
    yield from (lambda: Checkpointer(5), lambda: Checkpointer("x" * 300))
    yield from (lambda: Keep(last=0), lambda: Keep(every="x"))
    yield from (lambda: saver.attach(model=model), lambda: saver.attach(rng="no"))
    yield from (lambda: saver.attach(optimizer=model), lambda: saver.attach(extra={"/": {}}))
    yield from (lambda: saver.attach(extra=5), lambda: saver.attach(extra={"a": 5}))
    yield from (lambda: saver.save("1"), lambda: saver.save(1), lambda: ticket.wait("done"))
    yield from (lambda: saver.restore(9), lambda: saver.restore(only="x"))
    yield from (lambda: saver.restore(only=[]), lambda: saver.restore(strict="no"))
    yield from (lambda: saver.protect(5), lambda: saver.barrier(5))
    saver.close()
    yield lambda: saver.save(2)


def test_every_refusal_says_what_to_do(tmp_path):
    for number, call in enumerate(wrong_calls(tmp_path / "ck")):
        with pytest.raises(InputError) as caught:
            call()
        assert caught.value.fix, f"{number}: {caught.value}"
    assert number == 25

"""A file is linked only if it would be, byte for byte, the committed one."""

import errno

import numpy as np
import pytest
import torch
from torch import nn

from eke.checkpoint import Checkpointer, Storage
from eke.checkpoint.capture import Captured, Held
from eke.checkpoint.manifest import MANIFEST
from eke.checkpoint.previous import Previous
from eke.checkpoint.write import lanes_of
from eke.distributed import World
from eke.errors import EkeError

FILE = "rank00000.frozen.safetensors"
SCRATCH = np.empty(1 << 16, np.uint8)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(40, 30).requires_grad_(False)


@pytest.fixture
def root(tmp_path, model):
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model)
        ck.save(1).wait()
    return tmp_path


def lane_of(tensors, group="frozen"):
    held = [Held(f"model/{name}", tensor, group, "segment") for name, tensor in tensors.items()]
    (lane,) = lanes_of(Captured(held, [], {}, {}, {}), World(), 1 << 16)
    return lane


def test_the_same_state_is_the_same_file(root, model):
    assert Previous(root, Storage()).same(lane_of(model.state_dict()), SCRATCH)


def lane_tensors(lane):
    names = (name.removeprefix("model/") for name in lane.layout.names)
    return dict(zip(names, lane._tensors, strict=True))


def changed_bit(state):
    state["weight"].view(torch.int32)[-1, -1] ^= 1


CHANGES = {
    "one bit": changed_bit,
    "another shape": lambda state: state.update(weight=state["weight"].view(40, 30)),
    "another dtype": lambda state: state.update(bias=state["bias"].view(torch.int32)),
    "another name": lambda state: state.update(other=state.pop("bias")),
    "one more": lambda state: state.update(more=torch.empty(0)),
    "one fewer": lambda state: state.pop("bias"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_is_found(root, model, change):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    CHANGES[change](state)
    assert not Previous(root, Storage()).same(lane_of(state), SCRATCH)


def test_another_group_is_another_file(root, model):
    assert not Previous(root, Storage()).same(lane_of(model.state_dict(), "state"), SCRATCH)


def test_a_tensor_that_changes_meanwhile_is_an_error(root, model):
    lane = lane_of(model.state_dict())
    model.bias.add_(1)
    with pytest.raises(EkeError, match="model/bias was changed before it was captured"):
        Previous(root, Storage()).same(lane, SCRATCH)


def test_the_disk_is_looked_at_once_until_told_otherwise(tmp_path, model):
    previous, lane = Previous(tmp_path, Storage()), lane_of(model.state_dict())
    assert not previous.same(lane, SCRATCH)
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model)
        ck.save(1).wait()
    assert not previous.same(lane, SCRATCH)
    previous.forget()
    assert previous.same(lane, SCRATCH)


def test_a_checkpoint_that_cannot_be_read_is_no_match(root, model):
    (root / "step-000000001" / MANIFEST).write_bytes(b"{}")
    assert not Previous(root, Storage()).same(lane_of(model.state_dict()), SCRATCH)


class NoLinks(Storage):
    def link(self, source, target):
        raise OSError(errno.EOPNOTSUPP, "no links here")


@pytest.mark.parametrize("storage", [Storage(), NoLinks()], ids=["link", "copy"])
@pytest.mark.parametrize("damage", ["none", "cut short", "a bit"])
def test_linking(root, model, storage, damage, tmp_path_factory):
    previous, lane = Previous(root, storage), lane_of(model.state_dict())
    assert previous.same(lane, SCRATCH)
    attempt, source = tmp_path_factory.mktemp("attempt"), root / "step-000000001" / FILE
    data = bytearray(source.read_bytes())
    if damage != "none":
        data[-1] ^= 1
        source.write_bytes(data[:-1] if damage == "cut short" else data)
    # A linked file's bytes are not read again: a damaged one is what verify() is for.
    if damage == "cut short" or (damage == "a bit" and isinstance(storage, NoLinks)):
        with pytest.raises(OSError, match="committed"):
            previous.link(lane, attempt, durable=True)
        return
    entry, stated = previous.link(lane, attempt, durable=True)
    assert (attempt / FILE).samefile(source) != isinstance(storage, NoLinks)
    assert (attempt / FILE).read_bytes() == data
    assert entry["bytes"] == len(data)
    assert sorted(stated.layout.names) == ["model/bias", "model/weight"]
    again = Previous(root, storage)
    files, written = {FILE: entry}, {FILE: stated}
    again.committed(root / "step-000000001", files, written, {})
    assert again.alike(files, written, {})
    assert not again.alike(files, written, {"model/a": "model/bias"})
    assert not again.alike({FILE: {**entry, "bytes": 1}}, written, {})
    assert not again.alike(files, {}, {})
    assert again.same(lane, SCRATCH), "what a link reports is itself comparable"
    assert again.same(lane_of(lane_tensors(lane)), SCRATCH), "also by a layout that is only equal"

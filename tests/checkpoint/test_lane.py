import json

import numpy as np
import pytest
import torch
import xxhash

from eke.checkpoint.capture import Captured, Held
from eke.checkpoint.lane import Lane
from eke.checkpoint.tensors import as_bytes
from eke.checkpoint.write import layouts_of
from eke.distributed import World
from eke.errors import EkeError

BLOCK_BYTES = 4096


def lane_of(tensors):
    held = [Held(name, tensor, "state", "segment") for name, tensor in tensors.items()]
    [(layout, cuts)] = layouts_of(Captured(shared=held), World(), BLOCK_BYTES)
    return Lane(layout, [cut.tensor for cut in cuts])


def read(lane):
    slot, out = np.empty(BLOCK_BYTES, np.uint8), b""
    for number, block in enumerate(lane.blocks):
        lane.fill(number, slot)
        out += slot[: block.end - block.begin].tobytes()
    return out


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return {"a": torch.randn(3000), "b": torch.randn(7, 5).t(), "c": torch.empty(0)}


def test_a_layout_serves_other_tensors_of_the_same_shapes(tensors):
    first = lane_of(tensors)
    others = {name: tensor + 1 for name, tensor in tensors.items()}
    again = Lane(first.layout, [others[name] for name in first.layout.names])
    for lane, live in ((first, tensors), (again, others)):
        data = read(lane)
        assert len(data) == lane.layout.nbytes
        for name, begin, size in zip(
            *(getattr(lane.layout, k) for k in ("names", "starts", "sizes")), strict=True
        ):
            assert data[begin : begin + size] == bytes(as_bytes(live[name]))


def test_the_manifests_entries(tensors):
    lane = lane_of(tensors)
    scratch = np.empty(BLOCK_BYTES, np.uint8)
    hashes = {number: lane.digest(number, scratch) for number in range(3)}
    stated = lane.layout.stated(hashes)
    assert json.loads(f"{{{lane.layout.text(hashes)}}}") == stated
    for name, tensor in tensors.items():
        shard = stated[name]["shards"][0]
        assert shard["xxh3_128"] == xxhash.xxh3_128_hexdigest(as_bytes(tensor))
        assert shard["end"] - shard["begin"] == tensor.numel() * 4
        assert lane.layout.entries[lane.layout.names.index(name)]["shards"][0]["xxh3_128"] == ""
    assert [lane.layout.sizes[n] for n in lane.layout.by_size] == sorted(lane.layout.sizes)


CHANGES = {
    "in place": lambda t: t.add_(1),
    "other memory": lambda t: setattr(t, "data", t.data.clone()),
    "fewer": lambda t: setattr(t, "data", t.data[:2]),
    "freed": lambda t: t.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("late", [False, True])
def test_what_changed_since_the_save_began_is_named(tensors, change, late):
    lane = lane_of(tensors)
    slot = np.empty(BLOCK_BYTES, np.uint8)
    if late:
        lane.fill(1, slot)  # a part of it is captured
    if late and change in ("other memory", "fewer"):
        return  # what it was is still held, and is what is captured
    CHANGES[change](tensors["a"])
    with pytest.raises(EkeError, match="the tensor a was changed before it was captured"):
        lane.fill(2, slot)
    with pytest.raises(EkeError, match="the tensor a was changed"):
        lane.digest(lane.layout.names.index("a"), slot)


def test_where_memory_lies(tensors):
    both = torch.randn(4000)
    lane = lane_of({"x": both[:2000], "y": both[2000:], "z": torch.randn(1)})
    last = lane.last_blocks()
    assert len(last) == 2
    assert last[both.device, both.untyped_storage().data_ptr()] == len(lane.blocks)


def test_what_a_device_copies_is_under_way_until_it_is_waited_for(tensors, new_device):
    device = new_device(lambda t: t.numel() == 3000)
    lane = lane_of(tensors)
    assert lane.device is device
    data = {name: bytes(as_bytes(tensor)) for name, tensor in tensors.items()}
    slots = [np.zeros(BLOCK_BYTES, np.uint8) for _ in lane.blocks]
    issued = [lane.fill(number, slot) for number, slot in enumerate(slots)]
    assert issued[0] is None  # a header
    assert not any(one.done() for one in issued[1:4])
    for one in filter(None, issued):
        one.wait()
        one.check()
    found = b"".join(slot.tobytes() for slot in slots)
    for name, begin in zip(lane.layout.names, lane.layout.starts, strict=True):
        assert found[begin : begin + len(data[name])] == data[name]
    tensors["a"].add_(1)
    with pytest.raises(EkeError, match="the tensor a was changed"):
        issued[1].check()


def test_several_devices_in_one_block(new_device, monkeypatch):
    tensors = {"a": torch.arange(100.0), "b": torch.arange(50.0), "c": torch.ones(7)}
    made = [new_device(lambda t, n=n: t.numel() == n) for n in (100, 50)]
    monkeypatch.setattr("eke.checkpoint.device._devices", made)
    lane, slot = lane_of(tensors), np.zeros(BLOCK_BYTES, np.uint8)
    issued = lane.fill(1, slot)
    assert [device.issued for device in made] == [1, 1]
    made[0].finish()
    assert not issued.done()
    issued.hold()
    changed = []
    for device in made:
        device.ask(lambda: changed.append(1))
    made[0].finish()
    assert len(changed) == 1, "each device waits for its own"
    issued.wait()
    data = b"".join(bytes(as_bytes(tensors[name])) for name in lane.layout.names)
    assert slot.tobytes()[: len(data)] == data


def test_nothing_is_under_way_in_a_block_that_failed(new_device):
    device = new_device(lambda _: True)
    tensors = {"a": torch.ones(100), "b": torch.ones(100)}
    lane = lane_of(tensors)
    tensors["b"].add_(1)
    with pytest.raises(EkeError, match="the tensor b was changed"):
        lane.fill(1, np.empty(BLOCK_BYTES, np.uint8))
    assert device.issued == 1
    assert not device.advance()


def test_nothing_is_under_way_when_no_event_can_be_had(new_device, monkeypatch):
    """Or the slot would be filled with something else while a copy still writes to it."""
    made = [new_device(lambda t, n=n: t.numel() == n) for n in (100, 50)]
    monkeypatch.setattr("eke.checkpoint.device._devices", made)
    lane = lane_of({"a": torch.ones(100), "b": torch.ones(50)})
    made[1].no_events = True
    with pytest.raises(RuntimeError, match="no event can be made"):
        lane.fill(1, np.empty(BLOCK_BYTES, np.uint8))
    for device in made:
        assert device.issued == 1
        assert not device.advance()
    with pytest.raises(RuntimeError, match="no event can be made"):
        lane.digest(lane.layout.names.index("b"), np.empty(BLOCK_BYTES, np.uint8))
    assert made[1].issued == 2
    assert not made[1].advance()

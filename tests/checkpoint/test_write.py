import itertools
from math import prod

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eke.checkpoint.capture import Captured, Held, Spread
from eke.checkpoint.manifest import Manifest, check, merge
from eke.checkpoint.reader import Reader
from eke.checkpoint.sharing import holders
from eke.checkpoint.storage import Storage
from eke.checkpoint.write import LaneWriter, cuts_of, lanes_of
from eke.distributed import Box, World
from eke.distributed.sharding import Split
from eke.distributed.sharding import cut as box_of


def captured_of(rank, shared):
    own = [Held(f"rng/rank{rank:05d}/t", torch.full((3,), rank), "state", "object")]
    return Captured(shared, own, {}, {"model": None, "rng": rank}, {"model": False, "rng": True})


def write_rank(directory, captured, here, block_bytes):
    """What the engine's two threads do, in one."""
    report = {"files": {}, "tensors": {}, "aliases": captured.aliases}
    for lane in lanes_of(captured, here, block_bytes):
        writer = LaneWriter(Storage(), directory, lane)
        for number in range(len(lane.blocks)):
            slot = np.empty(block_bytes, np.uint8)
            lane.fill(number, slot)
            writer.write(number, slot.data)
        entry, (layout, hashes) = writer.finish(durable=False)
        report["files"][layout.file] = entry
        report["tensors"] |= layout.stated(hashes)
    return report


def test_ranks_together_write_every_element_once(tmp_path):
    """Three ranks one after the other, their files read back as one checkpoint."""
    torch.manual_seed(0)
    tensors = {
        "big": torch.randn(1000, 700),
        "complex": torch.randn(400, 700, dtype=torch.complex64).t(),
        "frozen": torch.randn(300, 1000),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 5),
        "wide": torch.randn(1, 400_000),
    }
    shared = [
        Held(f"m/{k}", t, "frozen" if k == "frozen" else "state", "segment")
        for k, t in tensors.items()
    ]
    reports = [
        write_rank(tmp_path, captured_of(rank, shared), World(rank, 3), 1 << 16)
        for rank in range(3)
    ]
    files, entries, _ = merge(reports)
    manifest = Manifest(0, 3, {"data": 3}, 0.5, "0", "0", files, entries)
    check(manifest)
    assert len(entries["m/big"].shards) > 1
    assert len(entries["m/complex"].shards) > 1
    with Reader(tmp_path, manifest, Storage()) as reader:
        for name, tensor in tensors.items():
            assert torch.equal(reader.read(f"m/{name}"), tensor), name
        for rank in range(3):
            assert reader.read(f"rng/rank{rank:05d}/t").tolist() == [rank] * 3
    sizes = [sum(f["bytes"] for f in report["files"].values()) for report in reports]
    assert max(sizes) < 1.3 * min(sizes)


def test_one_rank_writes_whole_tensors():
    shared = [Held("m/a", torch.randn(2000, 300), "state", "segment")]
    [cut] = cuts_of(Captured(shared=shared), World())["state"]
    assert cut.tensor.shape == (2000, 300)
    assert cut.offset == (0, 0)


MESHES = st.lists(st.integers(1, 3), min_size=1, max_size=2)


@settings(max_examples=40, deadline=None)
@given(st.data(), MESHES, st.booleans())
def test_boxes_of_dtensors_are_written_once_and_shared_by_their_replicas(data, mesh, large):
    rows = 300_000 if large else 5
    shapes = {"a": (rows, 3), "b": (7,), "c": (), "d": (0, 4), "e": (2, 9)}
    layouts = {name: [data.draw(splits_of(shape)) for _ in mesh] for name, shape in shapes.items()}
    coordinates = list(itertools.product(*map(range, mesh)))
    boxes = {
        name: [box_of(shape, layouts[name], mesh, place) for place in coordinates]
        for name, shape in shapes.items()
    }
    count = {name: torch.zeros(shape, dtype=torch.int16) for name, shape in shapes.items()}
    loads = []
    for rank in range(len(coordinates)):
        held = []
        for name, shape in shapes.items():
            box = boxes[name][rank]
            local, spread = count[name], None
            if prod(shape):
                local = part(local, box)
                kept = box if local.numel() else None
                spread = Spread(local, shape, kept, holders(boxes[name], rank))
            held.append(Held(name, local, "state", "segment", False, spread))
        cuts = cuts_of(Captured(shared=held), World(rank, len(coordinates)))
        loads.append(0)
        for one in cuts.get("state", []):
            assert one.held.shape == shapes[one.held.name]
            where = part(count[one.held.name], Box(one.offset, tuple(one.tensor.shape)))
            where += 1
            loads[-1] += one.tensor.numel()
            assert one.tensor.data_ptr() == where.data_ptr() or not where.numel()
    assert all(bool((found == 1).all()) for found in count.values())
    if large and all(split is None for split in layouts["a"]):
        assert max(loads) - min(loads) < 100


def splits_of(shape):
    if not shape:
        return st.none()
    return st.none() | st.builds(Split, st.integers(0, len(shape) - 1), st.just(1))


def part(tensor, box):
    for dim, (start, size) in enumerate(zip(box.offset, box.shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def test_a_device_copies_what_was_there_when_the_lanes_were_made(new_device):
    device, live = new_device(lambda _: True, prefer="compute"), torch.zeros(500)
    device.ask(lambda: live.data.add_(1))
    held = Held("x", live, "state", "segment", False)
    [lane] = lanes_of(Captured(shared=[held]), World(), 4096)
    slot = np.zeros(4096, np.uint8)
    issued = lane.fill(1, slot)
    assert not slot.any()
    issued.wait()
    assert (slot[:2000].view(np.float32) == 1).all()
    assert lane.layout.eager_blocks == 0

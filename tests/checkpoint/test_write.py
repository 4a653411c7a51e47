import numpy as np
import torch

from eke.checkpoint.capture import Captured, Held
from eke.checkpoint.manifest import Manifest, check, merge
from eke.checkpoint.reader import Reader
from eke.checkpoint.storage import Storage
from eke.checkpoint.write import LaneWriter, cuts_of, lanes_of
from eke.distributed import World


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
        part = writer.finish(durable=False)
        report["files"] |= part["files"]
        report["tensors"] |= part["tensors"]
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

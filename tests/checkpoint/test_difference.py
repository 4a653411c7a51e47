import torch

from eke.checkpoint import Checkpointer, diff
from eke.checkpoint.capture import Captured, Held
from eke.checkpoint.manifest import Manifest, merge, serialise
from eke.checkpoint.storage import Storage
from eke.checkpoint.write import LaneWriter, lanes_of
from eke.distributed import World


def test_every_status(tmp_path):
    tensors = {"same": torch.ones(3), "changed": torch.ones(3), "reshaped": torch.ones(4)}

    def save(name, held):
        with Checkpointer(tmp_path / name) as ck:
            module = torch.nn.Module()
            for key, tensor in held.items():
                module.register_buffer(key, tensor)
            ck.attach(model=module)
            return ck.save(1).wait().path

    a = save("a", {**tensors, "removed": torch.ones(1)})
    changed = {"changed": torch.zeros(3), "reshaped": torch.ones(2, 2), "added": torch.ones(1)}
    b = save("b", {**tensors, **changed})
    found = {row["tensor"].removeprefix("model/"): row["status"] for row in diff(a, b)}
    assert found == {name: name for name in found}
    assert len(found) == 5


def test_ranks_do_not_matter(tmp_path):
    """The same tensor saved by one rank and by two, and then with one element changed."""
    tensor = torch.randn(2000, 300)

    def write(name, ranks, tensor):
        path = tmp_path / name
        path.mkdir()
        reports = []
        for rank in range(ranks):
            report = {"files": {}, "tensors": {}, "aliases": {}}
            captured = Captured(shared=[Held("m/t", tensor, "state", "segment")])
            for lane in lanes_of(captured, World(rank, ranks), 1 << 16):
                writer = LaneWriter(Storage(), path, lane)
                for number in range(len(lane.blocks)):
                    slot = torch.empty(1 << 16, dtype=torch.uint8).numpy()
                    lane.fill(number, slot)
                    writer.write(number, slot.data)
                entry, (layout, hashes) = writer.finish(durable=False)
                report["files"][layout.file] = entry
                report["tensors"] |= layout.stated(hashes)
            reports.append(report)
        files, entries, _ = merge(reports)
        manifest = Manifest(1, ranks, {"data": ranks}, 0.5, "0", "0", files, entries)
        (path / "MANIFEST.json").write_bytes(serialise(manifest))
        return path

    one, two = write("one", 1, tensor), write("two", 2, tensor)
    assert [row["status"] for row in diff(one, two)] == ["same"]
    tensor[-1, -1] += 1
    assert [row["status"] for row in diff(write("three", 3, tensor), two)] == ["changed"]

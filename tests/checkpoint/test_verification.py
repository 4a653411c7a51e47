import itertools
import json
import shutil

import pytest
import torch
import xxhash

from eke.checkpoint import (
    Checkpointer,
    CorruptCheckpoint,
    Problem,
    Storage,
    load_tensors,
    verify,
)
from eke.checkpoint.manifest import MANIFEST, parse
from eke.errors import EkeError


def test_a_sound_checkpoint(saved):
    _, path = saved
    report = verify(path)
    assert report.ok
    assert report.kind is None
    assert report.step == 3
    assert report.bytes_read == sum(f.stat().st_size for f in path.iterdir() if f.name != MANIFEST)
    assert verify(path.parent) == report


class Flipping(Storage):
    """A disk that shows one bit of one file as it is not."""

    def __init__(self):
        self.file, self.place, self.bit, self.names = "", 0, 0, {}

    def open(self, path):
        fd = super().open(path)
        self.names[fd] = path.name
        return fd

    def read_into(self, fd, buffer, offset):
        count = super().read_into(fd, buffer, offset)
        if self.names[fd] == self.file and offset <= self.place < offset + count:
            buffer[self.place - offset] ^= 1 << self.bit
        return count


@pytest.fixture
def smallest(tmp_path, monkeypatch):
    """Parameters, optimizer state and objects, in files whose headers have little padding."""
    monkeypatch.setattr("eke.checkpoint.tensorfile.ALIGN_BYTES", 64)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD([model.weight], lr=0.5, momentum=0.5)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()

    def attach(checkpointer):
        checkpointer.attach(model=model, optimizer=optimizer)
        return checkpointer

    with attach(Checkpointer(tmp_path / "ck")) as checkpointer:
        return attach, checkpointer.save(3).wait().path


def test_every_bit_of_every_file_is_found_by_verify_and_by_restore(smallest):
    attach, path = smallest
    storage = Flipping()
    manifest = parse((path / MANIFEST).read_bytes())
    shards = manifest.shards_by_file()
    tried, partly = 0, set()
    with attach(Checkpointer(path.parent, storage=storage)) as ck:
        for file in sorted(path.iterdir()):
            storage.file = file.name
            for storage.place, storage.bit in itertools.product(
                range(file.stat().st_size), range(8)
            ):
                where = (file.name, storage.place, storage.bit)
                problems = verify(path, storage=storage).problems
                with pytest.raises(CorruptCheckpoint) as caught:
                    ck.restore()
                tensors = [
                    name
                    for name, shard in shards.get(file.name, [])
                    if shard.begin <= storage.place < shard.end
                ]
                for found in (problems, caught.value.problems):
                    assert {(one.kind, one.file) for one in found} == {("corrupt", file.name)}, (
                        where
                    )
                    if tensors:
                        assert [one.tensor for one in found] == tensors, where
                assert caught.value.partly_restored == bool(tensors), where
                partly |= {*tensors}
                tried += 1
        storage.file = ""
        assert verify(path, storage=storage).ok
        assert ck.restore().step == 3
    assert partly == {*manifest.tensors}
    assert len(partly) == 2
    assert tried > 10_000


def test_bits_all_over_a_larger_checkpoint(saved, new_run):
    """Padding of the usual length; objects with tensors inside; every kind of provider."""
    _, path = saved
    run, storage = new_run(seed=50), Flipping()
    before = run.bits()
    ck = run.attach_to(Checkpointer(path.parent, storage=storage))
    for file in sorted(path.iterdir()):
        storage.file, size = file.name, file.stat().st_size
        for storage.place in range(3, size, max(1, size // 25)):
            storage.bit = storage.place % 8
            [problem] = verify(path, storage=storage).problems
            assert (problem.kind, problem.file) == ("corrupt", file.name)
            for first in (True, False):
                with pytest.raises(CorruptCheckpoint) as caught:
                    ck.restore(check_first=first)
                assert caught.value.problems == (problem,)
                assert file.name in str(caught.value)
                if first:
                    assert not caught.value.partly_restored
                    assert run.bits() == before
            if caught.value.partly_restored:
                before = run.bits()
            else:
                assert run.bits() == before
    storage.file = ""
    assert ck.restore().step == 3


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 4000, -1])
def test_a_truncated_file_is_incomplete(saved, keep):
    _, path = saved
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        file.write_bytes(whole[:keep])
        report = verify(path)
        assert report.kind == ("corrupt" if file.name == MANIFEST else "incomplete")
        assert report.problems[0].file == file.name
        with pytest.raises(CorruptCheckpoint, match=file.name.replace(".", r"\.")):
            Checkpointer(path.parent).restore(step=3)
        file.write_bytes(whole)


def test_added_bytes_missing_files_and_strangers(saved):
    _, path = saved
    file = path / "rank00000.state.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole + b"\0")
    assert verify(path).kind == "corrupt"
    file.unlink()
    report = verify(path)
    assert (report.kind, report.problems[0].file) == ("incomplete", file.name)
    file.write_bytes(whole)
    (path / "notes.txt").write_text("hello")
    report = verify(path)
    assert (report.kind, report.problems[0].file) == ("foreign", "notes.txt")


def test_directories_that_are_no_checkpoint(saved, tmp_path):
    _, path = saved
    (path / MANIFEST).unlink()
    assert verify(path).kind == "incomplete"
    attempt = path.rename(path.parent / ".tmp-step-000000003-a.b.1.2.c")
    assert verify(attempt).kind == "incomplete"
    assert verify(attempt.parent).kind == "foreign"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert verify(empty).kind == "foreign"


def rewrite(path, change):
    """Change the manifest as an attacker would, who can compute digests."""
    values = json.loads((path / MANIFEST).read_bytes())
    change(values)
    del values["digest"]
    body = json.dumps(values, separators=(",", ":")).encode()[:-1]
    digest = xxhash.xxh3_128_hexdigest(body)
    (path / MANIFEST).write_bytes(body + f',"digest":"{digest}"}}\n'.encode())


def test_a_file_whose_header_tells_another_story(saved):
    """Right hashes everywhere, but safetensors readers would see other tensors than eke does."""
    _, path = saved
    file = path / "rank00000.frozen.safetensors"
    data = file.read_bytes().replace(b'"dtype":"F32","shape":[8]', b'"dtype":"I32","shape":[8]')
    file.write_bytes(data)
    rewrite(path, lambda v: v["files"][file.name].update(xxh3_128=xxhash.xxh3_128_hexdigest(data)))
    [problem] = verify(path).problems
    assert (problem.file, problem.tensor) == (file.name, "model/inner.bias")
    assert "disagree" in problem.detail


def test_a_file_with_a_huge_header(saved):
    _, path = saved
    file = path / "rank00000.frozen.safetensors"
    data = b"\xff" * 7 + file.read_bytes()[7:]
    file.write_bytes(data)
    rewrite(path, lambda v: v["files"][file.name].update(xxh3_128=xxhash.xxh3_128_hexdigest(data)))
    [problem] = verify(path).problems
    assert "which cannot be" in problem.detail


def test_another_tensors_bytes_under_a_right_file_hash(saved):
    """Two tensors' ranges are swapped in the manifest, so only their own hashes can tell."""
    _, path = saved

    def swap(values):
        one = values["tensors"]["model/norm.weight"]["shards"][0]
        two = values["tensors"]["model/norm.bias"]["shards"][0]
        for key in ("begin", "end"):
            one[key], two[key] = two[key], one[key]

    rewrite(path, swap)
    assert {p.tensor for p in verify(path).problems} == {
        "model/norm.weight",
        "model/norm.bias",
    }


@pytest.mark.parametrize("size", [2**40, 2**62])
def test_lying_sizes_never_allocate(saved, size):
    _, path = saved

    def lie(values):
        entry = values["tensors"]["model/norm.weight"]
        shard = entry["shards"][0]
        values["files"][shard["file"]]["bytes"] = size
        shard["begin"], shard["end"] = 0, size // 4 * 4
        entry["shape"] = shard["shape"] = [size // 4]
        values["tensors"] = {"model/norm.weight": entry}
        values["aliases"] = {}

    rewrite(path, lie)
    file = "rank00000.state.safetensors"
    detail = f"the file has {(path / file).stat().st_size} of its {size} bytes"
    assert Problem(file, None, "incomplete", detail) in verify(path).problems
    with pytest.raises(CorruptCheckpoint, match="instead of"):
        load_tensors(path)


def test_objects_that_do_not_decode(saved, new_run):
    _, path = saved
    file = path / "rank00000.objects.json"
    for old, new in (
        (b'"scheduler":', b'"schedulex":'),
        (b'"$ndarray":"rng/', b'"$ndarray":"rnx/'),
        (b'"eke-objects"', b'"eke-objectx"'),
        (b'"objects":{', b'"objects":[{'),
        (b'{"$tuple":', b'{"$system":'),
    ):
        whole, manifest = file.read_bytes(), (path / MANIFEST).read_bytes()
        assert old in whole
        data = whole.replace(old, new)
        file.write_bytes(data)
        rewrite(
            path,
            lambda v, d=data: v["files"][file.name].update(
                bytes=len(d), xxh3_128=xxhash.xxh3_128_hexdigest(d)
            ),
        )
        run = new_run(seed=4)
        before = run.bits()
        with pytest.raises(CorruptCheckpoint, match=r"objects\.json"):
            run.attach_to(Checkpointer(path.parent)).restore()
        assert run.bits() == before
        file.write_bytes(whole)
        (path / MANIFEST).write_bytes(manifest)


def test_a_manifest_of_another_step(saved):
    _, path = saved
    other = path.parent / "step-000000004"
    shutil.copytree(path, other)
    report = verify(other)
    assert "is that of step 3" in report.problems[0].detail
    with pytest.raises(CorruptCheckpoint):
        Checkpointer(path.parent).restore()


def test_a_failing_disk_is_not_corruption(saved, faulty, new_run):
    _, path = saved
    faulty.fail("read_into", at=4)
    with pytest.raises(EkeError, match=r"reading .*Input/output error.*disk is failing"):
        verify(path, storage=faulty)
    ck = new_run().attach_to(Checkpointer(path.parent, storage=faulty))
    with pytest.raises(EkeError, match="disk is failing") as caught:
        ck.restore()
    assert not isinstance(caught.value, CorruptCheckpoint)
    faulty.heal()
    assert ck.restore().step == 3


def test_short_reads_are_no_problem(saved, faulty):
    faulty.short = True
    assert verify(saved[1], storage=faulty).ok

import errno
import itertools
import os
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eke.checkpoint import Checkpointer, CorruptCheckpoint, Storage
from eke.checkpoint.manifest import FileEntry, Manifest, Shard, TensorEntry, check
from eke.checkpoint.opening import open_manifest
from eke.checkpoint.reader import Fill, Reader
from eke.checkpoint.tensors import as_bytes
from eke.errors import InputError


@pytest.fixture
def quarters(tmp_path):
    """A 5x6 tensor as four boxes in two files, as a job sharded along both dimensions writes it."""
    tensor = torch.randn(5, 6)
    shards, files = [], {}
    for rows, name in ((slice(0, 2), "a.bin"), (slice(2, 5), "b.bin")):
        data = b"\0" * 16
        for columns in (slice(0, 4), slice(4, 6)):
            box = tensor[rows, columns]
            raw = bytes(as_bytes(box))
            offset = (rows.start, columns.start)
            span = (len(data), len(data) + len(raw))
            digest = xxhash.xxh3_128_hexdigest(raw)
            key = f"t{len(shards)}"
            shards.append(Shard(name, key, offset, tuple(box.shape), *span, digest))
            data += raw
        (tmp_path / name).write_bytes(data)
        files[name] = FileEntry(len(data), xxhash.xxh3_128_hexdigest(data))
    entry = TensorEntry("float32", (5, 6), "state", "segment", tuple(shards))
    manifest = Manifest(1, 4, {"data": 4}, 0.5, "0", "0", files, {"p/t": entry}, {"p/u": "p/t"})
    check(manifest)
    return tensor, manifest, tmp_path


def test_boxes_are_put_together(quarters):
    tensor, manifest, path = quarters
    with Reader(path, manifest, Storage()) as reader:
        assert torch.equal(reader.read("p/t"), tensor)
        assert torch.equal(reader.read("p/u"), tensor)
        target = torch.zeros(6, 5).t()
        reader.copy_into("p/t", target)
        assert torch.equal(target, tensor)


def test_a_wrong_box_is_named(quarters):
    _, manifest, path = quarters
    data = bytearray((path / "b.bin").read_bytes())
    data[-1] ^= 1
    (path / "b.bin").write_bytes(data)
    reader = Reader(path, manifest, Storage())
    with reader, pytest.raises(CorruptCheckpoint, match=r"b\.bin, tensor p/t"):
        reader.copy_into("p/t", torch.zeros(5, 6))


def test_what_is_not_listed(quarters):
    _, manifest, path = quarters
    reader = Reader(path, manifest, Storage())
    with reader, pytest.raises(CorruptCheckpoint, match="named but not listed"):
        reader.read("p/absent")


def test_files_are_closed(quarters):
    class Counting(Storage):
        def __init__(self):
            self.open_files = 0

        def open(self, path):
            self.open_files += 1
            return super().open(path)

        def close(self, fd):
            self.open_files -= 1
            super().close(fd)

    _, manifest, path = quarters
    storage = Counting()
    with Reader(path, manifest, storage) as reader:
        reader.read("p/t")
        assert storage.open_files == 2
    assert storage.open_files == 0
    wrong = replace(
        manifest, files={k: replace(v, bytes=v.bytes + 1) for k, v in manifest.files.items()}
    )
    reader = Reader(path, wrong, storage)
    with reader, pytest.raises(CorruptCheckpoint, match="instead of"):
        reader.read("p/t")
    assert storage.open_files == 0


@given(
    offset=st.tuples(st.integers(0, 4), st.integers(0, 5)),
    size=st.tuples(st.integers(0, 5), st.integers(0, 6)),
    transposed=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_box_is_put_together(quarters, offset, size, transposed):
    tensor, manifest, path = quarters
    shape = tuple(min(n, whole - o) for n, whole, o in zip(size, (5, 6), offset, strict=True))
    target = torch.zeros(shape[::-1]).t() if transposed else torch.zeros(shape)
    with Reader(path, manifest, Storage()) as reader:
        reader.copy_into("p/t", target, offset)
    rows, columns = (slice(o, o + n) for o, n in zip(offset, shape, strict=True))
    assert torch.equal(target, tensor[rows, columns])


def test_a_box_that_is_not_in_the_tensor(quarters):
    _, manifest, path = quarters
    with Reader(path, manifest, Storage()) as reader:
        for shape, offset in (((5, 6), (1, 0)), ((2, 2), (-1, 0)), ((2,), (0,)), ((4, 6), None)):
            with pytest.raises(InputError, match="cannot take p/t"):
                reader.copy_into("p/t", torch.zeros(shape), offset)
        with pytest.raises(InputError, match="saved was float32"):
            reader.copy_into("p/t", torch.zeros(5, 6, dtype=torch.int64))


def test_what_was_put_together_otherwise_or_converted_is_known(quarters):
    tensor, manifest, path = quarters
    with Reader(path, manifest, Storage()) as reader:
        reader.copy_into("p/t", torch.zeros(2, 4), (0, 0))
        assert not reader.resharded
        reader.copy_into("p/t", torch.zeros(3, 4), (0, 0))
        assert reader.resharded == {"p/t"}
        half = torch.zeros(5, 6, dtype=torch.bfloat16)
        assert not reader.cast
        reader.copy_into("p/u", half)
        assert reader.cast == {"p/u"}
    assert torch.equal(half, tensor.bfloat16())


@pytest.fixture
def many(tmp_path):
    """Large and small tensors of one file, read by several threads; and their names."""
    torch.manual_seed(0)
    tensors = {f"t{n:02}": torch.randn(n % 3 * 130_000 + n + 1) for n in range(24)}
    model = torch.nn.Module()
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model)
        path = ck.save(1).wait().path
    manifest = open_manifest(path, Storage())
    return {f"model/{name}": tensor for name, tensor in tensors.items()}, manifest, path


def threads_named(name):
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_several_threads_read_every_byte_once(many):
    class Recording(Storage):
        def __init__(self):
            self.spans, self.threads = [], set()

        def read_into(self, fd, buffer, offset):
            count = super().read_into(fd, buffer, offset)
            self.spans.append((offset, offset + count))
            self.threads.add(threading.current_thread().name)
            return count

    tensors, manifest, path = many
    storage = Recording()
    with Reader(path, manifest, storage) as reader:
        read = reader.read_all(tensors)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    spans = sorted(storage.spans)
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert sum(end - begin for begin, end in spans) == sum(4 * len(t) for t in tensors.values())
    assert len(spans) < len(tensors) + 20, "small neighbours are read together"
    if len(os.sched_getaffinity(0)) > 1:
        assert all(name.startswith("eke-reader") for name in storage.threads)
    assert not threads_named("eke-reader")


@pytest.mark.parametrize("short", [False, True])
def test_a_failing_disk_stops_all_threads_and_names_the_file(many, faulty, short):
    tensors, manifest, path = many
    faulty.short = short
    with Reader(path, manifest, faulty) as reader:
        assert torch.equal(reader.read("model/t23"), tensors["model/t23"])
        faulty.fail("read_into", at=faulty.calls["read_into"] + 5)
        with pytest.raises(OSError, match=r"safetensors") as caught:
            reader.read_all(tensors)
        assert caught.value.errno == errno.EIO
        assert faulty.calls["read_into"] < 5 + 40 + 2 * len(tensors)
        assert not threads_named("eke-reader")
        faulty.heal()
        read = reader.read_all(tensors)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_a_file_that_shrinks_while_it_is_read(many):
    tensors, manifest, path = many
    [file] = path.glob("*.safetensors")
    with Reader(path, manifest, Storage()) as reader:
        reader.entry("model/t00")
        os.truncate(file, file.stat().st_size - 5)
        with pytest.raises(CorruptCheckpoint, match="the file ends inside it") as caught:
            reader.read_all(tensors)
        assert {one.kind for one in caught.value.problems} == {"incomplete"}


@pytest.mark.parametrize("name", ["model/t00", "model/t23"])
def test_damage_in_a_small_and_in_a_large_tensor(many, name):
    tensors, manifest, path = many
    [shard] = manifest.tensors[name].shards
    with (path / shard.file).open("r+b") as file:
        file.seek(shard.end - 1)
        last = file.read(1)
        file.seek(shard.end - 1)
        file.write(bytes([last[0] ^ 1]))
    with Reader(path, manifest, Storage()) as reader:
        with pytest.raises(CorruptCheckpoint) as caught:
            reader.read_all(tensors)
        assert [(one.tensor, one.file) for one in caught.value.problems] == [(name, shard.file)]


def test_targets_that_share_memory_are_filled_one_after_another(many):
    """Read at once, one's bytes would change under the other's hash."""
    tensors, manifest, path = many
    a, b = "model/t20", "model/t23"
    memory = torch.zeros(len(tensors[a]) + 100)
    with Reader(path, manifest, Storage()) as reader:
        for _ in range(5):
            reader.fill([Fill(a, memory[: len(tensors[a])]), Fill(b, memory[: len(tensors[b])])])
            assert torch.equal(memory[: len(tensors[b])], tensors[b])


def test_files_of_a_checkpoint_are_checked_before_their_tensors(many):
    tensors, manifest, path = many
    [file] = path.glob("*.safetensors")
    names = list(manifest.files)
    with Reader(path, manifest, Storage()) as reader:
        reader.check(names)
    data = bytearray(file.read_bytes())
    for place in (20, 4095):
        data[place] ^= 1
        file.write_bytes(data)
        reader = Reader(path, manifest, Storage())
        with reader, pytest.raises(CorruptCheckpoint, match="do not match the file's hash"):
            reader.check(names)
        data[place] ^= 1
    # Another version may write another header: then the file's own hash decides.
    data[:4096] = data[:4096].replace(b'"DCP_VERSION":"1.0"', b'"DCP_VERSION":"1.1"')
    file.write_bytes(data)
    entry = FileEntry(len(data), xxhash.xxh3_128_hexdigest(bytes(data)))
    other = replace(manifest, files={**manifest.files, file.name: entry})
    with Reader(path, other, Storage()) as reader:
        reader.check(names)
        assert torch.equal(reader.read("model/t01"), tensors["model/t01"])


def test_memory_that_reading_adds_is_small_whatever_the_state(tmp_path):
    """Into memory that is there, one tensor of 128 MiB as it lies in the file, others not."""
    script = """
        import sys, torch
        from eke.checkpoint import Checkpointer

        def memory(key):
            with open("/proc/self/status") as file:
                return next(int(row.split()[1]) for row in file if row.startswith(key)) << 10

        torch.set_num_threads(1)
        model = torch.nn.Module()
        model.large = torch.nn.Parameter(torch.ones(32 << 20))
        model.turned = torch.nn.Parameter(torch.ones(2 << 10, 2 << 10).t())
        model.small = torch.nn.Parameter(torch.ones(4 << 20))
        with Checkpointer(sys.argv[1], pool="16MiB", durability="none") as ck:
            ck.attach(model=model, rng=True)
            ck.save(1).wait()
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor.zero_()
            model.small.data = model.small.data.double()
            for first in (False, True):
                ck.restore(only="rng", check_first=first)  # what is imported and opened once
                open("/proc/self/clear_refs", "w").write("5")  # the peak so far is forgotten
                before = memory("VmRSS")
                ck.restore(cast=True, check_first=first)
                print(memory("VmHWM") - before)
            assert all((tensor == 1).all() for tensor in model.parameters())
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    added = [int(line) for line in run.stdout.split()]
    assert len(added) == 2
    assert max(added) < 24 << 20

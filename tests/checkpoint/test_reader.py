from dataclasses import replace

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eke.checkpoint import CorruptCheckpoint, Storage
from eke.checkpoint.manifest import FileEntry, Manifest, Shard, TensorEntry, check
from eke.checkpoint.reader import Reader
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

import itertools

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from eke.checkpoint.source import Changed, Source, storage_of
from eke.checkpoint.tensors import as_bytes

BASE = torch.arange(-60.0, 60.0).reshape(4, 5, 6)
TENSORS = {
    "plain": BASE,
    "transposed": BASE.transpose(0, 2),
    "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "view": BASE[1:3, ::2, 1:],
    "expanded": BASE[:, :1, :1].expand(4, 3, 2),
    "empty": BASE[:0],
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "bf16": BASE.to(torch.bfloat16).transpose(0, 1),
    "fp8": BASE.to(torch.float8_e4m3fn).transpose(0, 1),
    "bool": (BASE > 0).transpose(1, 2),
    "int64": BASE.long()[::2],
    "complex": torch.complex(BASE, -BASE).transpose(0, 2),
    "conjugated": torch.complex(BASE, -BASE).conj(),
    "negative": torch.complex(BASE, -BASE).conj().imag,
    "parameter": torch.nn.Parameter(BASE.clone()),
}


@pytest.mark.parametrize("name", TENSORS)
@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=5))
def test_pieces_are_the_bytes_of_the_whole(name, cuts):
    tensor = TENSORS[name]
    source, expected = Source(tensor), bytes(as_bytes(tensor))
    assert source.nbytes == len(expected)
    size = max(1, tensor.element_size() // (2 if tensor.is_complex() else 1))
    edges = sorted({0, source.nbytes, *(min(c * size, source.nbytes) for c in cuts)})
    out = bytearray()
    for begin, end in itertools.pairwise(edges):
        target = np.zeros(end - begin + 8, np.uint8)
        source.fill(target, begin, end)
        assert not target[end - begin :].any(), "it wrote beyond the end"
        out += target[: end - begin].tobytes()
    assert bytes(out) == expected
    assert source.digest(np.empty(16, np.uint8)) == xxhash.xxh3_128_hexdigest(expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.add_(1),
        lambda t: torch._foreach_lerp_([t], [torch.ones(300_000)], 0.1),
        lambda t: t.copy_(torch.zeros(300_000)),
        lambda t: t.untyped_storage().resize_(0),
    ],
    ids=["add_", "foreach", "copy_", "freed"],
)
def test_a_change_is_noticed(change):
    tensor = torch.zeros(300_000)
    source, target = Source(tensor), np.empty(1_200_000, np.uint8)
    source.fill(target, 0, 1_200_000)
    change(tensor)
    with pytest.raises(Changed):
        source.fill(target, 0, 1_200_000)
    with pytest.raises(Changed):
        source.digest(target)


def test_memory_outlives_the_tensor():
    tensor = torch.full((300_000,), 7, dtype=torch.uint8)
    source, target = Source(tensor), np.empty(300_000, np.uint8)
    del tensor
    source.fill(target, 0, 300_000)
    assert (target == 7).all()


def test_inference_tensors():
    with torch.inference_mode():
        tensor = torch.ones(3)
    target = np.empty(12, np.uint8)
    Source(tensor).fill(target, 0, 12)
    assert target.view(np.float32).tolist() == [1, 1, 1]


def test_storages():
    assert storage_of(BASE) == storage_of(BASE[2:].transpose(0, 1))
    assert storage_of(BASE) != storage_of(BASE.clone())


@pytest.mark.parametrize("name", TENSORS)
def test_pieces_that_a_device_copies(name, new_device):
    """Issued all together, and done in any order."""
    device = new_device(lambda _: True)
    tensor = TENSORS[name]
    source, expected = Source(tensor), bytes(as_bytes(tensor))
    size = 8 if source.nbytes % 8 == 0 else 1
    edges = sorted({0, source.nbytes // 3 // size * size, source.nbytes})
    target = np.zeros(source.nbytes + 8, np.uint8)
    for begin, end in itertools.pairwise(edges):
        source.fill(target[begin:], begin, end)
    assert not target.any(), "nothing is done before somebody waits"
    assert source.device is device
    device.event(source.place).wait()
    assert target[: source.nbytes].tobytes() == expected
    assert not target[source.nbytes :].any(), "it wrote beyond the end"
    assert source.digest(np.empty(16, np.uint8)) == xxhash.xxh3_128_hexdigest(expected)

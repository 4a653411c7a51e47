import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eke.checkpoint.sink import Sink
from eke.checkpoint.tensors import as_bytes
from eke.distributed import Box
from eke.errors import InputError


def feed(sink, tensor, box, cut_bytes):
    """Give a sink a shard in stretches of at most `cut_bytes`."""
    part = tensor[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
    raw = np.frombuffer(as_bytes(part), np.uint8).copy()
    for begin in range(0, len(raw), cut_bytes):
        sink.put(box, begin, raw[begin : begin + cut_bytes])


MAKE = {
    "plain": lambda: torch.zeros(4, 6),
    "transposed": lambda: torch.zeros(6, 4).t(),
    "a view": lambda: torch.zeros(9, 13)[1::2, ::2][:4, :6],
    "a parameter": lambda: torch.nn.Parameter(torch.zeros(4, 6)),
    "channels apart": lambda: torch.zeros(2, 4, 6)[1],
    "for inference": lambda: _for_inference(),
}


def _for_inference():
    with torch.inference_mode():
        return torch.zeros(4, 6)


@pytest.mark.parametrize("kind", MAKE)
@given(cut=st.integers(1, 12), rows=st.integers(1, 9), columns=st.integers(1, 9))
def test_every_layout_takes_its_box_of_every_cut(kind, cut, rows, columns):
    whole = torch.arange(90, dtype=torch.float32).reshape(9, 10)
    target = MAKE[kind]()
    sink = Sink(target, (2, 3), torch.float32)
    version = None if target.is_inference() else target._version
    for box in (
        Box((0, 0), (rows, columns)),
        Box((0, columns), (rows, 10 - columns)),
        Box((rows, 0), (9 - rows, 10)),
    ):
        if all(box.shape):
            feed(sink, whole, box, cut * 4)
    sink.finish()
    assert torch.equal(target, whole[2:6, 3:9])
    assert version is None or target._version > version


def test_room_is_the_targets_own_memory():
    target = torch.zeros(4, 6)
    sink = Sink(target, (2, 0), torch.float32)
    room = sink.room(Box((3, 0), (5, 6)))
    assert (room.begin, room.end) == (0, 3 * 6 * 4)
    room.memory.view(np.float32)[:] = 7
    assert target.tolist() == [[0] * 6] + [[7] * 6] * 3
    assert sink.room(Box((0, 0), (9, 3))) is None, "a part of each row"
    assert sink.room(Box((7, 0), (2, 6))) is None, "nothing of it"
    assert Sink(target.t(), (0, 0), torch.float32).room(Box((0, 0), (6, 4))) is None
    assert Sink(target, (0, 0), torch.float64).room(Box((0, 0), (4, 6))) is None


@pytest.mark.parametrize("saved", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("live", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_another_type_is_what_torch_converts_it_to(saved, live):
    torch.manual_seed(1)
    whole = torch.randn(300, 200).to(saved)
    target = torch.zeros(200, 300, dtype=live).t()
    sink = Sink(target, (0, 0), saved)
    feed(sink, whole, Box((0, 0), (300, 200)), 1 << 18)
    assert bytes(as_bytes(target)) == bytes(as_bytes(whole.to(live)))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32])
def test_views_that_torch_computes_take_what_they_show(dtype):
    base = torch.zeros(5, dtype=dtype)
    values = torch.complex(torch.arange(5.0), -torch.arange(5.0)).to(dtype)
    sink = Sink(base.conj(), (0,), dtype)
    assert sink.room(Box((0,), (5,))) is None
    feed(sink, values, Box((0,), (5,)), 32)
    sink.finish()
    assert torch.equal(torch.view_as_real(base.conj().resolve_conj()), torch.view_as_real(values))


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1), (2,), (0, 2)])
@pytest.mark.parametrize("cut", [4, 20, 1000])
def test_an_expanded_target_takes_values_that_agree_and_no_others(axes, cut):
    shape = (3, 4, 2)
    small = torch.arange(24.0).reshape(shape)
    for axis in axes:
        small = small.narrow(axis, 0, 1)
    whole = small.expand(shape).contiguous()
    target = torch.zeros_like(small).expand(shape)
    sink = Sink(target, (0, 0, 0), torch.float32)
    assert sink.serial
    assert sink.room(Box((0, 0, 0), shape)) is None
    feed(sink, whole, Box((0, 0, 0), shape), cut)
    assert torch.equal(target, whole)
    whole[-1, -1, -1] += 1
    sink = Sink(target, (0, 0, 0), torch.float32)
    with pytest.raises(InputError, match="is expanded"):
        feed(sink, whole, Box((0, 0, 0), shape), cut)

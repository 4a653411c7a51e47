import pytest
import torch

from eke.checkpoint.dtypes import STORED, stored_shape, tensor_bytes
from eke.checkpoint.tensors import as_bytes, copy_exactly, dtype_name, from_bytes, identity
from eke.errors import InputError


def random_bits(dtype, *shape):
    """Any bit pattern, NaNs with payloads among them (bool: only 0 and 1)."""
    size = tensor_bytes(dtype, shape)
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (size,), dtype=torch.uint8)
    return from_bytes(raw, dtype, shape)


def back(tensor):
    raw = torch.frombuffer(bytearray(as_bytes(tensor)) or bytearray(1), dtype=torch.uint8)
    raw = raw[: tensor.numel() * tensor.element_size()]
    return from_bytes(raw, dtype_name(tensor.dtype), tuple(tensor.shape))


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (0,), (2, 0, 3)])
def test_every_dtype_and_shape(dtype, shape):
    tensor = random_bits(dtype, *shape)
    assert len(as_bytes(tensor)) == tensor_bytes(dtype, shape)
    other = back(tensor)
    assert other.dtype == tensor.dtype
    assert other.shape == tensor.shape
    assert bytes(as_bytes(other)) == bytes(as_bytes(tensor))


def test_stored_shape_of_complex():
    assert stored_shape("complex64", (3,)) == (3, 2)
    assert stored_shape("float32", (3,)) == (3,)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(), lambda t: t[::2, 1:], lambda t: t[1], lambda t: t[:, 0].expand(3, 4),
        lambda t: t.flatten()[5:], lambda t: t.unsqueeze(1).expand(-1, 5, -1),
    ],
)  # fmt: skip
def test_views_are_written_as_their_contents(view):
    tensor = view(torch.arange(16.0).reshape(4, 4))
    assert torch.equal(back(tensor), tensor)


def test_conjugate_and_negative_views():
    tensor = torch.randn(4, dtype=torch.complex64)
    assert torch.equal(back(tensor.conj()), tensor.conj().resolve_conj())
    assert torch.equal(back(tensor.conj().imag), -tensor.imag)


def test_a_plain_tensor_is_not_copied():
    tensor = torch.zeros(4, requires_grad=True)
    view = as_bytes(tensor)
    with torch.no_grad():
        tensor[0] = 1.0
    assert bytes(view[:4]) == b"\0\0\x80\x3f"


def test_identity_tells_the_same_memory_from_equal_contents():
    tensor = torch.zeros(4, 4)
    assert identity(tensor) == identity(tensor.view(4, 4))
    assert identity(tensor) != identity(tensor.clone())
    assert identity(tensor) != identity(tensor.t())
    assert identity(tensor) != identity(tensor[:2])
    assert identity(tensor) != identity(tensor.view(torch.int32))
    assert identity(torch.empty(0)) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "bool", "float8_e5m2"])
def test_copy_keeps_every_bit(dtype):
    source, target = (
        random_bits(dtype, 5, 3),
        from_bytes(torch.zeros(tensor_bytes(dtype, (3, 5)), dtype=torch.uint8), dtype, (3, 5)),
    )
    copy_exactly(target.t(), source)
    assert bytes(as_bytes(target.t())) == bytes(as_bytes(source))


def test_copy_into_a_leaf_that_needs_a_gradient():
    target = torch.zeros(3, requires_grad=True)
    copy_exactly(target, torch.ones(3))
    assert target.is_leaf
    assert target.tolist() == [1, 1, 1]


def test_copy_into_an_expanded_tensor():
    base = torch.zeros(1, 3)
    copy_exactly(base.expand(4, 3), torch.arange(3.0).expand(4, 3).contiguous())
    assert base.tolist() == [[0, 1, 2]]
    with pytest.raises(InputError, match="is expanded"):
        copy_exactly(base.expand(4, 3), torch.randn(4, 3))

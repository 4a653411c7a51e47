"""Tensors as bytes and back, exactly: every bit pattern, shape and stride.

What is kept is a tensor's logical contents, not its storage: a view, a transposed or an expanded
tensor is written as if it were contiguous. Only plain strided tensors are taken.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from eke.checkpoint.dtypes import STORED
from eke.distributed import part_of
from eke.errors import InputError

_LAZY = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name without the prefix: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def refuse_unusual(tensor: torch.Tensor, name: str) -> None:
    """Raise for a tensor whose bytes are not simply its elements in order.

    Raises:
        InputError: it is sparse, quantized, on the meta device, of a subclass (a DTensor comes as
            its local part), or of a dtype that has no stored form.
    """
    what = None
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        what = f"is a {type(tensor).__name__}"
    elif tensor.layout != torch.strided:
        what = f"has the layout {tensor.layout}"
    elif tensor.is_meta:
        what = "is on the meta device and has no values"
    elif dtype_name(tensor.dtype) not in STORED:
        what = f"has the dtype {tensor.dtype}"
    if what is not None:
        raise InputError(
            f"the tensor {name} {what}, which a checkpoint cannot hold",
            rule="checkpoints hold plain dense tensors",
            fix="Attach it through a StateProvider whose segments are plain tensors or DTensors",
        )


def require_place(tensor: torch.Tensor, name: str) -> None:
    """Raise for a live tensor that nothing can be restored into.

    Raises:
        InputError: it has no memory, because it is on the meta device or belongs to a lazy module
            that has seen no input; or it is a DTensor of which this rank has no plain box.
    """
    if isinstance(tensor, _LAZY):
        what, fix = "has never been initialised", "Run one batch through the lazy modules first"
    elif tensor.device.type == "meta":
        what = "is on the meta device and has no memory"
        fix = 'Call model.to_empty(device="cpu"), or another device, before restoring'
    else:
        part_of(tensor, name)
        return
    raise InputError(f"the tensor {name} {what}, so nothing can be restored into it", fix=fix)


def identity(tensor: torch.Tensor) -> Hashable | None:
    """Equal for tensors that are the same memory seen the same way; None if it has no memory."""
    if tensor.numel() == 0:
        return None
    return (
        tensor.device,
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's elements in row-major order, little-endian; a copy only where one is needed."""
    dense = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    return dense.reshape(-1).view(torch.uint8).numpy().data


def from_bytes(data: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor whose bytes are `data` (uint8, one dimension); it shares their memory."""
    kind = getattr(torch, dtype)
    assert isinstance(kind, torch.dtype)
    return data.view(kind).reshape(shape) if data.numel() else torch.empty(shape, dtype=kind)


def copy_exactly(target: torch.Tensor, source: torch.Tensor) -> None:
    """Put `source` into the live `target`, which has its dtype and shape.

    Raises:
        InputError: several elements of the target are one place in memory (an expanded tensor), and
            the source has different values for them.
    """
    with torch.no_grad():
        full = source
        for axis, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
            if stride == 0 and size > 1:
                target, source = target.narrow(axis, 0, 1), source.narrow(axis, 0, 1)
        if source is not full and as_bytes(source.expand_as(full)) != as_bytes(full):
            raise InputError(
                f"a live tensor of shape {tuple(full.shape)} is expanded, and the saved one has "
                "different values where it has one",
                fix="Make it contiguous before restoring",
            )
        target.copy_(source)

"""What a user's `collate` adds to a micro-batch: tensors made of whole samples, all fields.

Property: whatever the function does, the ids, labels, lengths and uids of a micro-batch are those
that were planned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eke.batching.batch import MicroBatch
from eke.batching.source import failure
from eke.errors import InputError


class Shape(NamedTuple):
    """The shape of a micro-batch.

    Attributes:
        rows, length: B and T of its `input_ids` [B, T]; B is 1 if it is packed.
        lengths: tokens of each sample, after truncation, in the order of the rows or, packed, of
            the one row; empty for a dummy.
        packed: whether samples are end to end in one row.
    """

    rows: int
    length: int
    lengths: tuple[int, ...]
    packed: bool


Collate = Callable[[list[Any], Shape], Mapping[str, Tensor]]
"""From samples, as the dataset gave them, and the shape of their micro-batch to further tensors by
name. For a dummy, which has no samples, tensors of a shape that the model takes beside one row of
`shape.length` tokens, so that its parameters take part on every rank."""


def with_extra(micro: MicroBatch, items: list[Any], collate: Collate) -> MicroBatch:
    """The micro-batch with what `collate` makes of its items besides.

    What the loader makes itself may be among it, if it is the same.

    Raises:
        InputError: it gives no tensors by name, or other ids, labels, masks or positions.
        EkeError: it raises an exception; it is named with the samples.
    """
    uids = ", ".join(f"({epoch}, {index})" for epoch, index in micro.uids)
    who = f"collate, for the samples {uids}" if uids else "collate, for a dummy without samples"
    rows, length = micro["input_ids"].shape
    try:
        extra = collate(items, Shape(rows, length, tuple(micro.lengths), micro.is_packed))
    except Exception as error:
        raise failure(who, error) from error
    if not isinstance(extra, Mapping):
        raise InputError(
            f"{who}: it gave no mapping", value=type(extra).__name__, rule="tensors by name"
        )
    for name, value in extra.items():
        own = micro.tensors.get(name)
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise InputError(
                f"{who}: {name!r} is no tensor", value=type(value).__name__, rule="tensors by name"
            )
        if name == "attention_mask" and own is None:
            raise InputError(
                f"{who}: it gave an attention_mask",
                rule="a packed micro-batch has none: its samples are told apart by position_ids",
                fix="Leave it out, or give a mask of your own another name",
            )
        if own is not None and not (value.shape == own.shape and bool((value == own).all())):
            raise InputError(
                f"{who}: it gave another {name}",
                value=f"{value.dtype} {list(value.shape)}",
                rule=f"the loader makes it, {own.dtype} {list(own.shape)}, of the samples that "
                "were planned, as they were planned",
                fix=f"Leave {name} out of what collate gives, or pad on the right to shape.length",
            )
    return replace(micro, tensors={**extra, **micro.tensors})


class _Bytes(NamedTuple):
    """A tensor on its way from a worker: one that is sent as such holds a file descriptor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]


def sent(value: Any) -> Any:
    """A sample, or a part of one, for the way from a worker."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return _Bytes(value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy())
    return _mapped(sent, value)


def received(value: Any) -> Any:
    """What was sent, as it was."""
    if isinstance(value, _Bytes):
        if not value.data.size:  # bytes without any have no type
            return torch.empty(value.shape, dtype=value.dtype)
        return torch.from_numpy(value.data).view(value.dtype).reshape(value.shape)
    return _mapped(received, value)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """The same of each part of a plain dict, list or tuple; anything else travels as it is."""
    if type(value) is dict:
        return {key: change(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(change, value))
    return value

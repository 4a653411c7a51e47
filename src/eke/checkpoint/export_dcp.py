"""A checkpoint's tensors as `torch.distributed.checkpoint` keeps them on disk."""

from __future__ import annotations

from pathlib import Path

import torch

from eke.checkpoint.reader import Reader
from eke.distributed.dcp import save


def write_dcp(reader: Reader, place: Path) -> None:
    """Fill an empty directory with every tensor, by its name in the manifest.

    Tied tensors are written under each of their names, because a state dict to load into has them
    all. What is not a tensor is left out: there it could only be a pickle.

    Raises:
        CorruptCheckpoint: bytes are not the ones that were written.
        OSError: the disk failed.
    """
    shapes = {}
    for name in reader.manifest.names():
        entry = reader.manifest.find(name)
        assert entry is not None  # a checked manifest has no alias to nowhere
        shapes[name] = from_meta(entry.dtype, entry.shape)
    save(shapes, reader.read, place)


def from_meta(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of this type and shape without memory."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

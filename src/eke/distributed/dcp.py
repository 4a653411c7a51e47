"""Writes torch's own distributed checkpoint format, one tensor in memory at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict


class _Lazy(DefaultSavePlanner):
    """Plans with tensors that have no memory, and reads each one when it is to be written."""

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._read(index.fqn)


def save(
    tensors: Mapping[str, torch.Tensor], read: Callable[[str], torch.Tensor], directory: Path
) -> None:
    """Write tensors to a directory as `torch.distributed.checkpoint.load` reads them.

    torch writes the files, and needs no process group for it.

    Args:
        tensors: tensors on the `meta` device, by name.
        read: the tensor of a name, on the CPU; called once for each, while it is written.
        directory: an existing, empty directory.

    Raises:
        OSError: the disk refused.
        Exception: whatever `read` raised.
    """
    writer = FileSystemWriter(directory, thread_count=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group: there need not be
            save_state_dict(dict(tensors), storage_writer=writer, planner=_Lazy(read), no_dist=True)
    except CheckpointException as error:  # torch's wrapping is no Exception, and hides the cause
        raise error.failures[0][0] from error

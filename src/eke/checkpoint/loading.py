"""Tensors of a checkpoint as a dict, without a model."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from eke.checkpoint.errors import reading
from eke.checkpoint.layout import checkpoint_of
from eke.checkpoint.opening import open_manifest
from eke.checkpoint.reader import Reader
from eke.checkpoint.storage import Storage
from eke.errors import InputError


def load_tensors(
    path: str | Path, only: str | Iterable[str] = "*", *, storage: Storage | None = None
) -> dict[str, torch.Tensor]:
    """CPU tensors by their names in the manifest, every hash checked; tied ones are one tensor.

    Args:
        path: a checkpoint's directory; of a run or a directory of checkpoints, the newest one.
        only: shell patterns (`*`, `?`, `[..]`) of names, for example "model/*".

    Raises:
        InputError: there is no checkpoint, or a pattern matches nothing in it.
        CorruptCheckpoint: a tensor's bytes are not the ones that were written.
        EkeError: the disk failed.
    """
    storage = storage or Storage()
    directory = checkpoint_of(path)
    patterns = [only] if isinstance(only, str) else list(only)
    with reading(directory):
        manifest = open_manifest(directory, storage)
        names = manifest.names()
        for pattern in patterns:
            if names and not any(fnmatchcase(name, pattern) for name in names):
                raise InputError(
                    f"no tensor of {directory} matches a pattern",
                    value=pattern,
                    fix=f"Tensors are called PROVIDER/NAME, for example {names[0]!r}",
                )
        wanted = [name for name in names if any(fnmatchcase(name, p) for p in patterns)]
        with Reader(directory, manifest, storage) as reader:
            own = {name: manifest.aliases.get(name, name) for name in wanted}
            loaded = reader.read_all(dict.fromkeys(own.values()))
            return {name: loaded[target] for name, target in own.items()}

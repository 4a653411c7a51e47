"""A checkpoint as one file that `torch.load(weights_only=True)` reads.

The only place where eke writes a pickle, for other tools to read; eke never reads one. Every value
in it is of a type that `weights_only` allows.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eke.checkpoint.checks import ManifestError
from eke.checkpoint.errors import CorruptCheckpoint, Problem
from eke.checkpoint.objects import decode
from eke.checkpoint.opening import open_objects
from eke.checkpoint.reader import Reader
from eke.checkpoint.storage import Storage
from eke.errors import InputError

FILE = "checkpoint.pt"


def write_torch(reader: Reader, storage: Storage, place: Path) -> None:
    """Fill an empty directory with `checkpoint.pt`.

    It holds `{"step", "tensors": {NAME: tensor}, "objects": {PROVIDER: value}}`; where each rank
    has an object of its own, the value is a list of them. Needs memory for the whole state.

    Raises:
        InputError: an object has a key that `weights_only` does not allow.
        CorruptCheckpoint: bytes are not the ones that were written.
        OSError: the disk failed.
    """
    manifest = reader.manifest
    tensors = {name: reader.read(name) for name in sorted(manifest.tensors)}
    tensors |= {alias: tensors[target] for alias, target in sorted(manifest.aliases.items())}
    objects: dict[str, Any] = {}
    for provider, entry in manifest.objects.items():
        values = [_object(reader, storage, provider, file, tensors) for file in entry.files]
        objects[provider] = values if entry.per_rank else values[0]
    state = {"step": manifest.step, "tensors": tensors, "objects": objects}
    with (place / FILE).open("xb") as file_:
        torch.save(state, file_)


def _object(
    reader: Reader, storage: Storage, provider: str, file: str, tensors: dict[str, torch.Tensor]
) -> Any:
    objects = open_objects(reader.path, file, reader.manifest, storage)
    try:
        return plain(decode(objects[provider], tensors.__getitem__))
    except (ManifestError, KeyError) as error:
        detail = f"the object {provider!r} cannot be decoded: {error}"
        problem = Problem(file, None, "corrupt", detail)
        raise CorruptCheckpoint(str(reader.path), [problem]) from error


def plain(value: Any) -> Any:
    """A decoded value in types that `torch.load(weights_only=True)` builds.

    numpy's arrays and scalars become tensors, frozen sets become sets.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        return torch.from_numpy(np.array(value))
    if isinstance(value, Counter):
        return Counter({_key(key): plain(item) for key, item in value.items()})
    if isinstance(value, dict):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        return kind((_key(key), plain(item)) for key, item in value.items())
    if isinstance(value, (set, frozenset)):
        return {_key(item) for item in value}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return value


def _key(value: Any) -> Any:
    """A key or a set's member: hashable, and equal to itself after it was read back."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_key(item) for item in value)
    if isinstance(value, (frozenset, torch.Tensor)):
        raise InputError(
            f"an object has a {type(value).__name__} as a key or in a set",
            rule="torch.load(weights_only=True) cannot build that",
            fix="Export to hf or dcp, or leave it out of what is attached",
        )
    return value

"""A checkpoint's model as a folder that transformers' `from_pretrained` loads.

The folder is what `save_pretrained` of the live model would have written: weights under their
plain names, tied ones once, the configuration and the tokenizer. One tensor is in memory at a
time, however many ranks its shards come from.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eke.checkpoint.dtypes import STORED, tensor_bytes
from eke.checkpoint.manifest import TensorEntry
from eke.checkpoint.reader import Reader
from eke.checkpoint.storage import Storage
from eke.checkpoint.tensorfile import FileWriter, Piece, arrange, build_header, write_file
from eke.checkpoint.tensors import as_bytes
from eke.errors import InputError
from eke.models.skeleton import Skeleton, skeleton_of

PREFIX = "model/"
SHARD_BYTES = 5_000_000_000
"""The largest file, unless one tensor is larger: what model hubs and their tools are used to."""

_COPIED = {".json", ".jinja", ".txt", ".model", ".tiktoken"}


def config_of(checkpoint: Path, given: str | Path | None) -> Path:
    """The folder with the model's `config.json`: the given one, or the `model/` of the run.

    Raises:
        InputError: there is none.
    """
    if given is not None:
        if not (Path(given) / "config.json").is_file():
            raise InputError(
                "there is no config.json in the config folder",
                value=str(given),
                fix="Name the folder that model.config.save_pretrained wrote",
            )
        return Path(given)
    found = Path(checkpoint).absolute().parent.parent / "model"
    if checkpoint.absolute().parent.name == "checkpoints" and (found / "config.json").is_file():
        return found
    raise InputError(
        f"a checkpoint has no model configuration, and there is no finished model beside "
        f"{checkpoint}",
        rule="from_pretrained needs a config.json",
        fix="Name the folder that has the model's config.json and tokenizer (--config FOLDER)",
    )


def write_hf(reader: Reader, config: Path, place: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Fill an empty directory.

    Raises:
        InputError: the configuration is that of another model.
        CorruptCheckpoint: bytes are not the ones that were written.
        OSError: the disk failed.
    """
    skeleton = skeleton_of(config)
    entries = _entries(reader, skeleton, config)
    groups = shards(entries, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, 1):
        many = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        file = many if len(groups) > 1 else "model.safetensors"
        _write(reader, {name: entries[name] for name in names}, place / file)
        weight_map |= dict.fromkeys(names, file)
    if len(groups) > 1:
        total = sum(tensor_bytes(entry.dtype, entry.shape) for entry in entries.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(place / "model.safetensors.index.json", index)
    for file_ in sorted(config.iterdir()):
        weights = file_.name.endswith(".index.json") or file_.name == "config.json"
        if file_.suffix in _COPIED and file_.is_file() and not weights:
            shutil.copyfile(file_, place / file_.name)
    values = json.loads((config / "config.json").read_text())
    _write_json(place / "config.json", described(values, skeleton.architecture, entries))


def described(
    values: Mapping[str, Any], architecture: str, entries: Mapping[str, TensorEntry]
) -> dict[str, Any]:
    """The configuration of the exported weights: their type, to generate with a cache, unquantized.

    `from_pretrained` converts weights to the type that the configuration states.
    """
    changed = {k: v for k, v in values.items() if k not in ("torch_dtype", "quantization_config")}
    changed.setdefault("architectures", [architecture])
    kinds = [entry.dtype for entry in entries.values() if "float" in entry.dtype]
    if kinds:
        changed["dtype"] = kinds[0]
    if changed.get("use_cache") is False:
        changed["use_cache"] = True  # training goes without one
    return changed


def shards(entries: Mapping[str, TensorEntry], limit_bytes: int) -> list[list[str]]:
    """Names in files of at most so many bytes each, in order; a larger tensor has its own file."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, entry in entries.items():
        size = tensor_bytes(entry.dtype, entry.shape)
        if groups[-1] and used + size > limit_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def _entries(reader: Reader, skeleton: Skeleton, config: Path) -> dict[str, TensorEntry]:
    """The checkpoint's tensor for each tensor of the model, tied ones once."""
    manifest = reader.manifest
    entries: dict[str, TensorEntry] = {}
    wrong = []
    for name, shape in skeleton.shapes.items():
        if name in skeleton.tied:
            continue
        entry = manifest.find(PREFIX + name)
        if entry is None:
            wrong.append(f"{name} is not in the checkpoint")
        elif entry.shape != shape:
            wrong.append(f"{name} is {list(entry.shape)} in the checkpoint, here {list(shape)}")
        elif STORED[entry.dtype].parts == 2 or entry.dtype.endswith(("fnuz", "fnu")):
            wrong.append(f"{name} is {entry.dtype}, which safetensors has no name for")
        else:
            entries[name] = entry
    saved = {n for n in manifest.names() if n.startswith(PREFIX)}
    extra = sorted(saved - {PREFIX + name for name in skeleton.shapes})
    wrong += [f"{name} is no tensor of {skeleton.architecture}" for name in extra]
    for name, first in skeleton.tied.items():
        alias, target = (manifest.aliases.get(PREFIX + n, PREFIX + n) for n in (name, first))
        if alias != target and alias in manifest.tensors:
            wrong.append(f"{name} is tied to {first}, but not in the checkpoint")
    if wrong:
        more = f" (and {len(wrong) - 1} more differences)" if len(wrong) > 1 else ""
        raise InputError(
            f"{config / 'config.json'} does not describe the model in {reader.path}: "
            f"{wrong[0]}{more}",
            rule="the tensors of the provider `model` are those of the configured model",
            fix="Name the folder of the model that was trained (--config FOLDER)",
        )
    return entries


def _write(reader: Reader, entries: Mapping[str, TensorEntry], path: Path) -> None:
    pieces = arrange(
        Piece(name, STORED[entry.dtype].name, entry.shape, (0,) * len(entry.shape))
        for name, entry in entries.items()
    )
    writer = FileWriter(Storage(), path)
    try:
        writer.write(memoryview(build_header(pieces)[0]))
        for piece in pieces:
            writer.write(as_bytes(reader.read(PREFIX + piece.key)))
        writer.finish(durable=True)
    finally:
        writer.close()


def _write_json(path: Path, value: object) -> None:
    write_file(Storage(), path, (json.dumps(value, indent=2) + "\n").encode(), durable=True)

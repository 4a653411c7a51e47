"""The manifest: what a checkpoint holds, where each byte of it lies, and every hash.

Pure: from values to bytes and back, no files. Properties:

* `parse(serialise(m)) == m` for every manifest that `check` accepts.
* Changing, adding or dropping any byte of a serialised manifest makes `parse` refuse it.
* A manifest that `parse` returns names only plain file names in its own directory; every tensor
  is covered exactly once by its shards, each shard's byte range fits its shape and its file, and
  no two shards share a byte. So a reader that trusts it cannot be led out of the directory, nor
  into reading or allocating what is not there.

The digest is that of the bytes before it, not of a canonical form, so that a reader in any
language needs no JSON of one particular style: a manifest ends with `,"digest":"<32 hex>"}` and
a newline, and the hex is the xxh3-128 of all the bytes before that comma.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import xxhash

from eke.checkpoint.checks import (
    MAX_NATURAL,
    ManifestError,
    check_box_cover,
    check_ranges,
    digest_value,
    file_name,
    flag,
    natural,
    naturals,
    record,
    strict_json,
    text,
    unicode,
)
from eke.checkpoint.dtypes import STORED, stored_shape, tensor_bytes

MANIFEST = "MANIFEST.json"
FORMAT = "eke-checkpoint"
VERSION = 1
MAX_MANIFEST_BYTES = 1 << 28
MAX_UNIX_S = 253402300799.0
"""The end of the year 9999, the last that calendars know."""

Role = Literal["segment", "object"]
"""`segment`: a live tensor of a provider. `object`: a tensor that a provider's object refers to."""


@dataclass(frozen=True)
class FileEntry:
    """A file's length and the xxh3-128 of all its bytes."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Shard:
    """A box of a tensor: `shape` elements from `offset`, at bytes `begin` to `end` of `file`."""

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int
    end: int
    xxh3_128: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: its true type and whole shape, and the boxes that make it up."""

    dtype: str
    shape: tuple[int, ...]
    group: str
    role: Role
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class ObjectEntry:
    """Where a provider's object is: one file for all ranks, or one for each, in rank order."""

    per_rank: bool
    files: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything that a reader needs to know. See `docs/checkpoint-format.md`."""

    step: int
    world_size: int
    mesh: Mapping[str, int]
    created_unix_s: float
    eke: str
    torch: str
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    aliases: Mapping[str, str] = field(default_factory=dict)
    objects: Mapping[str, ObjectEntry] = field(default_factory=dict)

    def find(self, name: str) -> TensorEntry | None:
        """The tensor of this name, or the one that it is an alias of."""
        return self.tensors.get(self.aliases.get(name, name))

    def names(self) -> list[str]:
        """Every tensor's name, aliases among them, sorted."""
        return sorted([*self.tensors, *self.aliases])

    def shards_by_file(self) -> dict[str, list[tuple[str, Shard]]]:
        """Each file's (tensor, shard) pairs in the order of their bytes; every file has a list."""
        found: dict[str, list[tuple[str, Shard]]] = {file: [] for file in self.files}
        for name, entry in self.tensors.items():
            for shard in entry.shards:
                found[shard.file].append((name, shard))
        for pairs in found.values():
            pairs.sort(key=lambda pair: (pair[1].begin, pair[1].end))
        return found

    @property
    def data_bytes(self) -> int:
        """The length of all files, without the manifest's own."""
        return sum(entry.bytes for entry in self.files.values())


def check(manifest: Manifest) -> None:
    """Whether the manifest keeps the promises in this module's docstring.

    Raises:
        ManifestError: it does not; the error names the file or the tensor.
    """
    for name, entry in manifest.tensors.items():
        if entry.dtype not in STORED:
            raise ManifestError(f"unknown dtype {entry.dtype!r}", tensor=name)
        # Also where a dimension of 0 makes it empty: strides are computed from the others.
        if tensor_bytes(entry.dtype, tuple(max(1, n) for n in entry.shape)) > MAX_NATURAL:
            raise ManifestError("has a shape beyond 2**62 bytes", tensor=name)
        for shard in entry.shards:
            if shard.file not in manifest.files:
                raise ManifestError(f"lies in {shard.file!r}, which is not listed", tensor=name)
            if shard.end - shard.begin != tensor_bytes(entry.dtype, shard.shape):
                raise ManifestError("a byte range does not fit its shape", shard.file, name)
            if shard.end > manifest.files[shard.file].bytes:
                raise ManifestError("a byte range is outside its file", shard.file, name)
        check_box_cover(name, entry.shape, [(s.offset, s.shape) for s in entry.shards])
    for file, pairs in manifest.shards_by_file().items():
        check_ranges(file, [(name, shard.begin, shard.end) for name, shard in pairs])
        keys = [shard.key for _, shard in pairs]
        if len(set(keys)) != len(keys):
            raise ManifestError("two shards have one key", file)
    for alias, target in manifest.aliases.items():
        if alias in manifest.tensors or target not in manifest.tensors:
            raise ManifestError(f"is an alias of {target!r}, which is no tensor", tensor=alias)
    for provider, entry_ in manifest.objects.items():
        if len(entry_.files) != (manifest.world_size if entry_.per_rank else 1):
            raise ManifestError(f"object {provider!r} has the wrong number of files")
        for file in entry_.files:
            if file not in manifest.files:
                raise ManifestError(f"object {provider!r} lies in {file!r}, which is not listed")


def stored_layout(entry: TensorEntry, shard: Shard) -> tuple[str, tuple[int, ...]]:
    """The type and shape that the safetensors header must state for a shard."""
    return STORED[entry.dtype].name, stored_shape(entry.dtype, shard.shape)


def serialise(manifest: Manifest, tensors: str | None = None) -> bytes:
    """The manifest's file, its digest last.

    Args:
        manifest: what it says.
        tensors: the members of its `tensors` as text, if they are not in `manifest`.
    """
    values = {"format": FORMAT, "version": VERSION, **vars(manifest)}
    dumps = partial(json.dumps, separators=(",", ":"), allow_nan=False, default=vars)
    texts = {key: dumps(value) for key, value in values.items()}
    if tensors is not None:
        texts["tensors"] = f"{{{tensors}}}"
    body = ("{" + ",".join(f'"{key}":{text}' for key, text in texts.items())).encode()
    return body + _tail(body)


def _tail(body: bytes) -> bytes:
    return f',"digest":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()


_TAIL_BYTES = len(_tail(b""))


def digest_holds(data: bytes) -> bool:
    """Whether these bytes are a manifest's, and the ones that were written."""
    return len(data) > _TAIL_BYTES and data[-_TAIL_BYTES:] == _tail(data[:-_TAIL_BYTES])


def parse(data: bytes) -> Manifest:
    """The inverse of `serialise`, for bytes that may come from anywhere.

    Raises:
        ManifestError: the bytes are no manifest (`kind` "corrupt"), or one of another format or a
            later version ("foreign").
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"longer than {MAX_MANIFEST_BYTES} bytes")
    if not digest_holds(data):
        raise ManifestError("its digest does not match its bytes")
    root = record(_json(data), "the manifest")
    if root.get("format") != FORMAT:
        raise ManifestError("is not the manifest of an eke checkpoint", kind="foreign")
    if root.get("version") != VERSION:
        raise ManifestError(
            f"format version {root.get('version')!r:.40}; this eke reads {VERSION}", kind="foreign"
        )
    created = root.get("created_unix_s")
    if not isinstance(created, float) or not 0 <= created <= MAX_UNIX_S:
        raise ManifestError("`created_unix_s` is not a number with a fraction, of this age")
    manifest = Manifest(
        step=natural(root, "step"),
        world_size=natural(root, "world_size"),
        mesh={axis: natural(root["mesh"], axis) for axis in record(root.get("mesh"), "`mesh`")},
        created_unix_s=created,
        eke=text(root, "eke"),
        torch=text(root, "torch"),
        files=_files(root),
        tensors=_tensors(root),
        aliases=_aliases(root),
        objects={
            unicode(name): _object(record(value, name))
            for name, value in record(root.get("objects"), "`objects`").items()
        },
    )
    check(manifest)
    return manifest


def merge(
    reports: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, FileEntry], dict[str, TensorEntry], dict[str, str]]:
    """The `files`, `tensors` and `aliases` of a checkpoint from every rank's, in rank order.

    Raises:
        ManifestError: a report is malformed, or two ranks disagree on a file or a tensor.
    """
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    aliases: dict[str, str] = {}
    for report in reports:
        for name, file in _files(report).items():
            if name in files:
                raise ManifestError("two ranks wrote it", name)
            files[name] = file
        for name, entry in _tensors(report).items():
            if name in tensors:
                shards = tensors[name].shards + entry.shards
                if replace(tensors[name], shards=shards) != replace(entry, shards=shards):
                    raise ManifestError("ranks disagree on what it is", tensor=name)
                entry = replace(entry, shards=shards)
            tensors[name] = entry
        for name, target in _aliases(report).items():
            if aliases.setdefault(name, target) != target:
                raise ManifestError("ranks disagree on what it is an alias of", tensor=name)
    return files, tensors, aliases


def _files(values: Mapping[str, Any]) -> dict[str, FileEntry]:
    return {
        file_name(name): _file(record(value, name))
        for name, value in record(values.get("files"), "`files`").items()
    }


def _tensors(values: Mapping[str, Any]) -> dict[str, TensorEntry]:
    return {
        unicode(name): _tensor(record(value, name))
        for name, value in record(values.get("tensors"), "`tensors`").items()
    }


def _aliases(values: Mapping[str, Any]) -> dict[str, str]:
    aliases = record(values.get("aliases"), "`aliases`")
    return {unicode(name): text(aliases, name) for name in aliases}


def _json(data: bytes) -> Any:
    try:
        return strict_json(data)
    except ValueError as error:
        raise ManifestError(f"is not JSON ({error})") from error


def _file(value: Mapping[str, Any]) -> FileEntry:
    return FileEntry(natural(value, "bytes"), digest_value(value, "xxh3_128"))


def _tensor(value: Mapping[str, Any]) -> TensorEntry:
    role = text(value, "role")
    if role not in ("segment", "object"):
        raise ManifestError(f"unknown role {role!r}")
    shards = value.get("shards")
    if not isinstance(shards, list):
        raise ManifestError("`shards` is not a list")
    return TensorEntry(
        dtype=text(value, "dtype"),
        shape=naturals(value, "shape"),
        group=text(value, "group"),
        role="segment" if role == "segment" else "object",
        shards=tuple(_shard(record(shard, "a shard")) for shard in shards),
    )


def _shard(value: Mapping[str, Any]) -> Shard:
    return Shard(
        file=file_name(text(value, "file")),
        key=text(value, "key"),
        offset=naturals(value, "offset"),
        shape=naturals(value, "shape"),
        begin=natural(value, "begin"),
        end=natural(value, "end"),
        xxh3_128=digest_value(value, "xxh3_128"),
    )


def _object(value: Mapping[str, Any]) -> ObjectEntry:
    files = value.get("files")
    if not isinstance(files, list):
        raise ManifestError("`files` of an object is not a list")
    return ObjectEntry(flag(value, "per_rank"), tuple(file_name(file) for file in files))

"""Tensor files: plain safetensors with the header first, padded so that data starts at 4096.

The header is pure (from a list of pieces to bytes and back); writing and scanning are a thin
layer of `write` and `pread`. Files are never mapped into memory: a mapped file on a network
disk is slow, and kills the process if the file shrinks.

Properties: data starts at a multiple of 4096; pieces lie without holes in the order of
`arrange`, every one at a multiple of its element size; `parse_header(build_header(p)) == p`.
The header also holds torch's own sharding metadata, with which
`torch.distributed.checkpoint.HuggingFaceStorageReader` puts shards together again.
"""

from __future__ import annotations

import errno
import json
import struct
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from eke.checkpoint.checks import ManifestError, naturals, record, strict_json, text
from eke.checkpoint.errors import Problem
from eke.checkpoint.manifest import FileEntry, Manifest, Shard, stored_layout
from eke.checkpoint.storage import Storage, read_exactly
from eke.errors import InputError

ALIGN_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000
CHUNK_BYTES = 8 << 20
SCAN_BYTES = 1 << 20
"""Read and hash this much at a time: it stays in a core's cache in between."""
ITEMSIZE = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


class Piece(NamedTuple):
    """One entry of a file: safetensors' type and shape, and where it lies in the whole tensor."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its length in the file."""
        return prod(self.shape) * ITEMSIZE[self.dtype]


class Span(NamedTuple):
    """An entry as a header states it, its bytes counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def arrange(pieces: Iterable[Piece]) -> list[Piece]:
    """The order in a file: wide elements first, so that every piece starts aligned to its own."""
    return sorted(pieces, key=lambda piece: (-ITEMSIZE[piece.dtype], piece.key))


def build_header(pieces: Sequence[Piece]) -> tuple[bytes, list[int]]:
    """The first bytes of a file of these pieces in this order, and where each one starts.

    Raises:
        InputError: there are more pieces than a safetensors header can name.
    """
    sharding = {piece.key: {"saved_offsets": list(piece.offset)} for piece in pieces}
    values: dict[str, object] = {
        "__metadata__": {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps(sharding, separators=(",", ":")),
        }
    }
    starts, start = [], 0
    for piece in pieces:
        starts.append(start)
        values[piece.key] = {
            "dtype": piece.dtype,
            "shape": list(piece.shape),
            "data_offsets": [start, start + piece.nbytes],
        }
        start += piece.nbytes
    body = json.dumps(values, separators=(",", ":")).encode()
    body += b" " * (-(8 + len(body)) % ALIGN_BYTES)
    if len(body) > MAX_HEADER_BYTES:
        raise InputError(
            f"a checkpoint file would have a header of {len(body)} bytes for {len(pieces)} tensors",
            rule=f"safetensors allows {MAX_HEADER_BYTES}",
            fix="Save fewer, larger tensors, for example by stacking them in a provider",
        )
    header = struct.pack("<Q", len(body)) + body
    return header, [len(header) + begin for begin in starts]


def header_length(first: bytes, file_bytes: int) -> int:
    """How long the header is, from a file's first 8 bytes.

    Raises:
        ManifestError: the stated length is beyond the limit or the file.
    """
    if len(first) < 8:
        raise ManifestError("is too short to be a safetensors file")
    length = int(struct.unpack("<Q", first)[0])
    if length > MAX_HEADER_BYTES or 8 + length > file_bytes:
        raise ManifestError(f"states a header of {length} bytes, which cannot be")
    return length


def parse_header(body: bytes, file_bytes: int) -> dict[str, Span]:
    """Every entry of a header (the bytes after the first 8).

    Raises:
        ManifestError: an entry is malformed, or the entries do not tile the data exactly.
    """
    try:
        values = record(strict_json(body), "the header")
    except ValueError as error:
        raise ManifestError(f"its header is not JSON ({error})") from error
    base = 8 + len(body)
    spans = {}
    for key, value in values.items():
        if key == "__metadata__":
            continue
        entry = record(value, key)
        dtype, shape = text(entry, "dtype"), naturals(entry, "shape")
        offsets = naturals(entry, "data_offsets")
        if dtype not in ITEMSIZE or len(offsets) != 2:
            raise ManifestError("its header has a malformed entry", tensor=key)
        begin, end = offsets
        if end - begin != prod(shape) * ITEMSIZE[dtype]:
            raise ManifestError("its header states a size that does not fit", tensor=key)
        spans[key] = Span(dtype, shape, base + begin, base + end)
    position = base
    for key, span in sorted(spans.items(), key=lambda pair: (pair[1].begin, pair[1].end)):
        if span.begin != position:
            raise ManifestError("its header leaves a hole or overlaps", tensor=key)
        position = span.end
    if position != file_bytes:
        raise ManifestError("its header does not account for all its bytes")
    return spans


def header_of(manifest: Manifest, file: str, shards: Sequence[tuple[str, Shard]]) -> bytes | None:
    """The header that eke writes for a file of these shards, given in the order of their bytes.

    A file that begins with it has no byte that is not known: the rest is its shards, each with a
    hash of its own. None if the shards do not lie as eke lays them.
    """
    laid: list[Piece] = []
    for name, shard in shards:
        dtype, shape = stored_layout(manifest.tensors[name], shard)
        last = (0,) * (len(shape) - len(shard.offset))
        laid.append(Piece(shard.key, dtype, shape, (*shard.offset, *last)))
    header, starts = build_header(laid)
    ends = [start + piece.nbytes for start, piece in zip(starts, laid, strict=True)]
    if [(shard.begin, shard.end) for _, shard in shards] != list(zip(starts, ends, strict=True)):
        return None
    return header if manifest.files[file].bytes == (ends or [len(header)])[-1] else None


class FileWriter:
    """Writes one new file from start to end, hashing what it writes.

    With `direct`, whole blocks at multiples of `ALIGN_BYTES`, in memory and in the file, go around
    the page cache where the file system can do that; all else goes through it.
    """

    def __init__(self, storage: Storage, path: Path, *, direct: bool = False) -> None:
        self._storage, self.path = storage, path
        self._hash = xxhash.xxh3_128()
        self._bytes = 0
        self._fd = storage.create(path)
        self._direct = direct and storage.go_around_cache(self._fd, True)

    def write(self, data: memoryview) -> None:
        """Hash bytes and append them.

        Raises:
            OSError: the disk refused them.
        """
        self.hash(data)
        self.append(data)

    def hash(self, data: memoryview) -> None:
        """Only hash bytes, which are appended by another thread meanwhile."""
        self._hash.update(data)

    def append(self, data: memoryview) -> None:
        """Append bytes (one dimension, format "B") without hashing them.

        Raises:
            OSError: the disk refused them.
        """
        self._bytes += len(data)
        while len(data):
            count = min(len(data), CHUNK_BYTES)
            if self._direct:
                count -= count % ALIGN_BYTES
                if not count:
                    self._through_cache()
                    continue
            try:
                taken = self._storage.write(self._fd, data[:count])
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:
                    raise
                self._through_cache()  # it said that it could, and cannot
                continue
            if self._direct and taken % ALIGN_BYTES:
                self._through_cache()
            data = data[taken:]

    def _through_cache(self) -> None:
        self._direct = False
        self._storage.go_around_cache(self._fd, False)

    def finish(self, durable: bool) -> FileEntry:
        """Make the file durable if asked to, close it, and say what it is."""
        try:
            if durable:
                self._storage.sync(self._fd)
        finally:
            self.close()
        return FileEntry(self._bytes, self._hash.hexdigest())

    def close(self) -> None:
        """Let the file go; closing twice is harmless."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._storage.close(fd)


def write_file(storage: Storage, path: Path, data: bytes, durable: bool) -> dict[str, Any]:
    """Write one whole small file; returns its entry."""
    writer = None
    try:
        writer = FileWriter(storage, path)
        writer.write(memoryview(data))
        return dict(vars(writer.finish(durable)))
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        if writer is not None:
            writer.close()


def scan(
    storage: Storage, path: Path, manifest: Manifest, shards: Sequence[tuple[str, Shard]]
) -> list[Problem]:
    """Read a whole file once and compare every byte of it with the manifest.

    Args:
        path: the file.
        manifest: names the file's length and hash.
        shards: what of it is tensors, in the order of their bytes.

    Raises:
        OSError: the disk failed; an absent file is a problem, not an error.
    """
    file, entry = path.name, manifest.files[path.name]
    try:
        fd = storage.open(path)
    except FileNotFoundError:
        return [Problem(file, None, "incomplete", "the file is missing")]
    except ManifestError as error:
        return [Problem(file, None, error.kind, error.detail)]
    try:
        size = storage.size(fd)
        if size < entry.bytes:
            lost = f"the file has {size} of its {entry.bytes} bytes"
            return [Problem(file, None, "incomplete", lost)]
        if size > entry.bytes:
            extra = f"the file has {size} bytes, {size - entry.bytes} too many"
            return [Problem(file, None, "corrupt", extra)]
        return _scan_bytes(storage, fd, file, manifest, shards)
    finally:
        storage.close(fd)


def _scan_bytes(
    storage: Storage,
    fd: int,
    file: str,
    manifest: Manifest,
    shards: Sequence[tuple[str, Shard]],
) -> list[Problem]:
    entry = manifest.files[file]
    whole = xxhash.xxh3_128()
    buffer = memoryview(bytearray(min(SCAN_BYTES, entry.bytes)))
    problems: list[Problem] = []
    position = 0

    def advance(until: int, part: xxhash.xxh3_128 | None) -> None:
        nonlocal position
        while position < until:
            window = buffer[: until - position]
            count = read_exactly(storage, fd, window, position)
            if count == 0:
                return  # it shrank since its size was read; the hash will not match
            whole.update(window[:count])
            if part is not None:
                part.update(window[:count])
            position += count

    for name, shard in shards:
        advance(shard.begin, None)
        part = xxhash.xxh3_128()
        advance(shard.end, part)
        if part.hexdigest() != shard.xxh3_128:
            problems.append(Problem(file, name, "corrupt", "its bytes do not match its hash"))
    advance(entry.bytes, None)
    if whole.hexdigest() != entry.xxh3_128 and not problems:
        problems.append(Problem(file, None, "corrupt", "its bytes do not match the file's hash"))
    if not problems and file.endswith(".safetensors"):
        problems.extend(_compare_header(storage, fd, file, manifest, shards))
    return problems


def _compare_header(
    storage: Storage,
    fd: int,
    file: str,
    manifest: Manifest,
    shards: Sequence[tuple[str, Shard]],
) -> list[Problem]:
    """Whether the file's own header and the manifest tell the same story."""
    size = manifest.files[file].bytes
    try:
        first = bytearray(8)
        length = header_length(
            bytes(first[: read_exactly(storage, fd, memoryview(first), 0)]), size
        )
        body = bytearray(length)
        read_exactly(storage, fd, memoryview(body), 8)
        spans = parse_header(bytes(body), size)
    except ManifestError as error:
        return [Problem(file, error.tensor, "corrupt", error.detail)]
    stated = {
        shard.key: Span(*stored_layout(manifest.tensors[name], shard), shard.begin, shard.end)
        for name, shard in shards
    }
    different = sorted(
        key for key in spans.keys() | stated.keys() if spans.get(key) != stated.get(key)
    )
    return [
        Problem(file, key, "corrupt", "the file's header and the manifest disagree on it")
        for key in different
    ]

"""Opening a checkpoint: its manifest and object files, read, checked and parsed. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from eke.checkpoint.checks import ManifestError, file_name, natural, record, strict_json
from eke.checkpoint.errors import CorruptCheckpoint, Problem
from eke.checkpoint.layout import step_of
from eke.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, digest_holds, parse
from eke.checkpoint.storage import Storage, read_file
from eke.checkpoint.tags import check_tree

OBJECTS_FORMAT = "eke-objects"
OBJECTS_VERSION = 1
MOST_KNOWN = 64
_known_lengths: dict[bytes, Mapping[str, int]] = {}


def open_manifest(path: Path, storage: Storage) -> Manifest:
    """The manifest of the checkpoint in a directory.

    Raises:
        CorruptCheckpoint: it is absent, damaged, or of another format.
        OSError: the disk failed.
    """
    try:
        manifest = parse(read_file(storage, path / MANIFEST, MAX_MANIFEST_BYTES))
        named = step_of(path.name)
        if named is not None and named != manifest.step:
            raise ManifestError(f"is that of step {manifest.step}, in a directory of step {named}")
        return manifest
    except FileNotFoundError as error:
        problem = Problem(MANIFEST, None, "incomplete", "the file is missing")
        raise CorruptCheckpoint(str(path), [problem]) from error
    except ManifestError as error:
        problem = Problem(error.file or MANIFEST, error.tensor, error.kind, error.detail)
        raise CorruptCheckpoint(str(path), [problem]) from error
    except ValueError as error:
        problem = Problem(MANIFEST, None, "corrupt", str(error))
        raise CorruptCheckpoint(str(path), [problem]) from error


def glance(path: Path, storage: Storage) -> Problem | None:
    """What a glance shows to be wrong with a checkpoint: its manifest, and its files' lengths.

    Reads no tensor, so None does not say that every byte is right; `verify` does.

    Raises:
        OSError: the disk failed.
    """
    try:
        data = read_file(storage, path / MANIFEST, MAX_MANIFEST_BYTES)
        if not digest_holds(data):
            return Problem(MANIFEST, None, "corrupt", "its digest is not that of its bytes")
        lengths = _lengths(data)
    except FileNotFoundError:
        return Problem(MANIFEST, None, "incomplete", "the file is missing")
    except ValueError:
        return Problem(MANIFEST, None, "foreign", "it is not one that this eke reads")
    for name, stated in sorted(lengths.items()):
        try:
            size = (path / name).stat().st_size
        except FileNotFoundError:
            return Problem(name, None, "incomplete", "the file is missing")
        if size < stated:
            return Problem(name, None, "incomplete", f"it has {size} of its {stated} bytes")
        if size > stated:
            return Problem(name, None, "corrupt", f"it has {size} bytes, not {stated}")
    return None


def _lengths(data: bytes) -> Mapping[str, int]:
    """The files of a manifest and their lengths; remembered, as each save looks at a few again."""
    key = xxhash.xxh3_128_digest(data)
    if key not in _known_lengths:
        if len(_known_lengths) >= MOST_KNOWN:
            _known_lengths.clear()
        files = record(record(strict_json(data), "the manifest").get("files"), "`files`")
        _known_lengths[key] = {
            file_name(name): natural(record(entry, f"`files` of {name}"), "bytes")
            for name, entry in files.items()
        }
    return _known_lengths[key]


def open_objects(path: Path, file: str, manifest: Manifest, storage: Storage) -> Mapping[str, Any]:
    """The encoded objects in one file, by provider.

    Raises:
        CorruptCheckpoint: the file is absent, is not the one that was written, or is malformed.
        OSError: the disk failed.
    """
    entry = manifest.files[file]
    try:
        data = read_file(storage, path / file, entry.bytes)
        if len(data) < entry.bytes:
            raise ManifestError("the file is shorter than it was", kind="incomplete")
        if xxhash.xxh3_128_hexdigest(data) != entry.xxh3_128:
            raise ManifestError("its bytes do not match the file's hash")
        root = record(strict_json(data), "the file")
        if root.get("format") != OBJECTS_FORMAT or root.get("version") != OBJECTS_VERSION:
            raise ManifestError("is not a file of objects that this eke reads", kind="foreign")
        objects = record(root.get("objects"), "`objects`")
        for tree in objects.values():
            check_tree(tree)
        return objects
    except FileNotFoundError as error:
        problem = Problem(file, None, "incomplete", "the file is missing")
        raise CorruptCheckpoint(str(path), [problem]) from error
    except ManifestError as error:
        problem = Problem(file, None, error.kind, error.detail)
        raise CorruptCheckpoint(str(path), [problem]) from error
    except ValueError as error:
        problem = Problem(file, None, "corrupt", str(error))
        raise CorruptCheckpoint(str(path), [problem]) from error

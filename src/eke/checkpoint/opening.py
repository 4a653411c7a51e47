"""Opening a checkpoint: its manifest and object files, read, checked and parsed. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from eke.checkpoint.checks import ManifestError, record, strict_json
from eke.checkpoint.errors import CorruptCheckpoint, Problem
from eke.checkpoint.layout import step_of
from eke.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, parse
from eke.checkpoint.storage import Storage, read_file
from eke.checkpoint.tags import check_tree

OBJECTS_FORMAT = "eke-objects"
OBJECTS_VERSION = 1


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

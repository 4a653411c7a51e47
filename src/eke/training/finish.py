"""The finished model: a folder that `from_pretrained` loads, whole or absent.

Property: a write that fails leaves what was there before, or nothing where nothing was.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from eke.budget.files import fsync_dir
from eke.errors import EkeError


def write_model(model: Any, tokenizer: Any, path: Path) -> None:
    """Write weights, configuration and tokenizer to `path`, replacing what was there.

    Raises:
        EkeError: the disk refused it; the checkpoints still hold the model.
    """
    beside, aside = path.with_name(f".{path.name}.tmp"), path.with_name(f".{path.name}.old")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        _save(model, tokenizer, beside)
        for file in beside.rglob("*"):
            if file.is_file():
                _fsync(file)
        fsync_dir(beside)
        _exchange(beside, path, aside)
    # The writers of safetensors and of tokenizers report a full disk by exceptions of their own,
    # the latter by a bare Exception.
    except Exception as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise EkeError(
            f"could not write the finished model to {path}: "
            f"{getattr(error, 'strerror', None) or error}",
            fix="Free some space and run the same command again: training is done and saved",
        ) from error


def _save(model: Any, tokenizer: Any, path: Path) -> None:
    """Write the files. The model trains without a cache of keys, but must generate with one."""
    model.config.use_cache, before = True, model.config.use_cache
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.use_cache = True
    try:
        model.save_pretrained(path)
    finally:
        model.config.use_cache = before
    tokenizer.save_pretrained(path)


def _exchange(new: Path, path: Path, aside: Path) -> None:
    """Put `new` in the place of `path`. A directory cannot be renamed over another."""
    if path.exists():
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    try:
        new.rename(path)
    except OSError:
        if aside.exists():
            aside.rename(path)
        raise
    fsync_dir(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""What a model is trained on: sources of rows, the sample pipeline, the built-in corpus.

Names are imported when first used, so that reading a file list does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eke.data.base import Source
    from eke.data.bpe import builtin_tokenizer
    from eke.data.formats import detect_format
    from eke.data.pipeline import TokenizedDataset, check_rows
    from eke.data.sources import open_source
    from eke.data.split import content_hash, split_by_content

__all__ = [
    "Source",
    "TokenizedDataset",
    "builtin_tokenizer",
    "check_rows",
    "content_hash",
    "detect_format",
    "open_source",
    "split_by_content",
]

_HOMES = {
    "Source": "base",
    "TokenizedDataset": "pipeline",
    "builtin_tokenizer": "bpe",
    "check_rows": "pipeline",
    "content_hash": "split",
    "detect_format": "formats",
    "open_source": "sources",
    "split_by_content": "split",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

"""Training: the configuration, and the one loop where the parts meet. Imported when used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eke.training.config import RunConfig
    from eke.training.trainer import Result, Trainer

__all__ = ["Result", "RunConfig", "Trainer"]

_HOMES = {"RunConfig": "config", "Result": "trainer", "Trainer": "trainer"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

"""Packages of the extra `train`, imported only when something needs them."""

from __future__ import annotations

import importlib
from typing import Any

from eke.errors import MissingExtraError


def require(module: str, feature: str) -> Any:
    """Import `module`, which `feature` needs.

    Raises:
        MissingExtraError: its package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        if (error.name or "").split(".")[0] != package:
            raise  # the package is there, but broken: that is not ours to explain
        raise MissingExtraError(package, "train", feature) from error

"""eke trains language models inside a budget that you state.

The public names, and nothing else. They are imported when first used, so that `import eke` and
`eke --help` do not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from eke.version import __version__

if TYPE_CHECKING:
    from eke import checkpoint, testing
    from eke.batching import CostModel, DynamicLoader
    from eke.budget import Bill, Budget, Decision, Ledger
    from eke.checkpoint import Checkpointer, Keep, Ticket
    from eke.errors import EkeError, InputError
    from eke.governor import Governor
    from eke.training import RunConfig, Trainer

__all__ = [
    "Bill",
    "Budget",
    "Checkpointer",
    "CostModel",
    "Decision",
    "DynamicLoader",
    "EkeError",
    "Governor",
    "InputError",
    "Keep",
    "Ledger",
    "RunConfig",
    "Ticket",
    "Trainer",
    "__version__",
    "checkpoint",
    "testing",
]

_HOMES = {
    "Bill": "eke.budget",
    "Budget": "eke.budget",
    "Checkpointer": "eke.checkpoint",
    "CostModel": "eke.batching",
    "Decision": "eke.budget",
    "DynamicLoader": "eke.batching",
    "EkeError": "eke.errors",
    "Governor": "eke.governor",
    "InputError": "eke.errors",
    "Keep": "eke.checkpoint",
    "Ledger": "eke.budget",
    "RunConfig": "eke.training",
    "Ticket": "eke.checkpoint",
    "Trainer": "eke.training",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in ("checkpoint", "testing"):
        return importlib.import_module(f"eke.{name}")
    raise AttributeError(f"module 'eke' has no attribute {name!r}")

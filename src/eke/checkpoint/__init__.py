"""Checkpoints: the whole state of a run, saved in one commit and restored bit for bit.

Nothing here is ever unpickled. The format is stated in `docs/checkpoint-format.md`. Names are
imported when they are first used, so that reading a checkpoint's directory needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eke.checkpoint.checkpointer import Checkpointer
    from eke.checkpoint.commit import collect
    from eke.checkpoint.difference import diff
    from eke.checkpoint.errors import CorruptCheckpoint, Problem, SaveError
    from eke.checkpoint.exporting import export
    from eke.checkpoint.inspection import inspect, overview
    from eke.checkpoint.layout import latest, steps
    from eke.checkpoint.loading import load_tensors
    from eke.checkpoint.optimizer_state import OptimizerProvider
    from eke.checkpoint.providers import (
        Fit,
        ModuleProvider,
        ObjectProvider,
        RngProvider,
        Saved,
        Segment,
        Spec,
        StateProvider,
    )
    from eke.checkpoint.restore import LoadReport
    from eke.checkpoint.retention import Keep
    from eke.checkpoint.storage import Storage
    from eke.checkpoint.ticket import Ticket
    from eke.checkpoint.verification import Report, verify

_HOMES = {
    "Checkpointer": "checkpointer",
    "CorruptCheckpoint": "errors",
    "Fit": "providers",
    "Keep": "retention",
    "LoadReport": "restore",
    "ModuleProvider": "providers",
    "ObjectProvider": "providers",
    "OptimizerProvider": "optimizer_state",
    "Problem": "errors",
    "Report": "verification",
    "RngProvider": "providers",
    "SaveError": "errors",
    "Saved": "providers",
    "Segment": "providers",
    "Spec": "providers",
    "StateProvider": "providers",
    "Storage": "storage",
    "Ticket": "ticket",
    "collect": "commit",
    "diff": "difference",
    "export": "exporting",
    "inspect": "inspection",
    "latest": "layout",
    "load_tensors": "loading",
    "overview": "inspection",
    "steps": "layout",
    "verify": "verification",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "Checkpointer",
    "CorruptCheckpoint",
    "Fit",
    "Keep",
    "LoadReport",
    "ModuleProvider",
    "ObjectProvider",
    "OptimizerProvider",
    "Problem",
    "Report",
    "RngProvider",
    "SaveError",
    "Saved",
    "Segment",
    "Spec",
    "StateProvider",
    "Storage",
    "Ticket",
    "collect",
    "diff",
    "export",
    "inspect",
    "latest",
    "load_tensors",
    "overview",
    "steps",
    "verify",
]

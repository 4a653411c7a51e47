"""What users give the checkpointer, checked: one clear error each, and nothing is changed. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from eke.checkpoint.layout import require_step
from eke.errors import InputError

_PROVIDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def root_of(root: str | os.PathLike[str]) -> Path:
    """The directory of checkpoints, which may not be there yet.

    Raises:
        InputError: it is not a path, or something else than a directory is there.
    """
    if not isinstance(root, (str, os.PathLike)) or not os.fspath(root):
        raise InputError(
            "the checkpoints' root is wrong", value=repr(root), rule="it is the path of a directory"
        )
    path = Path(root)
    if path.exists() and not path.is_dir():
        raise InputError("the checkpoints' root is not a directory", value=str(root))
    return path


def extras_of(extra: Mapping[str, object] | None, reserved: Collection[str]) -> dict[str, object]:
    """What else is attached, by name.

    Raises:
        InputError: it is not a mapping, or a name is not one that a checkpoint can have.
    """
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise InputError(
            "what else to attach is wrong",
            value=type(extra).__name__,
            rule="`extra` maps names to what is saved under them",
            fix='Write extra={"ema": ema}, for example',
        )
    for name in extra:
        known = isinstance(name, str) and _PROVIDER_NAME.fullmatch(name)
        if name in reserved or not known:
            raise InputError(
                "an extra's name is unusable",
                value=name,
                rule="letters, digits, `_`, `-` and `.`, and none of " + ", ".join(reserved),
            )
    return dict(extra)


def steps_of(steps: Iterable[int]) -> frozenset[int]:
    """Several steps.

    Raises:
        InputError: it is not a row of steps.
    """
    if isinstance(steps, (str, bytes)) or not isinstance(steps, Iterable):
        raise InputError(
            "the steps to protect are wrong", value=steps, rule="it is a list of steps, as [100]"
        )
    return frozenset(map(require_step, steps))


def tensors_in(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that a barrier is for.

    Raises:
        InputError: something there is not a tensor.
    """
    given: list[Any] = [params]
    if isinstance(params, Iterable) and not isinstance(params, torch.Tensor):
        given = list(params)
    for one in given:
        if not isinstance(one, torch.Tensor):
            raise InputError(
                "a barrier is for tensors",
                value=type(one).__name__,
                rule="`params` is a list of tensors, or None for all that is attached",
                fix="Give `model.parameters()`, not `model.named_parameters()`, for example",
            )
    return given


def chosen(only: str | Iterable[str] | None, attached: Collection[str]) -> set[str]:
    """The names of what to restore: all by default.

    Raises:
        InputError: it names nothing, or what is not attached.
    """
    if only is None:
        return set(attached)
    names = [only] if isinstance(only, str) else only
    there = "attached: " + ", ".join(attached)
    if not isinstance(names, Iterable) or not (wanted := list(names)):
        raise InputError("`only` names nothing to restore", value=only, rule=there)
    for name in wanted:
        if not isinstance(name, str) or name not in attached:
            raise InputError(f"{name!r} is not attached, so it cannot be restored", rule=there)
    return set(wanted)

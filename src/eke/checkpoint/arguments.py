"""What users give the checkpointer, checked: one clear error each, and nothing is changed. Pure."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eke.checkpoint.layout import require_step
from eke.checkpoint.providers import Stateful, StateProvider
from eke.checkpoint.storage import Storage
from eke.errors import InputError

MAX_NAME = 100
_PROVIDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_WITH_STATE = "an object with state_dict and load_state_dict"
_PARTS: dict[str, tuple[type, str]] = {
    "model": (torch.nn.Module, "a torch.nn.Module"),
    "optimizer": (torch.optim.Optimizer, "a torch.optim.Optimizer"),
    "scheduler": (Stateful, _WITH_STATE),
    "loader": (Stateful, _WITH_STATE),
}


def root_given(root: str | os.PathLike[str]) -> Path:
    """The directory of checkpoints, which may not be there yet.

    Raises:
        InputError: it is not a path, none that a directory can have, or one that cannot be reached.
    """
    text = os.fspath(root) if isinstance(root, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise InputError(
            "the checkpoints' root is wrong",
            value=root,
            rule="it is the path of a directory",
            fix='Write Checkpointer("checkpoints"), for example',
        )
    path = Path(text)
    for there in (path, *path.parents):
        try:
            is_directory = stat.S_ISDIR(there.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            continue  # what is above it tells
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise InputError(
                f"the checkpoints' root cannot be used: {why}",
                value=text,
                fix="Name a directory that this process can reach",
            ) from error
        if not is_directory:
            raise InputError(
                "the checkpoints' root is not a directory"
                if there == path
                else f"the checkpoints' root lies in {there}, which is not a directory",
                value=text,
                fix="Name another one",
            )
        break
    return path


def storage_given(storage: Storage | None) -> Storage:
    """How the disk is reached.

    Raises:
        InputError: it is no `Storage`.
    """
    if storage is not None and not isinstance(storage, Storage):
        raise InputError(
            "the checkpoints' storage is wrong",
            value=storage,
            rule="it is an eke.checkpoint.Storage",
            fix="Leave it out",
        )
    return storage or Storage()


def check_choice(what: str, name: str, value: object, choices: Sequence[str]) -> None:
    """Whether an argument is one of a few words; the first is what is advised.

    Raises:
        InputError: it is none of them.
    """
    if value not in choices:
        raise InputError(
            f"{what} is wrong",
            value=value,
            rule="it is " + " or ".join(f'"{one}"' for one in choices),
            fix=f'Write {name}="{choices[0]}"',
        )


def check_switches(**switches: bool) -> None:
    """Whether each of these arguments is True or False.

    Raises:
        InputError: one is neither; "no" would pass for true.
    """
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise InputError(
                f"`{name}` is wrong",
                value=value,
                rule="it is True or False",
                fix=f"Write {name}=True or {name}=False",
            )


def check_parts(named: Mapping[str, object]) -> None:
    """Whether each of these may be attached under its name.

    Raises:
        InputError: one is a class, or of another kind than its name says.
    """
    for name, (kind, rule) in _PARTS.items():
        value = named.get(name)
        if isinstance(value, type):
            shown, fix = f"the class {value.__name__}", f"Give {name}= an object of it"
        elif value is None or isinstance(value, (kind, StateProvider)):
            continue
        else:
            shown = f"a {type(value).__name__}"
            fix = f'Attach another kind of object by a name of yours: extra={{"my_{name}": ..}}'
        raise InputError(
            f"{name!r} cannot be attached: it is {shown}",
            rule=f"it takes {rule}, or a StateProvider",
            fix=fix,
        )


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
        if name in reserved or not known or len(name) > MAX_NAME:
            raise InputError(
                "an extra's name is unusable",
                value=name,
                rule=f"at most {MAX_NAME} letters, digits, `_`, `-` and `.`, and none of "
                + ", ".join(reserved),
                fix="Choose another one",
            )
    return dict(extra)


def steps_of(steps: Iterable[int]) -> frozenset[int]:
    """Several steps.

    Raises:
        InputError: it is not a row of steps.
    """
    if isinstance(steps, (str, bytes)) or not isinstance(steps, Iterable):
        raise InputError(
            "the steps to protect are wrong",
            value=steps,
            rule="it is a list of steps",
            fix="Write protect([100]), for example",
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
    there = "attached: " + (", ".join(attached) or "nothing")
    fix = 'Write only=["model"], for example'
    is_row = isinstance(names, Iterable) and not isinstance(names, (bytes, bytearray))
    if not is_row or not (wanted := list(names)):
        raise InputError("`only` names nothing to restore", value=only, rule=there, fix=fix)
    for name in wanted:
        if not isinstance(name, str) or name not in attached:
            raise InputError(
                f"{name!r} is not attached, so it cannot be restored", rule=there, fix=fix
            )
    return set(wanted)

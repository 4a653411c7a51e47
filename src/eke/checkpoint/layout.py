"""Names on the disk: which directories are checkpoints, and how to find the newest.

```
ROOT/
  step-000001200/               a checkpoint; appears only by one rename
    MANIFEST.json               written last
    rank00000.state.safetensors
    rank00000.objects.json
  .tmp-step-000001200-TOKEN/    an attempt to save; debris once its owner is dead
  .tmp-delete-000001200-TOKEN/  a checkpoint that is being deleted
```

There is no pointer file that could go stale: the newest checkpoint is found by looking.
"""

from __future__ import annotations

import re
from operator import index
from pathlib import Path
from typing import NamedTuple

from eke.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, digest_holds
from eke.checkpoint.storage import Storage, read_file
from eke.errors import InputError

MAX_STEP = 2**53
_STEP = re.compile(r"step-(\d{9,16})")
_TEMPORARY = re.compile(r"\.tmp-(step|delete)-(\d{9,16})-([0-9a-z.]+)")


class Temporary(NamedTuple):
    """A directory that is on its way to being a checkpoint, or to being gone."""

    path: Path
    purpose: str  # "step" or "delete"
    step: int
    token: str


def require_step(step: object) -> int:
    """A step that a checkpoint can be of; numpy's integers are taken too.

    Raises:
        InputError: it is none.
    """
    number = -1
    # A truth value of numpy's or torch's may pass for a number too.
    if not isinstance(step, bool) and not str(getattr(step, "dtype", "")).endswith("bool"):
        try:
            number = index(step)  # type: ignore[arg-type]
        except (TypeError, RuntimeError):
            number = -1
    if not 0 <= number < MAX_STEP:
        raise InputError(
            "a checkpoint's step is wrong",
            value=step,
            rule="a whole number from 0 to 2**53 - 1",
            fix="Give the number of steps that are done",
        )
    return number


def step_name(step: int) -> str:
    """The directory of a step's checkpoint."""
    return f"step-{step:09d}"


def temporary_name(purpose: str, step: int, token: str) -> str:
    """The directory of an attempt (`purpose` "step") or of a deletion ("delete")."""
    return f".tmp-{purpose}-{step:09d}-{token}"


def step_of(name: str) -> int | None:
    """The step that a directory's name states, if it is a checkpoint's name."""
    match = _STEP.fullmatch(name)
    if match is None or step_name(int(match[1])) != name:
        return None
    return int(match[1])


def _inside(root: Path) -> list[Path]:
    """What is in a directory of checkpoints; nothing, where it is not there yet."""
    try:
        return sorted(root.iterdir())
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise InputError(
            "what is to hold checkpoints is not a directory, or lies in none",
            value=str(root),
            fix="Name a run or its checkpoints directory; a file that took its place must go",
        ) from error


def step_dirs(root: Path) -> dict[int, Path]:
    """Every directory with a checkpoint's name, whatever is in it, oldest first.

    Raises:
        InputError: something else than a directory is there.
    """
    found = {
        step: path
        for path in _inside(root)
        if (step := step_of(path.name)) is not None and path.is_dir() and not path.is_symlink()
    }
    return dict(sorted(found.items()))


def temporaries(root: Path) -> list[Temporary]:
    """Every attempt and every unfinished deletion.

    Raises:
        InputError: something else than a directory is there.
    """
    found = []
    for path in _inside(root):
        match = _TEMPORARY.fullmatch(path.name)
        if match is not None and path.is_dir() and not path.is_symlink():
            found.append(Temporary(path, match[1], int(match[2]), match[3]))
    return found


def is_committed(path: Path, storage: Storage | None = None) -> bool:
    """Whether the directory holds a manifest whose digest is right."""
    try:
        data = read_file(storage or Storage(), path / MANIFEST, MAX_MANIFEST_BYTES)
    except (FileNotFoundError, ValueError):
        return False
    return digest_holds(data)


def steps(root: str | Path) -> list[int]:
    """The committed steps under a directory of checkpoints, oldest first.

    Raises:
        InputError: it is not a directory.
    """
    return [step for step, path in step_dirs(Path(root)).items() if is_committed(path)]


def latest(root: str | Path) -> int | None:
    """The newest committed step, or None.

    Raises:
        InputError: what is to hold them is not a directory.
    """
    for step, path in reversed(step_dirs(Path(root)).items()):
        if is_committed(path):
            return step
    return None


def root_of(path: str | Path) -> Path:
    """The directory of checkpoints that `path` means: itself, or a run's `checkpoints/`."""
    path = Path(path)
    inner = path / "checkpoints"
    return inner if inner.is_dir() else path


def checkpoint_of(path: str | Path) -> Path:
    """The one checkpoint that `path` means: itself, or the newest one of a run.

    Raises:
        InputError: there is nothing there.
    """
    path = Path(path)
    if not path.is_dir():
        raise InputError(
            "there is no such directory",
            value=str(path),
            fix="Name a run, its checkpoints directory, or one step's directory",
        )
    if step_of(path.name) is not None or (path / MANIFEST).exists():
        return path
    root = root_of(path)
    step = latest(root)
    if step is not None:
        return root / step_name(step)
    if step_dirs(root):
        return next(reversed(step_dirs(root).values()))
    return path

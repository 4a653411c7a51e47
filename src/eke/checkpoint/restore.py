"""From a checkpoint back into live state: choose a step, check all of it, compare, then load.

Property: until every file's every byte has been checked on some rank, every object decoded, and
every provider has said that its part fits, nothing that is live is changed. Tensors are checked
once more as they are read for good, before they are copied.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eke.checkpoint.capture import rank_name
from eke.checkpoint.checks import ManifestError
from eke.checkpoint.errors import CorruptCheckpoint, Problem
from eke.checkpoint.layout import step_dirs
from eke.checkpoint.manifest import MANIFEST, Manifest
from eke.checkpoint.objects import decode
from eke.checkpoint.opening import open_manifest, open_objects
from eke.checkpoint.providers import Fit, Saved, Spec, StateProvider
from eke.checkpoint.reader import Reader
from eke.checkpoint.storage import Storage
from eke.checkpoint.together import agree
from eke.checkpoint.verification import check_files
from eke.distributed import World
from eke.errors import EkeError, InputError

log = logging.getLogger("eke.checkpoint")


@dataclass(frozen=True)
class LoadReport:
    """What was restored, and what was not.

    Attributes:
        step: the restored step.
        path: its directory.
        missing: live state that the checkpoint does not have; it is as it was.
        unexpected: saved state that nothing live takes.
        mismatched: state that both have, but not alike; the live one is as it was.
        left_alone: state that cannot move here, such as the generators of another number of
            ranks; the live one is as it was. This is never an error.
        damaged: (step, why) of newer checkpoints that were passed over, with `fallback=True`.
    """

    step: int
    path: Path
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    left_alone: tuple[str, ...] = ()
    damaged: tuple[tuple[int, str], ...] = ()


def restore(
    providers: Mapping[str, StateProvider],
    root: Path,
    storage: Storage,
    here: World,
    *,
    step: int | None,
    partial: bool,
    strict: bool,
    fallback: bool,
) -> LoadReport | None:
    """Load a step, the newest by default, into the providers. A collective.

    With `partial`, saved state of other providers is no difference.

    Raises:
        InputError: the step is not there, or `strict` and the states differ.
        CorruptCheckpoint: its bytes are not the ones that were written.
        EkeError: the disk failed, or a provider did while it took its state.
    """
    candidates: list[int] = agree("looking for checkpoints", lambda: _candidates(root, step))[0]
    damaged: list[tuple[int, str]] = []
    for chosen in candidates:
        path = step_dirs(root).get(chosen, root / f"step-{chosen:09d}")
        try:
            manifest = _check(path, storage, here)
        except CorruptCheckpoint as error:
            if step is not None or not fallback:
                raise
            log.warning("step %d is damaged and is passed over: %s", chosen, error)
            damaged.append((chosen, str(error.problems[0])))
            continue
        with Reader(path, manifest, storage) as reader:
            return _load(providers, reader, storage, here, partial, strict, tuple(damaged))
    if damaged:
        raise EkeError(
            f"none of the {len(damaged)} checkpoints in {root} is sound",
            rule="; ".join(f"step {number}: {why}" for number, why in damaged),
            fix="Restore the directory from a copy, or start anew in another one",
        )
    return None


def _candidates(root: Path, step: int | None) -> list[int]:
    """Steps to try, newest first: every directory that has a manifest, sound or not."""
    there = [number for number, path in step_dirs(root).items() if (path / MANIFEST).exists()]
    if step is None:
        return there[::-1]
    if step not in there:
        shown = ", ".join(map(str, there)) or "no steps"
        raise InputError(
            f"there is no checkpoint of step {step} in {root}", rule=f"it holds {shown}"
        )
    return [step]


def _check(path: Path, storage: Storage, here: World) -> Manifest:
    """Read and check every byte, the files shared out over the ranks."""
    found: list[Manifest] = []

    def work() -> None:
        manifest = open_manifest(path, storage)
        mine = sorted(manifest.files)[here.rank :: here.size]
        problems = check_files(path, manifest, mine, storage)
        if problems:
            raise CorruptCheckpoint(str(path), problems)
        found.append(manifest)

    agree(f"checking {path.name}", work)
    return found[0]


def _load(
    providers: Mapping[str, StateProvider],
    reader: Reader,
    storage: Storage,
    here: World,
    partial: bool,
    strict: bool,
    damaged: tuple[tuple[int, str], ...],
) -> LoadReport:
    manifest, path = reader.manifest, reader.path
    parts: dict[str, Saved] = {}
    report: dict[str, list[str]] = {
        "missing": [name for name in providers if name not in manifest.objects],
        "unexpected": [n for n in manifest.objects if n not in providers and not partial],
        "mismatched": [],
        "left_alone": [],
    }

    def compare() -> None:
        for name, provider in providers.items():
            if name not in manifest.objects:
                continue
            entry = manifest.objects[name]
            if entry.per_rank and manifest.world_size != here.size:
                # What differs between ranks by design has no place among another number of them;
                # what turned out to differ, such as a loader's position, is the user's to settle.
                sort = "left_alone" if provider.per_rank else "mismatched"
                report[sort].append(f"{name} (of {manifest.world_size} ranks)")
                continue
            parts[name] = _saved(name, provider, reader, storage, here)
            fit = _fit(path, name, provider, parts[name])
            for sort, names in report.items():
                names += [f"{name}/{key}" for key in getattr(fit, sort)]
        if strict and (report["missing"] or report["unexpected"] or report["mismatched"]):
            raise _misfit(path, report)

    def load() -> None:
        for name, saved in parts.items():
            try:
                providers[name].load(saved)
            except Exception as error:
                raise _half_done(path, name, error) from error

    agree(f"restoring {path.name}", compare)
    agree(f"restoring {path.name}", load)
    return LoadReport(
        manifest.step,
        path,
        damaged=damaged,
        **{sort: tuple(names) for sort, names in report.items()},
    )


def _saved(
    name: str, provider: StateProvider, reader: Reader, storage: Storage, here: World
) -> Saved:
    """One provider's part, as this rank takes it."""
    manifest, entry = reader.manifest, reader.manifest.objects[name]
    file = entry.files[here.rank if entry.per_rank else 0]
    objects = open_objects(reader.path, file, manifest, storage)
    prefix = f"{name}/{rank_name(here.rank)}/" if provider.per_rank else f"{name}/"
    tensors = {}
    for full in manifest.names():
        spec = manifest.find(full)
        if spec is not None and spec.role == "segment" and full.startswith(prefix):
            tensors[full.removeprefix(prefix)] = Spec(spec.dtype, spec.shape)
    cache: dict[str, torch.Tensor] = {}

    def tensor(key: str) -> torch.Tensor:
        key = manifest.aliases.get(key, key)
        if key not in cache:
            cache[key] = reader.read(key)
        return cache[key]

    try:
        state: Any = decode(objects[name], tensor)
    except (ManifestError, KeyError) as error:
        problem = Problem(file, None, "corrupt", f"the object {name!r} cannot be decoded: {error}")
        raise CorruptCheckpoint(str(reader.path), [problem]) from error
    return Saved(
        tensors,
        state,
        read=lambda key: reader.read(prefix + key),
        copy_into=lambda key, live: reader.copy_into(prefix + key, live),
    )


def _fit(path: Path, name: str, provider: StateProvider, saved: Saved) -> Fit:
    """What a provider says of its part; whatever it stumbles over is what it cannot take."""
    try:
        return provider.fit(saved)
    except EkeError:
        raise
    except Exception as error:
        raise InputError(
            f"the checkpoint {path} does not fit what is attached",
            rule=f"the saved state of {name!r} is not of the kind that it takes: {error}",
            fix="Attach what was attached when it was saved",
        ) from error


def _misfit(path: Path, report: Mapping[str, list[str]]) -> InputError:
    parts = []
    for sort in ("missing", "unexpected", "mismatched"):
        names = report[sort]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{sort}: {', '.join(names[:3])}{more}")
    return InputError(
        f"the checkpoint {path} does not fit what is attached",
        rule="; ".join(parts),
        fix="Attach what was attached when it was saved, or call restore(strict=False)",
    )


def _half_done(path: Path, name: str, error: Exception) -> EkeError:
    return EkeError(
        f"restoring {name!r} from {path} failed: {error}",
        rule="the state may now be partly restored",
        fix="Do not train on with it: restore again, or start the process again",
    )

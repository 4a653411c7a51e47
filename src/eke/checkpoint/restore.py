"""From a checkpoint back into live state: choose a step, check it, compare, then load.

Property: until the manifest, every file's length and header, every object and every provider's fit
have been checked on some rank, nothing that is live is changed. The bytes of tensors are checked as
they pass into live memory, so that each is read once; or all of them before, with `check_first`.

Falling back from a step that turned out to be damaged half way is only allowed to a step that
overwrites all that the damaged one may have changed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from eke.checkpoint.attempt import Attempt
from eke.checkpoint.errors import CorruptCheckpoint
from eke.checkpoint.layout import step_dirs
from eke.checkpoint.manifest import MANIFEST
from eke.checkpoint.opening import open_manifest
from eke.checkpoint.providers import StateProvider
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
        resharded: tensors that were put together otherwise than they were saved: what this rank
            took is none of the boxes that were written.
        cast: tensors that were converted to another floating-point type, with `cast=True`.
        damaged: (step, why) of newer checkpoints that were passed over, with `fallback=True`.
    """

    step: int
    path: Path
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    left_alone: tuple[str, ...] = ()
    resharded: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
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
    cast: bool,
    check_first: bool,
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
    untouched: set[str] | None = None
    for chosen in candidates:
        path = step_dirs(root).get(chosen, root / f"step-{chosen:09d}")
        attempt = None
        try:
            with ExitStack() as stack:
                reader = _opened(stack, path, storage, here, check_first)
                attempt = Attempt(providers, reader, here, cast=cast, partial=partial)
                _load(attempt, path, strict, untouched)
                return _report(attempt, reader, damaged)
        except CorruptCheckpoint as error:
            if step is not None or not fallback:
                raise
            log.warning("step %d is damaged and is passed over: %s", chosen, error)
            damaged.append((chosen, str(error.problems[0])))
            if error.partly_restored and attempt is not None:
                left = attempt.untouched
                untouched = left if untouched is None else untouched & left
    if damaged:
        now = [] if untouched is None else ["the state is now partly restored from one of them"]
        raise EkeError(
            f"none of the {len(damaged)} checkpoints in {root} is sound",
            rule="; ".join([*(f"step {number}: {why}" for number, why in damaged), *now]),
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
            f"there is no checkpoint of step {step} in {root}",
            rule=f"it holds {shown}",
            fix="Name one of these, or none for the newest",
        )
    return [step]


def _opened(
    stack: ExitStack, path: Path, storage: Storage, here: World, check_first: bool
) -> Reader:
    """The checkpoint, open for reading, after all checks that change nothing.

    Its files are shared out over the ranks: each is checked by one of them.
    """
    opened: list[Reader] = []

    def work() -> None:
        manifest = open_manifest(path, storage)
        reader = stack.enter_context(Reader(path, manifest, storage))
        opened.append(reader)
        mine = sorted(manifest.files)[here.rank :: here.size]
        if check_first:
            problems = check_files(path, manifest, mine, storage)
            if problems:
                raise CorruptCheckpoint(str(path), problems)
        else:
            reader.check(mine)

    agree(f"checking {path.name}", work)
    return opened[0]


def _load(attempt: Attempt, path: Path, strict: bool, untouched: set[str] | None) -> None:
    """Compare, then load; `untouched` is what a damaged step before this one has not changed."""

    def compare() -> None:
        attempt.compare(strict)
        if untouched is not None and (left := sorted(attempt.untouched - untouched)):
            raise EkeError(
                f"{path} cannot take the place of the damaged checkpoint: it does not have "
                f"{left[0]}, which is now partly restored from that one",
                fix="Do not train on with it: start the process again, and restore this step",
            )

    agree(f"restoring {path.name}", compare)
    agree(f"restoring {path.name}", attempt.load)


def _report(attempt: Attempt, reader: Reader, damaged: list[tuple[int, str]]) -> LoadReport:
    return LoadReport(
        reader.manifest.step,
        reader.path,
        resharded=tuple(sorted(reader.resharded)),
        cast=tuple(sorted(reader.cast)),
        damaged=tuple(damaged),
        **{sort: tuple(names) for sort, names in attempt.report.items()},
    )

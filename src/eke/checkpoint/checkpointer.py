"""The checkpointer: attach what is to be saved, save it, and get it back.

This saver is synchronous: `save` returns when the checkpoint is committed (and durable, unless
asked otherwise). With several ranks every method but `attach` is a collective.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import torch

from eke.budget.bill import Bill
from eke.checkpoint import layout
from eke.checkpoint.capture import Captured, capture
from eke.checkpoint.checks import ManifestError
from eke.checkpoint.commit import Attempt, clean, delete
from eke.checkpoint.errors import SaveError, reading
from eke.checkpoint.manifest import Manifest, ObjectEntry, check, merge, serialise
from eke.checkpoint.optimizer_state import OptimizerProvider
from eke.checkpoint.providers import (
    RngProvider,
    Stateful,
    StateProvider,
    provider_of,
)
from eke.checkpoint.restore import LoadReport, restore
from eke.checkpoint.retention import Keep, expired
from eke.checkpoint.storage import Storage
from eke.checkpoint.together import agree
from eke.checkpoint.write import objects_file, write_rank
from eke.distributed import world
from eke.errors import EkeError, InputError
from eke.version import __version__

log = logging.getLogger("eke.checkpoint")

Durability = Literal["fsync", "none"]
_PROVIDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Ticket:
    """The handle of one save.

    Attributes:
        state: "committed" or "failed".
        path: the checkpoint's directory, whether or not it came to be.
        bill: what the save cost training on this rank, in measured seconds.
        bytes_written: the length of all its files, of all ranks; 0 if it failed.
    """

    step: int
    state: Literal["committed", "failed"]
    path: Path
    bill: Bill
    bytes_written: int


class Checkpointer:
    """Saves and restores the state of a training run under one directory.

    Args:
        root: the directory of checkpoints; created by the first save.
        keep: which of them to keep; applied after each save.
        durability: "fsync" makes a checkpoint outlive a loss of power before `save` returns;
            "none" only a killed process.
        storage: how the disk is reached; tests make it fail.

    Raises:
        InputError: `durability` is not one of the two.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        keep: Keep | None = None,
        durability: Durability = "fsync",
        storage: Storage | None = None,
    ) -> None:
        if durability not in get_args(Durability):
            raise InputError(
                "the checkpoints' durability is wrong",
                value=durability,
                rule='it is "fsync" or "none"',
            )
        self.root = Path(root)
        self.keep = keep or Keep()
        self._durable = durability == "fsync"
        self._storage = storage or Storage()
        self._providers: dict[str, StateProvider] = {}
        self._model: torch.nn.Module | None = None
        self._protected: frozenset[int] = frozenset()
        self._closed = False

    def attach(
        self,
        *,
        model: torch.nn.Module | StateProvider | None = None,
        optimizer: torch.optim.Optimizer | StateProvider | None = None,
        scheduler: Stateful | StateProvider | None = None,
        loader: Stateful | StateProvider | None = None,
        rng: bool = False,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        """Say what a checkpoint holds. May be called again to add more.

        Args:
            model: its parameters and persistent buffers.
            optimizer: its state, by the names of the model's parameters.
            scheduler: an object with `state_dict` and `load_state_dict`.
            loader: the same; its position in the data.
            rng: this process's random generators.
            extra: more, by name: a module, an optimizer, an object with `state_dict` and
                `load_state_dict`, a dict or list (its contents are replaced at restore), or a
                `StateProvider`.

        Raises:
            InputError: a name is taken or unusable, or something has no state to restore.
        """
        if isinstance(model, torch.nn.Module):
            self._model = model
        named: dict[str, object] = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "loader": loader,
            "rng": RngProvider() if rng else None,
        }
        given = {name: value for name, value in named.items() if value is not None}
        for name, value in (extra or {}).items():
            if name in named or _PROVIDER_NAME.fullmatch(name) is None:
                raise InputError(
                    "an extra's name is unusable",
                    value=name,
                    rule="letters, digits, `_`, `-` and `.`, and none of " + ", ".join(named),
                )
            given[name] = value
        taken = sorted(given.keys() & self._providers.keys())
        if taken:
            raise InputError(f"{taken[0]!r} is attached already")
        self._providers |= {name: self._provider(name, value) for name, value in given.items()}

    def _provider(self, name: str, value: object) -> StateProvider:
        if isinstance(value, torch.optim.Optimizer):
            return OptimizerProvider(value, self._model)
        return provider_of(value, name)

    def save(self, step: int) -> Ticket:
        """Save everything attached as the checkpoint of `step`; returns once it is committed.

        Raises:
            InputError: the step is committed already (see `discard_after`), nothing is attached, or
                something attached holds what a checkpoint cannot.
            SaveError: the disk or another rank failed. Nothing of the attempt is left, older
                checkpoints are untouched, and a later save may succeed.
        """
        started = time.perf_counter()
        self._require_open()
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < layout.MAX_STEP:
            raise InputError(
                "a checkpoint's step is wrong", value=step, rule="a whole number from 0 to 2**53"
            )
        if not self._providers:
            raise InputError("nothing is attached to save", fix="Call attach(model=...) first")

        def ticket(state: Literal["committed", "failed"], size: int) -> Ticket:
            seconds = time.perf_counter() - started
            bill = Bill(who="checkpoint", what="checkpoint", step=step, seconds=seconds)
            return Ticket(step, state, self.root / layout.step_name(step), bill, size)

        try:
            return ticket("committed", self._save(step))
        except InputError:
            raise
        except EkeError as error:
            failed = SaveError(
                error.what,
                value=error.value,
                rule=error.rule or "older checkpoints are untouched",
                fix=error.fix,
            )
            failed.ticket = ticket("failed", 0)
            raise failed from error

    def _save(self, step: int) -> int:
        here, doing = world(), f"saving step {step}"
        captured = capture(self._providers, step, here)
        attempt = Attempt(self._storage, self.root, step, self._durable)

        def begin() -> str | None:
            if not here.is_main:
                return None
            if layout.is_committed(self.root / layout.step_name(step), self._storage):
                raise InputError(
                    f"step {step} is committed already in {self.root}",
                    rule="a committed checkpoint is never overwritten",
                    fix="After going back to an earlier step, call discard_after(EARLIER) first",
                )
            clean(self._storage, self.root)
            attempt.begin()
            return attempt.path.name

        def write() -> dict[str, Any]:
            return write_rank(self._storage, directory, captured, here, self._durable)

        def commit() -> int:
            if not here.is_main:
                return 0
            manifest = _manifest(step, captured, reports, here.size)
            data = serialise(manifest)
            attempt.commit(data)
            self._expire()
            return manifest.data_bytes + len(data)

        try:
            directory = self.root / agree(doing, begin)[0]
            reports = agree(doing, write)
            return int(agree(doing, commit)[0])
        finally:
            if here.is_main:
                attempt.abort()

    def _expire(self) -> None:
        """Apply retention. The new checkpoint is safe by now, so a failure here is not a save's."""
        try:
            for step in expired(layout.steps(self.root), self.keep, self._protected):
                delete(self._storage, self.root, step, self._durable)
        except OSError as error:
            log.warning("could not delete an old checkpoint (%s); the next save tries again", error)

    def protect(self, steps: Iterable[int]) -> None:
        """Keep these steps whatever `keep` says, in place of those that were protected before.

        Only rank 0's answer counts. This lasts as long as the checkpointer does.
        """
        self._protected = frozenset(steps)

    def restore(
        self,
        step: int | None = None,
        *,
        only: Iterable[str] | None = None,
        strict: bool = True,
        fallback: bool = False,
    ) -> LoadReport | None:
        """Load a checkpoint, the newest by default, into what is attached.

        Every byte is checked before anything live is changed.

        Args:
            step: which one.
            only: names of what is attached ("model", "optimizer", ..); all else is neither read
                into nor compared.
            strict: whether it is an error that saved and attached state differ.
            fallback: whether, if the newest is damaged, to take the newest that is sound; the
                report's `damaged` says what was passed over.

        Returns:
            None when there is nothing to restore.

        Raises:
            InputError: there is no such step, `only` names what is not attached, or `strict` and
                the states differ.
            CorruptCheckpoint: its bytes are not the ones that were written.
            EkeError: the disk failed, or a part of the state could not take its own back; the
                message says so if anything was changed by then.
        """
        self._require_open()
        wanted = set(self._providers) if only is None else set(only)
        if unknown := sorted(wanted - self._providers.keys()):
            raise InputError(
                f"{unknown[0]!r} is not attached, so it cannot be restored",
                rule="attached: " + ", ".join(self._providers),
            )
        return restore(
            {name: self._providers[name] for name in self._providers if name in wanted},
            self.root,
            self._storage,
            world(),
            step=step,
            partial=only is not None,
            strict=strict,
            fallback=fallback,
        )

    def steps(self) -> list[int]:
        """The committed steps, oldest first. Not a collective.

        Raises:
            EkeError: the disk failed.
        """
        with reading(self.root):
            return layout.steps(self.root)

    def discard_after(self, step: int) -> list[int]:
        """Delete every checkpoint of a later step, damaged ones too; returns their steps.

        A run that goes back to `step` calls this before it trains on, so that the steps which it
        reaches again can be saved again, and no restart finds what was undone.

        Raises:
            EkeError: the disk failed.
        """
        self._require_open()

        def discard() -> list[int]:
            if not world().is_main:
                return []
            # Newest first: if this is cut short, what is left is still a run without a gap.
            later = [s for s in reversed(layout.step_dirs(self.root)) if s > step]
            for one in later:
                delete(self._storage, self.root, one, self._durable)
            return later[::-1]

        found: list[int] = agree(f"discarding checkpoints after step {step}", discard)[0]
        return found

    def _require_open(self) -> None:
        if self._closed:
            raise InputError("this checkpointer is closed", fix="Make a new one")

    def close(self) -> None:
        """Let everything go; closing twice is harmless. Every save is committed by now."""
        self._closed = True
        self._providers.clear()
        self._model = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _manifest(step: int, captured: Captured, reports: list[dict[str, Any]], ranks: int) -> Manifest:
    """The manifest of what all ranks wrote.

    Raises:
        EkeError: together they did not write every tensor exactly once.
    """
    try:
        files, tensors, aliases = merge(reports)
        manifest = Manifest(
            step=step,
            world_size=ranks,
            mesh={"data": ranks},
            created_unix_s=time.time(),
            eke=__version__,
            torch=torch.__version__,
            files=files,
            tensors=tensors,
            aliases=aliases,
            objects={
                name: ObjectEntry(
                    own, tuple(objects_file(rank) for rank in range(ranks if own else 1))
                )
                for name, own in captured.per_rank.items()
            },
        )
        check(manifest)
    except ManifestError as error:
        where = error.tensor or error.file or "the manifest"
        raise EkeError(f"saving step {step} failed: {where}: {error.detail}") from error
    return manifest

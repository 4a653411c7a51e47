"""The checkpointer: attach what is to be saved, save it, and get it back.

`save` returns as soon as what may change at any time is captured: objects, random generators,
buffers. What only an optimizer changes is captured while training goes on; an optimizer's `step`
waits, through a hook, for those of its own tensors that are not captured yet. Writing and
committing happen in the background.

With several ranks `save`, `restore` and `discard_after` are collectives, called on all ranks in the
same order. No background thread ever is in a collective.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, get_args

import torch

from eke.budget.units import parse_bytes, parse_duration
from eke.checkpoint import layout
from eke.checkpoint.arguments import (
    check_choice,
    check_parts,
    check_switches,
    chosen,
    extras_of,
    root_given,
    steps_of,
    storage_given,
    tensors_in,
)
from eke.checkpoint.capture import Captured, capture, tensors_of
from eke.checkpoint.commit import delete
from eke.checkpoint.engine import Engine
from eke.checkpoint.errors import SaveError, reading
from eke.checkpoint.failures import hear, unheard
from eke.checkpoint.hook import hook_steps, let_go, wait_for
from eke.checkpoint.optimizer_state import OptimizerProvider
from eke.checkpoint.owner import me, new_token
from eke.checkpoint.pool import slot_size
from eke.checkpoint.previous import Previous
from eke.checkpoint.providers import (
    RngProvider,
    Stateful,
    StateProvider,
    provider_of,
    unwrap,
)
from eke.checkpoint.restore import LoadReport, restore
from eke.checkpoint.retention import Keep
from eke.checkpoint.roster import Roster
from eke.checkpoint.source import storage_of
from eke.checkpoint.storage import Storage
from eke.checkpoint.task import Place, Save, save_error
from eke.checkpoint.ticket import Ticket
from eke.checkpoint.together import agree
from eke.checkpoint.write import lanes_of
from eke.distributed import local_of, store, world
from eke.errors import EkeError, InputError

log = logging.getLogger("eke.checkpoint")

Durability = Literal["fsync", "none"]
OnError = Literal["raise", "warn"]


class Checkpointer:
    """Saves and restores the state of a training run under one directory.

    Args:
        root: the directory of checkpoints; created by the first save.
        keep: which of them to keep; applied after each save is committed, in the background.
        pool: the memory through which everything is saved, and all that saving adds; a state may
            be many times as large. It is taken as it is needed.
        durability: "fsync" makes a committed checkpoint outlive a loss of power; "none" only a
            killed process.
        on_error: "raise" what a save failed with at the next `save`, `barrier`, optimizer step,
            `restore` or `close`; or "warn", log it, and train on. `Ticket.wait` always raises it.
        patience: how long a save may make no progress (a hung disk or rank) before it fails.
        storage: how the disk is reached; tests make it fail.

    Raises:
        InputError: one of these is not what it must be.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        pool: int | str = "512MiB",
        keep: Keep | None = None,
        durability: Durability = "fsync",
        on_error: OnError = "raise",
        patience: float | str = "10m",
        storage: Storage | None = None,
    ) -> None:
        check_choice("the checkpoints' durability", "durability", durability, get_args(Durability))
        check_choice("what to do about a failed save", "on_error", on_error, get_args(OnError))
        pool_bytes = parse_bytes(pool, "the checkpoints' pool")
        slot_size(pool_bytes)
        self._patience_s = parse_duration(patience, "the checkpoints' patience")
        if not self._patience_s > 0:
            raise InputError(
                "the checkpoints' patience is wrong",
                value=patience,
                rule="above 0",
                fix='Write patience="10m"',
            )
        self.root = root_given(root)
        if keep is not None and not isinstance(keep, Keep):
            raise InputError(
                "what to keep is wrong",
                value=keep,
                rule="it is a Keep",
                fix="Write keep=eke.Keep(last=3), for example",
            )
        self.keep = keep or Keep()
        self._durable = durability == "fsync"
        self._storage = storage_given(storage)
        self._providers: dict[str, StateProvider] = {}
        self._model: torch.nn.Module | None = None
        self._protected: frozenset[int] = frozenset()
        self._closed = self._let_go = False
        self._last: Ticket | None = None
        self._saves = 0
        self._previous = Previous(self.root, self._storage)
        self._roster = Roster()
        self._pool_ready = False
        self._engine = Engine(pool_bytes, self._patience_s, warn=on_error == "warn")
        self._hook = hook_steps(self._before_step, self._engine)
        # Dropped without `close`: what is in flight is finished, and the threads end.
        self._finalizer = weakref.finalize(self, let_go, self._engine, self._hook)
        self._finalizer.atexit = False

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
            model: its parameters and persistent buffers; it may be under DDP, FSDP2 or
                torch.compile.
            optimizer: its state, by the names of the model's parameters.
            scheduler: an object with `state_dict` and `load_state_dict`.
            loader: the same; its position in the data.
            rng: this process's random generators.
            extra: more, by name: a module, an optimizer, an object with `state_dict` and
                `load_state_dict`, a dict or list (its contents are replaced at restore), or a
                `StateProvider`.

        Raises:
            InputError: a name is taken or unusable, something has no state to restore or is not
                what its name says, or the checkpointer is closed.
        """
        self._require_open()
        named: dict[str, object] = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "loader": loader,
            "rng": RngProvider() if rng else None,
        }
        check_switches(rng=rng)
        check_parts(named)
        given = {name: value for name, value in named.items() if value is not None}
        given |= extras_of(extra, named)
        taken = sorted(given.keys() & self._providers.keys())
        if taken:
            raise InputError(
                f"{taken[0]!r} is attached already",
                fix="Attach it once, or the other one under extra= by a name of its own",
            )
        module = model if isinstance(model, torch.nn.Module) else self._model
        providers = {
            name: OptimizerProvider(value, module)
            if isinstance(value, torch.optim.Optimizer)
            else provider_of(value, name)
            for name, value in given.items()
        }
        # Nothing has changed so far, so what is refused leaves all as it was.
        self._model = module
        for known in self._providers.values():
            if isinstance(known, OptimizerProvider) and known.model is None and module:
                known.model = unwrap(module)  # it was attached before its model
        self._providers |= providers

    def save(self, step: int) -> Ticket:
        """Save everything attached as the checkpoint of `step`.

        Returns once objects, random generators and buffers are captured. Until the ticket is
        "captured", nothing but a `torch.optim` optimizer's `step()` may change what is attached;
        call `barrier` before anything else does. A save that finds another in flight waits until
        that one is captured, and is then written after it; a third one waits until the first is
        done. A change that torch counted is found, and fails the save.

        Raises:
            InputError: the step is committed already (see `discard_after`), nothing is attached, or
                something attached holds what a checkpoint cannot.
            SaveError: an earlier save failed and nobody has heard of it yet, or this one did. Older
                checkpoints are untouched, and a later save may succeed.
        """
        started = time.perf_counter()
        self._require_open()
        step = layout.require_step(step)
        if not self._providers:
            raise InputError("nothing is attached to save", fix="Call attach(model=...) first")
        self._saves += 1
        ticket = Ticket(step, self.root / layout.step_name(step), self._engine, self._saves)
        try:
            self._save(ticket)
        except (InputError, SaveError):
            raise
        except EkeError as error:
            ticket.error = save_error(ticket, error)
            ticket.reach("failed")
            raise ticket.error from error
        finally:
            self._engine.charge(ticket, time.perf_counter() - started)
        return ticket

    def _save(self, ticket: Ticket) -> None:
        here, step = world(), ticket.step
        self._engine.wait_for_room()

        def note() -> dict[str, Any]:
            failed = unheard(self._engine)
            if failed is not None or not here.is_main:
                return {"failed": failed}
            in_flight = self._last is not None and not self._last.final and self._last.step == step
            if in_flight or layout.is_committed(ticket.path, self._storage):
                raise InputError(
                    f"step {step} is {'being saved' if in_flight else 'committed'} already in "
                    f"{self.root}",
                    rule="a committed checkpoint is never overwritten",
                    fix="After going back to an earlier step, call discard_after(EARLIER) first",
                )
            return {"failed": None, "token": new_token(me())}

        place = Place(
            self._storage,
            self.root,
            self._durable,
            self.keep,
            here,
            store(),
            self._patience_s,
            self._previous,
        )
        block_bytes = self._engine.slot_bytes()
        look = None
        if here.size == 1:
            self._engine.raise_failed()
            noted = agree(f"saving step {step}", note)
            look = self._roster.look(self._providers, block_bytes)
        if look is None:
            again = note if here.size > 1 else lambda: noted[0]
            captured = capture(self._providers, step, here, again)
            noted = captured.notes
            lanes, rest = lanes_of(captured, here, block_bytes), None
        else:
            per_rank = {name: one.per_rank for name, one in self._providers.items()}
            captured = Captured([], [], look.aliases, look.objects, per_rank, {"data": 1})
            lanes, rest = look.lanes, look.rest
        hear(self._engine, [row["failed"] for row in noted])
        token = noted[0]["token"]
        task = Save(place, ticket, captured, lanes, token, self._protected, rest)
        self._last = ticket
        self._engine.submit(task)

    def barrier(self, params: Iterable[torch.Tensor] | None = None) -> None:
        """Wait until these tensors may change: all that is attached, by default.

        Call it before anything but a `torch.optim` optimizer's `step()` changes what is attached:
        an average of weights, a hand-written update, an optimizer that updates inside backward.
        Returns at once when nothing is being captured. Not a collective.

        Raises:
            InputError: the checkpointer is closed, or something there is no tensor.
            SaveError: a save failed, and nobody has heard of it yet (with one rank; with several,
                only `save`, `restore` and `close` raise, so that all ranks do at the same place).
        """
        self._require_open()
        if world().size == 1:
            self._engine.raise_failed()
        if params is None:
            self._engine.barrier(lambda: None)
        else:
            given = tensors_in(params)
            self._engine.barrier(lambda: {storage_of(local_of(tensor)) for tensor in given})

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Any optimizer is about to change its parameters and its state."""
        if world().size == 1:
            self._engine.raise_failed()
        wait_for(self._engine, optimizer)
        # Training has begun, and the optimizer has its state: the first save is not far.
        if not self._pool_ready and optimizer.state and self._is_attached(optimizer):
            self._pool_ready = True
            self._engine.prefault(sum(local_of(tensor).nbytes for tensor in tensors_of(optimizer)))

    def _is_attached(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(
            isinstance(one, OptimizerProvider) and one.optimizer is optimizer
            for one in self._providers.values()
        )

    @property
    def stall_s(self) -> float:
        """How long training on this rank has waited for saves, all together: in `save`, and at
        barriers."""
        return self._engine.stall_s

    def _settle(self, doing: str, needs: Callable[[Ticket], bool]) -> None:
        """Wait for what is in flight, so that what was saved can be read. A collective.

        Args:
            needs: whether this cannot be done while that save is stuck in the disk.
        """
        stuck = self._engine.drain()

        def note() -> dict[str, Any] | None:
            failed = unheard(self._engine)
            if failed is None and stuck is not None and needs(stuck):
                raise EkeError(
                    f"{doing} has to wait: saving step {stuck.step} is stuck in the disk",
                    rule=f"it is {stuck.state}"
                    + ("" if stuck.final else ", and may yet become a checkpoint"),
                    fix="See whether the disk answers, then try again",
                )
            return failed

        hear(self._engine, agree(doing, note))

    def protect(self, steps: Iterable[int]) -> None:
        """Keep these steps whatever `keep` says, in place of those that were protected before.

        Only rank 0's answer counts. This lasts as long as the checkpointer does.
        """
        self._require_open()
        self._protected = steps_of(steps)

    def restore(
        self,
        step: int | None = None,
        *,
        only: Iterable[str] | None = None,
        strict: bool = True,
        fallback: bool = False,
        cast: bool = False,
        check_first: bool = False,
    ) -> LoadReport | None:
        """Load a checkpoint, the newest by default, into what is attached.

        Manifest, lengths, headers, objects and how it all fits are checked before anything live is
        changed. The bytes of tensors are checked as they are read, so if one is damaged, what is
        attached is partly restored then, and `CorruptCheckpoint.partly_restored` is true.

        Args:
            step: which one.
            only: names of what is attached ("model", "optimizer", ..), or one; all else is neither
                read into nor compared.
            strict: whether it is an error that saved and attached state differ.
            fallback: whether, if the newest is damaged, to take the newest that is sound; the
                report's `damaged` says what was passed over. It overwrites all that a damaged one
                has changed.
            cast: whether a saved floating-point tensor may be converted into a live one of another
                floating-point type; the report's `cast` names them. Else they are mismatched.
            check_first: whether to check the bytes of tensors, too, before anything live is
                changed, at the cost of reading them twice: for going back in a run that is sound.

        Returns:
            None when there is nothing to restore.

        Raises:
            InputError: there is no such step, `only` names what is not attached, or `strict` and
                the states differ.
            CorruptCheckpoint: its bytes are not the ones that were written.
            EkeError: the disk failed, or a part of the state could not take its own back; the
                message says so if anything was changed by then. Or a save is stuck in the disk, so
                that nobody knows whether this step is a checkpoint.
        """
        self._require_open()
        step = None if step is None else layout.require_step(step)
        wanted = chosen(only, self._providers)
        check_switches(strict=strict, fallback=fallback, cast=cast, check_first=check_first)
        # Which step is the newest, or whether there is that one, nobody knows then.
        self._settle("restoring", lambda stuck: not stuck.final and step in (None, stuck.step))
        return restore(
            {name: self._providers[name] for name in self._providers if name in wanted},
            self.root,
            self._storage,
            world(),
            step=step,
            partial=only is not None,
            strict=strict,
            fallback=fallback,
            cast=cast,
            check_first=check_first,
        )

    def steps(self) -> list[int]:
        """The committed steps, oldest first. Not a collective.

        Raises:
            InputError: something else than a directory has taken the root's place.
            EkeError: the disk failed.
        """
        with reading(self.root):
            return layout.steps(self.root)

    def discard_after(self, step: int) -> list[int]:
        """Delete every checkpoint of a later step, damaged ones too; returns their steps.

        A run that goes back to `step` calls this before it trains on, so that the steps which it
        reaches again can be saved again, and no restart finds what was undone.

        Raises:
            EkeError: the disk failed, or a save is stuck in it: nothing is deleted then.
        """
        self._require_open()
        step = layout.require_step(step)
        self._settle("discarding checkpoints", lambda stuck: True)
        self._previous.forget()

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
        self._engine.home.require()

    def wait(self) -> None:
        """Wait until nothing is in flight and older checkpoints are deleted. Not a collective.

        Raises:
            SaveError: a save failed, and nobody has heard of it yet.
        """
        self._require_open()
        self._engine.drain()
        self._engine.raise_failed()

    def close(self) -> None:
        """Wait for what is in flight, then let everything go; closing twice is harmless.

        In a forked child it does nothing, for the checkpointer is its parent's.
        A process that ends without it finishes what is in flight too, but can only log a failure.

        Raises:
            SaveError: a save failed, and nobody has heard of it yet.
        """
        if self._let_go or not self._engine.home.here:
            return
        self._closed = True  # what follows can be interrupted, and is then done by the next call
        self._engine.close()
        self._hook.remove()  # not before: another thread may train on meanwhile
        self._finalizer.detach()
        self._providers.clear()
        self._roster = Roster()
        self._model = None
        self._let_go = True
        self._engine.raise_failed()

    def __enter__(self) -> Checkpointer:
        self._require_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except SaveError as error:
            if value is None:
                raise
            log.error("%s", error)  # the error that is on its way says more

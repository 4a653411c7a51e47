"""What a save takes from the providers: named tensors, encoded objects, and who has what.

A tensor that all ranks hold alike is *shared* and is written once by all ranks together; one
that belongs to a rank is its *own*. A provider's object is shared when every rank has the same
one, which is found by comparing hashes, and each rank's own otherwise, or when the provider says
that it is `per_rank`. Own tensors have the rank in their names: `rng/rank00001/torch`.

A DTensor is a shared tensor too, of which every rank has a box: each box is written once, by the
ranks that hold it together.

Tensors that are the same memory seen the same way (tied weights) appear once; their other names
are aliases.

A tensor is *eager* if it must be captured before `save` returns; the others are only changed by
optimizers. The tensors of the group "state" are split by the optimizer that changes them ("other"
if none does), so that a step waits for its own file's tensors and for no others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
import xxhash

from eke.checkpoint.manifest import Role
from eke.checkpoint.objects import canonical, encode
from eke.checkpoint.optimizer_state import OptimizerProvider
from eke.checkpoint.providers import OBJECTS, OTHER, STATE, StateProvider
from eke.checkpoint.sharing import holders
from eke.checkpoint.source import storage_of
from eke.checkpoint.tensors import as_bytes, dtype_name, identity, refuse_unusual
from eke.checkpoint.together import agree
from eke.distributed import Box, World, is_dtensor, mesh_of, part_of
from eke.errors import EkeError, InputError

GROUP = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


class Spread(NamedTuple):
    """What a rank knows of a DTensor.

    Attributes:
        live: the DTensor itself.
        shape: the whole tensor's.
        box: what this rank holds; None if that is nothing.
        holders: the ranks that hold the same box, in order.
    """

    live: torch.Tensor
    shape: tuple[int, ...]
    box: Box | None
    holders: tuple[int, ...] = ()


class Held(NamedTuple):
    """A tensor to write, under its name in the manifest; of a DTensor, what this rank has of it."""

    name: str
    tensor: torch.Tensor
    group: str
    role: Role
    eager: bool = True
    spread: Spread | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's."""
        return tuple(self.tensor.shape) if self.spread is None else self.spread.shape


@dataclass
class Captured:
    """All that one rank knows of what is to be written."""

    shared: list[Held] = field(default_factory=list)
    own: list[Held] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[str, bool] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)
    notes: list[Any] = field(default_factory=list)


def rank_name(rank: int) -> str:
    """How a rank appears in names of files and tensors."""
    return f"rank{rank:05d}"


def capture(
    providers: Mapping[str, StateProvider],
    step: int,
    here: World,
    note: Callable[[], Any] = lambda: None,
) -> Captured:
    """Ask every provider for its state. A collective.

    The tensors are the live ones, not copies: write them before they change.

    Args:
        providers: by name.
        step: for errors.
        here: this rank.
        note: called first, may raise; what it returned on each rank is `Captured.notes`.

    Raises:
        InputError: something is of a type that a checkpoint cannot hold.
        EkeError: the ranks do not hold the same shared tensors.
    """
    states: dict[str, object] = {}
    segments: list[Held] = []
    own: list[Held] = []

    def look() -> dict[str, Any]:
        noted = note()
        digests = {}
        clocks = _clocks(providers)
        for name, provider in providers.items():
            prefix = prefix_of(name, here.rank, own=provider.per_rank)
            for key, tensor, group, eager in provider.segments():
                full = f"{prefix}/{key}"
                held = _held(full, tensor, group, eager)
                refuse_unusual(held.tensor, full)
                require_group(group, full)
                if clocks and group == STATE:
                    held = held._replace(group=clocks.get(clock(tensor), OTHER))
                if provider.per_rank and held.spread is not None:
                    raise InputError(
                        f"the tensor {full} is spread over ranks, and its provider says that every "
                        "rank's state is its own",
                        fix="Give it through a provider whose `per_rank` is false",
                    )
                (own if provider.per_rank else segments).append(held)
            states[name] = provider.state()
            digests[name] = _digest(*encode(states[name], name)) if here.size > 1 else ""
        if len({held.name for held in segments}) != len(segments):
            raise InputError(
                "a provider gave two tensors one name",
                fix="Give each of its segments a key of its own",
            )
        # Alone there is nobody to compare with.
        structure = _structure(segments) if here.size > 1 else ""
        boxes = [held.spread.box for held in _spread(segments) if held.spread is not None]
        return {"digests": digests, "segments": structure, "boxes": boxes, "note": noted}

    rows = agree(f"saving step {step}", look)
    for rank, row in enumerate(rows):
        same_names = row["digests"].keys() == rows[0]["digests"].keys()
        if row["segments"] != rows[0]["segments"] or not same_names:
            raise EkeError(
                f"step {step} cannot be saved: rank {rank} holds other tensors than rank 0",
                rule="every rank attaches the same things, with tensors of equal names and shapes",
                fix="Attach on every rank what rank 0 attaches",
            )
    out = Captured(notes=[row["note"] for row in rows])
    spread = _spread(segments)
    out.mesh = mesh_of((held.spread.live for held in spread if held.spread), here.size)
    where = {
        held.name: holders([row["boxes"][number] for row in rows], here.rank)
        for number, held in enumerate(spread)
    }
    segments = [
        held._replace(spread=held.spread._replace(holders=where[held.name]))
        if held.spread is not None
        else held
        for held in segments
    ]

    def name_all() -> None:
        for name, provider in providers.items():
            differs = any(row["digests"][name] != rows[0]["digests"][name] for row in rows)
            out.per_rank[name] = provider.per_rank or differs
            prefix = prefix_of(name, here.rank, own=out.per_rank[name])
            out.objects[name], tensors = encode(states[name], prefix)
            held = [Held(key, tensor, OBJECTS, "object") for key, tensor in tensors.items()]
            (own if out.per_rank[name] else segments).extend(held)
        out.shared = untie(segments, out.aliases)
        out.own = untie(own, out.aliases)

    agree(f"saving step {step}", name_all)
    return out


def prefix_of(provider: str, rank: int, *, own: bool) -> str:
    """What the names of a provider's tensors start with."""
    return f"{provider}/{rank_name(rank)}" if own else provider


def require_group(group: str, tensor: str) -> None:
    """Raise unless a group can be part of a file's name.

    Raises:
        InputError: it cannot.
    """
    if GROUP.fullmatch(group) is None:
        raise InputError(
            f"the tensor {tensor} has an unusable group",
            value=group,
            rule="groups become parts of file names: a-z, 0-9, _ and -",
            fix="Give its segment another group",
        )


def _clocks(providers: Mapping[str, StateProvider]) -> dict[Hashable, str]:
    optimizers = [p.optimizer for p in providers.values() if isinstance(p, OptimizerProvider)]
    return clocks_of(list(map(tensors_of, optimizers)))


def clocks_of(changes: Sequence[Iterable[torch.Tensor]]) -> dict[Hashable, str]:
    """Memory -> the group of what the optimizer that changes it changes; empty without any.

    Args:
        changes: what each optimizer changes.
    """
    groups: dict[Hashable, str] = {}
    for number, tensors in enumerate(changes, 1):
        name = STATE if number == 1 else f"{STATE}-{number}"
        for tensor in tensors:
            groups.setdefault(clock(tensor), name)
    return groups


def clock(tensor: torch.Tensor) -> Hashable:
    """What an optimizer's tensor is known by, alike on all ranks, also where one has no memory."""
    return id(tensor) if is_dtensor(tensor) else storage_of(tensor)


def _held(name: str, tensor: torch.Tensor, group: str, eager: bool) -> Held:
    part = part_of(tensor, name)
    if not part.spread:
        return Held(name, tensor, group, "segment", eager)
    if not prod(part.shape):  # then every rank has all that there is
        return Held(name, part.local.new_empty(part.shape), group, "segment", eager)
    box = part.box if part.local.numel() else None
    return Held(name, part.local, group, "segment", eager, Spread(tensor, part.shape, box))


def _spread(segments: list[Held]) -> list[Held]:
    """The DTensors, in an order that is the same on all ranks."""
    return sorted((held for held in segments if held.spread is not None), key=lambda one: one.name)


def tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """What an optimizer's step may change: its parameters and every tensor in their state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor):
                    yield value


def _structure(segments: list[Held]) -> str:
    """Equal on ranks that hold the same shared tensors."""
    names = {
        held.name: [dtype_name(held.tensor.dtype), held.shape, held.group, held.spread is not None]
        for held in segments
    }
    tied: dict[str, str] = {}
    untie(segments, tied)
    return xxhash.xxh3_128_hexdigest(canonical([names, tied]).encode())


def untie(held: list[Held], aliases: dict[str, str]) -> list[Held]:
    """The tensors once each; the other names of one are added to `aliases`."""
    first: dict[Any, str] = {}
    kept, seen = [], set()
    for one in held:
        if one.name in seen:
            raise InputError(
                f"two tensors would both be called {one.name}",
                fix="Rename one of them in its provider or object",
            )
        seen.add(one.name)
        # A DTensor is known by itself: a rank may have no memory of it.
        same = identity(one.tensor) if one.spread is None else id(one.spread.live)
        if same is not None and (same, one.role) in first:
            aliases[one.name] = first[same, one.role]
        else:
            first[same, one.role] = one.name
            kept.append(one)
    return kept


def _digest(tree: object, tensors: Mapping[str, torch.Tensor]) -> str:
    """Equal on ranks whose objects are equal, tensors included."""
    total = xxhash.xxh3_128(canonical(tree).encode())
    for name, tensor in tensors.items():
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(as_bytes(tensor))
    return total.hexdigest()

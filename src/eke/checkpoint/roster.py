"""Who is to be saved: the tensors of all providers, and the layouts of their files.

A save looks at every provider (`glance`) and, if nothing is added, removed, exchanged or frozen
since the save before, knows its tensors by name without asking. All else that a layout depends on,
shapes and types, is compared when the capture begins, in another thread; a layout that does not
fit any more is made anew. So a save's own part is some hundred nanoseconds for a tensor.

Properties: what a save takes is the same as if it were the first; and between saves nothing that
was attached is kept alive.

For a job of one process: with several, the ranks also have to agree, see `capture`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from eke.checkpoint.capture import (
    Captured,
    Held,
    clocks_of,
    prefix_of,
    require_group,
    untie,
)
from eke.checkpoint.device import begin_save, foreign
from eke.checkpoint.glance import Glance, glance
from eke.checkpoint.lane import Lane, Layout
from eke.checkpoint.objects import encode
from eke.checkpoint.optimizer_state import OptimizerProvider
from eke.checkpoint.providers import OBJECTS, OTHER, STATE, StateProvider
from eke.checkpoint.remembered import Remembered
from eke.checkpoint.source import seen, storage_of
from eke.checkpoint.tensors import refuse_unusual
from eke.checkpoint.write import layouts_of
from eke.distributed import World, any_dtensor
from eke.errors import InputError

_ALONE = World()


class Row(NamedTuple):
    """A segment: its place among the tensors looked at, and what it is called."""

    place: int
    name: str
    group: str
    eager: bool


class _Plan(NamedTuple):
    """The layouts that tensors of these traits have, and the places of the tensors of each."""

    traits: list[object]
    layouts: list[tuple[Layout, list[int]]]
    aliases: dict[str, str]


class _Part:
    """Some of the rows, and how they were laid out last."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.plan: _Plan | None = None


class Look(NamedTuple):
    """What a save takes.

    Attributes:
        lanes: what must be captured before `save` returns.
        objects: each provider's encoded object.
        aliases: other names of tensors in `lanes`.
        rest: finds out the other lanes, and the aliases of all; for any thread. None without any.
    """

    lanes: list[Lane]
    objects: dict[str, Any]
    aliases: dict[str, str]
    rest: Callable[[], tuple[list[Lane], dict[str, str]]] | None


class Roster:
    """Looks at providers, and remembers what they had."""

    def __init__(self) -> None:
        self._known: _Known | None = None

    def look(self, providers: Mapping[str, StateProvider], block_bytes: int) -> Look | None:
        """Take what is live now; None if some of it is a DTensor, see `capture`.

        Raises:
            InputError: something is of a type that a checkpoint cannot hold.
        """
        modules: dict[int, Glance | None] = {}
        glances = {name: glance(provider, modules) for name, provider in providers.items()}
        if any(any_dtensor(one.tensors) for one in glances.values()):
            return None
        known = self._known
        if known is None or not known.fits(providers, glances):
            self._known = None  # nothing to go by if this fails
            known = _Known(providers, glances)
        live = _Live(known, glances, block_bytes)
        objects, loose = _objects(known, providers, glances)
        aliases: dict[str, str] = {}
        held = untie([*map(live.held, known.loose), *loose], aliases)
        lanes = [
            Lane(layout, [cut.tensor for cut in cuts])
            for layout, cuts in layouts_of(Captured(shared=held), _ALONE, block_bytes)
        ]
        lanes += live.lanes(known.now, aliases)
        lazy = not any(map(foreign, live.devices))
        if not lazy:
            lanes += live.lanes(known.later, aliases)
        begin_save(live.devices | {one.tensor.device for one in held})
        self._known = known
        if not lazy or not known.later.rows:
            return Look(lanes, objects, aliases, None)

        def rest() -> tuple[list[Lane], dict[str, str]]:
            more = dict(aliases)
            return live.lanes(known.later, more), more

        return Look(lanes, objects, aliases, rest)


class _Known:
    """What is remembered of a look at all providers. Holds no tensor and no module."""

    def __init__(
        self, providers: Mapping[str, StateProvider], glances: Mapping[str, Glance]
    ) -> None:
        self._providers = dict(providers)
        self._marks = {name: one.mark for name, one in glances.items()}
        self._died = False
        self.pointers: list[int] = []
        self.devices: set[torch.device] = set()
        watch = {
            id(one): one for found in glances.values() for one in (*found.tensors, *found.alive)
        }
        me = weakref.ref(self)

        def died(_: object) -> None:
            known = me()
            if known is not None:
                known._died = True

        self._watch = [weakref.ref(one, died) for one in watch.values()]
        rows = list(_rows(providers, glances))
        self.names = {row.name for row in rows}
        if len(self.names) != len(rows):
            raise InputError(
                "a provider gave two tensors one name",
                fix="Give each of its segments a key of its own",
            )
        self.states = {
            name: Remembered(provider)
            for name, provider in providers.items()
            if isinstance(provider, OptimizerProvider) and glances[name].segments is None
        }
        # What changes at any time is captured before `save` returns, with all that may share a
        # file with it. What is in the file of the objects is laid out anew each time.
        self.loose = [row for row in rows if row.group == OBJECTS]
        rows = [row for row in rows if row.group != OBJECTS]
        early = {row.group for row in rows if row.eager}
        if any(group.startswith((STATE, OTHER)) for group in early):
            early = {row.group for row in rows}
        self.now = _Part([row for row in rows if row.group in early])
        self.later = _Part([row for row in rows if row.group not in early])

    def fits(self, providers: Mapping[str, StateProvider], glances: Mapping[str, Glance]) -> bool:
        """Whether the providers have what they had."""
        return (
            list(self._providers) == list(providers)
            and all(self._providers[name] is provider for name, provider in providers.items())
            and all(self._marks[name] == found.mark for name, found in glances.items())
            and not self._died  # last, for an identity says nothing of what is no more
        )


def _rows(providers: Mapping[str, StateProvider], glances: Mapping[str, Glance]) -> list[Row]:
    tensors = [tensor for found in glances.values() for tensor in found.tensors]
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    rows = []
    for name, provider in providers.items():
        prefix = prefix_of(name, 0, own=provider.per_rank)
        for key, tensor, group, eager in glances[name].segments or provider.segments():
            full = f"{prefix}/{key}"
            refuse_unusual(tensor, full)
            require_group(group, full)
            rows.append(Row(places[id(tensor)], full, group, eager))
    return rows


def _objects(
    known: _Known, providers: Mapping[str, StateProvider], glances: Mapping[str, Glance]
) -> tuple[dict[str, Any], list[Held]]:
    """The encoded objects, and the tensors that are inside them."""
    objects: dict[str, Any] = {}
    held: list[Held] = []
    names: set[str] = set()
    for name, provider in providers.items():
        state = None
        if name in known.states:
            state = known.states[name].state()
        elif not glances[name].stateless:
            state = provider.state()
        objects[name], inside = encode(state, prefix_of(name, 0, own=provider.per_rank))
        for key, tensor in inside.items():
            if key in known.names or key in names:
                raise InputError(
                    f"two tensors would both be called {key}",
                    fix="Rename one of them in its provider or object",
                )
            names.add(key)
            held.append(Held(key, tensor, OBJECTS, "object"))
    return objects, held


class _Live:
    """The live tensors of one save, and what they were when it began."""

    def __init__(self, known: _Known, glances: Mapping[str, Glance], block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._tensors = list(chain.from_iterable(one.tensors for one in glances.values()))
        self._changes = [one.changes for one in glances.values() if one.changes is not None]
        # Numbers, not one object for each tensor: those would set off the garbage collector.
        self._versions: list[int | None]
        try:
            self._versions = list(map(attrgetter("_version"), self._tensors))
            self._pointers = list(map(torch.Tensor.data_ptr, self._tensors))
        except RuntimeError:  # torch does not count the changes of one, or it has no memory
            for part in (known.now, known.later):
                for row in part.rows:
                    refuse_unusual(self._tensors[row.place], row.name)
            now = [seen(tensor) for tensor in self._tensors]
            self._versions = [one.version for one in now]
            self._pointers = [one.pointer for one in now]
        if known.pointers != self._pointers:
            known.pointers = self._pointers
            known.devices = set(map(attrgetter("device"), self._tensors))
        self.devices = known.devices

    def held(self, row: Row) -> Held:
        """A row with its tensor."""
        return Held(row.name, self._tensors[row.place], row.group, "segment", row.eager)

    def lanes(self, part: _Part, aliases: dict[str, str]) -> list[Lane]:
        """The lanes of some rows; adds the other names of their tensors to `aliases`."""
        tensors = [self._tensors[row.place] for row in part.rows]
        traits: list[object] = [
            self._block_bytes,
            [self._pointers[row.place] for row in part.rows],
            list(map(torch.Tensor.dim, tensors)),
            list(chain.from_iterable(map(attrgetter("shape"), tensors))),
            list(chain.from_iterable(map(torch.Tensor.stride, tensors))),
            list(map(torch.Tensor.is_conj, tensors)),
            list(map(torch.Tensor.is_neg, tensors)),
            *(list(map(attrgetter(name), tensors)) for name in ("dtype", "layout", "device")),
            *(list(map(torch.Tensor.data_ptr, changes)) for changes in self._changes),
        ]
        plan = part.plan
        if plan is None or plan.traits != traits:
            plan = part.plan = self._plan(part.rows, traits)
        aliases |= plan.aliases
        return [
            Lane(
                layout,
                [self._tensors[place] for place in places],
                [self._versions[place] for place in places],
                [self._pointers[place] for place in places],
            )
            for layout, places in plan.layouts
        ]

    def _plan(self, rows: list[Row], traits: list[object]) -> _Plan:
        clocks = clocks_of(self._changes)
        held = []
        for row in rows:
            one = self.held(row)
            refuse_unusual(one.tensor, one.name)
            if clocks and one.group == STATE:
                one = one._replace(group=clocks.get(storage_of(one.tensor), OTHER))
            held.append(one)
        places = {row.name: row.place for row in rows}
        aliases: dict[str, str] = {}
        kept = untie(held, aliases)
        layouts = [
            (layout, [places[name] for name in layout.names])
            for layout, _ in layouts_of(Captured(shared=kept), _ALONE, self._block_bytes)
        ]
        return _Plan(traits, layouts, aliases)

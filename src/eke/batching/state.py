"""What a loader's state holds, and whether a state fits a loader; pure functions over JSON values.

A state names the round in progress (where it began, how many samples it took, which of them were
delivered or dropped, for how many ranks, under which cap and how it was planned) and the
configuration that the order of the samples depends on. It is the same on every rank.

Property: whatever the number of ranks and the cap that a state is loaded for, the samples that are
delivered, dropped or still to come are each sample of the epoch exactly once.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from eke.batching.order import AnyOrder, Place
from eke.errors import InputError

VERSION = 4


@dataclass
class Counts:
    """Samples of all ranks that were not simply used, since the start of the run."""

    empty: int = 0
    skipped: int = 0
    truncated: int = 0
    solo: int = 0


@dataclass(frozen=True)
class Progress:
    """Where a loader stands: `block` blocks delivered, the last in the round that began at `place`.

    Attributes:
        micro_tokens: the cap that the round was planned under.
        waiting: of each rank, the indices that waited when the round began.
        taken: samples that the round took from the order; 0 at the start of a round.
        delivered: their indices so far, in order of delivery.
        dropped: indices that the round dropped; counted in `counts`.
        planner: the version of eke and the cost model that planned the round; others plan otherwise
        begins: a digest of the sample that the epoch of an iterable begins with; "" if nobody read
            it yet.
    """

    place: Place
    block: int
    world_size: int
    micro_tokens: int
    counts: Counts
    waiting: tuple[tuple[int, ...], ...] = ()
    taken: int = 0
    delivered: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    begins: str = ""
    planner: str = field(kw_only=True)

    def to_json(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The state, as JSON values."""
        return {
            "version": VERSION,
            "config": dict(config),
            "world_size": self.world_size,
            "micro_tokens": self.micro_tokens,
            "waiting": [list(one) for one in self.waiting],
            "epoch": self.place.epoch,
            "cursor": self.place.cursor,
            "pending": list(self.place.pending),
            "ended": list(self.place.ended),
            "taken": self.taken,
            "delivered": list(self.delivered),
            "dropped": list(self.dropped),
            "begins": self.begins,
            "planner": self.planner,
            "block": self.block,
            "counts": vars(self.counts).copy(),
        }

    def position(self) -> dict[str, Any]:
        """Where it stands, for ranks to compare: two that differ in any sample differ in this."""
        place = self.place
        lists = [place.pending, place.ended, self.waiting, self.taken, self.delivered, self.dropped]
        samples = hashlib.blake2b(json.dumps(lists).encode(), digest_size=8).hexdigest()
        return {
            "epoch": place.epoch, "cursor": place.cursor, "block": self.block, "samples": samples
        }  # fmt: skip

    def move_to(
        self, order: AnyOrder, world_size: int, micro_tokens: int, planner: str
    ) -> Progress:
        """The same progress for so many ranks, this cap and this planner.

        If any is another, the round ends here: what is left of it goes first in the next one.
        """
        planned = (self.world_size, self.micro_tokens, self.planner)
        if planned == (world_size, micro_tokens, planner):
            return self
        indices, after = order.window(self.place, self.taken)
        done = {*self.delivered, *self.dropped}
        own = [index for one in self.waiting for index in one]
        rest = tuple(index for index in (*own, *indices) if index not in done)
        place = replace(after, pending=rest + after.pending)
        begins = self.begins if place.epoch == self.place.epoch else ""
        return Progress(
            place, self.block, world_size, micro_tokens, self.counts, begins=begins, planner=planner
        )


def progress_of(
    state: Mapping[str, Any], config: Mapping[str, Any], samples: int | None
) -> Progress:
    """Read a state that `Progress.to_json` wrote.

    Args:
        samples: how many the dataset has; `None` if nobody knows.

    Raises:
        InputError: it was written under another configuration, by a newer eke, or is damaged.
    """
    if not isinstance(state, Mapping):
        raise _damaged(f"a {type(state).__name__}")
    version = state.get("version")
    if version != VERSION:
        raise InputError(
            "the loader's state has an unknown version",
            value=version,
            rule=f"this eke reads version {VERSION}",
            fix="Resume with the version of eke that wrote the checkpoint",
        )
    saved = state.get("config")
    if not isinstance(saved, Mapping):
        raise _damaged(f"its config is a {type(saved).__name__}")
    # The cap is no part of what the order depends on: a round under another one is planned anew.
    differing = [k for k in config if k != "micro_tokens" and saved.get(k) != config[k]]
    if differing:
        raise InputError(
            f"the loader's state was saved with other settings: {', '.join(differing)}",
            value={key: config[key] for key in differing},
            rule=f"the state has { ({key: saved.get(key) for key in differing})!r}",
            fix="Resume with the same settings, or start a new run",
        )
    try:
        progress = Progress(
            Place(
                int(state["epoch"]),
                int(state["cursor"]),
                tuple(map(int, state["pending"])),
                tuple(map(int, state["ended"])),
            ),
            block=int(state["block"]),
            world_size=int(state["world_size"]),
            micro_tokens=int(state["micro_tokens"]),
            waiting=tuple(tuple(map(int, one)) for one in state["waiting"]),
            counts=Counts(**{f.name: int(state["counts"][f.name]) for f in fields(Counts)}),
            taken=int(state["taken"]),
            delivered=tuple(map(int, state["delivered"])),
            dropped=tuple(map(int, state["dropped"])),
            planner=str(state["planner"]),
            begins=str(state["begins"]),
        )
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise _damaged(f"{type(error).__name__}: {error}") from error
    _check(progress, math.inf if samples is None else samples, config.get("dataset_parts") or 0)
    return progress


def _check(progress: Progress, samples: float, parts: int) -> None:
    """Refuse what no loader can have written; a sample named twice would be seen twice.

    Raises:
        InputError: which.
    """
    place = progress.place
    if not (place.epoch >= 0 and 0 <= place.cursor <= samples):
        raise _damaged(f"epoch {place.epoch}, cursor {place.cursor}")
    least = {"block": 0, "taken": 0, "world_size": 1, "micro_tokens": 2}
    for name, value in least.items():
        if getattr(progress, name) < value:
            raise _damaged(f"{name} {getattr(progress, name)}")
    if len(progress.waiting) not in (0, progress.world_size):
        raise _damaged(f"waiting of {len(progress.waiting)} ranks, of {progress.world_size}")
    ahead = [*place.pending, *(index for one in progress.waiting for index in one)]
    if list(place.ended) != sorted({*range(parts)} & {*place.ended}):
        raise _damaged(f"ended {place.ended}, of {parts} parts")
    for indices in (ahead, [*progress.delivered, *progress.dropped]):
        if any(not 0 <= index < samples for index in indices):
            raise _damaged(f"a sample outside 0..{samples - 1}")
        twice = [index for index, times in Counter(indices).items() if times > 1]
        if twice:
            raise _damaged(f"sample {twice[0]} is there twice")
    if (progress.delivered or progress.dropped) and not progress.taken:
        raise _damaged("samples were delivered of a round that took none")


def _damaged(why: str) -> InputError:
    return InputError(
        "the loader's state is damaged", value=why, fix="Resume from another checkpoint"
    )

"""One save, from captured blocks to a committed checkpoint: what the engine's writer runs.

Rank 0 makes the attempt's directory; every rank writes its files there and reports their lengths
and hashes; rank 0 checks that together they cover every tensor exactly once, and commits; after
that, when nobody waits for this save any more, older checkpoints are deleted. Nothing here is a
collective.

A file whose every tensor hashes to what the newest committed checkpoint has is linked instead of
written, which leaves the bytes on the disk once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eke.checkpoint.capture import Captured
from eke.checkpoint.checks import ManifestError
from eke.checkpoint.commit import Attempt, clean, expire
from eke.checkpoint.conference import Conference
from eke.checkpoint.device import Device, Issued
from eke.checkpoint.errors import SaveError, disk_error
from eke.checkpoint.flow import Flow, Link, Spot
from eke.checkpoint.lane import Lane, Stated
from eke.checkpoint.manifest import (
    FileEntry,
    Manifest,
    ObjectEntry,
    TensorEntry,
    check,
    merge,
    serialise,
)
from eke.checkpoint.objects import to_json
from eke.checkpoint.opening import OBJECTS_FORMAT, OBJECTS_VERSION
from eke.checkpoint.previous import Previous
from eke.checkpoint.providers import FROZEN, OBJECTS, OTHER
from eke.checkpoint.retention import Keep
from eke.checkpoint.storage import Storage
from eke.checkpoint.tensorfile import write_file
from eke.checkpoint.ticket import Ticket
from eke.checkpoint.together import describe, rebuild
from eke.checkpoint.work import Array, Progress, Written
from eke.checkpoint.write import LaneWriter, objects_file
from eke.distributed import Store, World
from eke.errors import EkeError
from eke.version import __version__

log = logging.getLogger("eke.checkpoint")

Rest = tuple[list[Lane], dict[str, str]]
"""Lanes that were not known when a save began, and the aliases of all of its tensors."""

BYE_S = 5.0
"""How long rank 0 keeps its store up for a rank that has not heard the end."""


@dataclass(frozen=True)
class Place:
    """Where and how saves are made; the same for all saves of a checkpointer."""

    storage: Storage
    root: Path
    durable: bool
    keep: Keep
    here: World
    store: Store | None
    patience_s: float
    previous: Previous


class Save:
    """One save's task for the engine (see `work.Task`)."""

    def __init__(
        self,
        place: Place,
        ticket: Ticket,
        captured: Captured,
        lanes: list[Lane],
        token: str,
        protected: frozenset[int],
        rest: Callable[[], Rest] | None = None,
    ) -> None:
        self.ticket, self.doing, self._rest = ticket, "", rest
        self._place, self._lanes, self._token, self._protected = place, lanes, token, protected
        self._aliases, self._objects = captured.aliases, captured.objects
        self._per_rank, self._mesh = captured.per_rank, captured.mesh
        self.eager: Mapping[int, int] = {
            i: lane.layout.eager_blocks for i, lane in enumerate(lanes) if lane.layout.eager_blocks
        }
        self.flow = Flow(*self._flowing(0), more=rest is not None)
        self._last: list[dict[Hashable, int]] | None = None
        self._stated: dict[str, Stated] = {}
        self._talk: Conference | None = None

    # ------------------------------------------------------------------ capture

    def _flowing(self, first: int) -> tuple[list[int], list[int], list[int]]:
        """For the flow: the blocks of the lanes from `first` on; which of these lanes may be the
        same as in the newest checkpoint; and for which of those nothing waits."""
        groups = [(i, lane.layout.group) for i, lane in enumerate(self._lanes)][first:]
        return (
            [len(lane.blocks) for lane in self._lanes[first:]],
            [i for i, group in groups if group != OBJECTS],
            [i for i, group in groups if group in (FROZEN, OTHER)],
        )

    def more(self) -> tuple[Sequence[int], Collection[int], Collection[int]]:
        """See `work.Task`."""
        assert self._rest is not None
        lanes, self._aliases = self._rest()
        self._rest = None
        first = len(self._lanes)
        self._lanes = [*self._lanes, *lanes]
        return self._flowing(first)

    def wanted(self, storages: Collection[object] | None) -> Mapping[int, int]:
        """See `work.Task`."""
        if storages is None:
            return {i: len(lane.blocks) for i, lane in enumerate(self._lanes)}
        lasts = self._last  # read once: the writer may release all of it meanwhile
        if lasts is None:
            lasts = self._last = [lane.last_blocks() for lane in self._lanes]
        found = {}
        for index, last in enumerate(lasts):
            blocks = max((last[one] for one in storages if one in last), default=0)
            if blocks:
                found[index] = blocks
        return found

    def device(self, lane: int) -> Device | None:
        """See `work.Task`."""
        return self._lanes[lane].device

    def fill(self, spot: Spot, slot: Array) -> Issued | None:
        """See `work.Task`."""
        return self._lanes[spot.lane].fill(spot.block, slot)

    def same(self, lane: int, scratch: Array) -> bool:
        """See `work.Task`."""
        return self._place.previous.same(self._lanes[lane], scratch)

    def release(self) -> None:
        """See `work.Task`."""
        self._lanes, self._last, self._rest = [], None, None
        self._objects = {}

    def failure(self, error: BaseException) -> EkeError:
        """What the user is told: one `SaveError` that has the ticket."""
        if isinstance(error, SaveError):
            return error
        return save_error(self.ticket, error)

    # ------------------------------------------------------------------ writing

    def run(self, blocks: Iterator[Written], progress: Progress) -> int:
        """See `work.Task`."""
        place = self._place
        if place.store is not None:
            self.doing = "talking to rank 0"
            self._talk = Conference(
                place.store, self._token, place.here, place.patience_s, progress.moved
            )
        if place.here.is_main:
            return self._lead(blocks, progress)
        return self._follow(blocks, progress)

    def _lead(self, blocks: Iterator[Written], progress: Progress) -> int:
        place, talk = self._place, self._talk
        attempt = Attempt(place.storage, place.root, self.ticket.step, place.durable, self._token)
        others = range(1, place.here.size) if talk is not None else ()
        during = self.ticket.marks.during
        try:
            clean(place.storage, place.root)
            attempt.begin()
            if talk is not None:
                talk.tell("begun", {})
            reports = [self._write(attempt.path, blocks)]
            progress.persisted()
            with during("commit", "other ranks"):
                for rank in others:
                    assert talk is not None
                    reports.append(self._opened(rank, self._hear(talk, ["report"], rank)))
            with during("commit", "commit"):
                data = self._serialised(reports)
            self.doing = f"committing in {place.root}"
            with during("commit", "commit"):
                path = attempt.commit(data, progress.decide)
            linked = {name for report in reports for name in report["linked"]}
            files = {name: file for report in reports for name, file in report["files"].items()}
            size = len(data) + sum(
                int(file["bytes"]) for name, file in files.items() if name not in linked
            )
            self._done({"bytes": size})
            self._remember(path, reports[0])
        except BaseException as error:
            self._done({"error": describe(self._shown(error))})
            raise
        finally:
            attempt.abort()
        return size

    def tidy(self) -> None:
        """See `engine.Task`."""
        if not self._place.here.is_main:
            return
        self._farewell()
        if self.ticket.state == "committed":
            with self.ticket.marks.during("commit", "retention"):
                self._expire()

    def _done(self, outcome: dict[str, Any]) -> None:
        if self._talk is not None:
            self._talk.tell("done", outcome)

    def _farewell(self) -> None:
        """Stay until every rank has heard the end, for rank 0's process serves the store."""
        if self._talk is None:
            return
        for rank in range(1, self._place.here.size):
            try:
                self._talk.hear(["bye"], rank, at_most_s=BYE_S)
            except EkeError as error:
                log.warning("step %d: %s", self.ticket.step, error)
        self._talk.forget()

    def _follow(self, blocks: Iterator[Written], progress: Progress) -> int:
        place, talk = self._place, self._talk
        assert talk is not None
        directory = Attempt(
            place.storage, place.root, self.ticket.step, place.durable, self._token
        ).path
        report: dict[str, Any] = {}
        try:
            self._opened(0, self._hear(talk, ["begun", "done"], 0))
            report = self._write(directory, blocks)
            progress.persisted()
            progress.decide()
            talk.tell("report", {**report, "tensors": self._tensors()})
            size = int(self._opened(0, self._word(talk))["bytes"])
        except Exception as error:
            outcome = talk.look("done", 0)
            if outcome is not None and "error" in outcome:
                self._opened(0, outcome)  # rank 0 gave up first: its reason is the reason
            talk.tell("report", {"error": describe(self._shown(error))})
            raise
        finally:
            talk.tell("bye", {})
        self._remember(directory.parent / self.ticket.path.name, report)
        return size

    def _remember(self, path: Path, report: dict[str, Any]) -> None:
        self._place.previous.committed(path, report["files"], self._stated, report["aliases"])

    def _tensors(self) -> dict[str, Any]:
        """The manifest's entries of what this rank has written."""
        return {
            name: entry
            for layout, hashes in self._stated.values()
            for name, entry in layout.stated(hashes).items()
        }

    def _hear(self, talk: Conference, whats: list[str], rank: int) -> dict[str, Any]:
        self.doing = f"waiting for rank {rank}"
        row: dict[str, Any] = talk.hear(whats, rank)
        return row

    def _word(self, talk: Conference) -> dict[str, Any]:
        """Rank 0's last word, after which the save is committed or has failed on every rank."""
        try:
            return self._hear(talk, ["done"], 0)
        except EkeError as error:
            raise EkeError(
                error.what,
                value=error.value,
                rule="whether it has become a checkpoint only rank 0 can say",
                fix=error.fix,
            ) from error

    def _opened(self, rank: int, row: dict[str, Any]) -> dict[str, Any]:
        """What a rank said, or its error."""
        if "error" in row:
            raise rebuild(f"saving step {self.ticket.step}", rank, row["error"])
        return row

    def _shown(self, error: BaseException) -> BaseException:
        if isinstance(error, OSError):
            return disk_error(f"saving step {self.ticket.step}", error)
        return error

    def _write(self, directory: Path, blocks: Iterator[Written]) -> dict[str, Any]:
        """Write this rank's files into the attempt; returns what they are."""
        storage, durable = self._place.storage, self._place.durable
        report: dict[str, Any] = {
            "files": {},
            "linked": [],
        }
        during = self.ticket.marks.during
        with during("write", "objects"):
            self._write_objects(directory, report)
        writers: dict[int, LaneWriter] = {}
        path = directory
        try:
            for what, data in blocks:
                if self._talk is not None:
                    self._talk.beat()
                lane = self._lanes[what.lane]
                path = directory / lane.layout.file
                self.doing = f"writing {path}"
                if isinstance(what, Link):
                    with during("write", "link"):
                        entry, stated = self._place.previous.link(lane, directory, durable)
                    report["linked"].append(lane.layout.file)
                else:
                    assert data is not None
                    if what.lane not in writers:
                        writers[what.lane] = LaneWriter(storage, directory, lane)
                    with during("write", "write"):
                        writers[what.lane].write(what.block, data)
                    if what.block + 1 < len(lane.blocks):
                        continue
                    with during("write", "fsync"):
                        entry, stated = writers.pop(what.lane).finish(durable)
                report["files"][lane.layout.file] = entry
                self._stated[lane.layout.file] = stated
        except OSError as error:
            error.filename = str(path)
            raise
        finally:
            with ExitStack() as all_of_them:  # also when one cannot be closed
                for writer in writers.values():
                    all_of_them.callback(writer.close)
        report["aliases"] = self._aliases
        return report

    def _write_objects(self, directory: Path, report: dict[str, Any]) -> None:
        rank = self._place.here.rank
        values = {
            "format": OBJECTS_FORMAT,
            "version": OBJECTS_VERSION,
            "rank": rank,
            "objects": {
                name: tree
                for name, tree in self._objects.items()
                if rank == 0 or self._per_rank[name]
            },
        }
        data = to_json(values) + b"\n"
        path = directory / objects_file(rank)
        self.doing = f"writing {path}"
        report["files"][path.name] = write_file(
            self._place.storage, path, data, self._place.durable
        )

    # ------------------------------------------------------------------ committing

    def _serialised(self, reports: list[dict[str, Any]]) -> bytes:
        """The manifest of what all ranks wrote.

        Raises:
            EkeError: together they did not write every tensor exactly once.
        """
        own = reports[0]
        if len(reports) == 1 and self._place.previous.alike(
            own["files"], self._stated, own["aliases"]
        ):
            # That these tensors are whole was found when they were first saved like this.
            files = {name: FileEntry(**entry) for name, entry in own["files"].items()}
            texts = [layout.text(hashes) for layout, hashes in self._stated.values()]
            return serialise(
                self._manifest(files, {}, own["aliases"]), ",".join(text for text in texts if text)
            )
        try:
            manifest = self._manifest(*merge([{**own, "tensors": self._tensors()}, *reports[1:]]))
            check(manifest)
        except ManifestError as error:
            where = error.tensor or error.file or "the manifest"
            step = self.ticket.step
            raise EkeError(f"saving step {step} failed: {where}: {error.detail}") from error
        return serialise(manifest)

    def _manifest(
        self,
        files: Mapping[str, FileEntry],
        tensors: Mapping[str, TensorEntry],
        aliases: Mapping[str, str],
    ) -> Manifest:
        ranks = self._place.here.size
        return Manifest(
            step=self.ticket.step,
            world_size=ranks,
            mesh=self._mesh,
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
                for name, own in self._per_rank.items()
            },
        )

    def _expire(self) -> None:
        """Apply retention. The new checkpoint is safe by now, so a failure here is not a save's."""
        place = self._place
        try:
            expire(
                place.storage,
                place.root,
                place.keep,
                protected=self._protected,
                durable=place.durable,
            )
        except OSError as error:
            log.warning("could not delete an old checkpoint (%s); the next save tries again", error)


def save_error(ticket: Ticket, error: BaseException) -> SaveError:
    """The error of a failed save; the disk's refusal with what to do about it."""
    doing = f"saving step {ticket.step}"
    if isinstance(error, OSError):
        shown = disk_error(doing, error)
    elif isinstance(error, EkeError):
        shown = error
    else:
        shown = EkeError(f"{doing} failed: {type(error).__name__}: {error}")
    named = f"step {ticket.step} " in f"{shown.what} "
    failed = SaveError(
        shown.what if named else f"{doing} failed: {shown.what}",
        value=shown.value,
        rule=shown.rule or "older checkpoints are untouched",
        fix=shown.fix,
    )
    failed.ticket = ticket
    failed.__cause__ = error
    return failed

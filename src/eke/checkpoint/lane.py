"""One file of a save: how it is laid out, and the live tensors that fill it.

A `Layout` depends on names, dtypes and shapes alone. Most saves are of the same tensors as the one
before and share its layouts; what is new in each is the `Lane`: a layout with live tensors.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from eke.checkpoint.device import Device, Issued, device_of, wait_until_over
from eke.checkpoint.plan import HEADER, Block
from eke.checkpoint.source import Changed, Seen, Source, seen, storage_of
from eke.errors import EkeError


@dataclass(frozen=True, eq=False)
class Layout:
    """A file's bytes.

    Attributes:
        names: its tensors, in the order of their bytes.
        entries: the manifest's entry of each, but for the hash of its one shard, which is "".
        starts: where in the file each of them begins.
        sizes: how many bytes each of them has.
        eager_blocks: the first so many blocks hold all that must be captured at once.
    """

    file: str
    group: str
    header: bytes
    names: list[str]
    entries: list[dict[str, Any]]
    starts: list[int]
    sizes: list[int]
    blocks: list[Block]
    eager_blocks: int

    @property
    def nbytes(self) -> int:
        """The file's length."""
        return self.blocks[-1].end

    @cached_property
    def by_size(self) -> list[int]:
        """The tensors' numbers, small ones first."""
        return sorted(range(len(self.sizes)), key=self.sizes.__getitem__)

    def stated(self, hashes: Mapping[int, str]) -> dict[str, Any]:
        """The manifest's entries of this file's tensors, from their hashes."""
        return {
            name: {**entry, "shards": [{**entry["shards"][0], "xxh3_128": hashes[number]}]}
            for number, (name, entry) in enumerate(zip(self.names, self.entries, strict=True))
        }

    def like(self, other: Layout) -> bool:
        """Whether the other file has the same tensors at the same places."""
        return self is other or (
            self.names == other.names
            and self.entries == other.entries
            and self.header == other.header
        )

    @cached_property
    def _heads(self) -> list[str]:
        """The manifest's text of each tensor up to its hash, which comes last."""
        dumps = partial(json.dumps, separators=(",", ":"))
        heads = []
        for name, entry in zip(self.names, self.entries, strict=True):
            text = f"{dumps(name)}:{dumps(entry)}"
            if not text.endswith(f'"xxh3_128":"{_TAIL}'):
                raise ValueError("an entry does not end with its hash")
            heads.append(text.removesuffix(_TAIL))
        return heads

    def text(self, hashes: Mapping[int, str]) -> str:
        """The members of the JSON object that `stated` is."""
        return ",".join([head + hashes[n] + _TAIL for n, head in enumerate(self._heads)])


_TAIL = '"}]}'


def _places(sources: Mapping[int, Source]) -> set[tuple[Device, torch.device]]:
    """What copies these, and where they are."""
    return {(one.device, one.place) for one in sources.values() if one.device is not None}


class Stated(NamedTuple):
    """A file that was written or linked: its layout, and the hash of each of its tensors."""

    layout: Layout
    hashes: Mapping[int, str]


class Lane:
    """One file: its layout, and what is live.

    Args:
        layout: of the file.
        tensors: the live tensors, in the layout's order.
        versions, pointers: of each when the save began, see `Seen`; as they are now, by default.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        versions: Sequence[int | None] | None = None,
        pointers: Sequence[int] | None = None,
    ) -> None:
        self.layout, self._tensors = layout, tensors
        if versions is None or pointers is None:
            now = [seen(tensor) for tensor in tensors]
            versions = [one.version for one in now]
            pointers = [one.pointer for one in now]
        self._versions, self._pointers = versions, pointers
        self._sources: dict[int, Source] = {}
        self._wholes: dict[int, tuple[torch.Tensor, int]] = {}

    def watch(self, wholes: Mapping[int, torch.Tensor]) -> None:
        """Watch DTensors that some of the tensors, by number, are this rank's part of: torch counts
        changes of the DTensor, and none of the part's."""
        self._wholes |= {number: (whole, whole._version) for number, whole in wholes.items()}

    @property
    def blocks(self) -> list[Block]:
        """What it is captured and written in."""
        return self.layout.blocks

    @cached_property
    def device(self) -> Device | None:
        """What copies some of its tensors; None if they are all in host memory."""
        return next(filter(None, map(device_of, self._tensors)), None)

    def fill(self, block: int, slot: npt.NDArray[np.uint8]) -> Issued | None:
        """Copy a block from what is live; returns what is under way on a device, if anything.

        Raises:
            EkeError: a tensor was changed before it was captured.

        When it raises, whatever that is, nothing is under way.
        """
        remote: dict[int, Source] = {}
        try:
            for tensor, begin, end, at in self.blocks[block].parts:
                target = slot[at:]
                if tensor == HEADER:
                    target[: end - begin] = np.frombuffer(self.layout.header, np.uint8)[begin:end]
                    continue
                with self._unchanged(tensor):
                    source = self._source(tensor)
                    if source.device is not None:
                        remote[tensor] = source
                    source.fill(target, begin, end)
                if end == self.layout.sizes[tensor]:
                    self._sources.pop(tensor, None)
            return self._under_way(remote) if remote else None
        except BaseException as first:
            failed: Exception | None = None
            for device, place in _places(remote):
                try:
                    wait_until_over(device, place)
                except Exception as caught:  # noqa: BLE001 - raised below: the others still write
                    failed = failed or caught
            if failed is not None and isinstance(first, Exception):
                raise failed from first
            raise

    def _under_way(self, remote: Mapping[int, Source]) -> Issued:
        """What was issued for some tensors, by number."""

        def check() -> None:
            for tensor, source in remote.items():
                with self._unchanged(tensor):
                    source.check()

        return Issued([device.event(place) for device, place in _places(remote)], check)

    def digest(self, tensor: int, scratch: npt.NDArray[np.uint8]) -> str:
        """The hash of a tensor as it is now.

        Raises:
            EkeError: it was changed before it was captured.
        """
        with self._unchanged(tensor):
            return self._new_source(tensor).digest(scratch)

    def _source(self, tensor: int) -> Source:
        """Made when the first part of a tensor is copied, and kept until the last is."""
        found = self._sources.get(tensor)
        if found is None:
            found = self._sources[tensor] = self._new_source(tensor)
        return found

    def _new_source(self, tensor: int) -> Source:
        found = Source(self._tensors[tensor], Seen(self._versions[tensor], self._pointers[tensor]))
        if found.nbytes != self.layout.sizes[tensor]:
            raise Changed
        return found

    @contextmanager
    def _unchanged(self, tensor: int) -> Iterator[None]:
        try:
            yield
            if tensor in self._wholes:
                whole, version = self._wholes[tensor]
                if whole._version != version:
                    raise Changed
        except Changed as error:
            raise EkeError(
                f"the tensor {self.layout.names[tensor]} was changed before it was captured",
                rule="between save() and the next step() of a torch.optim optimizer, nothing "
                "changes what is attached",
                fix="Call Checkpointer.barrier() before anything else changes it: an average "
                "of weights, a hand-written update, load_state_dict",
            ) from error

    def last_blocks(self) -> dict[Hashable, int]:
        """Memory -> how many of the first blocks hold all of it."""
        found: dict[Hashable, int] = {}
        for number, block in enumerate(self.blocks, 1):
            for part in block.parts:
                if part.tensor != HEADER:
                    found[storage_of(self._tensors[part.tensor])] = number
        return found

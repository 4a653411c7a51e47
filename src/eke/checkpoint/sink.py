"""Where the bytes of a saved tensor go: the memory of a live tensor, whatever it is like.

Memory that lies as the file does is offered as `room`, to be read into directly. All else is given
stretches of a shard through `put`: a target that is transposed, a view, expanded, on a GPU, or of
another floating-point type. Copies are numpy's, or of at most `SERIAL` elements: no torch operator
that would start OpenMP threads beside the ones that read.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from eke.checkpoint.boxes import overlap, pieces, span
from eke.distributed import Box
from eke.errors import InputError

Bytes = npt.NDArray[np.uint8]

SERIAL = 1 << 14
"""torch works on fewer than 2**15 elements in one thread."""

_PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Room(NamedTuple):
    """Bytes `begin` to `end` of a shard belong into this memory, as they are."""

    begin: int
    end: int
    memory: Bytes


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a type that numpy knows, bit for bit."""
    bare = tensor.detach()
    return bare.view(_PLAIN[bare.element_size()]) if bare.element_size() in _PLAIN else bare


class Sink:
    """A live tensor, as the place for the box of a saved tensor that begins at `offset`.

    Several threads may `put` different shards at once, unless `serial`.

    Args:
        target: a plain strided tensor, filled in place.
        offset: where in the whole tensor it begins.
        dtype: that of the saved tensor; both must be floating-point types if they differ.
    """

    def __init__(self, target: torch.Tensor, offset: tuple[int, ...], dtype: torch.dtype) -> None:
        self.target, self._saved = target.detach(), dtype
        self.box = Box(offset, tuple(target.shape))
        self._cast = target.dtype != dtype
        self._odd = target.is_conj() or target.is_neg()
        repeated = [
            size > 1 and stride == 0
            for size, stride in zip(target.shape, target.stride(), strict=True)
        ]
        self._repeated = self.serial = any(repeated)
        self._once: torch.Tensor | None = None
        live = self.target
        if self._repeated:
            for axis, several in enumerate(repeated):
                if several:
                    live = live.narrow(axis, 0, 1)
            if live.device.type != "cpu" or self._odd:
                # torch refuses to write into an expanded tensor: into a plain one of its size first
                self._once, self._odd = live, False
                live = torch.empty(live.shape, dtype=live.dtype)
            self._seen = np.broadcast_to(seen := np.zeros(live.shape, np.bool_), self.box.shape)
            self._mark = seen
            live = live.expand(self.box.shape)
        self._live = live
        self._by_torch = live.device.type != "cpu" or self._odd
        self._array = None if self._by_torch else plain(live).numpy()

    def room(self, shard: Box) -> Room | None:
        """Where the shard's part of the target lies as it does in the file, if it does."""
        common = overlap(shard, self.box)
        if common is None or self._cast or self._by_torch or not self._live.is_contiguous():
            return None
        there, here = span(shard.shape, common[0]), span(self.box.shape, common[1])
        if there is None or here is None:
            return None
        size = self._live.element_size()
        memory = plain(self._live).reshape(-1).view(torch.uint8).numpy()
        return Room(there[0] * size, there[1] * size, memory[here[0] * size : here[1] * size])

    def put(self, shard: Box, begin: int, data: Bytes) -> None:
        """Take a stretch of a shard: its bytes from `begin`, both on an element's border.

        Raises:
            InputError: several elements of the target are one place in memory (an expanded
                tensor), and the saved values for them differ.
        """
        size = self._saved.itemsize
        values = torch.from_numpy(data).view(self._saved)
        if not self._cast:
            self._put(shard, begin // size, values)
            return
        for at in range(0, len(values), SERIAL):
            few = values[at : at + SERIAL].to(self._live.dtype)
            self._put(shard, begin // size + at, few)

    def _put(self, shard: Box, first: int, values: torch.Tensor) -> None:
        array = plain(values).numpy()
        for piece in pieces(shard, self.box, first, first + len(values)):
            count = prod(piece.shape)
            if self._array is None:
                some = values[piece.at : piece.at + count].reshape(piece.shape)[piece.taken]
                self._live[piece.place].copy_(some)
                continue
            part = array[piece.at : piece.at + count].reshape(piece.shape)[piece.taken]
            place = self._array[piece.place]
            if self._repeated:
                self._repeat(piece.place, place, part)
            else:
                np.copyto(place, part)

    def _repeat(
        self, where: tuple[slice, ...], place: npt.NDArray[Any], part: npt.NDArray[Any]
    ) -> None:
        known = self._seen[where] & (place != part)
        np.copyto(place, part)
        if known.any() or (place != part).any():
            raise InputError(
                f"a live tensor of shape {self.box.shape} is expanded, and the saved one has "
                "different values where it has one",
                fix="Make it contiguous before restoring",
            )
        ends = [
            slice(0, 1) if size == 1 else part
            for size, part in zip(self._mark.shape, where, strict=True)
        ]
        self._mark[tuple(ends)] = True

    def finish(self) -> None:
        """All of the box has been put: make it seen by the target and by autograd."""
        if self._once is not None:
            self._once.copy_(self._live[tuple(slice(0, n) for n in self._once.shape)])
        if not self.target.is_inference():
            torch.autograd.graph.increment_version(self.target)


def clashing(sinks: Sequence[Sink]) -> list[Sink]:
    """Those whose memory may overlap another one's: filled at once, neither would have its bytes.

    Two targets that interleave without overlapping, such as columns of one tensor, are counted.
    """
    spans = []
    for sink in sinks:
        live = sink.target
        if live.numel():
            pairs = zip(live.shape, live.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in pairs)
            end = live.data_ptr() + (last + 1) * live.element_size()
            spans.append((str(live.device), live.data_ptr(), end, sink))
    spans.sort(key=lambda span: span[:3])
    found: dict[int, Sink] = {}
    reach: tuple[str, int, Sink] | None = None
    for device, begin, end, sink in spans:
        if reach is not None and reach[0] == device and begin < reach[1]:
            found |= {id(reach[2]): reach[2], id(sink): sink}
            if end <= reach[1]:
                continue
        reach = (device, end, sink)
    return list(found.values())

"""Packing samples end to end into micro-batches without padding: a pure function.

Longest first, each sample goes to the micro-batch that takes the least time so far, if it fits
there, and otherwise to the fullest one into which it fits. The first keeps the times alike, the
second leaves room for what is still to come.

Properties: no micro-batch exceeds a cap, except one that holds a single sample; every sample is
in one micro-batch or among those that were left; none is left if there are as many micro-batches
as samples.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def pack(
    lengths: Sequence[int],
    times: Sequence[int],
    k: int,
    tokens: int,
    loads: Sequence[Sequence[int]] = (),
    caps: Sequence[int] = (),
) -> tuple[list[list[int]], list[int]]:
    """Pack samples into `k` micro-batches of at most `tokens` tokens and `caps` of other resources.

    Args:
        lengths: of each sample, in tokens.
        times: how long each takes.
        loads: what each takes of every other resource; empty if there is none.

    Returns:
        The numbers of the samples in each micro-batch, the longest first, and those that fit
        nowhere.
    """
    room = [tokens] * k
    rooms = [list(caps)] * k
    bins: list[list[int]] = [[] for _ in range(k)]
    left: list[int] = []
    busy = [(0, at) for at in range(k)]  # a heap: the least busy first
    none: tuple[int, ...] = ()
    for number in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[number]
        load = loads[number] if loads else none
        time, at = busy[0]
        if length <= room[at] and (not load or _within(load, rooms[at])):
            heapq.heapreplace(busy, (time + times[number], at))
        else:
            alone = length > tokens or (load and not _within(load, caps))
            at = _empty(bins) if alone else _fullest(length, load, room, rooms)
            if at < 0:
                left.append(number)
                continue
            busy = [(time + times[number] * (one == at), one) for time, one in busy]
            heapq.heapify(busy)
        bins[at].append(number)
        room[at] -= length
        if load:
            rooms[at] = [have - take for take, have in zip(load, rooms[at], strict=True)]
    return bins, left


def _within(loads: Sequence[int], rooms: Sequence[int]) -> bool:
    return all(take <= have for take, have in zip(loads, rooms, strict=True))


def _empty(bins: Sequence[Sequence[int]]) -> int:
    return next((at for at, one in enumerate(bins) if not one), -1)


def _fullest(
    length: int, loads: Sequence[int], room: Sequence[int], rooms: Sequence[Sequence[int]]
) -> int:
    """The micro-batch with the least room of those in which the sample fits, or -1."""
    best = -1
    for at, free in enumerate(room):
        fuller = free >= length and (best < 0 or free < room[best])
        if fuller and (not loads or _within(loads, rooms[at])):
            best = at
    return best

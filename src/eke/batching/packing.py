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
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence


def pack(
    lengths: Sequence[int],
    times: Sequence[int],
    numbers: Iterable[int],
    k: int,
    tokens: int,
    loads: Sequence[Sequence[int]] = (),
    caps: Sequence[int] = (),
) -> tuple[list[list[int]], list[int]]:
    """Pack samples into `k` micro-batches of at most `tokens` tokens and `caps` of other resources.

    Args:
        lengths: of each sample, in tokens.
        times: how long each takes.
        numbers: which of them to pack.
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
    for number in sorted(numbers, key=lengths.__getitem__, reverse=True):
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


def fill(
    bins: list[list[int]], spare: Iterable[int], lengths: Sequence[int], tokens: int, must: int
) -> list[int]:
    """Use the room that is left in micro-batches, by samples that could also wait.

    What fits is added; then one sample of a micro-batch is exchanged for a longer spare one, that
    which leaves the least room.

    Args:
        bins: the numbers of the samples in each micro-batch; changed in place.
        spare: the numbers of those in none.
        tokens: the most of a micro-batch.
        must: samples of lower numbers are in one already, and may not leave it.

    Returns:
        The numbers of those that are in none now.
    """
    waiting = sorted((lengths[number], number) for number in spare)
    no_number = len(lengths)
    for one in bins:
        room = tokens - sum([lengths[number] for number in one])
        while waiting and waiting[0][0] <= room:
            length, number = waiting.pop(bisect_right(waiting, (room, no_number)) - 1)
            one.append(number)
            room -= length
        gain, place, taken = 0, -1, -1
        for at, number in enumerate(one if room > 0 and waiting else ()):
            if number < must:
                continue
            length = lengths[number]
            found = bisect_right(waiting, (length + room, no_number)) - 1
            if found >= 0 and waiting[found][0] - length > gain:
                gain, place, taken = waiting[found][0] - length, at, found
        if gain:
            number, one[place] = one[place], waiting.pop(taken)[1]
            insort(waiting, (lengths[number], number))
        one.sort(key=lambda number: -lengths[number])
    return [number for _, number in waiting]


def _within(loads: Sequence[int], rooms: Sequence[int]) -> bool:
    return all(take <= have for take, have in zip(loads, rooms, strict=True))


def _empty(bins: Sequence[Sequence[int]]) -> int:
    return next((at for at, one in enumerate(bins) if not one), -1)


def _fullest(
    length: int, loads: Sequence[int], room: Sequence[int], rooms: Sequence[Sequence[int]]
) -> int:
    """The micro-batch with the least room of those in which the sample fits, or -1."""
    if not loads:
        fits = [free for free in room if free >= length]
        return room.index(min(fits)) if fits else -1
    best = -1
    for at, free in enumerate(room):
        fuller = free >= length and (best < 0 or free < room[best])
        if fuller and _within(loads, rooms[at]):
            best = at
    return best

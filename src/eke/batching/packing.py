"""Packing samples end to end into micro-batches without padding: a pure function.

Longest first, each sample goes to the micro-batch that takes the least time so far, if it fits
there, and otherwise to the fullest one into which it fits. The first keeps the times alike, the
second leaves room for what is still to come. Samples that must not be left come before all others,
and those that exceed a cap alone before the rest, while there are empty micro-batches.

Properties: no micro-batch exceeds a cap, except one that holds a single sample; every sample is
in one micro-batch or among those that were left; none is left if there are as many micro-batches
as samples, and some are if there are fewer than any of `shares_of` says.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eke.batching.cost import Integers

MANY = 64
"""From so many micro-batches on, samples are given to many of them at a time."""

_MOST = 2**62
"""More than any sum of what samples take."""

_PARTS = 4
"""Samples of more than a half, a third, ... of a cap are counted, down to one in so many."""


class Packed(NamedTuple):
    """Micro-batches.

    Attributes:
        bins: the numbers of the samples in each, the longest first.
        left: those of samples that fit nowhere.
        room: how many tokens more each could have.
    """

    bins: list[list[int]]
    left: list[int]
    room: list[int]


Shares = tuple[list[tuple[int, int]], list[tuple[int, int]]]
"""Two lists of fractions, as numerator and denominator."""


def shares_of(
    lengths: Sequence[int],
    numbers: Iterable[int],
    tokens: int,
    loads: Sequence[Sequence[int]] = (),
    caps: Sequence[int] = (),
) -> Shares:
    """How many micro-batches samples need at least, as pairs of numerator and denominator.

    What exceeds a cap alone counts as a full micro-batch.

    Args:
        lengths, numbers, tokens, loads, caps: those of `pack`.

    Returns:
        What they take of each resource, by its cap; and how many take more than a half, a third,
        ... of the cap, by one, two, ...: no micro-batch holds more of them.
    """
    chosen = [*numbers]
    sizes = np.array([lengths[n] for n in chosen], dtype=np.int64)
    columns, alone = [sizes], sizes > tokens
    caps = [min(cap, _MOST) for cap in caps]
    if loads:
        takes = np.array(loads, dtype=np.int64).reshape(-1, len(caps))[chosen]
        columns += list(takes.T)
        alone = _alone(sizes, takes, tokens, caps)
    sums, counts = [], []
    for column, cap in zip(columns, (tokens, *caps), strict=False):
        own, column = int(alone.sum()), column[~alone]
        sums.append((own * cap + int(column.sum()), cap))
        counts += [(own * n + int((column > cap // (n + 1)).sum()), n) for n in range(1, _PARTS)]
    return sums, counts


def pack(
    lengths: Sequence[int],
    times: Sequence[int],
    numbers: Iterable[int],
    k: int,
    tokens: int,
    loads: Sequence[Sequence[int]] = (),
    caps: Sequence[int] = (),
    first: int = 0,
) -> Packed:
    """Pack samples into `k` micro-batches of at most `tokens` tokens and `caps` of other resources.

    Args:
        lengths: of each sample, in tokens.
        times: how long each takes.
        numbers: which of them to pack.
        loads: what each takes of every other resource; empty if there is none.
        first: samples of lower numbers come before all others, so that they are not left if it can
            be helped.
    """
    chosen = np.array([*numbers], dtype=np.int64)
    sizes = np.array(lengths, dtype=np.int64)[chosen]
    takes_of = np.array(loads, dtype=np.int64).reshape(-1, len(caps)) if loads else None
    # Without loads, the longest are those that exceed a cap.
    alone = _alone(sizes, takes_of[chosen], tokens, caps) if takes_of is not None else sizes < 0
    by_length = np.lexsort((-sizes, ~alone, chosen >= first))
    chosen, sizes = chosen[by_length], sizes[by_length]
    order = chosen.tolist()
    room = [tokens] * k
    spent = [0] * k
    # What is left of each load; no micro-batch takes more of one than all samples together.
    rooms = np.array([[min(cap, _MOST)] * k for cap in caps], dtype=np.int64)
    bins: list[list[int]] = [[] for _ in range(k)]
    left: list[int] = []
    done = 0
    if k >= MANY and order and not loads:
        takes = np.array(times, dtype=np.int64)[chosen]
        places = _by_rows(sizes, takes, room, spent)
        for number, at in zip(order, places, strict=False):
            bins[at].append(number)
        done = len(places)
    # Pairs with a micro-batch are single numbers, `time * k + at` and `room * k + at`: as many
    # tuples would set off searches for garbage.
    busy = [time * k + at for at, time in enumerate(spent)]  # a heap: the least busy first
    heapq.heapify(busy)
    by_room: list[int] = []
    for number in order[done:]:
        length = lengths[number]
        load = takes_of[number] if takes_of is not None else None
        while busy[0] // k != spent[busy[0] % k]:
            heapq.heappop(busy)  # it was given a sample for which it was not the least busy
        at = busy[0] % k
        if length <= room[at] and (load is None or bool((load <= rooms[:, at]).all())):
            spent[at] += times[number]
            heapq.heapreplace(busy, spent[at] * k + at)
        else:
            if length > tokens or (load is not None and not _within(loads[number], caps)):
                at = _empty(bins)
            elif load is not None:
                at = _fullest(length, load, room, rooms)
            else:
                by_room = by_room or sorted(free * k + at for at, free in enumerate(room))
                found = bisect_left(by_room, length * k)
                at = by_room[found] % k if found < k else -1
            if at < 0:
                left.append(number)
                continue
            spent[at] += times[number]
            heapq.heappush(busy, spent[at] * k + at)
        bins[at].append(number)
        if by_room:
            del by_room[bisect_left(by_room, room[at] * k + at)]
            insort(by_room, (room[at] - length) * k + at)
        room[at] -= length
        if load is not None:
            rooms[:, at] -= load
    if first:
        for one in bins:
            if one and one[0] < first:
                one.sort(key=lambda number: -lengths[number])
    return Packed(bins, left, room)


def _by_rows(sizes: Integers, takes: Integers, room: list[int], spent: list[int]) -> list[int]:
    """Give samples to micro-batches many at a time, as far as each fits into the least busy one.

    Of the micro-batches in the order of their times, the j-th is the least busy one for the j-th
    sample if none before it, with its sample, takes less time: so a whole row of them is what one
    at a time would give.

    Args:
        sizes, takes: lengths and times of the samples in their order; at least one.
        room, spent: what is left and what is taken of each micro-batch; changed in place.

    Returns:
        The micro-batch of each sample that was given, in order.
    """
    free, load = np.array(room, dtype=np.int64), np.array(spent, dtype=np.int64)
    done, places = 0, []
    while done < len(sizes):
        ready = np.argsort(load, kind="stable")[: len(sizes) - done]
        after = load[ready] + takes[done : done + len(ready)]
        late = load[ready[1:]] >= np.minimum.accumulate(after)[:-1]
        full = sizes[done : done + len(ready)] > free[ready]
        row = min(_first(late) + 1, _first(full))
        ready = ready[:row]
        load[ready] = after[:row]
        free[ready] -= sizes[done : done + row]
        places.append(ready)
        done += row
        if row < len(full) and full[row]:
            break  # from here on, one at a time
    room[:], spent[:] = free.tolist(), load.tolist()
    given: list[int] = np.concatenate(places).tolist()
    return given


def _first(marks: NDArray[np.bool_]) -> int:
    """The place of the first mark; their number if there is none."""
    at = int(marks.argmax()) if len(marks) else 0
    return at if len(marks) and marks[at] else len(marks)


def fill(packed: Packed, spare: Iterable[int], lengths: Sequence[int], must: int) -> list[int]:
    """Use the room that is left in micro-batches, by samples that could also wait.

    What fits is added; then one sample of a micro-batch is exchanged for a longer spare one, that
    which leaves the least room.

    Args:
        packed: micro-batches; changed in place.
        spare: the numbers of samples in none.
        must: samples of lower numbers are in one already, and may not leave it.

    Returns:
        The numbers of those that are in none now.
    """
    n = len(lengths)
    waiting = sorted(lengths[number] * n + number for number in spare)  # the shortest first
    for place, room in enumerate(packed.room):
        if not waiting:
            break
        if room <= 0:
            continue
        one, changed = packed.bins[place], False
        while waiting and waiting[0] // n <= room:
            length, number = divmod(waiting.pop(bisect_left(waiting, (room + 1) * n) - 1), n)
            one.append(number)
            room -= length
            changed = True
        gain, given, taken = 0, -1, -1
        longest = waiting[-1] // n if waiting else 0
        for at, number in enumerate(one if room > 0 else ()):
            length = lengths[number]
            if length >= longest or number < must:
                continue
            found = bisect_left(waiting, (length + room + 1) * n) - 1
            if found >= 0 and waiting[found] // n - length > gain:
                gain, given, taken = waiting[found] // n - length, at, found
        if gain:
            number, one[given] = one[given], waiting.pop(taken) % n
            room -= gain
            insort(waiting, lengths[number] * n + number)
        if gain or changed:
            one.sort(key=lambda number: -lengths[number])
            packed.room[place] = room
    return [number % n for number in waiting]


def _alone(sizes: Integers, loads: Integers, tokens: int, caps: Sequence[int]) -> NDArray[np.bool_]:
    """Which samples `[n]`, with their loads `[n, len(caps)]`, exceed a cap alone."""
    most = np.array([min(cap, _MOST) for cap in caps], dtype=np.int64)
    alone: NDArray[np.bool_] = (sizes > tokens) | (loads > most).any(axis=1)
    return alone


def _within(loads: Sequence[int], rooms: Sequence[int]) -> bool:
    return all(take <= have for take, have in zip(loads, rooms, strict=True))


def _empty(bins: Sequence[Sequence[int]]) -> int:
    return next((at for at, one in enumerate(bins) if not one), -1)


def _fullest(length: int, load: Integers, room: Sequence[int], rooms: Integers) -> int:
    """The micro-batch with the least room of those in which the sample fits, or -1."""
    free = np.array(room, dtype=np.int64)
    fits = (free >= length) & (rooms >= load[:, None]).all(axis=0)
    at = int(np.where(fits, free, _MOST).argmin())
    return at if fits[at] else -1

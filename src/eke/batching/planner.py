"""The batch plan: which samples each rank sees in which micro-batch, as a pure function.

Whole numbers in, whole numbers out; no torch, no clock, no files. Every rank computes the plan of
all ranks from the same numbers, so nothing has to be agreed on afterwards.

Properties, for `plan_round`:
- every rank runs the same number of micro-batches in every block;
- every sample of the round is in exactly one micro-batch or waits for the next round, and one
  that has waited does not wait again;
- a micro-batch of more than one sample never exceeds a cap, packed or padded;
- counting steps in samples, every block is exactly the next so many samples of the epoch, on the
  ranks that balance it; where they may not move, every full block has an equal part of each rank's
  samples;
- where samples may not move, each is on the rank that brought it;
- no micro-step is of dummies alone, and counting in tokens there are dummies only where there are
  fewer samples than micro-batches: of all ranks, or of that rank if samples may not move;
- equal arguments give equal plans.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain, compress, zip_longest
from typing import NamedTuple

import numpy as np

from eke.batching.packing import fill
from eke.batching.partition import costliest_first, cut, fewest, level
from eke.batching.plan import DUMMY_TOKENS, BlockPlan, Group, PerStep, Round, Rules, Sample
from eke.batching.rows import sizes_of, sorted_row

__all__ = [
    "DUMMY_TOKENS",
    "BlockPlan",
    "Group",
    "PerStep",
    "Round",
    "Rules",
    "Sample",
    "blocks_and_steps",
    "plan_round",
]

_MORE = (0, 1, 2, 4, 8)
"""How many more micro-steps than needed are tried: a few more may take less time in all."""

_LEVELLED = 3
"""How many more are tried where samples move, and how many of the best are improved further."""

_MANY = 24
"""Of more micro-steps none is improved further: the time grows with the square, the gain falls."""


Steps = list[tuple[Group, ...]]

Numbers = list[int]
"""Places of samples in the sequence that they come from."""


def plan_round(
    shares: Sequence[Sequence[Sample]],
    rules: Rules,
    *,
    rng_seed: int,
    waited: Sequence[int] = (),
    last: bool = True,
) -> Round:
    """Plan every optimizer step of one round.

    Counting in tokens, the micro-steps of the whole round are planned together, so that lengths
    are sorted over all of it, and then dealt to blocks of about the asked number of tokens.

    Args:
        shares: each rank's samples, those that waited first, then in the order of the epoch;
            every length is positive.
        rng_seed: orders blocks, and micro-steps inside a block.
        waited: how many of each rank's samples have waited already.
        last: nothing of the epoch comes after this round, so nothing waits.
    """
    order = random.Random(rng_seed)
    waiting: list[list[Sample]] = [[] for _ in shares]
    if rules.per_step.unit == "samples":
        by_samples = _moved if rules.move else _stratified
        return Round(by_samples(_arrivals(shares), len(shares), rules, order), waiting)
    may_wait = rules.wait_rounds > 0 and not last
    waited = waited or [0] * len(shares)
    if rules.move:
        steps, waiting = _together(shares, rules, may_wait, waited)
    elif not may_wait:
        steps = _stay(shares, rules, rules.per_step.amount)
    else:
        steps, waiting = _stay_or_wait(shares, rules, waited)
    return Round(_deal(steps, rules, order), waiting)


def _together(
    shares: Sequence[Sequence[Sample]], rules: Rules, may_wait: bool, waited: Sequence[int]
) -> tuple[Steps, list[list[Sample]]]:
    """The micro-steps of a round whose samples move: groups are cut as if all were one rank's.

    Ranks then are in step whatever each brought, so that a sample waits only for a micro-batch
    without padding to be full.
    """
    ranks = len(shares)
    old = [share[:aged] for share, aged in zip(shares, waited, strict=True)]
    new = [share[aged:] for share, aged in zip(shares, waited, strict=True)]
    first, then = _arrivals(old), _arrivals(new)
    arrivals = Arrivals([*first.samples, *then.samples], [*first.by, *then.by])
    samples, amount = arrivals.samples, rules.per_step.amount
    waiting: list[list[Sample]] = [[] for _ in shares]
    if rules.packed:
        every, must = [[True] * len(samples)], [len(first.samples)] if may_wait else ()
        (groups,), (rest,) = _columns_packed([samples], rules, amount, every, must, ranks)
        for n in sorted(rest):
            waiting[arrivals.by[n]].append(samples[n])
    else:
        (groups,) = _columns([samples], rules, amount, ranks)
    return _place(groups, arrivals, ranks), waiting


def _stay_or_wait(
    shares: Sequence[Sequence[Sample]], rules: Rules, waited: Sequence[int]
) -> tuple[Steps, list[list[Sample]]]:
    """The micro-steps of a round whose samples stay, and what waits on each rank."""
    emitted = _emit(shares, waited)
    amount = rules.per_step.amount
    if rules.packed:
        columns, rests = _columns_packed(shares, rules, amount, emitted, waited)
        waiting = [_these(*one) for one in zip(shares, map(sorted, rests), strict=True)]
        return _side_by_side(shares, columns), waiting
    given = [list(compress(*one)) for one in zip(shares, emitted, strict=True)]
    waiting = [
        [sample for sample, now in zip(*one, strict=True) if not now]
        for one in zip(shares, emitted, strict=True)
    ]
    return _stay(given, rules, amount), waiting


def _emit(shares: Sequence[Sequence[Sample]], waited: Sequence[int]) -> list[list[bool]]:
    """Which each rank gives now: what has waited, then in order up to the smallest rank's total.

    A rank with nothing at all runs dummies whatever the others do, so it is not waited for.
    """
    lengths = [[sample.length for sample in share] for share in shares]
    least = min(filter(None, map(sum, lengths)), default=0)
    emitted = []
    for row, aged in zip(lengths, waited, strict=True):
        given, total = [], 0
        for number, length in enumerate(row):
            now = number < aged or total + length <= least
            given.append(now)
            if now:
                total += length
        emitted.append(given)
    return emitted


# ---------------------------------------------------------------------- micro-batches


def _stay(shares: Sequence[Sequence[Sample]], rules: Rules, amount: int) -> Steps:
    """The micro-steps of samples that stay on their ranks; all of them are used."""
    if rules.packed:
        every = [[True] * len(share) for share in shares]
        columns, _ = _columns_packed(shares, rules, amount, every, ())
    else:
        columns = _columns(shares, rules, amount)
    return _side_by_side(shares, columns)


def _side_by_side(
    shares: Sequence[Sequence[Sample]], columns: Sequence[Sequence[Numbers]]
) -> Steps:
    groups = [
        [tuple(_these(share, numbers)) for numbers in column]
        for share, column in zip(shares, columns, strict=True)
    ]
    return list(zip_longest(*groups, fillvalue=()))


def _these(samples: Sequence[Sample], numbers: Numbers) -> list[Sample]:
    return [samples[n] for n in numbers]


def _columns(
    rows: Sequence[Sequence[Sample]], rules: Rules, amount: int, each: int = 1
) -> list[list[Numbers]]:
    """Each row's samples in groups, costliest first, of which it gives `each` to a micro-step."""
    ordered = [sorted_row(row, rules) for row in rows]
    least = max((-(-fewest(row.sorted) // each) for row in ordered), default=0)
    if not least:
        return [[] for _ in rows]
    blocks, per_block = blocks_and_steps(sum(row.tokens for row in ordered), amount, least)
    fixed = rules.cost.fixed
    bound = max(-(-row.time() // each) for row in ordered)
    best_time, best = -1, []
    for k in _tries(least, blocks, per_block):
        if 0 <= best_time <= bound + k * fixed:
            break  # more micro-steps cannot pay any more, however well they are balanced
        # Costliest with costliest: a micro-step lasts as long as its slowest rank.
        columns = [costliest_first(row.sorted, cut(row.sorted, k * each), each) for row in ordered]
        lasts = [max(step) for step in zip_longest(*(times for _, times in columns), fillvalue=0)]
        time = sum(lasts) + fixed * len(lasts)
        if best_time < 0 or time < best_time:
            best_time, best = time, [stretches for stretches, _ in columns]
    return [
        [row.order[start:stop] for start, stop in stretches]
        for row, stretches in zip(ordered, best, strict=True)
    ]


def _tries(least: int, blocks: int, per_block: int) -> list[int]:
    """Numbers of micro-steps worth trying, all of them whole blocks, the fewest first."""
    fewest_steps = blocks * per_block
    limit = max(least + least // 8, least + 4)
    tries = [blocks * (per_block + -(-more // blocks)) for more in _MORE]
    return [fewest_steps, *sorted({k for k in tries if fewest_steps < k <= limit})]


def _columns_packed(
    rows: Sequence[Sequence[Sample]],
    rules: Rules,
    amount: int,
    emitted: Sequence[Sequence[bool]],
    waited: Sequence[int],
    each: int = 1,
) -> tuple[list[list[Numbers]], list[Numbers]]:
    """The same without padding, and what of each row is left for the next round.

    Args:
        emitted: which samples to use; others only where they fill a micro-batch better.
        waited: how many of each row's samples must be used; empty if all must.
    """
    numbers = [sizes_of(row, rules) for row in rows]
    given = [[*compress(range(len(one)), one)] for one in emitted]
    total = sum(sum(compress(row.lengths, one)) for row, one in zip(numbers, emitted, strict=True))
    if not total:
        return [[] for _ in rows], [[*range(len(row))] for row in rows]
    must = waited or [len(row) for row in rows]
    least = max(row.least(rules, range(old), each) for row, old in zip(numbers, must, strict=True))
    if waited:
        # What does not fill a micro-batch waits.
        full = [row.full(rules, one, each) for row, one in zip(numbers, given, strict=True)]
        least = max(1, least, *full)
    while True:
        blocks, per_block = blocks_and_steps(total, amount, least)
        k = blocks * per_block
        packs = [
            row.pack(min(k * each, len(row.lengths)), rules, one, old)
            for row, one, old in zip(numbers, given, waited or [0] * len(rows), strict=True)
        ]
        over = [
            row.least(rules, [n for n in packed.left if n < old], each)
            for row, packed, old in zip(numbers, packs, must, strict=True)
        ]
        if not any(over):
            break
        least = k + max(1, max(over) // 2)  # the half, for with more of them others fit too
    columns, rests = [], []
    for row, one, packed, old in zip(numbers, emitted, packs, must, strict=True):
        rest = packed.left + [n for n, now in enumerate(one) if not now]
        if waited and not row.loads:
            rest = fill(packed, rest, row.lengths, old)
        columns.append(row.busiest_first(packed.bins))
        rests.append(rest)
    return columns, rests


def blocks_and_steps(total: int, amount: int, least: int) -> tuple[int, int]:
    """How many blocks, and micro-steps in each, for `total` tokens in `least` micro-steps or more.

    A block should have the asked tokens, and micro-batches should be full. Asked for as many tokens
    a step as a micro-step holds with its padding, a somewhat smaller step is better than twice as
    many half-empty micro-batches; but not for the sake of one micro-step in a hundred. So the
    product of the micro-steps and of how far off the blocks are is made least, a quarter off at
    most.
    """
    ideal = max(1, (2 * total + amount) // (2 * amount))
    near = range(max(1, -(-ideal * 3 // 4)), ideal * 5 // 4 + 1)
    blocks = min(near, key=lambda n: (n * -(-least // n) * (ideal + abs(n - ideal)), n))
    return blocks, -(-least // blocks)


def _deal(steps: Steps, rules: Rules, order: random.Random) -> list[BlockPlan]:
    """Blocks of equal numbers of micro-steps and about equal real tokens."""
    if not steps:
        return []
    order.shuffle(steps)  # so that equal ones are dealt at random
    sizes = [_tokens(step) for step in steps]
    count, _ = blocks_and_steps(sum(sizes), rules.per_step.amount, len(steps))
    largest_first = sorted(range(len(steps)), key=lambda number: -sizes[number])
    totals = [0] * count
    dealt: list[Steps] = [[] for _ in range(count)]
    for start in range(0, len(steps), count):
        # The largest of each row to the block that has least so far.
        row = largest_first[start : start + count]
        emptiest_first = sorted(range(count), key=totals.__getitem__)
        for number, at in zip(row, emptiest_first, strict=False):
            dealt[at].append(steps[number])
            totals[at] += sizes[number]
    blocks = []
    for block in dealt:
        if block:
            order.shuffle(block)
            blocks.append(BlockPlan(tuple(block), rules))
    order.shuffle(blocks)
    return blocks


# ---------------------------------------------------------------------- steps of so many samples


class Arrivals(NamedTuple):
    """Samples in the order of the epoch, and the rank that brought each."""

    samples: list[Sample]
    by: list[int]


def _arrivals(shares: Sequence[Sequence[Sample]]) -> Arrivals:
    least, most = min(map(len, shares)), max(map(len, shares))
    if least == most:
        return Arrivals(
            [*chain.from_iterable(zip(*shares, strict=True))], [*range(len(shares))] * most
        )
    rows = list(zip_longest(*shares))
    samples = [sample for row in rows for sample in row if sample is not None]
    by = [rank for row in rows for rank, sample in enumerate(row) if sample is not None]
    return Arrivals(samples, by)


def _stratified(
    arrivals: Arrivals, ranks: int, rules: Rules, order: random.Random
) -> list[BlockPlan]:
    """Blocks of the asked number of samples that stay on their ranks.

    Each block gets as equal a number of each rank's samples as can be, of about as many tokens as
    any other block's; only the last, short one is what comes last in the epoch. Long samples of
    all ranks come to the same blocks.
    """
    n = rules.per_step.amount
    pairs = [*zip(arrivals.by, arrivals.samples, strict=True)]
    count = len(pairs) // n
    blocks: list[list[list[Sample]]] = [[[] for _ in range(ranks)] for _ in range(count)]
    place = 0
    for rank in range(ranks):
        mine = sorted((s for r, s in pairs[: count * n] if r == rank), key=_longest_first)
        # Places of all blocks in turn, rank after rank: every block gets exactly n.
        room = [0] * count
        for one in range(place, place + len(mine)):
            room[one % count] += 1
        place += len(mine)
        totals = [0] * count
        queue = iter(mine)
        for row in range(max(room, default=0)):
            open_blocks = [block for block in range(count) if room[block] > row]
            for block in sorted(open_blocks, key=totals.__getitem__):
                sample = next(queue)
                blocks[block][rank].append(sample)
                totals[block] += sample.length
    order.shuffle(blocks)
    if len(pairs) > count * n:
        rest = pairs[count * n :]
        blocks.append([[s for r, s in rest if r == rank] for rank in range(ranks)])
    plans = []
    for shares in blocks:
        steps = _stay(shares, rules, max(1, _tokens(shares)))
        order.shuffle(steps)
        plans.append(BlockPlan(tuple(steps), rules))
    return plans


def _moved(arrivals: Arrivals, ranks: int, rules: Rules, order: random.Random) -> list[BlockPlan]:
    """Blocks of the asked number of samples, in the order of the epoch, that move between ranks.

    Their micro-steps are of groups cut from the whole block as if it were one rank's.
    """
    n = rules.per_step.amount
    plans = []
    for start in range(0, len(arrivals.samples), n):
        here = slice(start, start + n)
        block = Arrivals(arrivals.samples[here], arrivals.by[here])
        groups = (_groups_packed if rules.packed else _groups)(block.samples, ranks, rules)
        steps = _place(groups, block, ranks)
        order.shuffle(steps)
        plans.append(BlockPlan(tuple(steps), rules))
    return plans


def _groups(samples: list[Sample], ranks: int, rules: Rules) -> list[Numbers]:
    row = sorted_row(samples, rules)
    least = -(-fewest(row.sorted) // ranks)
    fixed, bound = rules.cost.fixed, -(-row.time() // ranks)
    found: list[tuple[int, list[tuple[int, int]]]] = []
    steps, most = least, -(-len(samples) // ranks)
    while steps <= most and not (found and min(found)[0] <= bound + steps * fixed):
        stretches, lasts = costliest_first(row.sorted, cut(row.sorted, steps * ranks), ranks)
        found.append((sum(lasts) + fixed * len(lasts), stretches))
        # One more at first; then half as many again, for a sample at a time may be best.
        steps = (
            steps + 1 if steps < least + _LEVELLED else min(max(steps + 1, most), steps * 3 // 2)
        )
    best = min(found)
    for _, stretches in sorted(found)[:_LEVELLED]:
        if len(stretches) > (min(least, _MANY) + _LEVELLED) * ranks:
            continue  # not worth its time: they are small, and so are all differences
        levelled = level(row.sorted, stretches, ranks)
        _, lasts = costliest_first(row.sorted, levelled, ranks)
        best = min(best, (sum(lasts) + fixed * len(lasts), levelled))
    return [row.order[start:stop] for start, stop in best[1]]


def _groups_packed(samples: list[Sample], ranks: int, rules: Rules) -> list[Numbers]:
    row = sizes_of(samples, rules)
    every = range(len(samples))
    steps = row.least(rules, every, ranks)
    while (packed := row.pack(steps * ranks, rules, every)).left:
        steps += max(1, row.least(rules, packed.left, ranks) // 2)
    return row.busiest_first(packed.bins)


def _place(groups: Sequence[Numbers], arrivals: Arrivals, ranks: int) -> Steps:
    """Micro-steps of all ranks, of groups that come costliest first.

    A group is on the rank that brought most of it, if that is free.
    """
    if not groups:
        return []
    samples, brought_by = arrivals.samples, np.array(arrivals.by, dtype=np.int64)
    lengths = np.array([sample.length for sample in samples], dtype=np.int64)
    flat = np.array([*chain.from_iterable(groups)], dtype=np.int64)
    group_of = np.repeat(np.arange(len(groups)), [*map(len, groups)])
    tokens = np.zeros((len(groups), ranks), dtype=np.int64)
    np.add.at(tokens, (group_of, brought_by[flat]), lengths[flat])
    favourites = tokens.argmax(axis=1).tolist()
    steps: list[list[Group]] = [[()] * ranks for _ in range(-(-len(groups) // ranks))]
    later = []
    for number in np.argsort(-tokens.max(axis=1), kind="stable").tolist():
        step, rank = steps[number // ranks], favourites[number]
        if step[rank]:
            later.append(number)
        else:
            step[rank] = tuple([samples[n] for n in groups[number]])
    for number in sorted(later):
        step = steps[number // ranks]
        step[step.index(())] = tuple([samples[n] for n in groups[number]])
    return [tuple(step) for step in steps]


def _longest_first(sample: Sample) -> tuple[int, int]:
    return -sample.length, sample.index


def _tokens(groups: Sequence[Sequence[Sample]]) -> int:
    return sum([sample.length for group in groups for sample in group])

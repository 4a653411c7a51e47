"""The batch plan: which samples each rank sees in which micro-batch, as a pure function.

Whole numbers in, whole numbers out; no torch, no clock, no files. Every rank computes the plan of
all ranks from the same numbers, so nothing has to be agreed on afterwards.

Properties, for `plan_round`:
- every rank runs the same number of micro-batches in every block;
- every sample of the round is in exactly one micro-batch or waits for the next round, and one
  that has waited does not wait again;
- a micro-batch of more than one sample never exceeds a cap, packed or padded;
- counting steps in tokens, a sample stays on the rank that brought it; counting in samples, every
  block is exactly the next so many samples of the epoch, and they move to where they balance it;
  where they may not move, every full block has an equal part of each rank's samples;
- no micro-step is of dummies alone, and counting in tokens a rank has dummies only where it has
  fewer samples than there are micro-steps;
- equal arguments give equal plans.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import compress, zip_longest
from typing import NamedTuple

import numpy as np

from eke.batching.packing import fill, pack
from eke.batching.partition import Sorted, costliest_first, cut, fewest, level, reach_of
from eke.batching.plan import DUMMY_TOKENS, BlockPlan, Group, PerStep, Round, Rules, Sample

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


Steps = list[tuple[Group, ...]]


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
    waited = waited or [0] * len(shares)
    amount = rules.per_step.amount
    if rules.wait_rounds == 0 or last:
        return Round(_deal(_stay(shares, rules, amount), rules, order), waiting)
    emitted = _emit(shares, waited)
    if rules.packed:
        steps, waiting = _stay_packed(shares, rules, amount, emitted, waited)
    else:
        given = [list(compress(*one)) for one in zip(shares, emitted, strict=True)]
        steps = _stay(given, rules, amount)
        waiting = [
            [sample for sample, now in zip(*one, strict=True) if not now]
            for one in zip(shares, emitted, strict=True)
        ]
    return Round(_deal(steps, rules, order), waiting)


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


# ---------------------------------------------------------------------- samples stay


def _stay(shares: Sequence[Sequence[Sample]], rules: Rules, amount: int) -> Steps:
    """The micro-steps of samples that stay on their ranks; all of them are used."""
    if rules.packed:
        every = [[True] * len(share) for share in shares]
        return _stay_packed(shares, rules, amount, every, ())[0]
    rows = [_sorted(share, rules) for share in shares]
    least = max((fewest(row.sorted) for row in rows), default=0)
    if not least:
        return []
    blocks, per_block = blocks_and_steps(_tokens(shares), amount, least)
    fixed = rules.cost.fixed
    bound = max(row.time() for row in rows)
    best_time, best = -1, []
    for k in _tries(least, blocks, per_block):
        if 0 <= best_time <= bound + k * fixed:
            break  # more micro-steps cannot pay any more, however well they are balanced
        # Costliest with costliest: a micro-step lasts as long as its slowest rank.
        columns = [costliest_first(row.sorted, cut(row.sorted, k), 1) for row in rows]
        lasts = [max(step) for step in zip_longest(*(times for _, times in columns), fillvalue=0)]
        time = sum(lasts) + fixed * len(lasts)
        if best_time < 0 or time < best_time:
            best_time, best = time, [stretches for stretches, _ in columns]
    groups = [
        [tuple(row.samples[start:stop]) for start, stop in stretches]
        for row, stretches in zip(rows, best, strict=True)
    ]
    return list(zip_longest(*groups, fillvalue=()))


def _tries(least: int, blocks: int, per_block: int) -> list[int]:
    """Numbers of micro-steps worth trying, all of them whole blocks, the fewest first."""
    fewest_steps = blocks * per_block
    limit = max(least + least // 8, least + 4)
    tries = [blocks * (per_block + -(-more // blocks)) for more in _MORE]
    return [fewest_steps, *sorted({k for k in tries if fewest_steps < k <= limit})]


def _stay_packed(
    shares: Sequence[Sequence[Sample]],
    rules: Rules,
    amount: int,
    emitted: Sequence[Sequence[bool]],
    waited: Sequence[int],
) -> tuple[Steps, list[list[Sample]]]:
    """The same without padding, and what is left for the next round.

    Args:
        emitted: which samples to use; others only where they fill a micro-batch better.
        waited: how many of each rank's samples must be used; empty if all must.
    """
    rows = [_numbers(share, rules) for share in shares]
    given = [[n for n, now in enumerate(one) if now] for one in emitted]
    totals = [sum(row.lengths[n] for n in one) for row, one in zip(rows, given, strict=True)]
    most, cap = max(totals, default=0), rules.micro_tokens
    if not most:
        return [], [list(share) for share in shares]
    # What does not fill a micro-batch waits, if it may.
    least = max(1, most // cap if waited else -(-most // cap))
    must = waited or [len(share) for share in shares]
    while True:
        blocks, per_block = blocks_and_steps(sum(totals), amount, least)
        k = blocks * per_block
        packs = [_pack(row, k, rules, one) for row, one in zip(rows, given, strict=True)]
        if not any(n < old for (_, rest), old in zip(packs, must, strict=True) for n in rest):
            break
        least = k + 1
    columns, waiting = [], []
    for share, row, one, (bins, rest), old in zip(shares, rows, emitted, packs, must, strict=True):
        rest = rest + [n for n, now in enumerate(one) if not now]
        if waited and not row.loads:
            rest = fill(bins, rest, row.lengths, cap, old)
        columns.append([tuple([share[n] for n in one]) for one in _busiest_first(bins, row)])
        waiting.append([share[n] for n in sorted(rest)])
    return list(zip_longest(*columns, fillvalue=())), waiting


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

Arrivals = list[tuple[int, Sample]]
"""Samples in the order of the epoch, each with the rank that brought it."""


def _arrivals(shares: Sequence[Sequence[Sample]]) -> Arrivals:
    return [
        (rank, sample)
        for row in zip_longest(*shares)
        for rank, sample in enumerate(row)
        if sample is not None
    ]


def _stratified(
    arrivals: Arrivals, ranks: int, rules: Rules, order: random.Random
) -> list[BlockPlan]:
    """Blocks of the asked number of samples that stay on their ranks.

    Each block gets as equal a number of each rank's samples as can be, of about as many tokens as
    any other block's; only the last, short one is what comes last in the epoch. Long samples of
    all ranks come to the same blocks.
    """
    n = rules.per_step.amount
    count = len(arrivals) // n
    blocks: list[list[list[Sample]]] = [[[] for _ in range(ranks)] for _ in range(count)]
    place = 0
    for rank in range(ranks):
        mine = sorted((s for r, s in arrivals[: count * n] if r == rank), key=_longest_first)
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
    if len(arrivals) > count * n:
        rest = arrivals[count * n :]
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
    for start in range(0, len(arrivals), n):
        block = arrivals[start : start + n]
        home = {sample.index: rank for rank, sample in block}
        samples = [sample for _, sample in block]
        groups = (_groups_packed if rules.packed else _groups)(samples, ranks, rules)
        steps = [
            _place(groups[at : at + ranks], ranks, home) for at in range(0, len(groups), ranks)
        ]
        order.shuffle(steps)
        plans.append(BlockPlan(tuple(steps), rules))
    return plans


def _groups(samples: list[Sample], ranks: int, rules: Rules) -> list[Group]:
    row = _sorted(samples, rules)
    least = -(-fewest(row.sorted) // ranks)
    fixed, bound = rules.cost.fixed, -(-row.time() // ranks)
    found: list[tuple[int, list[tuple[int, int]]]] = []
    for steps in range(least, least + _LEVELLED + 1):
        if found and min(found)[0] <= bound + steps * fixed:
            break
        stretches = cut(row.sorted, steps * ranks)
        _, lasts = costliest_first(row.sorted, stretches, ranks)
        found.append((sum(lasts) + fixed * len(lasts), stretches))
    best: tuple[int, list[tuple[int, int]]] | None = None
    for _, stretches in sorted(found)[:_LEVELLED]:
        levelled = level(row.sorted, stretches, ranks)
        _, lasts = costliest_first(row.sorted, levelled, ranks)
        time = sum(lasts) + fixed * len(lasts)
        if best is None or time < best[0]:
            best = time, levelled
    assert best is not None
    return [tuple(row.samples[start:stop]) for start, stop in best[1]]


def _groups_packed(samples: list[Sample], ranks: int, rules: Rules) -> list[Group]:
    row = _numbers(samples, rules)
    every = range(len(samples))
    steps = max(1, -(-sum(row.lengths) // (rules.micro_tokens * ranks)))
    while True:
        bins, left = _pack(row, steps * ranks, rules, every)
        if not left:
            return [tuple([samples[n] for n in one]) for one in _busiest_first(bins, row)]
        steps += 1


def _place(groups: Sequence[Group], ranks: int, home: dict[int, int]) -> tuple[Group, ...]:
    """Each group on a rank of its own, the one that has most of it already where that is free."""
    claims = []
    for number, group in enumerate(groups):
        tokens: dict[int, int] = {}
        for sample in group:
            rank = home[sample.index]
            tokens[rank] = tokens.get(rank, 0) + sample.length
        claims += [(-have, number, rank) for rank, have in tokens.items()]
    placed: list[Group | None] = [None] * ranks
    done: set[int] = set()
    for _, number, rank in sorted(claims):
        if number not in done and placed[rank] is None:
            placed[rank] = groups[number]
            done.add(number)
    others = (group for number, group in enumerate(groups) if number not in done)
    return tuple(group if group is not None else next(others, ()) for group in placed)


# ---------------------------------------------------------------------- samples as numbers


def _longest_first(sample: Sample) -> tuple[int, int]:
    return -sample.length, sample.index


def _tokens(groups: Sequence[Sequence[Sample]]) -> int:
    return sum([sample.length for group in groups for sample in group])


class _Row(NamedTuple):
    """Samples, longest first, and the same as `partition` takes them."""

    samples: list[Sample]
    sorted: Sorted

    def time(self) -> int:
        """What they take without padding."""
        return sum(self.sorted.weights) + (self.sorted.loads[-1] if self.sorted.loads else 0)


def _sorted(samples: Sequence[Sample], rules: Rules) -> _Row:
    lengths = np.array([sample.length for sample in samples], dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    ordered, lengths = [samples[n] for n in order.tolist()], lengths[order]
    caps = rules.cost.caps()
    amounts = np.zeros((len(ordered), len(caps)), dtype=np.int64)
    loads: list[int] = []
    if caps and ordered:
        amounts = np.array([sample.loads for sample in ordered], dtype=np.int64)
        times = rules.cost.load_weights(amounts)
        loads = [0, *np.cumsum(times).tolist()] if times.any() else []
    reach = reach_of(lengths, rules.micro_tokens, amounts, caps)
    return _Row(ordered, Sorted(rules.cost.weights(lengths).tolist(), loads, reach))


class _Numbers(NamedTuple):
    """Samples as `packing` takes them."""

    lengths: list[int]
    times: list[int]
    loads: list[tuple[int, ...]]


def _numbers(samples: Sequence[Sample], rules: Rules) -> _Numbers:
    lengths = [sample.length for sample in samples]
    times = rules.cost.weights(np.array(lengths, dtype=np.int64))
    loads = [sample.loads for sample in samples] if rules.cost.loads else []
    if loads:
        times = times + rules.cost.load_weights(np.array(loads, dtype=np.int64))
    return _Numbers(lengths, times.tolist(), loads)


def _pack(
    row: _Numbers, k: int, rules: Rules, numbers: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    return pack(
        row.lengths, row.times, numbers, k, rules.micro_tokens, row.loads, rules.cost.caps()
    )


def _busiest_first(bins: list[list[int]], row: _Numbers) -> list[list[int]]:
    times = row.times
    return sorted(filter(None, bins), key=lambda one: -sum([times[n] for n in one]))

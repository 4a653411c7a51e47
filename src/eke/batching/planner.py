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
- equal arguments give equal plans.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal, NamedTuple

import numpy as np

from eke.batching.cost import CostModel
from eke.batching.packing import pack
from eke.batching.partition import Sorted, cost, cut, fewest, reach_of
from eke.errors import InputError

DUMMY_TOKENS = 2
"""Length of a dummy micro-batch: the shortest that leaves a position to predict."""

_MORE = (0, 1, 2, 4, 8)
"""How many more micro-steps than needed are tried: a few more may take less time in all."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the plan knows of a sample: its place in the dataset, and what it takes.

    `label_tokens` counts the labels that train, after the causal shift; `loads` has one number for
    each further resource of the cost model.
    """

    index: int
    length: int
    label_tokens: int
    loads: tuple[int, ...] = ()


Group = tuple[Sample, ...]
"""The samples of one micro-batch, longest first; empty for a dummy."""


class PerStep(NamedTuple):
    """What one optimizer step consumes, over all ranks."""

    unit: Literal["tokens", "samples"]
    amount: int

    @classmethod
    def parse(cls, text: str) -> PerStep:
        """Read `tokens:N` or `samples:N`.

        Raises:
            InputError: it is neither, or N is not a positive whole number.
        """
        unit, _, amount = text.partition(":") if isinstance(text, str) else ("", "", "")
        if amount.isdecimal() and int(amount) > 0:
            if unit == "tokens":
                return cls("tokens", int(amount))
            if unit == "samples":
                return cls("samples", int(amount))
        raise InputError(
            "per_step is not a size of an optimizer step",
            value=text,
            rule="it is tokens:N or samples:N with N > 0",
            fix="Write for example per_step='tokens:65536' or per_step='samples:64'",
        )


@dataclass(frozen=True)
class Rules:
    """What a plan obeys.

    Attributes:
        micro_tokens: most tokens in one micro-batch, padding included; only a longer sample
            exceeds it, alone in its micro-batch.
        packed: micro-batches without padding.
        wait_rounds: how many rounds a sample may wait, 0 or 1.
    """

    micro_tokens: int
    per_step: PerStep
    cost: CostModel = field(default_factory=CostModel)
    packed: bool = False
    wait_rounds: int = 0

    def tokens(self, group: Group) -> int:
        """Tokens that the micro-batch of `group` occupies."""
        if not group:
            return DUMMY_TOKENS
        if self.packed:
            return sum(sample.length for sample in group)
        return len(group) * group[0].length


@dataclass(frozen=True)
class BlockPlan:
    """One optimizer step: `steps[j][r]` is the j-th micro-batch of rank r."""

    steps: tuple[tuple[Group, ...], ...]
    rules: Rules

    def samples(self) -> list[Sample]:
        """All samples in the order in which they are seen, rank by rank inside a micro-step."""
        return [sample for step in self.steps for group in step for sample in group]

    def indices(self) -> list[int]:
        """The dataset indices of `samples()`."""
        return [sample.index for sample in self.samples()]

    def shapes(self) -> list[tuple[int, int]]:
        """(rows, tokens of a row) of every micro-batch of every rank."""
        shapes = []
        for group in (group for step in self.steps for group in step):
            rows = 1 if self.rules.packed or not group else len(group)
            shapes.append((rows, self.rules.tokens(group) // rows))
        return shapes

    def occupied_tokens(self) -> int:
        """Real tokens, padding and dummies, over all ranks."""
        return sum(self.rules.tokens(group) for step in self.steps for group in step)

    def paced_tokens(self) -> int:
        """The same if every rank took as long as the slowest one of each micro-step."""
        return sum(len(step) * max(map(self.rules.tokens, step)) for step in self.steps)

    def first_step(self) -> tuple[BlockPlan, BlockPlan]:
        """The first micro-step alone, and all the others."""
        return BlockPlan(self.steps[:1], self.rules), BlockPlan(self.steps[1:], self.rules)


@dataclass(frozen=True)
class Round:
    """A round's plan: its blocks, and each rank's samples that wait for the next round."""

    blocks: list[BlockPlan]
    waiting: list[list[Sample]]


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
    if rules.per_step.unit == "samples":
        blocks = [_block_of(block, len(shares), rules, order) for block in _cut(shares, rules)]
        return Round(blocks, [[] for _ in shares])
    waited = waited or [0] * len(shares)
    may_wait = rules.wait_rounds > 0 and not last
    if may_wait:
        emitted = _emit(shares, waited)
    else:
        emitted = [list(share) for share in shares]
    steps, left = _stay(emitted, waited, rules, may_wait)
    waiting = []
    for share, out, rest in zip(shares, emitted, left, strict=True):
        kept = {sample.index for sample in out} - {sample.index for sample in rest}
        waiting.append([sample for sample in share if sample.index not in kept])
    return Round(_deal(steps, rules, order), waiting)


def _emit(shares: Sequence[Sequence[Sample]], waited: Sequence[int]) -> list[list[Sample]]:
    """What each rank gives now: what has waited, then in order up to the smallest rank's total.

    A rank with nothing at all runs dummies whatever the others do, so it is not waited for.
    """
    totals = [sum(sample.length for sample in share) for share in shares]
    least = min((total for total in totals if total), default=0)
    emitted = []
    for share, aged in zip(shares, waited, strict=True):
        given, total = [], 0
        for number, sample in enumerate(share):
            if number < aged or total + sample.length <= least:
                given.append(sample)
                total += sample.length
        emitted.append(given)
    return emitted


# ---------------------------------------------------------------------- samples stay


def _stay(
    shares: Sequence[Sequence[Sample]], waited: Sequence[int], rules: Rules, may_wait: bool
) -> tuple[Steps, list[list[Sample]]]:
    """The micro-steps of samples that stay on their ranks, and what is left for the next round."""
    total = sum(sample.length for share in shares for sample in share)
    if rules.packed:
        return _stay_packed(shares, waited, rules, may_wait, total)
    ordered = [sorted(share, key=_longest_first) for share in shares]
    rows = [_sorted(share, rules) for share in ordered]
    least = max(map(fewest, rows), default=0)
    if not least:
        return [], [[] for _ in shares]
    blocks, per_block = blocks_and_steps(total, rules.per_step.amount, least)
    best: tuple[int, list[list[tuple[int, list[Sample]]]]] | None = None
    fixed = rules.cost.fixed
    for k in _tries(least, blocks, per_block):
        columns = []
        for share, row in zip(ordered, rows, strict=True):
            groups = [(cost(row, a, b), share[a:b]) for a, b in cut(row, k)]
            # Costliest with costliest: a micro-step lasts as long as its slowest rank.
            groups.sort(key=lambda group: -group[0])
            columns.append(groups)
        steps = zip_longest(*columns)
        time = sum(max(group[0] for group in step if group) + fixed for step in steps)
        if best is None or time < best[0]:
            best = time, columns
    assert best is not None
    return [
        tuple(tuple(group[1]) if group else () for group in step) for step in zip_longest(*best[1])
    ], [[] for _ in shares]


def _tries(least: int, blocks: int, per_block: int) -> list[int]:
    """Numbers of micro-steps worth trying, all of them whole blocks, the fewest first."""
    fewest_steps = blocks * per_block
    limit = max(least + least // 8, least + 4)
    tries = [blocks * (per_block + -(-more // blocks)) for more in _MORE]
    return [fewest_steps, *sorted({k for k in tries if fewest_steps < k <= limit})]


def _stay_packed(
    shares: Sequence[Sequence[Sample]],
    waited: Sequence[int],
    rules: Rules,
    may_wait: bool,
    total: int,
) -> tuple[Steps, list[list[Sample]]]:
    most = max((sum(sample.length for sample in share) for share in shares), default=0)
    if not most:
        return [], [[] for _ in shares]
    rows = [_numbers(share, rules) for share in shares]
    # What does not fill a micro-batch waits, if it may.
    least = max(1, most // rules.micro_tokens if may_wait else -(-most // rules.micro_tokens))
    while True:
        blocks, per_block = blocks_and_steps(total, rules.per_step.amount, least)
        packs = [_pack(row, blocks * per_block, rules) for row in rows]
        aged = any(n < old for (_, rest), old in zip(packs, waited, strict=True) for n in rest)
        if not aged and (may_wait or not any(rest for _, rest in packs)):
            break
        least = blocks * per_block + 1
    columns = [
        [tuple(share[n] for n in one) for one in _busiest_first(bins, row)]
        for share, row, (bins, _) in zip(shares, rows, packs, strict=True)
    ]
    left = [[share[n] for n in rest] for share, (_, rest) in zip(shares, packs, strict=True)]
    return list(zip_longest(*columns, fillvalue=())), left


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
    total = sum(sample.length for step in steps for group in step for sample in group)
    count, _ = blocks_and_steps(total, rules.per_step.amount, len(steps))
    order.shuffle(steps)  # so that equal ones are dealt at random
    steps = sorted(steps, key=lambda step: -sum(s.length for group in step for s in group))
    dealt: list[Steps] = [[] for _ in range(count)]
    for row, start in enumerate(range(0, len(steps), count)):
        # There and back, so that no block always has the largest of a row.
        part = steps[start : start + count]
        for block, step in zip(dealt if row % 2 == 0 else reversed(dealt), part, strict=False):
            block.append(step)
    blocks = []
    for block in dealt:
        if block:
            order.shuffle(block)
            blocks.append(BlockPlan(tuple(block), rules))
    order.shuffle(blocks)
    return blocks


# ---------------------------------------------------------------------- samples move


def _cut(shares: Sequence[Sequence[Sample]], rules: Rules) -> list[list[tuple[int, Sample]]]:
    """Blocks of the asked number of samples, in the order of the epoch, each with its rank."""
    arrivals = [
        (rank, sample)
        for row in zip_longest(*shares)
        for rank, sample in enumerate(row)
        if sample is not None
    ]
    n = rules.per_step.amount
    return [arrivals[i : i + n] for i in range(0, len(arrivals), n)]


def _block_of(
    block: list[tuple[int, Sample]], ranks: int, rules: Rules, order: random.Random
) -> BlockPlan:
    """Micro-steps of groups of about equal time, cut from the whole block as from one rank's."""
    home = {sample.index: rank for rank, sample in block}
    samples = sorted((sample for _, sample in block), key=_longest_first)
    groups = (
        _groups_packed(samples, ranks, rules) if rules.packed else _groups(samples, ranks, rules)
    )
    steps = [
        _place(groups[start : start + ranks], ranks, home) for start in range(0, len(groups), ranks)
    ]
    order.shuffle(steps)
    return BlockPlan(tuple(steps), rules)


def _groups(samples: list[Sample], ranks: int, rules: Rules) -> list[Group]:
    row = _sorted(samples, rules)
    least = -(-fewest(row) // ranks)
    best: tuple[int, list[tuple[int, int]]] | None = None
    for steps in (least + more for more in _MORE):
        stretches = sorted(cut(row, steps * ranks), key=lambda one: -cost(row, *one))
        slowest = [cost(row, *one) + rules.cost.fixed for one in stretches[::ranks]]
        if best is None or sum(slowest) < best[0]:
            best = sum(slowest), stretches
    assert best is not None
    return [tuple(samples[start:stop]) for start, stop in best[1]]


def _groups_packed(samples: list[Sample], ranks: int, rules: Rules) -> list[Group]:
    row = _numbers(samples, rules)
    steps = max(1, -(-sum(row.lengths) // (rules.micro_tokens * ranks)))
    while True:
        bins, left = _pack(row, steps * ranks, rules)
        if not left:
            return [tuple(samples[n] for n in one) for one in _busiest_first(bins, row)]
        steps += 1


def _place(groups: Sequence[Group], ranks: int, home: dict[int, int]) -> tuple[Group, ...]:
    """Each group on a rank of its own, the one that has most of it already where that is free."""
    claims = []
    for number, group in enumerate(groups):
        tokens = [0] * ranks
        for sample in group:
            tokens[home[sample.index]] += sample.length
        claims += [(-have, number, rank) for rank, have in enumerate(tokens)]
    placed: list[Group | None] = [None] * ranks
    done: set[int] = set()
    for _, number, rank in sorted(claims):
        if number not in done and placed[rank] is None:
            placed[rank] = groups[number]
            done.add(number)
    return tuple(group or () for group in placed)


# ---------------------------------------------------------------------- samples as numbers


def _longest_first(sample: Sample) -> tuple[int, int]:
    return -sample.length, sample.index


def _sorted(samples: Sequence[Sample], rules: Rules) -> Sorted:
    """Samples, longest first, as `partition` takes them."""
    lengths = [sample.length for sample in samples]
    columns = list(zip(*(sample.loads for sample in samples), strict=True))
    weights = rules.cost.weights(np.array(lengths, dtype=np.int64)).tolist()
    loads: list[int] = []
    if columns:
        times = rules.cost.load_weights(np.array(columns, dtype=np.int64).T)
        loads = [0, *np.cumsum(times).tolist()] if times.any() else []
    reach = reach_of(lengths, rules.micro_tokens, columns, rules.cost.caps() if columns else ())
    return Sorted(weights, loads, reach)


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


def _pack(row: _Numbers, k: int, rules: Rules) -> tuple[list[list[int]], list[int]]:
    return pack(row.lengths, row.times, k, rules.micro_tokens, row.loads, rules.cost.caps())


def _busiest_first(bins: list[list[int]], row: _Numbers) -> list[list[int]]:
    return sorted(
        (one for one in bins if one), key=lambda one: -sum(map(row.times.__getitem__, one))
    )

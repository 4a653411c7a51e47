"""The batch plan: which samples each rank sees in which micro-batch, as a pure function.

Integers in, integers out; no torch, no clock, no files. Every rank computes the plan of all
ranks from the same numbers, so nothing has to be agreed on afterwards.

Properties, for `plan_window`:
- every rank runs the same number of micro-batches in every block;
- every sample of the window is in exactly one micro-batch, on the rank that brought it;
- a micro-batch of more than one sample never exceeds `micro_tokens` padded tokens;
- blocks keep the order in which the samples came: lengths are sorted inside a block only;
- among the ways to cut a rank's sorted samples into its number of micro-batches, the largest
  micro-batch is the smallest possible;
- equal arguments give equal plans.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, NamedTuple

from eke.errors import InputError

DUMMY_TOKENS = 2
"""Length of a dummy micro-batch: the shortest that leaves a position to predict."""


@dataclass(frozen=True)
class Sample:
    """What the plan knows of a sample: its place in the dataset, and its size in tokens.

    `label_tokens` counts the labels that train, after the causal shift.
    """

    index: int
    length: int
    label_tokens: int


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
class BlockPlan:
    """One optimizer step: `steps[j][r]` is the j-th micro-batch of rank r."""

    steps: tuple[tuple[Group, ...], ...]

    def samples(self) -> list[Sample]:
        """All samples in the order in which they are seen, rank by rank inside a micro-step."""
        return [sample for step in self.steps for group in step for sample in group]

    def indices(self) -> list[int]:
        """The dataset indices of `samples()`."""
        return [sample.index for sample in self.samples()]

    def shapes(self) -> list[tuple[int, int]]:
        """(samples, padded length) of every micro-batch of every rank."""
        groups = [group for step in self.steps for group in step]
        return [(len(g), g[0].length) if g else (1, DUMMY_TOKENS) for g in groups]

    def padded_tokens(self) -> int:
        """Real tokens, padding and dummies, over all ranks."""
        return sum(padded_tokens(group) for step in self.steps for group in step)

    def paced_tokens(self) -> int:
        """Padded tokens if every rank took as long as the slowest one of each micro-step."""
        return sum(len(step) * max(map(padded_tokens, step)) for step in self.steps)

    def first_step(self) -> tuple[BlockPlan, BlockPlan]:
        """The first micro-step alone, and all the others."""
        return BlockPlan(self.steps[:1]), BlockPlan(self.steps[1:])


def padded_tokens(group: Group) -> int:
    """Tokens that the micro-batch of `group` occupies, padding included."""
    return len(group) * group[0].length if group else DUMMY_TOKENS


def plan_window(
    samples_by_rank: Sequence[Sequence[Sample]],
    *,
    micro_tokens: int,
    per_step: PerStep,
    world_size: int,
    rng_seed: int,
) -> list[BlockPlan]:
    """Plan every optimizer step of one window.

    In `samples` mode every block but the last has exactly the asked number of samples. In
    `tokens` mode the window is cut into the whole number of blocks that brings them closest to
    the asked size, all of about equal size (within one sample), so that no small block is left
    at the end of each window.

    Args:
        samples_by_rank: each rank's share, in the order of the epoch; every length is positive.
        micro_tokens: most padded tokens in one micro-batch; only a longer sample exceeds it,
            alone in its micro-batch.
        rng_seed: orders the micro-batches of a block.
    """
    if len(samples_by_rank) != world_size:
        raise ValueError(f"{len(samples_by_rank)} shares for {world_size} ranks")
    order = random.Random(rng_seed)
    arrivals = [
        (rank, sample)
        for row in zip_longest(*samples_by_rank)
        for rank, sample in enumerate(row)
        if sample is not None
    ]
    return [
        _plan_block(block, micro_tokens, world_size, order) for block in _cut(arrivals, per_step)
    ]


def _cut(arrivals: list[tuple[int, Sample]], per_step: PerStep) -> list[list[tuple[int, Sample]]]:
    """Cut the window into blocks without changing its order."""
    if per_step.unit == "samples":
        n = per_step.amount
        return [arrivals[i : i + n] for i in range(0, len(arrivals), n)]
    total = sum(sample.length for _, sample in arrivals)
    count = max(1, (2 * total + per_step.amount) // (2 * per_step.amount))
    blocks: list[list[tuple[int, Sample]]] = [[] for _ in range(count)]
    before = 0
    for rank, sample in arrivals:
        # The middle of the sample decides, so that a boundary is off by half a sample at most.
        blocks[(2 * before + sample.length) * count // (2 * total)].append((rank, sample))
        before += sample.length
    return [block for block in blocks if block]


def _plan_block(
    block: list[tuple[int, Sample]], micro_tokens: int, world_size: int, order: random.Random
) -> BlockPlan:
    shares: list[list[Sample]] = [[] for _ in range(world_size)]
    for rank, sample in block:
        shares[rank].append(sample)
    for share in shares:
        share.sort(key=lambda sample: (-sample.length, sample.index))
    lengths = [[sample.length for sample in share] for share in shares]
    n_steps = max(len(fewest_groups(row, micro_tokens)) for row in lengths)
    columns: list[list[Group]] = []
    for share, row in zip(shares, lengths, strict=True):
        bounds = partition(row, min(n_steps, len(row)), micro_tokens)
        groups = [tuple(share[start:stop]) for start, stop in bounds]
        # Costliest with costliest: a micro-step lasts as long as its slowest rank.
        groups.sort(key=padded_tokens, reverse=True)
        columns.append(groups + [()] * (n_steps - len(groups)))
    steps = list(zip(*columns, strict=True))
    order.shuffle(steps)
    return BlockPlan(tuple(steps))


def fewest_groups(lengths: Sequence[int], cap: int) -> list[int]:
    """Where each group starts, in the fewest contiguous groups with count * longest <= cap.

    `lengths` falls. Filling each group as far as it goes is optimal: the group's longest sample
    is its first, so a later start never admits fewer samples. What exceeds the cap is alone.
    """
    starts = []
    start = 0
    while start < len(lengths):
        starts.append(start)
        start += max(1, cap // lengths[start])
    return starts


def partition(lengths: Sequence[int], k: int, cap: int) -> list[tuple[int, int]]:
    """Cut falling `lengths` into exactly k contiguous groups whose largest is smallest.

    A group's size is count * longest. Bisection on the size, with the greedy `fewest_groups`
    as its test; then the largest groups are cut in two until there are k.

    Args:
        k: at least `len(fewest_groups(lengths, cap))` and at most `len(lengths)`.

    Returns:
        `(start, stop)` of each group, in order.
    """
    low, high = 1, cap
    while low < high:
        middle = (low + high) // 2
        if len(fewest_groups(lengths, middle)) <= k:
            high = middle
        else:
            low = middle + 1
    starts = fewest_groups(lengths, low)
    groups = list(zip(starts, [*starts, len(lengths)][1:], strict=True))
    while len(groups) < k:
        start, stop = max(
            (group for group in groups if group[1] - group[0] > 1),
            key=lambda group: (group[1] - group[0]) * lengths[group[0]],
        )
        cut = min(
            range(start + 1, stop),
            key=lambda at: (at - start) * lengths[start] + (stop - at) * lengths[at],
        )
        at = groups.index((start, stop))
        groups[at : at + 1] = [(start, cut), (cut, stop)]
    return groups

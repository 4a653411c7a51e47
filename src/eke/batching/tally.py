"""Where the ranks' time goes, counted in tokens; and where it would go with plain fixed batches.

Pure functions of whole numbers: every rank knows the plan of all ranks, so any of them can tell
all figures without asking.

Ranks are taken to meet once a step, as they do where gradients are added up on each before they are
exchanged; where they meet in every micro-step, they wait longer.

Properties: the four parts of a rank's tally add up to the same number on every rank, what the
slowest one computes; `fixed_batches` puts every sample into exactly one batch, in order, of at most
`most` samples, and no two batches differ by more than one sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from eke.batching.plan import DUMMY_TOKENS, BlockPlan


class Tally(NamedTuple):
    """One rank's part of an optimizer step, in tokens.

    Attributes:
        real: of samples.
        padding: what makes the samples of a micro-batch as long as the longest.
        waiting: until the slowest rank is through the step.
        dummies: of micro-batches without a sample.
    """

    real: int
    padding: int
    waiting: int
    dummies: int


def tally(block: BlockPlan) -> list[Tally]:
    """Of every rank, what a block's micro-batches hold."""
    return _tally(
        [
            (sum(sample.length for sample in group), block.rules.tokens(group) if group else 0)
            for group in step
        ]
        for step in block.steps
    )


def fixed_batches(lengths: Sequence[int], ranks: int, most: int) -> list[list[list[int]]]:
    """A step's samples as a plain sampler gives them: the next so many to each rank in turn.

    As few micro-steps as hold them at `most` samples a batch, and as equal numbers of samples in
    all batches as can be: nothing but lengths makes ranks wait.

    Args:
        lengths: of the step's samples, in the order of the epoch.
        most: samples in a batch.

    Returns:
        Micro-steps, each a batch for every rank; batches are empty where there are fewer samples
        than ranks.
    """
    steps = -(-len(lengths) // (ranks * most))
    bounds = (
        [len(lengths) * n // (steps * ranks) for n in range(steps * ranks + 1)] if steps else []
    )
    batches = [list(lengths[a:b]) for a, b in pairwise(bounds)]
    return [batches[at : at + ranks] for at in range(0, len(batches), ranks)]


def fixed_tally(lengths: Sequence[int], ranks: int, most: int) -> tuple[list[Tally], int]:
    """Of every rank, what `fixed_batches` hold when padded, and how many micro-steps they are."""
    steps = fixed_batches(lengths, ranks, most)
    tallies = _tally(
        [(sum(batch), len(batch) * max(batch, default=0)) for batch in step] for step in steps
    )
    return tallies or [Tally(0, 0, 0, 0)] * ranks, len(steps)


def _tally(steps: Iterable[Sequence[tuple[int, int]]]) -> list[Tally]:
    """Of micro-steps with (real tokens, tokens with padding) of every rank; (0, 0) is a dummy."""
    sums: list[list[int]] = []
    for step in steps:
        sums = sums or [[0, 0, 0] for _ in step]
        for row, (real, occupied) in zip(sums, step, strict=True):
            row[0] += real
            row[1] += occupied - real
            row[2] += 0 if occupied else DUMMY_TOKENS
    slowest = max(map(sum, sums), default=0)
    return [Tally(a, b, slowest - a - b - c, c) for a, b, c in sums]

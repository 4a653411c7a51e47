"""What a plan is made of, and what it obeys: plain data, whole numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from eke.batching.cost import CostModel
from eke.errors import InputError

DUMMY_TOKENS = 2
"""Length of a dummy micro-batch: the shortest that leaves a position to predict."""


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
        wait_rounds: how many rounds a sample may wait, 0 or 1; only where steps count tokens, and
            where samples move only for a micro-batch without padding to be full.
        move: samples move to the ranks that balance a step; counting steps in samples, it then is
            exactly what plain shuffling would show the optimizer. Without, for payloads that are
            not cheap to send, ranks are as even as their own samples make them, and counting in
            samples each rank gives its equal part of a step from all its samples of the round, so
            that steps are alike in tokens: the mix of lengths in a step varies less, and the order
            inside a round is not that of the epoch.
    """

    micro_tokens: int
    per_step: PerStep
    cost: CostModel = field(default_factory=CostModel)
    packed: bool = False
    wait_rounds: int = 0
    move: bool = True

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
        """(rows, tokens of a row) of every micro-batch of every rank; packed, (1, tokens) of every
        sample, which attends to itself alone, and of every dummy."""
        shapes: list[tuple[int, int]] = []
        for group in (group for step in self.steps for group in step):
            if not group:
                shapes.append((1, DUMMY_TOKENS))
            elif self.rules.packed:
                shapes += [(1, sample.length) for sample in group]
            else:
                shapes.append((len(group), group[0].length))
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

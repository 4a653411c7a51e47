"""Held-out evaluation: the same examples every time, one loss per example.

Examples are grouped once by the same plan as training's micro-batches, for all ranks: little
padding, and ranks that finish together. So evaluating twice gives the same bits, and on another
number of ranks the same numbers but for rounding. Memory does not grow with the size of the
holdout: only one number per example is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from eke.batching.batch import Loss
from eke.batching.planner import PerStep, Rules, Sample, plan_round
from eke.budget.flops import DecoderShape, forward_flops
from eke.distributed import gather_objects, world
from eke.errors import EkeError, InputError
from eke.training.loss import IGNORED, token_losses
from eke.training.memory import Shortage, is_out_of_memory, shortages_of


class EvaluationShort(EkeError):
    """An evaluation did not fit into some rank's memory; raised on all ranks.

    Attributes:
        shortages: by rank.
        shapes: (sequences, positions) of the groups that were begun, on all ranks.
    """

    def __init__(
        self, shortages: Mapping[int, Shortage], shapes: Sequence[tuple[int, int]]
    ) -> None:
        rank, shortage = min(shortages.items())
        super().__init__(f"rank {rank} ran out of memory in an evaluation: {shortage.error}")
        self.shortages, self.shapes = shortages, shapes


@dataclass(frozen=True)
class Scores:
    """One evaluation.

    Attributes:
        losses: mean nats per supervised token of each example.
        loss: the mean that training's loss is: over all supervised tokens (nats per token), over
            `losses` ("sample"), or over the examples' sums ("sequence", nats per example).
        se: the standard error of the mean of `losses`, each example counted once; of "sequence",
            that of the mean of their sums.
    """

    losses: tuple[float, ...]
    loss: float
    se: float


def scores_of(totals: Sequence[float], weights: Sequence[int], loss: Loss) -> Scores:
    """The scores of examples with these summed losses and numbers of supervised tokens."""
    losses = tuple(total / weight for total, weight in zip(totals, weights, strict=True))
    terms, n = totals if loss == "sequence" else losses, len(losses)
    mean = math.fsum(terms) / n
    variance = math.fsum((x - mean) ** 2 for x in terms) / max(1, n - 1)
    over_all = math.fsum(totals) / sum(weights) if loss == "token" else mean
    return Scores(losses=losses, loss=over_all, se=math.sqrt(variance / n))


class Holdout:
    """The fixed evaluation set, grouped under a cap on padded tokens.

    Args:
        samples: items with `input_ids` and `labels`, `[T]` each.
        micro_tokens: cap of a group's padded tokens; a longer sample is a group of its own.
        pad_id: fills the right.
        loss: what the mean of an evaluation is over.

    Raises:
        InputError: fewer than two examples have a supervised token.
    """

    def __init__(
        self,
        samples: Sequence[Mapping[str, Any]],
        micro_tokens: int,
        pad_id: int,
        loss: Loss = "token",
    ) -> None:
        kept = [s for s in samples if int((s["labels"][1:] != IGNORED).sum()) > 0]
        if len(kept) < 2:
            raise InputError(
                "the evaluation data has too few examples with a supervised token",
                value=f"{len(kept)} of {len(samples)}",
                rule="an error bar needs at least 2",
                fix="Give data.eval rows with a response, or raise data.max_length",
            )
        self.weights = [int((s["labels"][1:] != IGNORED).sum()) for s in kept]
        self.samples, self._pad_id, self._loss = kept, pad_id, loss
        self.limit(micro_tokens)

    def __len__(self) -> int:
        return len(self.samples)

    def limit(self, micro_tokens: int) -> None:
        """Group the examples under this cap, for all ranks of the job, the largest groups first:
        what does not fit into memory is met at once."""
        size = world().size
        samples = [
            Sample(i, len(sample["input_ids"]), weight)
            for i, (sample, weight) in enumerate(zip(self.samples, self.weights, strict=True))
        ]
        rules = Rules(micro_tokens, PerStep("samples", len(samples)))
        shares = [samples[rank::size] for rank in range(size)]
        (block,) = plan_round(shares, rules, rng_seed=0).blocks
        placed = [(rank, group) for step in block.steps for rank, group in enumerate(step) if group]
        placed.sort(key=lambda one: -rules.tokens(one[1]))
        self.micro_tokens = micro_tokens
        self._groups = [[sample.index for sample in group] for _, group in placed]
        self._ranks = [rank for rank, _ in placed]

    def shapes(self) -> list[tuple[int, int]]:
        """(sequences, positions) of each group."""
        return [(len(g), len(self.samples[g[0]]["input_ids"])) for g in self._groups]

    def flops(self, shape: DecoderShape) -> float:
        """FLOPs of one evaluation, all ranks together."""
        return sum(forward_flops(shape, b, t) for b, t in self.shapes())

    def batch(self, group: int) -> dict[str, torch.Tensor]:
        """The padded tensors `[B, T]` of one group."""
        members = [self.samples[i] for i in self._groups[group]]
        longest = max(len(m["input_ids"]) for m in members)
        ids_BT = torch.full((len(members), longest), self._pad_id, dtype=torch.long)
        labels_BT = torch.full_like(ids_BT, IGNORED)
        mask_BT = torch.zeros_like(ids_BT)
        for row, member in enumerate(members):
            n = len(member["input_ids"])
            ids_BT[row, :n] = member["input_ids"]
            labels_BT[row, :n] = member["labels"]
            mask_BT[row, :n] = 1
        return {"input_ids": ids_BT, "labels": labels_BT, "attention_mask": mask_BT}

    @torch.no_grad()
    def evaluate(
        self, model: Any, device: torch.device, autocast: AbstractContextManager[Any]
    ) -> Scores:
        """Score every example; all ranks get the same result. The model's mode is restored.

        Raises:
            EvaluationShort: it does not fit into some rank's memory under this cap.
        """
        was_training = model.training
        model.eval()
        mine: list[list[float]] = []
        begun: list[int] = []
        shortage = None
        try:
            with autocast:
                for group, rank in enumerate(self._ranks):
                    if rank == world().rank and shortage is None:
                        begun.append(group)
                        shortage = self._score(group, mine, model, device)
        finally:
            model.train(was_training)
        told = gather_objects([mine, shortage, begun])
        if shortages := shortages_of([short for _, short, _ in told]):
            shapes = self.shapes()
            raise EvaluationShort(shortages, [shapes[g] for _, _, groups in told for g in groups])
        sums_by_example = {int(i): float(s) for part, _, _ in told for i, s in part}
        totals = [sums_by_example[i] for i in range(len(self))]
        return scores_of(totals, self.weights, self._loss)

    def _score(
        self, group: int, found: list[list[float]], model: Any, device: torch.device
    ) -> Shortage | None:
        """Add (example, summed loss) of a group to `found`; or say what did not fit."""
        members, batch = self._groups[group], self.batch(group)
        try:
            batch = {k: v.to(device) for k, v in batch.items()}
            sums = token_losses(model, batch).double().sum(dim=1).tolist()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # The text alone is kept: the error holds on to all that the pass computed.
            return Shortage.of(error, batch["input_ids"].numel(), len(members))
        found += [[i, s] for i, s in zip(members, sums, strict=True)]
        return None

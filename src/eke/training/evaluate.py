"""Held-out evaluation: the same examples every time, one loss per example.

Examples are grouped by length once, so that evaluating twice gives the same bits, and groups are
dealt out to the ranks. Memory does not grow with the size of the holdout: only one number per
example is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from eke.budget.flops import DecoderShape, forward_flops
from eke.distributed import gather_objects, world
from eke.errors import InputError
from eke.training.loss import IGNORED, token_losses


@dataclass(frozen=True)
class Scores:
    """One evaluation: mean nats per supervised token of each example, and over all tokens.

    `se` is the standard error of the mean of `losses`, each example counted once.
    """

    losses: tuple[float, ...]
    loss: float
    se: float


class Holdout:
    """The fixed evaluation set, grouped under a cap on padded tokens.

    Args:
        samples: items with `input_ids` and `labels`, `[T]` each.
        micro_tokens: cap of a group's padded tokens; a longer sample is a group of its own.
        pad_id: fills the right.

    Raises:
        InputError: fewer than two examples have a supervised token.
    """

    def __init__(
        self, samples: Sequence[Mapping[str, Any]], micro_tokens: int, pad_id: int
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
        order = sorted(range(len(kept)), key=lambda i: (len(kept[i]["input_ids"]), i))
        self._groups: list[list[int]] = []
        for i in order:
            length = len(kept[i]["input_ids"])
            if not self._groups or (len(self._groups[-1]) + 1) * length > micro_tokens:
                self._groups.append([])
            self._groups[-1].append(i)
        self.samples, self._pad_id = kept, pad_id

    def __len__(self) -> int:
        return len(self.samples)

    def shapes(self) -> list[tuple[int, int]]:
        """(sequences, positions) of each group."""
        return [(len(g), len(self.samples[g[-1]]["input_ids"])) for g in self._groups]

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
        """Score every example; all ranks get the same result. The model's mode is restored."""
        was_training = model.training
        model.eval()
        mine: list[list[float]] = []
        try:
            with autocast:
                for group in range(world().rank, len(self._groups), world().size):
                    batch = {k: v.to(device) for k, v in self.batch(group).items()}
                    sums = token_losses(model, batch).double().sum(dim=1).tolist()
                    mine += [[i, s] for i, s in zip(self._groups[group], sums, strict=True)]
        finally:
            model.train(was_training)
        sums_by_example = {int(i): float(s) for part in gather_objects(mine) for i, s in part}
        totals = [sums_by_example[i] for i in range(len(self))]
        losses = tuple(s / w for s, w in zip(totals, self.weights, strict=True))
        n = len(losses)
        mean = math.fsum(losses) / n
        variance = math.fsum((x - mean) ** 2 for x in losses) / max(1, n - 1)
        return Scores(
            losses=losses,
            loss=math.fsum(totals) / sum(self.weights),
            se=math.sqrt(variance / n),
        )

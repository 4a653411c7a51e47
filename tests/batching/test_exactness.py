"""Gradients are those of one process on the same samples: over ranks, micro-batches, skewed labels,
padding, packing, both units of a step and all three means."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from eke.batching import Block, DynamicLoader, Exchange, MicroBatch

RunRanks = Callable[[int, Callable[[Exchange], Any]], list[Any]]
VOCAB, MICRO_TOKENS = 50, 40
LENGTHS = [2 + (i * 29) % 31 for i in range(36)]


class Samples:
    """Item i has `LENGTHS[i]` tokens. Skewed, all labels train in every fourth sample, few in the
    next two, and none in the last: in the order of the dataset, each of four ranks has its kind."""

    def __init__(self, skewed: bool) -> None:
        self._skewed = skewed

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        n = LENGTHS[index]
        ids = (torch.arange(n) * 7 + index * 13) % VOCAB
        labels = ids.clone()
        if self._skewed:
            labels[: [0, n - 1, n - 2, n][index % 4]] = -100
        return {"input_ids": ids, "labels": labels}


class CausalModel(torch.nn.Module):
    """Predicts from the mean of the embeddings so far, of the same sample where rows are packed."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(VOCAB, 8, dtype=dtype)
        self.head = torch.nn.Linear(8, VOCAB, dtype=dtype)

    def forward(self, ids_BT: torch.Tensor, mask_TT: torch.Tensor | None = None) -> torch.Tensor:
        length = ids_BT.shape[1]
        sees_TT = torch.ones(length, length).tril() if mask_TT is None else mask_TT
        sees_TT = sees_TT.to(self.head.weight.dtype)
        sees_TT = sees_TT / sees_TT.sum(-1, keepdim=True)
        return self.head(torch.tanh(sees_TT @ self.embed(ids_BT)))


def token_losses(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), reduction="none"
    )
    return losses.view(labels_BT.shape[0], -1)


def loss_of(model: CausalModel, micro: MicroBatch) -> torch.Tensor:
    mask = micro.block_causal_mask()[0, 0] if micro.is_packed else None
    losses_BT = token_losses(model(micro["input_ids"], mask), micro["labels"])
    if micro.loss == "token":
        return losses_BT.sum() * micro.scale
    return (losses_BT * micro.weights[:, 1:]).sum() * micro.scale


def reference(model: CausalModel, samples: Samples, indices: list[int], loss: str) -> torch.Tensor:
    """The mean over the samples, one at a time, without padding, scales or a loader."""
    sums, counts = [], []
    for index in indices:
        sample = samples[index]
        counted = int((sample["labels"][1:] != -100).sum())
        if counted:
            logits_BTV = model(sample["input_ids"][None])
            sums.append(token_losses(logits_BTV, sample["labels"][None]).sum())
            counts.append(counted)
    if not sums:
        return torch.stack([p.sum() for p in model.parameters()]).sum() * 0
    if loss == "token":
        return torch.stack(sums).sum() / sum(counts)
    if loss == "sample":
        sums = [one / count for one, count in zip(sums, counts, strict=True)]
    return torch.stack(sums).mean()


def gradient(model: CausalModel, losses: Sequence[torch.Tensor]) -> torch.Tensor:
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def blocks_of(run_ranks: RunRanks, world: int, skewed: bool, **settings: Any) -> list[list[Block]]:
    def run(exchange: Exchange) -> list[Block]:
        loader = DynamicLoader(
            Samples(skewed),  # type: ignore[arg-type]
            micro_tokens=MICRO_TOKENS,
            window=12,
            shuffle=False,
            epochs=1,
            exchange=exchange,
            **settings,
        )
        with loader:
            return list(loader.blocks())

    results = run_ranks(world, run)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("loss", ["token", "sample", "sequence"])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gradients_are_those_of_one_process(
    run_ranks: RunRanks, world: int, packing: bool, loss: str
) -> None:
    models = {dtype: CausalModel(dtype) for dtype in (torch.float64, torch.float32)}
    seen = set()
    for unit, accumulation, skewed in itertools.product(
        ["tokens", "samples"], [1, 2, 3], [False, True]
    ):
        # Samples of 16.5 tokens on average: two of them to a micro-batch.
        amount = world * accumulation * (MICRO_TOKENS if unit == "tokens" else 2)
        ranks = blocks_of(
            run_ranks, world, skewed, per_step=f"{unit}:{amount}", packing=packing, loss=loss
        )
        for blocks in zip(*ranks, strict=True):
            assert len({len(block) for block in blocks}) == 1
            seen.add((accumulation, min(len(blocks[0]), 3)))
            indices = [index for block in blocks for micro in block for _, index in micro.uids]
            for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
                model = models[dtype]
                by_rank = [gradient(model, [loss_of(model, m) for m in b]) for b in blocks]
                averaged = torch.stack(by_rank).mean(0)
                expected = gradient(model, [reference(model, Samples(skewed), indices, loss)])
                size = max(1.0, float(expected.abs().max()))
                assert (averaged - expected).abs().max() < tolerance * size
    assert {micro_steps for _, micro_steps in seen} == {1, 2, 3}


def test_weights_are_those_of_each_label(run_ranks: RunRanks) -> None:
    for packing in (False, True):
        (blocks,) = blocks_of(
            run_ranks, 1, True, per_step="samples:8", packing=packing, loss="sample"
        )
        for micro in itertools.chain(*blocks):
            assert micro.weights.shape == micro["labels"].shape
            assert micro.weights.dtype == torch.float64
            trained = [i % 4 != 3 for _, i in micro.uids]  # at least 2 tokens in every sample
            assert float(micro.weights.sum()) == pytest.approx(sum(trained))
            assert int(micro.weights.count_nonzero()) == micro.label_tokens

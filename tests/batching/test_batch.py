from __future__ import annotations

import numpy as np
import torch

from eke.batching.batch import Tokens, collate


def test_rows_are_padded_on_the_right() -> None:
    long = Tokens(np.array([5, 6, 7]), np.array([-100, 6, 7]), 3, 2)
    short = Tokens(np.array([8]), np.array([8]), 1, 0)
    batch = collate([long, short], [(0, 4), (0, 9)], pad_token_id=1, scale=0.5)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 1, 1]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert (batch.uids, batch.lengths, batch.scale) == ([(0, 4), (0, 9)], [3, 1], 0.5)
    assert (batch.tokens, batch.padded_tokens, batch.label_tokens) == (4, 6, 2)
    assert not batch.is_dummy


def test_a_dummy_has_no_weight_and_its_loss_touches_every_parameter() -> None:
    dummy = collate([], [], pad_token_id=3, scale=0.5)
    assert dummy.is_dummy
    assert (dummy.scale, dummy.tokens, dummy.label_tokens, dummy.uids) == (0.0, 0, 0, [])
    assert dummy["labels"].eq(-100).all()
    assert dummy["attention_mask"].any(dim=1).all()
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5))
    logits = model(dummy["input_ids"])[:, :-1]
    assert logits.numel() > 0
    loss_sum = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), dummy["labels"][:, 1:].flatten(), reduction="sum"
    )
    (loss_sum * dummy.scale).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()

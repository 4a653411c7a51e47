"""The summed next-token loss against torch's own, padded and not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from eke.data.pipeline import IGNORED as IGNORED_BY_DATA
from eke.training.loss import IGNORED, token_losses


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).double().eval()


def batch_of(lengths: list[int], longest: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(sum(lengths))
    ids_BT = torch.zeros((len(lengths), longest), dtype=torch.long)
    labels_BT = torch.full_like(ids_BT, IGNORED)
    mask_BT = torch.zeros_like(ids_BT)
    for row, n in enumerate(lengths):
        ids_BT[row, :n] = torch.randint(0, 97, (n,), generator=draw)
        labels_BT[row, n // 3 : n] = ids_BT[row, n // 3 : n]
        mask_BT[row, :n] = 1
    return {"input_ids": ids_BT, "labels": labels_BT, "attention_mask": mask_BT}


def reference(model: Any, ids_T: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    """Mean loss of one unpadded sample, the way a textbook has it."""
    logits_TV = model(input_ids=ids_T[None]).logits[0]
    return F.cross_entropy(logits_TV[:-1], labels_T[1:])


@pytest.mark.parametrize("lengths", [[9], [9, 9, 9], [2, 9, 5], [1, 9], [3, 3, 2]])
def test_it_is_the_cross_entropy_of_each_sample(model: Any, lengths: list[int]) -> None:
    batch = batch_of(lengths, max(lengths))
    losses_BT = token_losses(model, batch)
    assert losses_BT.shape == (len(lengths), max(lengths) - 1)
    assert losses_BT.dtype == torch.float64
    for row, n in enumerate(lengths):
        ids_T, labels_T = batch["input_ids"][row, :n], batch["labels"][row, :n]
        counted = int((labels_T[1:] != IGNORED).sum())
        if counted:
            expected = reference(model, ids_T, labels_T) * counted
            torch.testing.assert_close(losses_BT[row].sum(), expected, rtol=1e-12, atol=1e-12)
        else:
            assert losses_BT[row].sum() == 0


def test_padding_changes_nothing(model: Any) -> None:
    tight, wide = batch_of([9, 6], 9), batch_of([9, 6], 20)
    torch.testing.assert_close(
        token_losses(model, tight), token_losses(model, wide)[:, :8], rtol=1e-12, atol=1e-12
    )
    assert token_losses(model, wide)[:, 8:].count_nonzero() == 0


def test_what_is_not_supervised_counts_0_and_has_no_gradient(model: Any) -> None:
    batch = batch_of([9], 9)
    batch["labels"][:] = IGNORED
    losses = token_losses(model, batch)
    assert losses.count_nonzero() == 0
    (gradient,) = torch.autograd.grad(losses.sum(), [model.lm_head.weight])
    assert gradient.count_nonzero() == 0


def test_a_batch_of_single_tokens_has_no_loss_but_a_gradient(model: Any) -> None:
    """A dataset may hold such samples; every rank must still take part in the backward pass."""
    losses = token_losses(model, batch_of([1, 1, 1], 1))
    assert losses.shape == (3, 0)
    (gradient,) = torch.autograd.grad(losses.sum(), [model.lm_head.weight])
    assert gradient.count_nonzero() == 0


def test_half_precision_logits_are_scored_in_fp32(model: Any) -> None:
    batch = batch_of([9, 6], 9)
    single = LlamaForCausalLM(model.config)
    single.load_state_dict(model.state_dict())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = token_losses(single, batch)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), token_losses(model, batch), rtol=0.1, atol=0.1)


def test_the_mask_is_handed_over_only_when_there_is_padding(model: Any) -> None:
    seen = []

    def spy(**inputs: Any) -> Any:
        seen.append(inputs["attention_mask"])
        return model(**inputs)

    token_losses(spy, batch_of([5, 5], 5))
    token_losses(spy, batch_of([5, 4], 5))
    assert seen[0] is None
    assert seen[1].tolist() == [[1] * 5, [1] * 4 + [0]]


def test_data_and_loss_agree_on_what_is_ignored() -> None:
    assert IGNORED == IGNORED_BY_DATA

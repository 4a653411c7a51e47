"""Packed samples do not see one another, whatever the attention; a model that mixes them is
refused."""

from __future__ import annotations

import contextlib
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eke.batching.batch import MicroBatch, Tokens, collate
from eke.budget import Ledger
from eke.errors import InputError
from eke.training.loss import IGNORED, token_losses
from eke.training.packing import check_packing, packed_arguments

VOCAB = 97
CPU, NOTHING = torch.device("cpu"), contextlib.nullcontext()


def build(attention: str, *, scale: float = 0.2) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        initializer_range=scale,
        attn_implementation=attention,
    )
    assert config.use_cache  # as pretrained models come
    return LlamaForCausalLM(config).double()


def samples_of(lengths: list[int]) -> list[Tokens]:
    draw = np.random.default_rng(sum(lengths))
    samples = []
    for n in lengths:
        ids = draw.integers(0, VOCAB, n)
        labels = np.where(np.arange(n) < n // 3, IGNORED, ids)
        samples.append(Tokens(ids, labels, n, int((labels[1:] != IGNORED).sum())))
    return samples


def collated(samples: list[Tokens], *, packed: bool) -> MicroBatch:
    uids = [(0, i) for i in range(len(samples))]
    return collate(samples, uids, pad_token_id=0, scale=0.25, packed=packed)


def by_sample(micro: MicroBatch, losses_BT: torch.Tensor) -> list[torch.Tensor]:
    """The losses of each sample, `[T-1]`."""
    if not micro.is_packed:
        return [row[: n - 1] for row, n in zip(losses_BT, micro.lengths, strict=True)]
    starts = micro.cu_seqlens.tolist()
    return [losses_BT[0, a : b - 1] for a, b in pairwise(starts)]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", [[9, 4, 7], [1, 5, 1, 1], [6], [2, 2], [1, 1]])
def test_losses_and_gradients_are_those_of_the_padded_batch(
    attention: str, lengths: list[int]
) -> None:
    model, samples = build(attention), samples_of(lengths)
    # The eager attention of transformers takes its softmax in single precision, whatever the model.
    tolerance = 1e-10 if attention == "sdpa" else 1e-5
    found = []
    for packed in (True, False):
        micro = collated(samples, packed=packed)
        losses = by_sample(micro, token_losses(model, micro))
        gradients = []
        for one in losses:  # a gradient for each sample: no sum over them that could hide a mix-up
            if one.numel():
                gradients += torch.autograd.grad(one.sum(), model.parameters(), retain_graph=True)
        found.append((losses, gradients))
    for ours, theirs in zip(found[0][0] + found[0][1], found[1][0] + found[1][1], strict=True):
        assert ours.shape == theirs.shape
        assert not ours.numel() or (ours - theirs).abs().max() < tolerance
    micro = collated(samples, packed=True)
    assert micro.padded_tokens == micro.tokens == sum(lengths)
    assert token_losses(model, micro).count_nonzero() == micro.label_tokens


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_one_samples_change_does_not_change_anothers_logits(attention: str) -> None:
    model, samples = build(attention), samples_of([5, 8, 4])
    micro = collated(samples, packed=True)
    changed = micro["input_ids"].clone()
    changed[0, :5] = (changed[0, :5] + 1) % VOCAB
    arguments = packed_arguments(model, micro)
    before = model(input_ids=micro["input_ids"], **arguments).logits
    after = model(input_ids=changed, **arguments).logits
    assert not torch.equal(before[0, :5], after[0, :5])
    assert torch.equal(before[0, 5:], after[0, 5:])
    # The cache that a model keeps by default lets it mix them without a word.
    leaking = model(input_ids=changed, position_ids=micro["position_ids"]).logits
    assert (leaking[0, 5:] - before[0, 5:]).abs().max() > 1e-3
    check_packing(model, VOCAB, CPU, NOTHING)


@pytest.mark.parametrize(("attention", "dtype"), [("sdpa", torch.bool), ("eager", torch.float64)])
def test_the_block_causal_mask_keeps_samples_apart(attention: str, dtype: torch.dtype) -> None:
    model, micro = build(attention), collated(samples_of([5, 8, 4]), packed=True)
    mask = micro.block_causal_mask(dtype)
    assert mask.shape == (1, 1, 17, 17)
    assert mask.dtype == dtype
    by_mask = model(
        input_ids=micro["input_ids"], position_ids=micro["position_ids"], attention_mask=mask
    ).logits
    by_positions = model(input_ids=micro["input_ids"], **packed_arguments(model, micro)).logits
    assert (by_mask - by_positions).abs().max() < 1e-10


def test_varlen_attention_gets_the_ends_of_the_samples() -> None:
    micro = collated(samples_of([5, 8, 1]), packed=True)
    config = SimpleNamespace(_attn_implementation="flash_attention_2")
    arguments = packed_arguments(SimpleNamespace(module=SimpleNamespace(config=config)), micro)
    assert arguments.pop("position_ids") is micro["position_ids"]
    assert arguments.pop("use_cache") is False
    expected = micro.varlen_arguments()
    assert arguments.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(arguments[name]), torch.as_tensor(value)), name
    assert arguments["cu_seq_lens_q"].tolist() == [0, 5, 13, 14]
    assert arguments["cu_seq_lens_q"].dtype == torch.int32
    assert arguments["max_length_k"] == 8


def test_a_run_with_packing_has_no_padding(
    tmp_path: Path, write_toml: Any, run_training: Any, standing: Any
) -> None:
    assert run_training(write_toml(tmp_path), "batch.packing=true", "budget.steps=16") == 0
    run = tmp_path / "runs" / "run"
    steps = standing(run, "step")
    assert len(steps) == 16
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert all(s["padded_tokens"] == s["tokens"] for s in steps)
    assert any(s["samples"] > s["micro_batches"] for s in steps)
    with Ledger(run / "ledger.jsonl") as ledger:
        assert {bill.what for bill in ledger.bills}.isdisjoint({"padding"})
        by_training = sum(bill.flops for bill in ledger.bills if bill.what == "train")
    # Attention is counted by sample: the 128 tokens of a row at once would be more.
    plan = json.loads((run / "plan.json").read_text())
    per_token = by_training / sum(s["tokens"] for s in steps)
    assert per_token == pytest.approx(plan["flops_per_token"], rel=0.02)


class Careless(torch.nn.Module):
    """A model that takes `position_ids` and does not heed them, as one without masks would."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return self.inner(input_ids=input_ids)


@pytest.mark.parametrize("scale", [0.2, 0.02])
def test_a_model_that_mixes_samples_is_refused(scale: float) -> None:
    model = build("sdpa", scale=scale).float().train()
    check_packing(model, VOCAB, CPU, NOTHING)
    check_packing(model, VOCAB, CPU, torch.autocast("cpu", dtype=torch.bfloat16))
    assert model.training
    with pytest.raises(InputError, match="packed micro-batches"):
        check_packing(Careless(model), VOCAB, CPU, NOTHING)

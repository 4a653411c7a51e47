"""Shapes: the same without weights as with them, and against counts by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MambaConfig

from eke.budget.flops import BlockShape
from eke.errors import InputError
from eke.models import builtin_config, shape_of

CONFIGS = {
    "builtin": builtin_config("tiny", vocab_size=500, bos=None, eos=1, pad=0),
    "untied, grouped queries": LlamaConfig(
        vocab_size=300, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, intermediate_size=96, tie_word_embeddings=False,
    ),
    "gpt2": GPT2Config(vocab_size=300, n_embd=64, n_layer=3, n_head=4, n_positions=32),
}  # fmt: skip


def build(name: str, device: str = "cpu") -> Any:
    with torch.device(device):
        return AutoModelForCausalLM.from_config(CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_without_weights_has_the_same_shape(name: str) -> None:
    real, meta = build(name), build(name, "meta")
    assert next(meta.parameters()).is_meta
    assert shape_of(meta) == shape_of(real)
    for model in (real, meta):
        for parameter in list(model.parameters())[:4]:
            parameter.requires_grad_(False)
    assert shape_of(meta) == shape_of(real)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_is_counted_once(name: str) -> None:
    model = build(name)
    shape = shape_of(model)
    assert shape.n_parameters == model.num_parameters()
    assert shape.trained_parameters == model.num_parameters()
    for p in model.get_input_embeddings().parameters():
        p.requires_grad_(False)
    assert shape_of(model).trained_parameters == model.num_parameters(only_trainable=True)


def test_by_hand_with_grouped_queries() -> None:
    shape = shape_of(build("untied, grouped queries"))
    attention = 64 * 24 * 4 * 2 + 64 * 24 * 2 * 2
    block = BlockShape(
        matmul_params=attention + 3 * 64 * 96,
        attention_width=2 * 4 * 24,
        trained_matmul_params=attention + 3 * 64 * 96,
        trains=True,
    )
    assert shape.blocks == (block,) * 3
    assert shape.parameters == {
        "embedding": 300 * 64,
        "blocks": 3 * (block.matmul_params + 2 * 64),
        "norm": 64,
        "head": 300 * 64,
    }
    assert (shape.hidden, shape.vocab, shape.head_params) == (64, 300, 300 * 64)
    assert shape.bytes_per_parameter == 4


def test_a_tied_head_is_the_embedding() -> None:
    model = build("builtin")
    assert shape_of(model).parameters["head"] == 0
    assert shape_of(model).head_params == shape_of(model).parameters["embedding"]
    model.get_input_embeddings().weight.requires_grad_(False)
    shape = shape_of(model)
    assert not shape.head_trains
    assert not shape.embedding_trains


def test_what_trains_is_told_by_block() -> None:
    model = build("untied, grouped queries")
    model.requires_grad_(False)
    model.model.layers[1].input_layernorm.requires_grad_(True)
    model.model.layers[2].mlp.requires_grad_(True)
    shape = shape_of(model)
    assert [b.trains for b in shape.blocks] == [False, True, True]
    assert [b.trained_matmul_params for b in shape.blocks] == [0, 0, 3 * 64 * 96]
    assert (shape.embedding_trains, shape.norm_trains, shape.head_trains) == (False, False, False)
    model.model.norm.requires_grad_(True)
    assert shape_of(model).norm_trains


def test_trained_positions_need_gradients_through_all_blocks() -> None:
    model = build("gpt2")
    assert shape_of(model).parameters["embedding"] == (300 + 32) * 64
    assert shape_of(model).parameters["norm"] == 2 * 64
    model.requires_grad_(False)
    model.transformer.wpe.requires_grad_(True)
    assert shape_of(model).embedding_trains


def test_half_precision_takes_two_bytes() -> None:
    assert shape_of(build("builtin").to(torch.bfloat16)).bytes_per_parameter == 2


@pytest.mark.parametrize("kind", ["a layer", "no blocks", "no attention"])
def test_what_is_not_a_decoder_is_an_input_error(kind: str) -> None:
    if kind == "a layer":
        model: Any = nn.Linear(2, 2)
    elif kind == "no blocks":
        model = build("builtin")
        model.model.layers = nn.ModuleList()
    else:
        mamba = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(mamba)
    with pytest.raises(InputError, match="not a decoder that eke can read"):
        shape_of(model)

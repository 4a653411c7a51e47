"""The closed form against FLOPs that PyTorch counted while a real model ran.

`FlopCounterMode` counts the matrix products that were dispatched, so equality is exact, except
where a test says why not. Attention runs eagerly: the counter does not see inside fused kernels on
a CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from eke.budget.flops import (
    BlockShape,
    DecoderShape,
    backward_flops,
    flops_per_token,
    forward_flops,
    train_flops,
)
from eke.models import builtin_config, shape_of

B, T = 2, 24


def build(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation("eager")
    return model.train()


@pytest.fixture(scope="module")
def tiny() -> Any:
    return build(builtin_config("tiny", vocab_size=4096, bos=None, eos=1, pad=0))


def layer_of(name: str) -> int:
    """The block that a parameter is in; -1 for the embedding, 99 for what comes after blocks."""
    parts = name.split(".")
    numbers = [int(part) for part in parts if part.isdigit()]
    return numbers[0] if numbers else -1 if "embed" in name or "wte" in name else 99


FREEZING: dict[str, Callable[[str], bool]] = {
    "all of it": lambda name: True,
    "all but the embedding": lambda name: layer_of(name) >= 0,
    "the upper blocks": lambda name: layer_of(name) >= 3,
    "the top block": lambda name: layer_of(name) == 4,
    "the bottom block": lambda name: layer_of(name) == 0,
    "the embedding": lambda name: layer_of(name) == -1,
    "the norms": lambda name: "norm" in name,
    "the last norm": lambda name: name == "model.norm.weight",
}


def train_only(model: Any, trained: Callable[[str], bool]) -> DecoderShape:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained(name))
        parameter.grad = None
    return shape_of(model)


def counted(model: Any, batch: int = B, length: int = T) -> tuple[int, int]:
    """FLOPs of a forward and of a backward pass, as PyTorch counts them."""
    ids_BT = torch.randint(0, model.config.vocab_size, (batch, length))
    with FlopCounterMode(display=False) as forward:
        logits_BTV = model(input_ids=ids_BT).logits
    with FlopCounterMode(display=False) as backward:
        logits_BTV.square().mean().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("trained", FREEZING)
def test_forward_and_backward_exactly(tiny: Any, trained: str) -> None:
    shape = train_only(tiny, FREEZING[trained])
    forward, backward = counted(tiny)
    assert forward == forward_flops(shape, B, T)
    assert backward == backward_flops(shape, B, T)
    assert forward + backward == train_flops(shape, B, T)


@pytest.fixture
def checkpointed() -> Any:
    """The tiny model with gradient checkpointing, without transformers' hook.

    transformers asks for gradients of the embedding's output as soon as checkpointing is on, which
    the reentrant kind needs. With it every block passes gradients, whatever is frozen.
    """
    model = build(builtin_config("tiny", vocab_size=512, bos=None, eos=1, pad=0))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.disable_input_require_grads()
    return model


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("trained", FREEZING)
def test_recomputation_of_whole_blocks_exactly(checkpointed: Any, trained: str) -> None:
    shape = train_only(checkpointed, FREEZING[trained])
    with set_checkpoint_early_stop(False):
        total = sum(counted(checkpointed))
    assert total == train_flops(shape, B, T, recompute=True)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_recomputation_that_stops_early_costs_at_most_that(checkpointed: Any) -> None:
    # By default PyTorch does not repeat a block's last product: nothing in the backward needs it.
    shape = train_only(checkpointed, FREEZING["all of it"])
    total = sum(counted(checkpointed))
    down = checkpointed.model.layers[0].mlp.down_proj.weight.numel()
    assert total == train_flops(shape, B, T, recompute=True) - 5 * 2.0 * B * T * down
    assert total > 0.94 * train_flops(shape, B, T, recompute=True)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_with_transformers_hook_all_blocks_pass_gradients(checkpointed: Any) -> None:
    checkpointed.enable_input_require_grads()
    shape = train_only(checkpointed, FREEZING["the top block"])
    with set_checkpoint_early_stop(False):
        total = sum(counted(checkpointed))
    hooked = dataclasses.replace(shape, embedding_trains=True)
    assert total == train_flops(hooked, B, T, recompute=True)
    assert total > 1.5 * train_flops(shape, B, T, recompute=True)


@pytest.mark.parametrize("trained", ["all of it", "all but the embedding"])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(  # grouped queries, heads of another size, a head of its own
            vocab_size=300, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=24, intermediate_size=96, tie_word_embeddings=False,
        ),
        GPT2Config(vocab_size=300, n_embd=64, n_layer=3, n_head=4, n_positions=64),
    ],
    ids=["grouped queries", "gpt2"],
)  # fmt: skip
def test_other_architectures(config: Any, trained: str) -> None:
    model = build(config)
    shape = train_only(model, FREEZING[trained])
    forward, backward = counted(model)
    assert forward == pytest.approx(forward_flops(shape, B, T), rel=0.01)
    assert backward == pytest.approx(backward_flops(shape, B, T), rel=0.01)


@st.composite
def shapes(draw: st.DrawFn) -> DecoderShape:
    blocks = []
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.integers(1, 50))
        trained = draw(st.sampled_from([0, size]))
        blocks.append(BlockShape(size, draw(st.integers(1, 9)), trained, trained > 0))
    return DecoderShape(
        blocks=tuple(blocks),
        head_params=draw(st.integers(1, 50)),
        head_trains=draw(st.booleans()),
        embedding_trains=draw(st.booleans()),
        hidden=1,
        vocab=1,
        parameters={"embedding": 3, "blocks": 4, "norm": 1, "head": 0},
        trained_parameters=0,
        bytes_per_parameter=4,
        norm_trains=draw(st.booleans()),
    )


@given(shapes(), st.integers(1, 8), st.integers(1, 64))
def test_freezing_and_recomputing_stay_between_their_bounds(
    shape: DecoderShape, batch: int, length: int
) -> None:
    forward = forward_flops(shape, batch, length)
    plain = train_flops(shape, batch, length)
    recomputed = train_flops(shape, batch, length, recompute=True)
    everything = dataclasses.replace(
        shape,
        blocks=tuple(
            dataclasses.replace(b, trained_matmul_params=b.matmul_params, trains=True)
            for b in shape.blocks
        ),
        embedding_trains=True,
        head_trains=True,
    )
    assert 0 <= backward_flops(shape, batch, length) <= 2 * forward
    assert backward_flops(everything, batch, length) == 2 * forward
    assert plain <= recomputed <= plain + forward
    assert forward_flops(shape, 2 * batch, length) == 2 * forward
    assert flops_per_token(shape, length) == pytest.approx(train_flops(shape, 1, length) / length)
    assert shape.n_parameters == 8


def test_full_training_is_six_per_parameter_and_token_without_attention(tiny: Any) -> None:
    shape = train_only(tiny, FREEZING["all of it"])
    no_attention = dataclasses.replace(
        shape, blocks=tuple(dataclasses.replace(b, attention_width=0) for b in shape.blocks)
    )
    matrices = sum(p.numel() for p in tiny.parameters() if p.ndim == 2)
    assert flops_per_token(no_attention, 100) == 6 * matrices

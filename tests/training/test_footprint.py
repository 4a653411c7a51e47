"""The closed form of memory: exact where it says so, monotone, and its inverse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from eke.budget.flops import BlockShape, DecoderShape
from eke.models import shape_of
from eke.training.footprint import (
    LEAST_MICRO_TOKENS,
    LEAST_POOL_BYTES,
    MOST_POOL_BYTES,
    RUNTIME_BYTES,
    footprint,
    largest_micro_tokens,
    pool_bytes,
)


def tiny_llama(*, tied: bool) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_gradients_and_moments_are_exact(tied: bool, frozen: bool) -> None:
    model = tiny_llama(tied=tied)
    if frozen:
        model.model.layers[0].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    ids_BT = torch.arange(20).view(2, 10)
    model(input_ids=ids_BT, labels=ids_BT).loss.backward()
    optimizer.step()

    def size(tensors: list[torch.Tensor]) -> int:
        return sum(t.numel() * t.element_size() for t in tensors)

    terms = footprint(shape_of(model), 20)
    assert terms.weights == size(list(model.parameters()))
    assert terms.gradients == size([p.grad for p in trained if p.grad is not None])
    moments = [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    assert terms.optimizer == size(moments)
    # All that AdamW holds besides is one counter a tensor.
    held = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    assert size(held) - terms.optimizer == 4 * len(trained)


@st.composite
def shapes(draw: st.DrawFn) -> DecoderShape:
    hidden = draw(st.sampled_from([32, 64, 192, 512]))
    vocab = draw(st.integers(256, 50_000))
    blocks = draw(st.integers(1, 12))
    matmul = 12 * hidden * hidden
    groups = {"embedding": vocab * hidden, "blocks": blocks * matmul, "norm": hidden, "head": 0}
    return DecoderShape(
        blocks=(BlockShape(matmul, 2 * hidden, matmul, True),) * blocks,
        head_params=vocab * hidden,
        head_trains=True,
        embedding_trains=True,
        hidden=hidden,
        vocab=vocab,
        parameters=groups,
        trained_parameters=sum(groups.values()),
        bytes_per_parameter=4,
    )


@given(shapes(), st.integers(2, 10**5), st.integers(1, 10**5), st.sampled_from([2, 4]))
def test_more_tokens_take_more(shape: DecoderShape, tokens: int, more: int, width: int) -> None:
    less, much = (footprint(shape, n, compute_bytes=width) for n in (tokens, tokens + more))
    assert less.total < much.total
    assert all(less.terms()[name] <= much.terms()[name] for name in less.terms())
    assert (less.weights, less.optimizer) == (much.weights, much.optimizer)


@given(shapes(), st.integers(2, 10**5))
def test_more_model_takes_more_and_bf16_takes_less(shape: DecoderShape, tokens: int) -> None:
    larger = replace(
        shape,
        blocks=shape.blocks * 2,
        parameters={**shape.parameters, "blocks": shape.parameters["blocks"] * 2},
        trained_parameters=shape.trained_parameters + shape.parameters["blocks"],
    )
    assert footprint(larger, tokens).total > footprint(shape, tokens).total
    assert footprint(shape, tokens, compute_bytes=2).total < footprint(shape, tokens).total


@given(shapes(), st.integers(2, 10**5))
def test_the_total_is_the_sum_of_the_terms(shape: DecoderShape, tokens: int) -> None:
    whole = footprint(shape, tokens)
    assert whole.total == sum(whole.terms().values()) > RUNTIME_BYTES


@given(
    shapes(),
    st.integers(0, 8 * 2**30),
    st.sampled_from([64, 100, 1000, 1024, 4096, 16384]),
    st.sampled_from([2, 4]),
)
def test_the_largest_that_fits(shape: DecoderShape, limit: int, most: int, width: int) -> None:
    candidates = [most >> k for k in range(20) if most >> k >= LEAST_MICRO_TOKENS]
    fits = [n for n in candidates if footprint(shape, n, compute_bytes=width).total <= limit]
    found = largest_micro_tokens(shape, limit, compute_bytes=width, most=most)
    assert found == max(fits, default=0)


@given(st.integers(0, 10**13), st.integers(-(10**10), 10**11))
def test_the_pool_is_an_eighth_of_the_state_within_its_bounds(state: int, room: int) -> None:
    free, bounded = pool_bytes(state), pool_bytes(state, room)
    assert LEAST_POOL_BYTES <= bounded <= free <= MOST_POOL_BYTES
    if 8 * LEAST_POOL_BYTES <= state <= 8 * MOST_POOL_BYTES:
        assert 8 * (free - 1) < state <= 8 * free
    if room >= LEAST_POOL_BYTES:
        assert bounded == min(free, room)


@given(shapes(), st.integers(2, 10**4), st.integers(0, 2**30))
def test_the_pool_counts(shape: DecoderShape, tokens: int, pool: int) -> None:
    assert footprint(shape, tokens, pool=pool).total == footprint(shape, tokens).total + pool
    limit = footprint(shape, 128, pool=pool).total
    assert largest_micro_tokens(shape, limit, most=4096, pool=pool) == 128
    assert largest_micro_tokens(shape, limit - 1, most=4096, pool=pool) == 64

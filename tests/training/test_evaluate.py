"""Evaluation against a plain loop over examples, and what it leaves as it was."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from eke.batching import CostModel
from eke.distributed.world import World
from eke.errors import InputError
from eke.models import shape_of
from eke.training import evaluate
from eke.training.evaluate import EvaluationShort, Holdout, Scores
from eke.training.loss import IGNORED, token_losses

VOCAB = 97


def samples_of(lengths: list[int], seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Random tokens; the first third of each sample is not supervised."""
    draw = torch.Generator().manual_seed(seed)
    samples = []
    for n in lengths:
        ids_T = torch.randint(0, VOCAB, (n,), generator=draw)
        labels_T = ids_T.clone()
        labels_T[: n // 3] = IGNORED
        samples.append({"input_ids": ids_T, "labels": labels_T})
    return samples


def llama(dropout: float = 0.0) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        initializer_range=0.2,
        attention_dropout=dropout,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return llama().double()


def score(holdout: Holdout, model: Any) -> Scores:
    return holdout.evaluate(model, torch.device("cpu"), contextlib.nullcontext())


LENGTHS = [5, 17, 2, 30, 9, 9, 21, 4, 3, 12, 17]


def test_losses_are_those_of_a_plain_loop(model: LlamaForCausalLM) -> None:
    samples = samples_of(LENGTHS)
    scores = score(Holdout(samples, micro_tokens=40, pad_id=0), model)
    sums, counts = [], []
    with torch.no_grad():
        for sample in samples:
            logits_TV = model(input_ids=sample["input_ids"][None]).logits[0]
            sums.append(
                float(F.cross_entropy(logits_TV[:-1], sample["labels"][1:], reduction="sum"))
            )
            counts.append(int((sample["labels"][1:] != IGNORED).sum()))
    means = [s / n for s, n in zip(sums, counts, strict=True)]
    assert scores.losses == pytest.approx(means, rel=1e-10)
    assert scores.loss == pytest.approx(sum(sums) / sum(counts), rel=1e-10)
    assert scores.se == pytest.approx(statistics.stdev(means) / math.sqrt(len(means)), rel=1e-9)


@pytest.mark.parametrize("micro_tokens", [1, 10, 64, 10_000])
def test_the_grouping_does_not_matter(micro_tokens: int) -> None:
    samples, single = samples_of(LENGTHS), llama()
    alone = score(Holdout(samples, 1, pad_id=0), single)
    grouped = score(Holdout(samples, micro_tokens, pad_id=3), single)
    assert grouped.losses == pytest.approx(alone.losses, rel=1e-6)
    assert grouped.loss == pytest.approx(alone.loss, rel=1e-6)


def test_evaluating_twice_gives_the_same_bits(model: LlamaForCausalLM) -> None:
    holdout = Holdout(samples_of(LENGTHS), 40, pad_id=0)
    assert score(holdout, model) == score(holdout, model)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_comes_back_and_dropout_is_off(training: bool) -> None:
    dropping = llama(dropout=0.5).train(training)
    holdout = Holdout(samples_of(LENGTHS), 40, pad_id=0)
    assert score(holdout, dropping) == score(holdout, dropping)
    assert dropping.training is training
    assert all(m.training is training for m in dropping.modules())


def test_the_mode_comes_back_after_a_failure() -> None:
    single = llama().train()
    broken = samples_of(LENGTHS)
    broken[3]["input_ids"][0] = VOCAB  # has no row in the embedding
    with pytest.raises(IndexError):
        score(Holdout(broken, 40, pad_id=0), single)
    assert single.training


def test_no_random_generator_is_touched(model: LlamaForCausalLM) -> None:
    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002

    before = states()
    score(Holdout(samples_of(LENGTHS), 40, pad_id=0), model.train())
    assert states() == before


def test_no_gradient_is_kept(model: LlamaForCausalLM) -> None:
    score(Holdout(samples_of(LENGTHS), 40, pad_id=0), model)
    assert all(p.grad is None for p in model.parameters())


def test_examples_without_a_supervised_token_are_left_out(model: LlamaForCausalLM) -> None:
    samples = samples_of([6, 6, 1, 6])
    samples[1]["labels"][:] = IGNORED
    samples[3]["labels"][1:] = IGNORED  # the first label is never predicted
    samples += samples_of([8], seed=1)
    holdout = Holdout(samples, 40, pad_id=0)
    assert len(holdout) == 2
    assert [len(s["input_ids"]) for s in holdout.samples] == [6, 8]
    kept = score(Holdout([samples[0], samples[4]], 40, pad_id=0), model)
    assert score(holdout, model) == kept


@pytest.mark.parametrize("left", [0, 1])
def test_too_few_supervised_examples_are_refused(left: int) -> None:
    samples = samples_of([6, 6, 6])
    for sample in samples[left:]:
        sample["labels"][:] = IGNORED
    with pytest.raises(InputError, match=rf"supervised token; got '{left} of 3'; .* at least 2"):
        Holdout(samples, 40, pad_id=0)


@pytest.mark.parametrize("loss", ["token", "sample", "sequence"])
def test_the_mean_is_over_what_training_s_is(model: LlamaForCausalLM, loss: Any) -> None:
    samples = samples_of(LENGTHS)
    plain = score(Holdout(samples, 40, pad_id=0), model)
    holdout = Holdout(samples, 40, pad_id=0, loss=loss)
    found = score(holdout, model)
    sums = [x * w for x, w in zip(plain.losses, holdout.weights, strict=True)]
    terms = sums if loss == "sequence" else list(plain.losses)
    means = {
        "token": sum(sums) / sum(holdout.weights),
        "sample": statistics.mean(plain.losses),
        "sequence": statistics.mean(sums),
    }
    assert found.losses == plain.losses
    assert found.loss == pytest.approx(means[loss], rel=1e-12)
    assert found.se == pytest.approx(statistics.stdev(terms) / math.sqrt(len(terms)), rel=1e-9)


def on_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setattr(evaluate, "world", lambda: World(rank, size, rank))


@pytest.mark.parametrize("size", [2, 3, 16])
def test_any_number_of_ranks_gives_the_same_losses(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    samples = samples_of(LENGTHS)
    alone = score(Holdout(samples, 40, pad_id=0), model)
    told: list[Any] = []
    monkeypatch.setattr(evaluate, "gather_objects", lambda mine: (told.append(mine), told)[1])
    for rank in range(size):
        on_rank(monkeypatch, rank, size)
        holdout = Holdout(samples, 40, pad_id=0)
        if rank < size - 1:
            with contextlib.suppress(KeyError):  # the last rank has all parts
                score(holdout, model)
    found = score(holdout, model)
    assert len(told) == size
    assert all(part for part, *_ in told) or size > len(LENGTHS)
    assert sorted(i for part, *_ in told for i, _ in part) == list(range(len(samples)))
    assert found.losses == pytest.approx(alone.losses, rel=1e-12)
    assert (found.loss, found.se) == pytest.approx((alone.loss, alone.se), rel=1e-12)


@given(
    st.lists(st.integers(2, 400), min_size=64, max_size=200),
    st.integers(400, 20_000),
    st.sampled_from([1, 2, 8]),
)
def test_little_is_wasted_whatever_the_cap(lengths: list[int], cap: int, size: int) -> None:
    """Against groups filled to the cap from the shortest on, and dealt to the ranks in turn; a pass
    costs what the planner takes it to cost, or one more would always be free."""
    with pytest.MonkeyPatch.context() as patch:
        on_rank(patch, 0, size)
        holdout = Holdout(samples_of(lengths), cap, pad_id=0)
    filled: list[list[int]] = []
    for n in sorted(lengths):
        if not filled or (len(filled[-1]) + 1) * n > cap:
            filled.append([])
        filled[-1].append(n)
    one_pass = CostModel().per_micro_batch
    plain = [len(group) * group[-1] + one_pass for group in filled]
    slowest = max(sum(plain[rank::size]) for rank in range(size))
    times = [0] * size
    for (rows, longest), rank in zip(holdout.shapes(), holdout._ranks, strict=True):
        times[rank] += rows * longest + one_pass
    assert max(times) <= slowest * 1.02 + max(lengths) + one_pass


def test_what_does_not_fit_is_told_and_fits_under_a_lower_cap(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses(model: Any, batch: Any) -> torch.Tensor:
        if batch["input_ids"].numel() > 45:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")
        return token_losses(model, batch)

    samples = samples_of(LENGTHS)
    whole = score(Holdout(samples, 100, pad_id=0), model)
    monkeypatch.setattr(evaluate, "token_losses", losses)
    holdout = Holdout(samples, 100, pad_id=0)
    with pytest.raises(
        EvaluationShort, match=r"rank 0 ran out of memory in an evalu.*allocate"
    ) as e:
        score(holdout, model.train())
    assert model.training
    (shortage,) = e.value.shortages.values()
    rows, longest = holdout.shapes()[0]  # the largest comes first
    assert (shortage.tokens, shortage.samples) == (rows * longest, rows)
    holdout.limit(45)
    found = score(holdout, model)
    assert found.losses == pytest.approx(whole.losses, rel=1e-12)


@given(st.lists(st.integers(2, 50), min_size=2, max_size=40), st.integers(1, 200))
def test_groups_hold_everything_once_under_the_cap(lengths: list[int], micro_tokens: int) -> None:
    holdout = Holdout(samples_of(lengths), micro_tokens, pad_id=0)
    shapes = holdout.shapes()
    assert sum(b for b, _ in shapes) == len(holdout) == len(lengths)
    assert all(b == 1 or b * t <= micro_tokens for b, t in shapes)
    for group, shape in enumerate(shapes):
        batch = holdout.batch(group)
        assert all(tuple(tensor.shape) == shape for tensor in batch.values())
    real = sum(int(holdout.batch(g)["attention_mask"].sum()) for g in range(len(shapes)))
    assert real == sum(lengths)
    assert holdout.weights == [int((s["labels"][1:] != IGNORED).sum()) for s in holdout.samples]


def test_flops_are_those_of_the_padded_forward_passes(model: LlamaForCausalLM) -> None:
    holdout, shape = Holdout(samples_of([4, 4, 10]), 10, pad_id=0), shape_of(model)
    assert holdout.shapes() == [(1, 10), (2, 4)]
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    attention = 2 * 2 * 32 * 2  # layers x (scores and values) x width x operations
    assert holdout.flops(shape) == 18 * 2 * linear + attention * (2 * 16 + 100)

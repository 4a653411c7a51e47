"""How much fits is found on the model itself, whether memory or a test says no."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from eke.errors import InputError
from eke.training import RunConfig, Trainer, probing
from eke.training.probing import fits_in_memory, largest_fitting, worst_batches

CPU, NOTHING = torch.device("cpu"), contextlib.nullcontext()


@given(st.integers(1, 10**5), st.integers(0, 10**5), st.integers(0, 10**6))
def test_bisection_finds_the_most_that_fits(least: int, more: int, room: int) -> None:
    tried = []

    def fits(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= room

    most = least + more
    found = largest_fitting(fits, least, most)
    assert tried[0] == most
    assert all(least <= tokens <= most for tokens in tried)
    assert len(tried) <= 22
    if room < least:
        assert found == 0
    else:
        assert least <= found <= min(room, most)
        assert found == most or found + max(1, found // 8) > room


@pytest.mark.parametrize("packing", [False, True])
def test_the_worst_batches_fill_the_cap(packing: bool) -> None:
    batches = list(worst_batches(64, 12, packing=packing))
    assert [batch["input_ids"].numel() for batch in batches] == [64, 60, 60]
    for batch in batches:
        assert ("position_ids" in batch) is packing
        assert ("attention_mask" in batch) is not packing


def test_a_probe_leaves_no_gradient_and_tells_errors_apart() -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for packing in (False, True):
        assert fits_in_memory(model, 64, 8, CPU, NOTHING, packing=packing)
        # 800 TB of token ids: more than there are addresses.
        assert not fits_in_memory(model, 10**14, 8, CPU, NOTHING, packing=packing)
    assert all(p.grad is None for p in model.parameters())
    model.model.embed_tokens = torch.nn.Embedding(50, 17)
    with pytest.raises(RuntimeError, match=r"shape|size|expect"):
        fits_in_memory(model, 64, 8, CPU, NOTHING, packing=False)


def short(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Passes of more than `most` tokens fail; returns the tokens of those that were tried."""
    whole, tried = probing.token_losses, []

    def losses(model: Any, batch: Any) -> torch.Tensor:
        tried.append(batch["input_ids"].numel())
        if tried[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return whole(model, batch)

    monkeypatch.setattr(probing, "token_losses", losses)
    return tried


def auto(toml: Path) -> RunConfig:
    return RunConfig.load(toml, ["batch.micro_tokens=auto"])


def test_what_was_found_is_in_the_run_and_holds_when_it_goes_on(
    tmp_path: Path, write_toml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = write_toml(tmp_path, budget="steps = 3", save_every="99 steps", eval_every="99 steps")
    tried = short(monkeypatch, 200)
    Trainer(auto(toml)).train()
    run = tmp_path / "runs" / "run"
    found = RunConfig.load(run / "run.toml").batch.micro_tokens
    assert isinstance(found, int)
    assert 200 * 8 / 9 - 1 <= found <= 200
    assert json.loads((run / "plan.json").read_text())["micro_tokens"] == found
    assert len(tried) > 3
    tried.clear()
    more = RunConfig.load(toml, ["batch.micro_tokens=auto", "budget.steps=5"])
    assert Trainer(more).train().step == 5
    assert tried == []
    assert RunConfig.load(run / "run.toml").batch.micro_tokens == found


def test_a_sample_that_cannot_fit_is_refused(
    tmp_path: Path, write_toml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    short(monkeypatch, 20)
    with pytest.raises(InputError, match="do not fit into memory"):
        Trainer(auto(write_toml(tmp_path))).train()
    assert not (tmp_path / "runs" / "run").exists()

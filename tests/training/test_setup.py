"""What a run needs before its first step: refused early where it cannot work, else whole."""

from __future__ import annotations

import contextlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eke.data import open_source
from eke.errors import InputError
from eke.models import load_model, load_tokenizer
from eke.training import setup
from eke.training.config import RunConfig
from eke.training.resolve import MOST_MICRO_TOKENS, POLICIES
from eke.training.setup import pick_device, prepare, probe_clones


@pytest.fixture
def config_with(model_dir: Path, corpus: Path) -> Any:
    def config(**sections: dict[str, Any]) -> RunConfig:
        raw: dict[str, dict[str, Any]] = {
            "model": {"source": str(model_dir)},
            "data": {"train": str(corpus), "overlength": "truncate", "workers": 0},
            "run": {"device": "cpu"},
        }
        for section, keys in sections.items():
            raw.setdefault(section, {}).update(keys)
        return RunConfig.from_mapping(raw)

    return config


@pytest.fixture
def rows(tmp_path: Path) -> Any:
    """Write a .jsonl file of texts."""

    def write(*texts: str, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
        return str(path)

    return write


# ---------------------------------------------------------------------- the device


def test_cuda_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(name: str) -> torch.device:
        return pick_device(RunConfig.from_mapping({"run": {"device": name}}))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        InputError, match=r"no CUDA device; got 'cuda'\. Set run\.device = \"auto\""
    ):
        device("cuda")
    assert device("auto") == device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device("auto") == device("cuda") == torch.device("cuda", 0)
    assert device("cpu") == torch.device("cpu")


# ---------------------------------------------------------------------- what does not fit together


def test_a_sample_longer_than_the_context_is_refused(config_with: Any) -> None:
    with pytest.raises(
        InputError, match=r"longer than the model's context; got 65; the model takes 64 tokens"
    ):
        prepare(config_with(data={"max_length": 65}))
    assert prepare(config_with(data={"max_length": 64})).config.data.max_length == 64


@pytest.mark.parametrize(
    "texts", [["alone"], ["one", "two", "three"], ["same"] * 9], ids=["1", "3", "equal"]
)
def test_too_little_data_to_hold_any_out(config_with: Any, rows: Any, texts: list[str]) -> None:
    with pytest.raises(
        InputError, match=rf"too small to hold anything out; got '{len(texts)} rows, .*data\.eval"
    ):
        prepare(config_with(data={"train": rows(*texts)}))


def test_four_rows_are_enough(config_with: Any, rows: Any) -> None:
    prepared = prepare(config_with(data={"train": rows("aa", "bb", "cc", "dd")}))
    assert (len(prepared.train), len(prepared.holdout)) == (2, 2)


def test_a_single_row_to_evaluate_on_is_refused(config_with: Any, rows: Any) -> None:
    with pytest.raises(InputError, match=r"data\.eval has a single row.* needs 2"):
        prepare(config_with(data={"eval": rows("alone")}))


def test_samples_without_a_token_to_predict_are_refused(config_with: Any, rows: Any) -> None:
    data = {"train": rows(*["word " * 99] * 5), "eval": rows("a b", "c d", name="e.jsonl")}
    with pytest.raises(InputError, match=r"no training sample has two tokens or more"):
        prepare(config_with(data={**data, "overlength": "skip", "max_length": 4}))


def test_a_model_too_large_for_the_memory_limit_is_refused(config_with: Any) -> None:
    with pytest.raises(InputError, match=r"does not fit into the memory limit; got '100 MiB'"):
        prepare(config_with(budget={"memory": "100MiB"}))


# ---------------------------------------------------------------------- what comes out


def test_everything_is_resolved(config_with: Any, corpus: Path) -> None:
    said: list[str] = []
    prepared = prepare(config_with(), say=said.append)
    for section, keys in prepared.config.model_dump().items():
        for key, value in keys.items():
            assert value != "auto" or (section, key) in POLICIES
    assert prepared.config.data.max_length == 64
    assert prepared.config.data.eval_examples == len(prepared.holdout)
    assert not prepared.from_scratch
    assert prepared.flops_per_s is None
    assert prepared.corpus == {
        "name": str(corpus),
        "fingerprint": open_source(str(corpus)).fingerprint,
        "rows": 600,
        "train": len(prepared.train),
        "eval": len(prepared.holdout),
    }
    assert len(prepared.train) + prepared.facts.n_eval == 600
    assert said == [
        "reading the data",
        "loading the model",
        "trying how much fits into memory",
        "reading the evaluation examples",
    ]
    assert prepare(prepared.config).config == prepared.config


def test_the_model_is_in_training_mode(config_with: Any) -> None:
    """transformers loads a folder for inference; its dropout must be on again."""
    model = prepare(config_with()).model
    assert all(module.training for module in model.modules())


def test_held_out_rows_are_not_trained_on(config_with: Any) -> None:
    prepared = prepare(config_with())
    trained = {int(i) for i in prepared.train.indices}
    held_out = {s["index"] for s in prepared.holdout.samples}
    assert held_out
    assert not trained & held_out


def test_auto_is_always_a_configuration_that_works(
    config_with: Any, rows: Any, model_dir: Path, tmp_path: Path
) -> None:
    """A context longer than one pass of the model, and rows that must not be cut."""
    folder = tmp_path / "long"
    folder.mkdir()
    for path in model_dir.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((model_dir / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    model = {"source": str(folder)}
    prepared = prepare(config_with(model=model, data={"overlength": "auto"}))
    data, batch = prepared.config.data, prepared.config.batch
    assert (data.overlength, data.max_length) == ("error", 8192)
    assert batch.micro_tokens == MOST_MICRO_TOKENS["cpu"]
    long = rows(*("a b c d e f g h " * n for n in range(1, 100)))
    wide = prepare(config_with(model=model, data={"train": long, "overlength": "auto"}))
    assert int(wide.config.batch.micro_tokens) >= max(wide.lengths) > MOST_MICRO_TOKENS["cpu"]
    asked = config_with(model=model, data={"train": long}, batch={"micro_tokens": 300})
    assert prepare(asked).config.batch.micro_tokens == 300  # longer samples pass alone


def test_a_limit_on_time_is_probed_for(config_with: Any) -> None:
    for budget in ({"wall_time": "1h"}, {"cost": "1 USD", "price_per_hour": "2 USD"}):
        assert (prepare(config_with(budget=budget)).flops_per_s or 0) > 0


def test_a_plan_needs_no_weights(config_with: Any) -> None:
    prepared = prepare(config_with(), weights=False)
    assert {p.device.type for p in prepared.model.parameters()} == {"meta"}
    assert prepared.shape == prepare(config_with()).shape
    assert (prepared.flops_per_s or 0) > 0


@pytest.mark.parametrize("weights", [True, False])
def test_no_probe_moves_the_random_numbers(config_with: Any, weights: bool) -> None:
    before = torch.get_rng_state()
    prepare(config_with(budget={"wall_time": "1h"}), weights=weights)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_probe_of_clones_times_a_model_without_weights(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clones really run; their times are then set by hand, a block to a second."""
    meta = load_model(str(model_dir), load_tokenizer(str(model_dir)), seed=0, meta=True).model
    cpu, nothing = torch.device("cpu"), contextlib.nullcontext()
    assert probe_clones(meta, 32, cpu, nothing) > 0
    assert meta.config.num_hidden_layers == 2

    took = iter([2.0, 3.0])

    def timed(step: Any, _: torch.device) -> float:
        step()
        return next(took)

    monkeypatch.setattr(setup, "_timed", timed)
    shape = setup.shape_of(meta)
    assert len(shape.blocks) == 2
    speed = probe_clones(meta, 32, cpu, nothing)
    assert speed == setup.train_flops(shape, 16, 32) / 3.0


# ---------------------------------------------------------------------- small things


@given(st.integers(0, 3000), st.integers(1, 600))
def test_positions_are_spread(n: int, wanted: int) -> None:
    found = setup._spread(n, wanted)
    assert len(found) == min(n, wanted)
    assert found == sorted(set(found))
    assert all(0 <= i < n for i in found)
    gaps = {b - a for a, b in pairwise(found)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_padding_takes_a_token_that_exists(model_dir: Path) -> None:
    tokenizer = load_tokenizer(str(model_dir))
    assert setup._pad_id(tokenizer) == tokenizer.pad_token_id
    tokenizer.pad_token = None
    assert setup._pad_id(tokenizer) == tokenizer.eos_token_id

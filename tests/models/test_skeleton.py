"""What a configuration describes, against the model that is built from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from eke.errors import InputError
from eke.models.skeleton import skeleton_of


@pytest.mark.parametrize("tied", [True, False])
def test_names_shapes_and_ties(tmp_path: Path, tied: bool) -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=16, tie_word_embeddings=tied,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    found = skeleton_of(tmp_path)
    assert found.architecture == "LlamaForCausalLM"
    model = AutoModelForCausalLM.from_config(config)
    assert found.shapes == {k: tuple(v.shape) for k, v in model.state_dict().items()}
    assert found.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})


def test_the_stated_class_is_taken(tmp_path: Path) -> None:
    AutoConfig.for_model(
        "llama", vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, architectures=["LlamaForTokenClassification"],
    ).save_pretrained(tmp_path)  # fmt: skip
    assert "score.weight" in skeleton_of(tmp_path).shapes
    values = json.loads((tmp_path / "config.json").read_text())
    for name in ("load_tool", "NoSuchModel", "not a name"):
        (tmp_path / "config.json").write_text(json.dumps(values | {"architectures": [name]}))
        assert skeleton_of(tmp_path).architecture == "LlamaForCausalLM"


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"without a config\.json"):
        skeleton_of(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": -8}')
    with pytest.raises(InputError, match="could not load the"):
        skeleton_of(tmp_path)

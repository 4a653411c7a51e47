"""A run that was stopped in the middle can still be exported: its model is described again."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from eke.training.config import RunConfig
from eke.training.describe import describe_model


def test_it_is_what_the_finished_model_has_but_for_the_weights(tmp_path: Path) -> None:
    config = RunConfig.from_mapping(
        {
            "model": {"source": "builtin:tiny"},
            "data": {"train": "builtin:pydocs"},
            "budget": {"steps": 1},
        },
        origin="test",
    )
    (tmp_path / "run.toml").write_text(config.to_toml())
    describe_model(tmp_path / "run.toml", tmp_path / "model")
    found = AutoConfig.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert found.architectures == ["LlamaForCausalLM"]
    assert found.vocab_size == len(tokenizer)
    assert found.use_cache
    assert GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id is not None
    assert not list((tmp_path / "model").glob("*.safetensors"))

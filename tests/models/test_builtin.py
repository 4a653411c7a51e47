"""The built-in models: their sizes, and the names that exist."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from eke.errors import InputError, MissingExtraError
from eke.models import BUILTIN_VOCAB, builtin_config


@pytest.mark.parametrize(("name", "parameters"), [("tiny", 3.0e6), ("small", 29.9e6)])
def test_sizes(name: str, parameters: float) -> None:
    config = builtin_config(name, vocab_size=BUILTIN_VOCAB[name], bos=None, eos=1, pad=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == pytest.approx(parameters, abs=0.05e6)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_the_configuration_takes_the_tokenizers_ids() -> None:
    config = builtin_config("tiny", vocab_size=300, bos=5, eos=6, pad=7)
    assert (config.vocab_size, config.bos_token_id) == (300, 5)
    assert (config.eos_token_id, config.pad_token_id) == (6, 7)
    assert config.use_cache is False
    assert config.max_position_embeddings == 512


def test_weights_are_drawn_as_usual_for_the_family() -> None:
    torch.manual_seed(0)
    config = builtin_config("tiny", vocab_size=4096, bos=None, eos=1, pad=0)
    model = AutoModelForCausalLM.from_config(config)
    assert model.get_input_embeddings().weight.std().item() == pytest.approx(0.02, rel=0.02)


def test_no_such_model() -> None:
    with pytest.raises(InputError) as caught:
        builtin_config("huge", vocab_size=8, bos=None, eos=None, pad=None)
    assert "'builtin:huge'" in str(caught.value)
    assert "builtin:tiny or builtin:small" in str(caught.value)


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'eke\[train\]'"):
        builtin_config("tiny", vocab_size=8, bos=None, eos=None, pad=None)

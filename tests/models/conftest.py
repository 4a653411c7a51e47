"""A small tokenizer and a small saved model, made once."""

from __future__ import annotations

import os

# Before huggingface_hub is imported: nothing here may reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from eke.data.bpe import train_bpe

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A byte-level BPE of fewer than 300 entries."""
    texts = iter(["Data, memory and compute are scarce."] * 3)
    return PreTrainedTokenizerFast(
        tokenizer_object=train_bpe(texts, 300), eos_token="<|end|>", pad_token="<|pad|>"
    )


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A folder as save_pretrained writes it: grouped queries, an untied head."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("saved") / "model"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

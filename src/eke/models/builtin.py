"""The built-in models: Llama architectures of transformers, small enough for a laptop's CPU.

Embeddings are tied and initial weights are drawn with a standard deviation of 0.02, as usual for
this family.
"""

from __future__ import annotations

from typing import Any

from eke.errors import InputError, MissingExtraError

BUILTIN_VOCAB = {"tiny": 4096, "small": 8192}
"""Vocabulary of each model's own byte-level BPE."""

_SHAPES: dict[str, dict[str, Any]] = {
    # 3.0 M parameters
    "tiny": {
        "hidden_size": 192,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "intermediate_size": 512,
        "max_position_embeddings": 512,
    },
    # 29.9 M parameters
    "small": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 1408,
        "max_position_embeddings": 1024,
    },
}


def builtin_config(
    name: str, *, vocab_size: int, bos: int | None, eos: int | None, pad: int | None
) -> Any:
    """The `transformers.LlamaConfig` of `tiny` or `small`.

    Raises:
        InputError: no such model.
    """
    if name not in _SHAPES:
        raise InputError(
            "there is no such built-in model",
            value=f"builtin:{name}",
            fix=f"Use {' or '.join(f'builtin:{n}' for n in _SHAPES)}",
        )
    try:
        from transformers import LlamaConfig
    except ImportError as error:
        raise MissingExtraError("transformers", "train", "a built-in model") from error
    return LlamaConfig(
        vocab_size=vocab_size,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        tie_word_embeddings=True,
        rope_theta=10000.0,
        initializer_range=0.02,
        use_cache=False,
        **_SHAPES[name],
    )

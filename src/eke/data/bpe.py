"""The built-in tokenizer: a byte-level BPE learned from the data itself.

For the built-in model, which has no vocabulary of its own. Properties, each tested: any text
comes back from its ids unchanged; the same texts, size and version of `tokenizers` give the
same file, byte for byte; a saved tokenizer loads with `AutoTokenizer`.

Special tokens, from id 0: `<|pad|>`, `<|end|>` (end of a text and of each turn of a chat),
`<|system|>`, `<|user|>`, `<|assistant|>`. There is no unknown token, since every byte has an
id, and no begin token, since nothing here needs one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from eke.data.base import Source
from eke.data.cache import cache_folder, read_checked, write_checked
from eke.data.extras import require
from eke.data.formats import parse_row
from eke.errors import EkeError, InputError

RECIPE = 1
"""Raised whenever the same texts would give another tokenizer."""

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIAL = (PAD, END, *(f"<|{role}|>" for role in ROLES))
MIN_VOCAB = 256 + len(SPECIAL)
MAX_ROWS, MAX_CHARS = 50_000, 16_000_000
"""Of a large source, so many rows are read, evenly spread, until so many characters."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('the role must be system, user or assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def builtin_tokenizer(
    source: Source, vocab_size: int = 4096, cache_dir: str | os.PathLike[str] | None = None
) -> Any:
    """A `transformers.PreTrainedTokenizerFast` for the texts of `source`.

    It is kept in the cache under the source's fingerprint. A small source may not have enough
    different text for `vocab_size` entries; then there are fewer.

    Args:
        source: the rows to learn from, of any format.
        vocab_size: the most entries, special tokens and the 256 bytes included.
        cache_dir: default `$EKE_CACHE`, else `~/.cache/eke`.

    Raises:
        InputError: `vocab_size` has no room for the bytes; a row is damaged.
        MissingExtraError: transformers or tokenizers is not installed.
        EkeError: the cache cannot be written.
    """
    if vocab_size < MIN_VOCAB:
        raise InputError(
            "vocab_size is too small",
            value=vocab_size,
            rule=f"256 bytes and {len(SPECIAL)} special tokens need {MIN_VOCAB}",
        )
    tokenizers = require("tokenizers", "the built-in tokenizer")
    version: str = tokenizers.__version__
    name = f"bpe-{RECIPE}-{source.fingerprint}-{vocab_size}-{version}.json"
    path = cache_folder(cache_dir) / name
    header = {"recipe": RECIPE, "trained_on": source.fingerprint, "tokenizers": version}
    cached = read_checked(path)
    if cached is None:
        body = train_bpe(_texts(source), vocab_size).to_str().encode()
        write_checked(path, header, body)
        cached = read_checked(path)
        if cached is None:
            raise EkeError(f"{path} does not hold what was written to it", fix="Check the disk")
    transformers = require("transformers", "the built-in tokenizer")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(cached[1].decode()),
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def train_bpe(texts: Iterator[str], vocab_size: int) -> Any:
    """A `tokenizers.Tokenizer` with at most `vocab_size` entries."""
    tokenizers = require("tokenizers", "the built-in tokenizer")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _texts(source: Source) -> Iterator[str]:
    step = -(-len(source) // MAX_ROWS)
    chars = 0
    for i in range(0, len(source), step):
        for text in parse_row(source[i], origin=source.origin(i)).texts():
            yield text
            chars += len(text)
        if chars >= MAX_CHARS:
            return

"""From a row to a training sample: token ids, and the labels that are supervised.

Labels follow Hugging Face's convention: `labels_T` equals `input_ids_T` where the token is to
be learned and is `IGNORED` elsewhere; the loss compares position t's output with label t + 1,
so the first label is never used.

| format | ids | supervised |
|---|---|---|
| text | text, end token | everything |
| prompt | prompt, line break, response, end token | response and end token |
| chat | the chat template | assistant turns with their end tokens (`eke.data.chat`) |

Properties, each tested: an item depends on the row and the settings alone, in any process and
any order; without overlength nothing of the row is lost; with `truncate` no item is longer
than `max_length`.

Legend: T tokens of one sample.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, TypedDict, get_args

import numpy as np
import torch

from eke.data.base import Source
from eke.data.chat import ChatEncoder
from eke.data.formats import FORMATS, Sample, parse_row
from eke.data.split import content_hash
from eke.errors import InputError

IGNORED = -100
"""The label of a token that is not supervised."""

Overlength = Literal["error", "truncate", "skip", "solo"]
OVERLENGTH: tuple[Overlength, ...] = get_args(Overlength)


class Item(TypedDict):
    """One sample.

    `input_ids` and `labels` are int64 of shape [T]; `index` is the row in the source;
    `cut_tokens` is how many tokens `truncate` or `skip` left out, 0 for a whole sample. It
    travels with the item because a worker's counters do not reach the loader's process.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    index: int
    cut_tokens: int


MARKUP_TOKENS = 64
"""More than a chat template puts around a message, role names and a system prompt included."""


def check_rows(source: Source, format: str = "auto") -> list[int]:
    """Read every row once and return the hash of each one's content, for `split_by_content`.

    The hash covers what is trained on, so rows that differ in an id alone count as equal.

    Raises:
        InputError: the first row that is damaged or lacks its fields, with its place.
    """
    _check_format(format)
    return [
        content_hash(parse_row(source[i], format, source.origin(i)).content())
        for i in range(len(source))
    ]


class TokenizedDataset(torch.utils.data.Dataset[Item]):
    """The samples of some rows of a source, tokenized when asked for.

    Works in DataLoader workers, forked or spawned. Sets `TOKENIZERS_PARALLELISM=false` unless
    it is set: the workers are the parallelism.

    Args:
        source: the rows.
        indices: which rows, in which order; `None` for all.
        tokenizer: a Hugging Face tokenizer with an end-of-sequence token.
        format: `"auto"` (row by row), `"text"`, `"prompt"` or `"chat"`.
        max_length: the most tokens in a sample, at least 2.
        overlength: what becomes of a longer one. `error`: an `InputError` that names the row.
            `truncate`: the first `max_length` tokens; if no supervised token is among them,
            no label is left, and so no weight in the loss. `skip`: an item of length 0,
            for the loader to drop and count. `solo`: kept whole, for the loader to place alone.

    Raises:
        InputError: a setting is impossible, or the tokenizer has no end-of-sequence token.
    """

    def __init__(
        self,
        source: Source,
        indices: Sequence[int] | None,
        tokenizer: Any,
        *,
        format: str = "auto",
        max_length: int,
        overlength: str = "error",
    ) -> None:
        _check_format(format)
        if overlength not in OVERLENGTH:
            raise InputError(
                "no such way to treat a sample that is too long",
                value=overlength,
                rule=f"overlength is one of {', '.join(OVERLENGTH)}",
            )
        if max_length < 2:
            raise InputError(
                "max_length is too small", value=max_length, rule="a next token needs at least 2"
            )
        if tokenizer.eos_token_id is None:
            raise InputError(
                "the tokenizer has no end-of-sequence token, so no sample could end",
                value=getattr(tokenizer, "name_or_path", None) or type(tokenizer).__name__,
                fix="Set tokenizer.eos_token",
            )
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.source = source
        self.indices = np.arange(len(source)) if indices is None else np.asarray(indices, np.int64)
        if len(self.indices) and not 0 <= self.indices.min() <= self.indices.max() < len(source):
            raise InputError(
                "an index is outside the source",
                value=(int(self.indices.min()), int(self.indices.max())),
                rule=f"the source has rows 0 to {len(source) - 1}",
            )
        self.tokenizer = tokenizer
        self.format, self.max_length, self.overlength = format, max_length, overlength
        # What the model expects before any text, e.g. Llama's begin token.
        alone = list(tokenizer("")["input_ids"])
        begins = alone[:1] == [tokenizer.bos_token_id] and alone[:1] != [tokenizer.eos_token_id]
        self._prefix: tuple[int, ...] = tuple(alone[:1]) if begins else ()
        self._chat: ChatEncoder | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, k: int) -> Item:
        """The `k`-th sample.

        Raises:
            IndexError: there is no `k`-th.
            InputError: its row is damaged or, with `overlength="error"`, too long.
        """
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")
        index = int(self.indices[k])
        origin = self.source.origin(index)
        sample = parse_row(self.source[index], self.format, origin)
        ids, supervised = self._encode(sample, origin)
        kept = self._fit(len(ids), origin)
        ids_T = torch.tensor(ids[:kept], dtype=torch.int64)
        labels_T = torch.where(torch.tensor(supervised[:kept], dtype=torch.bool), ids_T, IGNORED)
        return {
            "input_ids": ids_T,
            "labels": labels_T,
            "index": index,
            "cut_tokens": len(ids) - kept,
        }

    def check_lengths(self, most: int = 20_000) -> int:
        """Under `overlength="error"`, meet the first sample that is too long now, not in mid-run.

        Only rows whose bytes could make so many tokens are tokenized, and of those at most `most`:
        with a long context that is next to none.

        Returns:
            How many were tokenized.

        Raises:
            InputError: a sample is too long; names its row.
        """
        tokenized = 0
        for k in range(len(self) if self.overlength == "error" else 0):
            index = int(self.indices[k])
            sample = parse_row(self.source[index], self.format, self.source.origin(index))
            texts = sample.texts()
            bound = sum(len(text.encode()) for text in texts) + MARKUP_TOKENS * (len(texts) + 1)
            if bound > self.max_length:
                self[k]
                tokenized += 1
                if tokenized == most:
                    break
        return tokenized

    def _encode(self, sample: Sample, origin: str) -> tuple[list[int], list[bool]]:
        if sample.format == "chat":
            if self._chat is None:
                self._chat = ChatEncoder(self.tokenizer, self._prefix)
            return self._chat.encode(sample.chat(), origin)
        end = self.tokenizer.eos_token_id
        if sample.format == "text":
            ids = [*self._prefix, *self._ids(sample.text), end]
            return ids, [True] * len(ids)
        # Prompt and response are tokenized apart, as they are when the model is used: the
        # prompt stands alone, and no token straddles the border.
        asked = [*self._prefix, *self._ids(joined_prompt(sample.prompt, sample.response))]
        answer = [*self._ids(sample.response), end]
        return asked + answer, [False] * len(asked) + [True] * len(answer)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _fit(self, length: int, origin: str) -> int:
        """How many of `length` tokens are kept."""
        if length <= self.max_length or self.overlength == "solo":
            return length
        if self.overlength == "truncate":
            return self.max_length
        if self.overlength == "skip":
            return 0
        raise InputError(
            f"{origin} has {length:,} tokens",
            rule=f"[data] max_length is {self.max_length:,}",
            fix="Raise max_length, shorten the row, or set [data] overlength to truncate, skip or "
            "solo",
        )


def joined_prompt(prompt: str, response: str = "") -> str:
    """The prompt as the model sees it: ending in a line break, unless white space is there."""
    touching = not prompt[-1:].isspace() and not response[:1].isspace()
    return prompt + "\n" if touching else prompt


def _check_format(format: str) -> None:
    if format != "auto" and format not in FORMATS:
        raise InputError(
            "no such data format", value=format, rule=f"it is auto, {', '.join(FORMATS)}"
        )

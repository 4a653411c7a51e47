"""What `batching_training` trains on: samples of tokens, made or of real text, and how they are put
into tensors.

A micro-batch's cap is four of the longest samples, so that a fixed batch that never exceeds it has
four. Texts are cut at `CUT` tokens, as a trainer's `max_length` does it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.batching_claims import MADE
from benchmarks.batching_lengths import SHAPES, tokenized
from eke.batching.planner import DUMMY_TOKENS
from eke.version import __version__

IGNORED = -100
SHRUNK, VOCABULARY = 16, 1024
"""Made lengths are divided by it, so that an epoch takes seconds; their number of token ids."""
CUT = 512
"""Tokens of a text, at most: six samples of `pydocs` have more, and three conversations in ten."""
FIXED = 4
"""The longest samples that a micro-batch holds."""


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of token ids, and of labels."""

    def __init__(self, ids: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> None:
        self._ids, self._labels = list(ids), list(labels)
        self.lengths = [len(one) for one in ids]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index].clone(), "labels": self._labels[index].clone()}

    @property
    def vocabulary(self) -> int:
        """How many token ids a model needs."""
        return max(int(one.max()) for one in self._ids) + 1

    @property
    def label_tokens(self) -> int:
        """Labels that train, after the causal shift."""
        return sum(int((one[1:] != IGNORED).sum()) for one in self._labels)

    def some(self, count: int, longest: int) -> Samples:
        """So many of them at random, always the same ones, cut at `longest` tokens."""
        generator = torch.Generator().manual_seed(0)
        chosen = torch.randperm(len(self), generator=generator)[:count].tolist()
        return Samples(
            [self._ids[i][:longest] for i in chosen], [self._labels[i][:longest] for i in chosen]
        )


def made(lengths: Sequence[int]) -> Samples:
    """Random tokens; the first third of each sample does not train."""
    generator = torch.Generator().manual_seed(0)
    stream = torch.randint(1, VOCABULARY, (max(lengths) + 997,), generator=generator)
    ids = [stream[i % 997 : i % 997 + n] for i, n in enumerate(lengths)]
    labels = [one.clone() for one in ids]
    for one in labels:
        one[: len(one) // 3] = IGNORED
    return Samples(ids, labels)


def workload(name: str, count: int) -> tuple[Samples, int]:
    """Samples, `count` of them at most, and the cap of a micro-batch in tokens."""
    if name == MADE:
        samples = made([max(4, n // SHRUNK) for n in SHAPES[2].lengths(count, 0)])
    else:
        samples = _text(name).some(count, CUT)
    return samples, FIXED * max(samples.lengths)


def _text(name: str) -> Samples:
    """Kept in a file: every rank of every measurement needs it."""
    kept = Path(tempfile.gettempdir()) / f"eke-bench-{name}-{__version__}-{os.getuid()}.npz"
    if not kept.exists():
        rows = tokenized(name)
        lengths = np.array([len(row["input_ids"]) for row in rows])
        ids, labels = (
            np.concatenate([np.asarray(row[key]) for row in rows])
            for key in ("input_ids", "labels")
        )
        mine = kept.with_suffix(f".{os.getpid()}.npz")
        np.savez(mine, lengths=lengths, input_ids=ids, labels=labels)
        mine.rename(kept)
    with np.load(kept) as found:
        ends = np.cumsum(found["lengths"])[:-1].tolist()
        columns = [
            torch.tensor_split(torch.from_numpy(found[key]), ends)
            for key in ("input_ids", "labels")
        ]
    return Samples(*columns)


def padded(items: Any) -> dict[str, torch.Tensor]:
    """Padded on the right, as eke does it; without a sample, a dummy of eke's shape."""
    items = items if isinstance(items, list) else [items]
    longest = max((len(item["input_ids"]) for item in items), default=DUMMY_TOKENS)
    shape = max(1, len(items)), longest
    batch = {
        "input_ids": torch.zeros(shape, dtype=torch.int64),
        "labels": torch.full(shape, IGNORED),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
    }
    for row, item in enumerate(items):
        n = len(item["input_ids"])
        batch["input_ids"][row, :n] = item["input_ids"]
        batch["labels"][row, :n] = item["labels"]
        batch["attention_mask"][row, :n] = 1
    if not items:
        batch["attention_mask"] += 1
    return batch


def packed(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """End to end in one row, positions from 0 in each; the first label of each does not train."""
    if not items:
        none = torch.zeros(1, DUMMY_TOKENS, dtype=torch.int64)
        positions = torch.arange(DUMMY_TOKENS)[None]
        return {"input_ids": none, "labels": none + IGNORED, "position_ids": positions}
    labels = [item["labels"].clone() for item in items]
    for own in labels:
        own[0] = IGNORED
    places = [torch.arange(len(item["input_ids"])) for item in items]
    return {
        "input_ids": torch.cat([item["input_ids"] for item in items])[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat(places)[None],
    }

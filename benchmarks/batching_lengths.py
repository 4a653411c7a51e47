"""Lengths to batch: made ones with the spreads of published training sets, and those of real text.

The made ones are **synthetic**. Their coefficients of variation are those that the paper on online
dynamic batching (arXiv 2606.19989) states for UltraChat, LLaVA and ShareGPT4o; MM-Mix is a mixture
of two kinds of samples with a larger one (1.32) than the paper's 0.80, and so harder. The form of
the distributions is an assumption, and so are their means: chosen so that the grouping of the
released package is about as efficient on them as it was in the measurements that the limits come
from. All of this is pure but for `real`.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SHORTEST = 8
"""Of a made sample, in tokens."""


@dataclass(frozen=True)
class Part:
    """Log-normal lengths: a share of all samples, their mean and coefficient of variation."""

    share: float
    mean: float
    cv: float


@dataclass(frozen=True)
class Shape:
    """A made set of lengths, clipped at the cap of a micro-batch.

    Attributes:
        cap: tokens of a micro-batch, and of the longest sample.
        cv: the coefficient of variation of the whole, before it is clipped.
    """

    name: str
    cap: int
    cv: float
    parts: tuple[Part, ...]

    def lengths(self, count: int, seed: int) -> list[int]:
        """So many lengths, in random order."""
        rng = np.random.default_rng(seed)
        kinds = rng.choice(len(self.parts), size=count, p=[part.share for part in self.parts])
        sigma = np.array([math.sqrt(math.log(1 + part.cv**2)) for part in self.parts])
        mu = np.log([part.mean for part in self.parts]) - sigma**2 / 2
        drawn = rng.lognormal(mu[kinds], sigma[kinds])
        clipped: NDArray[np.int64] = np.clip(drawn, SHORTEST, self.cap).astype(np.int64)
        return clipped.tolist()  # type: ignore[no-any-return]

    @property
    def mean(self) -> float:
        """Before it is clipped."""
        return sum(part.share * part.mean for part in self.parts)


SHAPES = (
    Shape("UltraChat-like", 12_288, 0.48, (Part(1.0, 1_500, 0.48),)),
    Shape("LLaVA-like", 8_192, 0.29, (Part(1.0, 800, 0.29),)),
    Shape("ShareGPT4o-like", 16_384, 1.00, (Part(1.0, 2_400, 1.00),)),
    Shape("MM-Mix-like", 12_288, 1.32, (Part(0.75, 300, 0.5), Part(0.25, 2_300, 0.5))),
)


@dataclass(frozen=True)
class RealText:
    """Real text, tokenized by eke's pipeline with a BPE tokenizer that is trained on the corpus.

    Attributes:
        cap: tokens of a micro-batch: eight samples of mean length, or the longest.
    """

    name: str
    lengths: list[int]

    @property
    def cap(self) -> int:
        """Tokens of a micro-batch."""
        return max(max(self.lengths), round(8 * sum(self.lengths) / len(self.lengths)))


def real() -> list[RealText]:
    """The built-in corpus, and the conversations of the PyPI package `chitchat-dataset`."""
    return [RealText(name, [len(row["input_ids"]) for row in tokenized(name)]) for name in REAL]


REAL = ("pydocs", "chitchat")


def tokenized(name: str) -> list[Any]:
    """The samples of a real text as eke's pipeline has them: `input_ids` and `labels`, [T]."""
    from eke.data import TokenizedDataset, builtin_tokenizer, open_source

    pydocs = open_source("builtin:pydocs")
    tokenizer = builtin_tokenizer(pydocs)
    with tempfile.TemporaryDirectory() as where:
        source = pydocs if name == "pydocs" else open_source(str(_chitchat(Path(where))))
        dataset = TokenizedDataset(source, None, tokenizer, max_length=2**20, overlength="error")
        return [dataset[i] for i in range(len(dataset))]


def _chitchat(where: Path) -> Path:
    from chitchat_dataset import ConversationDataset

    file = where / "chitchat.jsonl"
    with file.open("w", encoding="utf-8") as out:
        for conversation in ConversationDataset():
            text = "\n".join(conversation)
            if text.strip():
                out.write(json.dumps({"text": text}) + "\n")
    return file

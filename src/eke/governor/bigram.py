"""A bigram model: the level that a language model from scratch must pass before it may stop.

Small models linger at n-gram level before they learn to look further back, and a rule that sees
only the loss takes that plateau for the end. So the bar is what counting pairs of tokens
already achieves on the same held-out tokens.

Interpolated Kneser-Ney smoothing with one discount a level (Kneser and Ney 1995; Chen and
Goodman 1999, section 2.7), the lower level interpolated with the uniform distribution:

    p(w | v) = max(c(vw) - D2, 0) / c(v) + D2 * N1+(v.) / c(v) * p1(w)
    p1(w)    = max(N1+(.w) - D1, 0) / N + D1 * types / N * 1 / V

with c(vw) how often w followed v, N1+(v.) the different tokens after v, N1+(.w) the different
tokens before w, N the different pairs, and D = n1 / (n1 + 2 * n2) at each level.

Properties:
    * p(. | v) sums to 1 and is above 0 everywhere, for every v, seen or not.
    * Memory is 16 bytes a different pair, at most `max_tokens` of them, plus 24 bytes a token
      of the vocabulary; never V * V.

Labels are aligned with ids as in transformers: `labels[i]` is `ids[i]`, or -100 where token i is
not trained on; token i is predicted from token i - 1, so the first is never predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eke.errors import InputError

IGNORED_LABEL = -100
_CHUNK_TOKENS = 1 << 20

Ids = Sequence[int] | npt.NDArray[np.integer[Any]]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Bigram:
    """A fitted model. V tokens in the vocabulary, P different pairs.

    Attributes:
        vocab_size: V.
        tokens: supervised tokens that it was fitted on.
        pairs_P: v * V + w of each pair seen, ascending.
        counts_P: how often each was seen.
        context_counts_V: c(v). context_types_V: N1+(v.).
        unigram_V: p1(w).
        discount: D2.
    """

    vocab_size: int
    tokens: int
    pairs_P: Ints
    counts_P: Ints
    context_counts_V: Ints
    context_types_V: Ints
    unigram_V: Floats
    discount: float

    def probabilities(self, contexts_N: Ints, tokens_N: Ints) -> Floats:
        """p(token | context) for N pairs."""
        pairs_N = contexts_N * self.vocab_size + tokens_N
        at_N = np.searchsorted(self.pairs_P, pairs_N)
        at_N = np.minimum(at_N, len(self.pairs_P) - 1)
        counts_N = np.where(self.pairs_P[at_N] == pairs_N, self.counts_P[at_N], 0)
        context_N = self.context_counts_V[contexts_N]
        types_N = self.context_types_V[contexts_N]
        # A context never seen leaves everything to the lower level.
        total_N = np.maximum(context_N, 1)
        direct_N = np.maximum(counts_N - self.discount, 0.0) / total_N
        backoff_N = np.where(context_N > 0, self.discount * types_N / total_N, 1.0)
        result: Floats = direct_N + backoff_N * self.unigram_V[tokens_N]
        return result

    def loss(self, ids: Ids, labels: Ids) -> float:
        """Mean nats per supervised token of one sequence.

        Raises:
            InputError: nothing in it is supervised, or a token is outside the vocabulary.
        """
        contexts_N, tokens_N = supervised_pairs(ids, labels, self.vocab_size)
        if not len(tokens_N):
            raise InputError(
                "a held-out sequence has no supervised token to evaluate",
                fix="Drop sequences whose labels are all -100",
            )
        return float(-np.mean(np.log(self.probabilities(contexts_N, tokens_N))))

    def mean_loss(self, sequences: Iterable[tuple[Ids, Ids]]) -> float:
        """The mean over sequences of `loss`: as the governor averages, each example alike.

        Raises:
            InputError: there is no sequence, or as in `loss`.
        """
        losses = [self.loss(ids, labels) for ids, labels in sequences]
        if not losses:
            raise InputError("there is no held-out sequence to evaluate the bigram model on")
        return sum(losses) / len(losses)


def supervised_pairs(ids: Ids, labels: Ids, vocab_size: int) -> tuple[Ints, Ints]:
    """The (context, token) pairs of one sequence whose token is supervised.

    Raises:
        InputError: ids and labels differ in length, or hold a token outside the vocabulary.
    """
    ids_T = np.asarray(ids, dtype=np.int64)
    labels_T = np.asarray(labels, dtype=np.int64)
    if ids_T.shape != labels_T.shape or ids_T.ndim != 1:
        raise InputError(
            "ids and labels of a sequence differ in shape",
            value=(ids_T.shape, labels_T.shape),
            rule="both are one-dimensional and equally long",
        )
    kept = labels_T[1:] != IGNORED_LABEL
    contexts_N, tokens_N = ids_T[:-1][kept], labels_T[1:][kept]
    for values in (contexts_N, tokens_N):
        if len(values) and not (values.min() >= 0 and values.max() < vocab_size):
            raise InputError(
                "a token is outside the vocabulary",
                value=(int(values.min()), int(values.max())),
                rule=f"token ids are 0 to {vocab_size - 1}",
            )
    return contexts_N, tokens_N


def fit_bigram(
    sequences: Iterable[tuple[Ids, Ids]], vocab_size: int, *, max_tokens: int = 10_000_000
) -> Bigram:
    """Fit on the training set's (ids, labels), reading no further than `max_tokens` of them.

    Raises:
        InputError: a vocabulary below 1, no supervised token, or a token outside the vocabulary.
    """
    if vocab_size < 1 or max_tokens < 1:
        raise InputError(
            "a bigram model needs a vocabulary and tokens",
            value=(vocab_size, max_tokens),
            rule="vocab_size and max_tokens are at least 1",
        )
    pairs_P, counts_P = np.empty(0, np.int64), np.empty(0, np.int64)
    waiting: list[Ints] = []
    held = tokens = 0
    for ids, labels in sequences:
        contexts_N, tokens_N = supervised_pairs(ids, labels, vocab_size)
        pairs_N = (contexts_N * vocab_size + tokens_N)[: max_tokens - tokens]
        waiting.append(pairs_N)
        held += len(pairs_N)
        tokens += len(pairs_N)
        if held >= _CHUNK_TOKENS:
            pairs_P, counts_P = _merge(pairs_P, counts_P, waiting)
            waiting, held = [], 0
        if tokens >= max_tokens:
            break
    if not tokens:
        raise InputError(
            "there is no supervised token to fit a bigram model on",
            fix="Check that the training data is not empty and that some labels are not -100",
        )
    pairs_P, counts_P = _merge(pairs_P, counts_P, waiting)
    contexts_P, tokens_P = np.divmod(pairs_P, vocab_size)
    before_V = np.bincount(tokens_P, minlength=vocab_size)
    seen = before_V > 0
    discount = _discount(before_V[seen])
    spare = discount * np.count_nonzero(seen) / len(pairs_P)
    unigram_V = np.maximum(before_V - discount, 0.0) / len(pairs_P) + spare / vocab_size
    context_counts_V = np.zeros(vocab_size, np.int64)
    np.add.at(context_counts_V, contexts_P, counts_P)
    return Bigram(
        vocab_size=vocab_size,
        tokens=tokens,
        pairs_P=pairs_P,
        counts_P=counts_P,
        context_counts_V=context_counts_V,
        context_types_V=np.bincount(contexts_P, minlength=vocab_size).astype(np.int64),
        unigram_V=unigram_V,
        discount=_discount(counts_P),
    )


def _merge(pairs_P: Ints, counts_P: Ints, waiting: list[Ints]) -> tuple[Ints, Ints]:
    """The counts with those of `waiting` added, pairs ascending."""
    new_Q, new_counts_Q = np.unique(np.concatenate([*waiting, pairs_P[:0]]), return_counts=True)
    merged, inverse = np.unique(np.concatenate([pairs_P, new_Q]), return_inverse=True)
    total = np.zeros(len(merged), np.int64)
    np.add.at(total, inverse, np.concatenate([counts_P, new_counts_Q]))
    return merged, total


def _discount(counts: Ints) -> float:
    """n1 / (n1 + 2 n2), kept away from 0 and 1 where there are too few counts to estimate it."""
    ones, twos = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
    if ones == 0:
        return 0.5
    return min(0.9, max(0.1, ones / (ones + 2 * twos)))

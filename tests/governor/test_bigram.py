"""The bigram model, against its formula over dictionaries, a known entropy, and real text."""

from __future__ import annotations

import argparse
import inspect
import math
import typing
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eke.errors import InputError
from eke.governor import bigram as module
from eke.governor import fit_bigram

V = 6
IDS = st.lists(st.integers(0, V - 1), min_size=2, max_size=30)


@st.composite
def corpora(draw):
    corpus = []
    for ids in draw(st.lists(IDS, min_size=1, max_size=6)):
        masked = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        corpus.append((ids, [-100 if m else i for i, m in zip(ids, masked, strict=True)]))
    # One pair that is certainly supervised.
    corpus.append(([0, 1], [0, 1]))
    return corpus


def pairs_of(corpus):
    return [
        (ids[i - 1], ids[i])
        for ids, labels in corpus
        for i in range(1, len(ids))
        if labels[i] != -100
    ]


def discount(counts):
    ones, twos = counts.count(1), counts.count(2)
    return 0.5 if ones == 0 else min(0.9, max(0.1, ones / (ones + 2 * twos)))


def by_the_formula(corpus, v, w):
    """p(w | v) over dictionaries, straight from the module's docstring."""
    counts = Counter(pairs_of(corpus))
    before = Counter(b for _, b in counts)
    d1, d2 = discount(list(before.values())), discount(list(counts.values()))
    lower = max(before[w] - d1, 0) / len(counts) + d1 * len(before) / len(counts) / V
    context = sum(c for (a, _), c in counts.items() if a == v)
    types = sum(1 for a, _ in counts if a == v)
    if context == 0:
        return lower
    return max(counts[v, w] - d2, 0) / context + d2 * types / context * lower


@given(corpora())
@settings(max_examples=60)
def test_it_is_the_formula_and_a_distribution(corpus):
    model = fit_bigram(corpus, V)
    contexts, tokens = np.divmod(np.arange(V * V), V)
    table = model.probabilities(contexts, tokens).reshape(V, V)
    assert table.sum(axis=1) == pytest.approx(np.ones(V))
    assert (table > 0).all()
    expected = [[by_the_formula(corpus, v, w) for w in range(V)] for v in range(V)]
    assert table == pytest.approx(np.array(expected))
    assert model.tokens == len(pairs_of(corpus))


@given(corpora(), corpora())
def test_the_loss_is_the_mean_over_supervised_tokens(corpus, held_out):
    model = fit_bigram(corpus, V)
    for ids, labels in held_out:
        pairs = pairs_of([(ids, labels)])
        if not pairs:
            continue
        nats = [-math.log(by_the_formula(corpus, v, w)) for v, w in pairs]
        assert model.loss(ids, labels) == pytest.approx(sum(nats) / len(nats))


@given(corpora())
def test_how_the_counts_are_merged_changes_nothing(corpus):
    whole = fit_bigram(corpus, V)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_TOKENS", 3)
        pieces = fit_bigram(iter(corpus), V)
    assert np.array_equal(whole.pairs_P, pieces.pairs_P)
    assert np.array_equal(whole.counts_P, pieces.counts_P)
    assert np.array_equal(whole.unigram_V, pieces.unigram_V)


def test_on_a_markov_chain_it_reaches_the_entropy():
    rng = np.random.default_rng(0)
    size = 20
    chain = rng.dirichlet(np.full(size, 0.2), size)

    def walk(length):
        steps = [0]
        for u in rng.random(length):
            steps.append(min(size - 1, int(np.searchsorted(np.cumsum(chain[steps[-1]]), u))))
        return steps

    model = fit_bigram([(s, s) for s in [walk(20_000)]], size)
    held_out = walk(20_000)
    truth = -np.mean([math.log(chain[a, b]) for a, b in pairwise(held_out)])
    assert truth - 0.001 < model.loss(held_out, held_out) < truth + 0.02


def test_on_real_text_it_beats_single_bytes_and_add_one():
    train = np.frombuffer(inspect.getsource(argparse).encode(), np.uint8).astype(np.int64)
    held_out = np.frombuffer(inspect.getsource(typing).encode(), np.uint8).astype(np.int64)
    loss = fit_bigram([(train, train)], 256).loss(held_out, held_out)
    single = np.bincount(train, minlength=256) + 0.5
    assert loss < -np.mean(np.log((single / single.sum())[held_out[1:]])) - 0.3
    table = np.ones((256, 256))
    np.add.at(table, (train[:-1], train[1:]), 1)
    table /= table.sum(axis=1, keepdims=True)
    assert 1.5 < loss < -np.mean(np.log(table[held_out[:-1], held_out[1:]]))


def test_a_large_vocabulary_takes_memory_by_the_pair():
    rng = np.random.default_rng(0)
    size, length = 50_000, 400_000
    ids = np.minimum(rng.zipf(1.2, length), size) - 1
    model = fit_bigram([(ids, ids)], size)
    arrays = (model.pairs_P, model.counts_P, model.unigram_V)
    arrays += (model.context_counts_V, model.context_types_V)
    assert sum(a.nbytes for a in arrays) <= 16 * length + 24 * size
    held_out = np.minimum(rng.zipf(1.2, 1000), size) - 1
    assert math.isfinite(model.loss(held_out, held_out))


def test_it_reads_no_further_than_it_is_told():
    def endless():
        while True:
            yield [1, 2, 3, 1], [1, 2, 3, 1]

    model = fit_bigram(endless(), V, max_tokens=1000)
    assert model.tokens == int(model.counts_P.sum()) == 1000


def test_examples_are_averaged_alike_however_long():
    model = fit_bigram([([0, 1, 2], [0, 1, 2])], V)
    short, long = ([0, 1], [0, 1]), ([3, 4, 5, 3], [3, 4, 5, 3])
    assert model.mean_loss([short, long]) == pytest.approx(
        (model.loss(*short) + model.loss(*long)) / 2
    )


def test_bad_input_is_refused():
    model = fit_bigram([([0, 1], [0, 1])], V)
    with pytest.raises(InputError, match="outside the vocabulary"):
        fit_bigram([([0, V], [0, V])], V)
    with pytest.raises(InputError, match="outside the vocabulary"):
        model.loss([0, -1], [0, -1])
    with pytest.raises(InputError, match="differ in shape"):
        fit_bigram([([0, 1, 2], [0, 1])], V)
    with pytest.raises(InputError, match="no supervised token to fit"):
        fit_bigram([([0, 1], [0, -100])], V)
    with pytest.raises(InputError, match="no supervised token to fit"):
        fit_bigram([], V)
    with pytest.raises(InputError, match="no supervised token to evaluate"):
        model.loss([0, 1], [0, -100])
    with pytest.raises(InputError, match="no held-out sequence"):
        model.mean_loss([])
    with pytest.raises(InputError, match="needs a vocabulary"):
        fit_bigram([([0, 1], [0, 1])], 0)

"""What peers train on is the epoch; figures of two ranks by hand; a packed sample sees itself."""

from collections import Counter

import pytest
import torch
from benchmarks.batching_claims import FIXED_BATCHES, TRL
from benchmarks.batching_schedules import Schedule, eke
from benchmarks.batching_texts import FIXED, IGNORED, made, packed, padded, workload
from benchmarks.batching_training import (
    ARMS,
    RANKS,
    UNITS,
    grouped,
    indices,
    merged,
    sample_by_sample,
    schedule_of,
    together,
)

LENGTHS = [1 + (i * 29) % 31 for i in range(100)]


def test_a_schedule_of_lengths_is_one_of_samples():
    for schedule in (eke(LENGTHS, 64, RANKS, 16), schedule_of(FIXED_BATCHES, LENGTHS, 4 * 31)):
        found = indices(schedule, LENGTHS)
        seen = Counter(i for rank in found for group in rank for i in group)
        assert seen == Counter(range(len(LENGTHS)))
        for rank, groups in enumerate(found):
            assert [[LENGTHS[i] for i in g] for g in groups] == [s[rank] for s in schedule.steps]


def test_a_sample_that_a_schedule_has_twice_is_twice_in_it():
    assert indices(Schedule([[[5, 5], [5]]]), [5, 7, 5]) == [[[0, 2]], [[0]]]


def test_steps_consume_about_what_ekes_do():
    half_full = {"groups": [[[0]] * 40, [[0]] * 39], "packed": False}
    assert together(half_full, tokens=40 * 2 * 50, cap=100) == 4
    assert [len(step) for step in grouped(iter([{}] * 7), 3)] == [3, 3, 1]


def test_figures_of_two_ranks_by_hand():
    one = {"labels": 30, "seconds": 2.0, "steps": 1, "real": [8, 5], "occupied": [10, 5]}
    two = {"labels": 10, "seconds": 4.0, "steps": 1, "real": [4, 0], "occupied": [4, 2]}
    found = merged([one, two], 50, cap=9)
    assert found.keys() == UNITS.keys()
    assert found["labels"] == [10.0]
    assert found["padding"] == [pytest.approx(1 - 17 / 21)]
    assert found["efficiency"] == [pytest.approx(17 / 30)]
    assert (found["batches"], found["steps"], found["over"]) == ([2.0], [1.0], [0.25])
    assert found["lost"] == [pytest.approx(0.2)]


def test_padded_and_packed_train_the_same_labels():
    samples = made([5, 9, 3])
    items = [samples[i] for i in range(3)]
    for batch in (padded(items), packed(items)):
        assert int((batch["labels"][:, 1:] != IGNORED).sum()) == samples.label_tokens
    for dummy in (padded([]), packed([])):
        assert (dummy["labels"] == IGNORED).all()


def test_the_cap_holds_four_of_the_longest():
    samples, cap = workload("training", 64)
    assert len(samples) == 64
    assert cap == FIXED * max(samples.lengths)


def test_a_packed_sample_attends_to_itself_alone():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 7, 4, dtype=torch.float64).unbind()
    positions = torch.tensor([[0, 1, 2, 0, 0, 1, 2]])
    found, _ = sample_by_sample(None, query, key, value, None, scaling=0.5, position_ids=positions)
    sample = torch.tensor([0, 0, 0, 1, 2, 2, 2])
    mask = (sample[:, None] == sample).tril()
    whole = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.5
    )
    torch.testing.assert_close(found, whole.transpose(1, 2))


def test_texts_have_every_peer():
    assert all(TRL in ARMS[name] for name in ("pydocs", "chitchat"))

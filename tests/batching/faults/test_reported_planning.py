"""Faults of plans that users of other batchers reported, tried on the planner."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.batching import CostModel, Load
from eke.batching.planner import PerStep, Rules, Sample, plan_round

CAP = 64


def shares_of(lengths, loads=None):
    index = iter(range(10**6))
    return [
        [Sample(next(index), n, n, () if loads is None else loads(n)) for n in share]
        for share in lengths
    ]


def plan(shares, **rules):
    rules = {"micro_tokens": CAP, "per_step": PerStep("tokens", 3 * CAP * len(shares))} | rules
    return plan_round(shares, Rules(**rules), rng_seed=1).blocks


def groups_of(blocks):
    return [group for block in blocks for step in block.steps for group in step]


ranks_of_lengths = st.lists(
    st.lists(st.integers(1, CAP), max_size=20), min_size=1, max_size=4
).filter(any)
per_steps = st.sampled_from([PerStep("tokens", 200), PerStep("samples", 6)])


@given(ranks_of_lengths, per_steps, st.booleans())
def test_verl_7553_cap_is_strict_after_balancing(lengths, per_step, packed):
    """Balancing moved a sample into a full micro-batch: seven of eight tokens, and one more."""
    for group in groups_of(plan(shares_of(lengths), per_step=per_step, packed=packed)):
        total = sum(sample.length for sample in group)
        padded = len(group) * max((sample.length for sample in group), default=0)
        assert (total if packed else padded) <= CAP


@pytest.mark.parametrize("lengths", [[7] * 4 + [1] * 4, [5, 5, 4], [8, 8, 1], [6, 6, 3, 3]])
def test_verl_7553_samples_that_just_fit_are_not_balanced_above_the_cap(lengths):
    for packed in (True, False):
        rules = {"micro_tokens": 8, "per_step": PerStep("samples", 8), "packed": packed}
        for group in groups_of(plan(shares_of([lengths]), **rules)):
            assert sum(s.length for s in group) <= 8


@pytest.mark.parametrize("packed", [True, False])
def test_easyr1_11012_a_light_rank_has_fewer_samples_than_micro_batches(packed):
    """The agreed number of micro-batches was more than one rank had samples."""
    blocks = plan(shares_of([[60] * 7, [5], []]), packed=packed, move=False)
    steps = [step for block in blocks for step in block.steps]
    assert len(steps) == 7
    assert all(len(step) == 3 for step in steps)
    assert [sum(bool(step[rank]) for step in steps) for rank in range(3)] == [7, 1, 0]
    blocks = plan(shares_of([[60] * 7, [5], []]), packed=packed)
    assert sum(len(block.steps) for block in blocks) == 3, "samples that may move even this out"


@given(ranks_of_lengths, st.lists(st.integers(0, 9), min_size=1, max_size=5), st.booleans())
def test_vggt_285_sizes_that_vary_give_ranks_unequal_steps(lengths, images, packed):
    """Whatever a sample takes of other resources, ranks are in step and every cap holds."""
    cost = CostModel(
        loads={"patches": Load(cap=12, time=3.0)}, measure=lambda item: {"patches": item}
    )
    shares = shares_of(lengths, loads=lambda n: (images[n % len(images)],))
    blocks = plan(shares, cost=cost, packed=packed)
    for block in blocks:
        assert {len(step) for step in block.steps} == {len(shares)}
    for group in groups_of(blocks):
        assert sum(sample.loads[0] for sample in group) <= 12
    seen = Counter(s.index for group in groups_of(blocks) for s in group)
    assert seen == Counter(s.index for share in shares for s in share)


def test_ray_66085_equal_rows_are_unequal_batches():
    """Two ranks with as many rows each, of which one makes three times as many batches."""
    blocks = plan(shares_of([[10] * 12, [30] * 12]), move=False)
    steps = [step for block in blocks for step in block.steps]
    assert all(len(step) == 2 for step in steps)
    assert len(steps) >= 6, "the second rank needs six"
    assert [sum(len(step[rank]) for step in steps) for rank in range(2)] == [12, 12]


def test_lhotse_640_the_sum_of_lengths_is_no_cap_of_padded_memory():
    """One long sample among short ones: 60 + 4 * 1 tokens fit the cap, and are padded to 300."""
    for group in groups_of(plan(shares_of([[60, 1, 1, 1, 1]]))):
        assert len(group) * max(s.length for s in group) <= CAP


def test_lhotse_752_many_very_short_samples_exceed_memory():
    """What a sample takes however short is a resource of its own, with a cap of its own."""
    cost = CostModel(loads={"samples": Load(cap=16)}, measure=lambda item: {"samples": 1})
    for packed in (True, False):
        shares = shares_of([[1] * 200], loads=lambda _: (1,))
        sizes = [len(group) for group in groups_of(plan(shares, cost=cost, packed=packed))]
        assert sum(sizes) == 200
        assert max(sizes) <= 16


def test_ms_swift_10111_neighbouring_micro_batches_are_alike():
    """Batches in the order of lengths: a correlation of 0.761 from one to the next."""
    rng = np.random.default_rng(0)
    lengths = [np.clip(rng.lognormal(2.5, 0.8, 600), 1, CAP).astype(int).tolist() for _ in "ab"]
    blocks = plan(shares_of(lengths), per_step=PerStep("tokens", 8 * CAP))
    longest = [
        max(s.length for s in group)
        for block in blocks
        for step in block.steps
        for group in step[:1]
        if group
    ]
    assert len(longest) > 100
    assert abs(np.corrcoef(longest[:-1], longest[1:])[0, 1]) < 0.3


@given(ranks_of_lengths, per_steps)
def test_trl_5076_packing_drops_what_does_not_fit(lengths, per_step):
    """Best-fit packing cut samples off: tokens in are tokens out, and samples stay whole."""
    shares = shares_of(lengths)
    out = [s for group in groups_of(plan(shares, per_step=per_step, packed=True)) for s in group]
    assert Counter(out) == Counter(s for share in shares for s in share)


def test_llamafactory_9269_packing_with_images_is_a_silent_no_op():
    """Packed under two caps: fewer micro-batches than samples, and neither cap is exceeded."""
    cost = CostModel(
        loads={"patches": Load(cap=10)}, measure=lambda item: {"patches": int(item["patches"])}
    )
    shares = shares_of([[8] * 30], loads=lambda _: (4,))
    groups = groups_of(plan(shares, cost=cost, packed=True))
    assert len(groups) < 30
    assert all(len(group) == 2 for group in groups)

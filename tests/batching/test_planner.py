from __future__ import annotations

from itertools import combinations, zip_longest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eke.batching.planner import (
    DUMMY_TOKENS,
    BlockPlan,
    PerStep,
    Sample,
    fewest_groups,
    padded_tokens,
    partition,
    plan_window,
)
from eke.errors import InputError

CAP = 64


@st.composite
def windows(draw: st.DrawFn) -> list[list[Sample]]:
    """1 to 4 ranks with 0 to 25 samples each, uneven, some longer than the cap."""
    size = draw(st.integers(1, 4))
    lengths = st.integers(1, 40) | st.integers(60, 70)
    shares = draw(st.lists(st.lists(lengths, max_size=25), min_size=size, max_size=size))
    index = iter(range(1000))
    return [[Sample(next(index), n, n - 1) for n in s] for s in shares]


per_steps = st.builds(PerStep, st.just("tokens"), st.integers(1, 600)) | st.builds(
    PerStep, st.just("samples"), st.integers(1, 40)
)


def plan(shares: list[list[Sample]], per_step: PerStep, seed: int = 0) -> list[BlockPlan]:
    return plan_window(
        shares, micro_tokens=CAP, per_step=per_step, world_size=len(shares), rng_seed=seed
    )


@given(windows(), per_steps)
def test_every_sample_is_once_on_its_own_rank_and_ranks_are_in_step(
    shares: list[list[Sample]], per_step: PerStep
) -> None:
    blocks = plan(shares, per_step)
    seen: list[list[Sample]] = [[] for _ in shares]
    for block in blocks:
        for step in block.steps:
            assert len(step) == len(shares)
            assert any(step), "a micro-step of dummies alone is wasted"
            for rank, group in enumerate(step):
                seen[rank] += group
    by_index = [sorted(share, key=lambda s: s.index) for share in seen]
    assert by_index == shares


@given(windows(), per_steps)
def test_caps_are_strict_and_only_a_longer_sample_is_alone(
    shares: list[list[Sample]], per_step: PerStep
) -> None:
    for block in plan(shares, per_step):
        for group in (group for step in block.steps for group in step):
            assert [s.length for s in group] == sorted((s.length for s in group), reverse=True)
            assert padded_tokens(group) <= CAP or len(group) == 1


@given(windows(), per_steps)
def test_blocks_keep_the_order_of_the_epoch(shares: list[list[Sample]], per_step: PerStep) -> None:
    arrivals = [s for row in zip_longest(*shares) for s in row if s is not None]
    start = 0
    for block in plan(shares, per_step):
        samples = block.samples()
        assert set(block.indices()) == {s.index for s in arrivals[start : start + len(samples)]}
        start += len(samples)


@given(windows(), st.integers(1, 40))
def test_samples_mode_gives_exactly_n(shares: list[list[Sample]], n: int) -> None:
    sizes = [len(block.samples()) for block in plan(shares, PerStep("samples", n))]
    total = sum(map(len, shares))
    assert sizes == [n] * (total // n) + ([total % n] if total % n else [])


@given(windows(), st.integers(1, 600))
def test_tokens_mode_gives_equal_blocks_of_about_n(shares: list[list[Sample]], n: int) -> None:
    lengths = [s.length for share in shares for s in share]
    blocks = [sum(s.length for s in b.samples()) for b in plan(shares, PerStep("tokens", n))]
    if sum(lengths) >= n:
        target = sum(lengths) / max(1, (2 * sum(lengths) + n) // (2 * n))
        assert 2 / 3 * n <= target <= 3 / 2 * n
        assert all(abs(tokens - target) <= max(lengths) for tokens in blocks)
    else:
        assert len(blocks) == bool(lengths)


@given(windows(), per_steps, st.integers(0, 2**64 - 1))
def test_equal_arguments_give_equal_plans(
    shares: list[list[Sample]], per_step: PerStep, seed: int
) -> None:
    assert plan(shares, per_step, seed) == plan([list(s) for s in shares], per_step, seed)


def test_the_seed_orders_the_micro_batches_of_a_block() -> None:
    shares = [[Sample(i, n, n) for i, n in enumerate(range(20, 60))]]
    orders = [
        [group[0] for (group,) in plan(shares, PerStep("samples", 40), seed)[0].steps]
        for seed in range(3)
    ]
    assert sorted(orders[0], key=str) == sorted(orders[1], key=str)
    assert orders[0] != orders[1] != orders[2]
    by_length = sorted(orders[0], key=lambda s: s.length)
    assert orders[0] not in (by_length, by_length[::-1])


@given(windows(), per_steps)
def test_ranks_pair_costliest_with_costliest(shares: list[list[Sample]], per_step: PerStep) -> None:
    for block in plan(shares, per_step):
        costs = [[padded_tokens(group) if group else 0 for group in step] for step in block.steps]
        for one, other in combinations(costs, 2):
            signs = {(a > b) - (a < b) for a, b in zip(one, other, strict=True)}
            assert not {1, -1} <= signs, "one rank is costlier here, another there"


def test_padded_and_paced_tokens() -> None:
    long, short = Sample(0, 9, 8), Sample(1, 4, 3)
    block = BlockPlan((((long, short), (short,)), ((short,), ())))
    assert block.padded_tokens() == 18 + 4 + 4 + DUMMY_TOKENS
    assert block.paced_tokens() == 2 * 18 + 2 * 4


falling = st.lists(st.integers(1, 70), min_size=1, max_size=8).map(
    lambda lengths: sorted(lengths, reverse=True)
)


def _cuts(n: int, k: int) -> list[list[tuple[int, int]]]:
    return [
        list(zip((0, *cut), (*cut, n), strict=True)) for cut in combinations(range(1, n), k - 1)
    ]


def _size(lengths: list[int], group: tuple[int, int]) -> int:
    return (group[1] - group[0]) * lengths[group[0]]


def _fits(lengths: list[int], groups: list[tuple[int, int]]) -> bool:
    return all(b - a == 1 or _size(lengths, (a, b)) <= CAP for a, b in groups)


@settings(max_examples=300)
@given(falling)
def test_fewest_groups_and_partition_equal_brute_force(lengths: list[int]) -> None:
    n = len(lengths)
    feasible = [k for k in range(1, n + 1) if any(_fits(lengths, c) for c in _cuts(n, k))]
    assert len(fewest_groups(lengths, CAP)) == feasible[0]
    for k in range(feasible[0], n + 1):
        groups = partition(lengths, k, CAP)
        assert groups in _cuts(n, k), "k contiguous groups"
        assert _fits(lengths, groups)
        best = min(max(_size(lengths, g) for g in c) for c in _cuts(n, k) if _fits(lengths, c))
        assert max(_size(lengths, g) for g in groups) == best


def test_no_samples_make_no_groups_and_no_blocks() -> None:
    assert partition([], 0, CAP) == []
    assert plan([[], []], PerStep("tokens", 10)) == []
    assert plan([[], []], PerStep("samples", 10)) == []


def test_a_rank_without_samples_runs_dummies() -> None:
    (block,) = plan([[Sample(0, 60, 1), Sample(1, 50, 1)], []], PerStep("samples", 2))
    assert [step[1] for step in block.steps] == [(), ()]
    assert block.padded_tokens() == 110 + 2 * DUMMY_TOKENS


@pytest.mark.parametrize(
    "text", ["", "64", "tokens", "tokens:", "tokens:0", "tokens:-1", "steps:3"]
)
def test_a_per_step_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="per_step"):
        PerStep.parse(text)


def test_per_step_is_read() -> None:
    assert PerStep.parse("tokens:65536") == ("tokens", 65536)
    assert PerStep.parse("samples:64") == ("samples", 64)

"""Where the ranks' time goes, cell by cell; plain fixed batches, against a loop."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eke.batching.planner import DUMMY_TOKENS, PerStep, Rules, Sample, plan_round
from eke.batching.tally import Tally, fixed_batches, fixed_tally, tally

lengths_of_ranks = st.lists(st.lists(st.integers(1, 60), max_size=25), min_size=1, max_size=5)


def drawn(group, packed):
    """A micro-batch as one character a token: real, padding or dummy."""
    if not group:
        return "d" * DUMMY_TOKENS
    longest = 0 if packed else max(group)
    return "".join(("r" * n).ljust(longest, "p") for n in group)


def counted(steps, ranks, packed=False):
    rows = ["".join(drawn(step[rank], packed) for step in steps) for rank in range(ranks)]
    wide = max(map(len, rows))
    return [tuple(row.ljust(wide, "w").count(kind) for kind in "rpwd") for row in rows]


@given(
    lengths_of_ranks.filter(any),
    st.integers(60, 300),
    st.sampled_from([PerStep("tokens", 400), PerStep("samples", 7)]),
    st.booleans(),
)
def test_a_plan_is_tallied_cell_by_cell(shares, micro_tokens, per_step, packed):
    numbers = iter(range(1000))
    samples = [[Sample(next(numbers), n, n) for n in share] for share in shares]
    rules = Rules(micro_tokens, per_step, packed=packed)
    for block in plan_round(samples, rules, rng_seed=1).blocks:
        found = tally(block)
        steps = [[[s.length for s in group] for group in step] for step in block.steps]
        assert found == counted(steps, len(shares), packed)
        assert len({sum(one) for one in found}) == 1
        computed = sum(one.real + one.padding + one.dummies for one in found)
        assert computed == block.occupied_tokens()
        assert sum(one.real for one in found) == sum(s.length for s in block.samples())


def dealt(lengths, ranks, most):
    """Batches of a plain sampler, by a loop: to every batch in turn, until all samples have one."""
    batches = 0
    while batches * most < len(lengths):
        batches += ranks
    sizes = [0] * batches
    for n in range(len(lengths)):
        sizes[n % batches] += 1
    return sizes


@given(st.lists(st.integers(1, 60), max_size=90), st.integers(1, 8), st.integers(1, 9))
def test_fixed_batches_are_those_of_a_plain_sampler(lengths, ranks, most):
    steps = fixed_batches(lengths, ranks, most)
    assert [n for step in steps for batch in step for n in batch] == lengths
    assert {len(step) for step in steps} <= {ranks}
    sizes = [len(batch) for step in steps for batch in step]
    assert sorted(sizes) == sorted(dealt(lengths, ranks, most))
    assert max(sizes, default=0) <= most
    # As few micro-steps as hold them.
    assert (
        (len(steps) - 1) * ranks * most < max(1, len(lengths)) <= max(1, len(steps) * ranks * most)
    )
    found, passes = fixed_tally(lengths, ranks, most)
    assert passes == len(steps)
    assert found == counted(steps, ranks)
    assert sum(one.real for one in found) == sum(lengths)


def test_an_example_by_hand():
    # Two ranks, two samples a batch at most: two micro-steps hold seven, and share them evenly.
    assert fixed_batches([9, 1, 4, 4, 5, 2, 3], 2, 2) == [[[9], [1, 4]], [[4, 5], [2, 3]]]
    assert fixed_tally([9, 1, 4, 4], 2, 2) == ([Tally(10, 8, 0, 0), Tally(8, 0, 10, 0)], 1)
    assert fixed_tally([7], 3, 4) == ([Tally(0, 0, 5, 2), Tally(0, 0, 5, 2), Tally(7, 0, 0, 0)], 1)
    assert fixed_tally([], 2, 4) == ([Tally(0, 0, 0, 0)] * 2, 0)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from eke.batching.cost import CostModel, Load
from eke.batching.plan import PerStep, Rules, Sample
from eke.batching.rows import sizes_of, sorted_row


def _measure(item: Any) -> Mapping[str, int]:
    return {"patches": item["patches"]}


PATCHES = CostModel(1.0, 0.5, 2.0, 0.0, {"patches": Load(9, 3.0)}, _measure)
RULES = Rules(32, PerStep("tokens", 100), PATCHES)

samples = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), max_size=20).map(
    lambda rows: [Sample(i, length, 1, (patches,)) for i, (length, patches) in enumerate(rows)]
)


@given(samples)
def test_a_row_is_longest_first_and_every_stretch_within_reach_fits(made: list[Sample]) -> None:
    row = sorted_row(made, RULES)
    assert sorted(row.order) == list(range(len(made)))
    lengths = [made[n].length for n in row.order]
    assert lengths == sorted(lengths, reverse=True)
    assert row.tokens == sum(lengths)
    for start, stop in enumerate(row.sorted.reach):
        stretch = [made[n] for n in row.order[start:stop]]
        if len(stretch) > 1:
            assert RULES.tokens(tuple(stretch)) <= 32
            assert sum(sample.loads[0] for sample in stretch) <= 9


@given(samples)
def test_both_ways_to_cut_see_the_same_times(made: list[Sample]) -> None:
    row, sizes = sorted_row(made, RULES), sizes_of(made, RULES)
    assert row.time() == sum(sizes.times)
    expected = [1024 * (s.length + 0.5 * s.length**2 + 2 + 3 * s.loads[0]) for s in made]
    assert sizes.times == expected


@given(samples, st.integers(1, 10))
def test_micro_batches_come_busiest_first_and_none_is_empty(made: list[Sample], k: int) -> None:
    sizes = sizes_of(made, RULES)
    packed = sizes.pack(k, RULES, range(len(made)))
    bins = sizes.busiest_first(packed.bins)
    times = [sum(sizes.times[n] for n in one) for one in bins]
    assert times == sorted(times, reverse=True)
    assert sorted(n for one in bins for n in one) == sorted(set(range(len(made))) - {*packed.left})
    assert all(bins)

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.batching.planner import PerStep, Sample
from eke.batching.triage import Overlength, Triage
from eke.errors import InputError


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 20))),
    st.sampled_from(["truncate", "skip", "solo"]),
)
def test_every_sample_has_one_fate(arrivals: list[tuple[int, int]], overlength: Overlength) -> None:
    triage = Triage(10, overlength, [[], []])
    for index, (rank, length) in enumerate(arrivals):
        triage.add(rank, Sample(index, length, 0))
    usable = [sample for share in triage.shares for sample in share]
    fates = [s.index for s in usable] + triage.empty + triage.skipped
    assert sorted(fates) == list(range(len(arrivals)))
    assert triage.empty == [i for i, (_, n) in enumerate(arrivals) if n == 0]
    overlong = {i for i, (_, n) in enumerate(arrivals) if n > 10}
    assert (set(triage.skipped) if overlength == "skip" else triage.overlong) == overlong
    for sample in usable:
        n = arrivals[sample.index][1]
        assert sample.length == (min(n, 10) if overlength == "truncate" else n)
        assert sample in triage.shares[arrivals[sample.index][0]]
    assert triage.filled(PerStep("samples", 1)) == len(usable)
    assert triage.filled(PerStep("tokens", 1)) == sum(s.length for s in usable)


def test_an_overlong_sample_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(InputError, match=r"sample 7 .*'11 tokens.* micro_tokens = 10.*at least 11"):
        Triage(10, "error", [[]]).add(0, Sample(7, 11, 0))


def test_under_a_lowered_cap_only_what_never_was_allowed_is_an_error() -> None:
    triage = Triage(10, "error", [[]], allowed=20)
    triage.add(0, Sample(7, 20, 0))
    assert triage.shares == [[Sample(7, 20, 0)]]
    with pytest.raises(InputError, match="sample 8 "):
        triage.add(0, Sample(8, 21, 0))

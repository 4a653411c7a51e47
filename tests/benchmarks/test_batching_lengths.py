"""The made lengths have the spreads that they are named after."""

from statistics import fmean, pstdev

import pytest
from benchmarks.batching_lengths import SHAPES, SHORTEST, RealText


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_mean_and_spread_are_those_stated(shape):
    lengths = shape.lengths(100_000, seed=0)
    assert min(lengths) >= SHORTEST
    assert max(lengths) <= shape.cap
    assert fmean(lengths) == pytest.approx(shape.mean, rel=0.02)
    # Clipping at the cap takes the far end off the widest of them.
    assert pstdev(lengths) / fmean(lengths) == pytest.approx(shape.cv, rel=0.07)
    assert sum(part.share for part in shape.parts) == 1


def test_a_seed_gives_the_same_lengths():
    shape = SHAPES[0]
    assert shape.lengths(50, 1) == shape.lengths(50, 1) != shape.lengths(50, 2)


def test_the_cap_of_a_text_holds_its_longest_sample():
    assert RealText("even", [10, 10, 10]).cap == 80
    assert RealText("one is long", [1, 1, 1, 50]).cap == 106
    assert RealText("one is very long", [1] * 20 + [100]).cap == 100

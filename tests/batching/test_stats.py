"""Shares of waste, from counts."""

import pytest

from eke.batching.stats import LoaderStats


def test_shares_are_of_what_was_computed():
    stats = LoaderStats(tokens=60, padded_tokens=80, paced_tokens=120, capacity_tokens=200)
    assert stats.padding == pytest.approx(0.25)
    assert stats.efficiency == pytest.approx(0.5)
    assert stats.fill == pytest.approx(0.3)


def test_nothing_done_is_nothing_wasted():
    stats = LoaderStats()
    assert (stats.padding, stats.efficiency, stats.fill) == (0.0, 1.0, 1.0)

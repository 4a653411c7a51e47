"""What a claim about batching needs is measured, and the worst cell is the worst."""

import pytest
from benchmarks.batching_claims import (
    BATCHING_CLAIMS,
    EFFICIENCY,
    EVERYWHERE,
    ODB,
    PADDED,
    cell,
    lead,
)
from benchmarks.batching_efficiency import RANKS, UNITS, WHOLE, WINDOWED, WINDOWS, Table
from benchmarks.batching_lengths import SHAPES
from benchmarks.claims import verdicts

MINE = [claim for claim in BATCHING_CLAIMS if claim.script == EFFICIENCY]


@pytest.mark.parametrize("claim", MINE, ids=lambda c: c.text)
def test_what_a_claim_needs_is_measured(claim):
    always = {cell(s.name, r, w) for s in SHAPES for r in RANKS for w in WINDOWS}
    once = {cell(s.name, r, max(WINDOWS)) for s in SHAPES for r in RANKS}
    for arm in (claim.arm, *claim.against):
        assert arm in WINDOWED or arm in WHOLE
        assert claim.workload in {EVERYWHERE, *(always if arm in WINDOWED else once)}
    assert claim.metric in UNITS


def test_the_lead_is_that_of_the_worst_cell_and_losses_are_never_averaged_away():
    table = Table()
    for workload, ours, theirs, lost in (("a", 0.9, 0.8, 0), ("b", 0.7, 0.75, -2)):
        table.add(
            workload, PADDED, {"efficiency": ours, "charged": ours / 2, "lost": lost, "over": 0}
        )
        table.add(workload, ODB, {"efficiency": theirs, "charged": 0.4, "lost": 9, "over": 9})
    table.add(
        "a", PADDED, {"efficiency": 0.1, "charged": 0.1, "lost": 0, "over": 0}
    )  # a seed that ODB has not
    found = table.results()
    worst = found[EVERYWHERE, PADDED].values
    assert worst[lead("efficiency", ODB)] == [pytest.approx(0.7 / 0.75)]
    assert worst[lead("charged", ODB)] == [pytest.approx(0.35 / 0.4)]
    assert found[EVERYWHERE, PADDED].values["lost"] == [2]
    assert found["a", PADDED].values["efficiency"] == [pytest.approx(0.5)]
    assert found["b", PADDED].values["lost"] == [-2]


def test_without_figures_nothing_is_met():
    assert {verdict.word for verdict in verdicts(EFFICIENCY, {})} == {"not measured"}

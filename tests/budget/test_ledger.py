"""The ledger: totals over any number of reopenings and resumes, against sums by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eke.budget import ACTIVITIES, UNITS, Bill, Ledger
from eke.budget.jsonl import read_records
from eke.budget.ledger import Totals, add_up, bills_of
from eke.errors import EkeError

# Whole numbers, so that sums in another order are equal and not only close.
AMOUNT = st.none() | st.integers(0, 1000).map(float)
BILLS = st.builds(
    Bill,
    who=st.just("training"),
    what=st.sampled_from(ACTIVITIES),
    step=st.integers(0, 99),
    flops=AMOUNT,
    seconds=AMOUNT,
    joules=AMOUNT,
    money=AMOUNT,
    tokens=st.none() | st.integers(0, 1000),
)
FILES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)


def by_hand(bills: list[Bill]) -> Totals:
    totals: Totals = {}
    for what in {b.what for b in bills}:
        amounts = {u: [getattr(b, u) for b in bills if b.what == what] for u in UNITS}
        totals[what] = {u: None if None in a else sum(a) for u, a in amounts.items()}
    return totals


def check(ledger: Ledger, bills: list[Bill]) -> None:
    assert sorted(map(repr, ledger.bills)) == sorted(map(repr, bills))
    assert ledger.totals() == by_hand(bills)
    for unit in UNITS:
        amounts = [getattr(b, unit) for b in bills]
        assert ledger.spent(unit) == (None if None in amounts else sum(amounts))


@given(st.lists(BILLS, max_size=12))
def test_in_memory(bills: list[Bill]) -> None:
    ledger = Ledger()
    for bill in bills:
        assert ledger.add(bill) is bill
    check(ledger, bills)
    assert ledger.offset == len(bills)
    assert add_up(bills) == ledger.totals()


@FILES
@given(st.lists(BILLS | st.just("open again") | st.just("save") | st.just("resume"), max_size=25))
def test_reopening_changes_nothing_and_resumes_turn_bills_into_lost(
    tmp_path: Path, moves: list[Bill | str]
) -> None:
    path = tmp_path / "ledger.jsonl"
    path.unlink(missing_ok=True)
    ledger = Ledger(path)
    standing: list[Bill] = []
    lost: list[Bill] = []
    saved_offset, saved_count = 0, 0
    for step, move in enumerate(moves):
        if isinstance(move, Bill):
            ledger.add(move)
            standing.append(move)
        elif move == "save":
            saved_offset, saved_count = ledger.offset, len(standing)
        else:
            ledger.close()
            ledger = Ledger(path)
            if move == "resume":
                undone = [
                    Bill.from_json({**b.to_json(), "what": "lost"}) for b in standing[saved_count:]
                ]
                assert ledger.resume(saved_offset, step) == undone
                lost += undone
                del standing[saved_count:]
        check(ledger, standing + lost)
    ledger.close()
    assert sorted(map(repr, bills_of(read_records(path)))) == sorted(map(repr, standing + lost))


def test_an_estimate_of_lost_work_that_is_undone_is_lost_once(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        train = ledger.add(Bill("training", "train", 1, flops=5.0))
        ledger.add(Bill("training", "lost", 1, flops=7.0, measured=False))
        undone = ledger.resume(0, 0)
        assert [(b.what, b.flops, b.measured) for b in undone] == [
            ("lost", 5.0, True),
            ("lost", 7.0, False),
        ]
        assert ledger.resume(0, 0) == []
        assert ledger.spent("flops") == 12.0
        assert train.what == "train"


def test_an_unknown_amount_makes_its_total_unknown_and_no_other() -> None:
    ledger = Ledger()
    ledger.add(Bill("training", "train", 1, flops=5.0, joules=3.0))
    ledger.add(Bill("training", "eval", 1, flops=2.0, joules=None))
    assert ledger.totals()["train"]["joules"] == 3.0
    assert ledger.totals()["eval"]["joules"] is None
    assert ledger.spent("joules") is None
    assert ledger.spent("flops") == 7.0


def test_totals_are_a_copy() -> None:
    ledger = Ledger()
    ledger.add(Bill("training", "train", 1, flops=5.0))
    ledger.totals()["train"]["flops"] = 0.0
    assert ledger.spent("flops") == 5.0


def test_a_torn_last_bill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.add(Bill("training", "train", 1, flops=5.0))
        whole = ledger.offset
        ledger.add(Bill("training", "train", 2, flops=5.0))
        ledger.sync()
    path.write_bytes(path.read_bytes()[:-3])
    with Ledger(path) as ledger:
        assert ledger.spent("flops") == 5.0
        assert ledger.offset == whole == path.stat().st_size


def test_without_a_file_there_is_nothing_to_resume_from() -> None:
    with pytest.raises(ValueError, match="without a file"):
        Ledger().resume(0, 0)


def test_a_damaged_ledger_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text("oops\n{}\n")
    with pytest.raises(EkeError, match="damaged"):
        Ledger(tmp_path / "ledger.jsonl")

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.budget.bill import ACTIVITIES, Bill
from eke.budget.jsonl import Record
from eke.budget.ledger import Ledger
from eke.report.accounting import Accounts, add_up
from eke.report.records import load


def bill(what: str, t: float | None, seconds: float | None = 1.0, **more: Any) -> dict[str, Any]:
    record = {"kind": "bill", **Bill("w", what, 1, seconds=seconds, **more).to_json()}  # type: ignore[arg-type]
    return record if t is None else {**record, "t": t}


def accounts(*values: dict[str, Any]) -> Accounts:
    return add_up(Record(i, v) for i, v in enumerate(values))


def mark(cut: int, t: float) -> dict[str, Any]:
    return {"kind": "resume", "from_offset": cut, "step": 1, "t": t}


def test_every_activity_is_added_up_in_its_row() -> None:
    found = accounts(
        bill("startup", 3, 3.0), bill("train", 5, 2.0, flops=10.0), bill("train", 7, 2.0, flops=5),
    )  # fmt: skip
    assert [r.activity for r in found.rows] == ["train", "startup"]
    train = found.row("train")
    assert train is not None
    assert train.amounts["seconds"].value == 4
    assert train.amounts["flops"].value == 15
    assert found.total("seconds").value == 7
    assert found.row("eval") is None


def test_undone_bills_are_lost_work_and_counted_once() -> None:
    found = accounts(
        bill("startup", 1), bill("train", 2, flops=4.0), bill("train", 3, flops=6.0),
        mark(2, 50), bill("startup", 52, 2.0), bill("train", 53, flops=6.0),
    )  # fmt: skip
    lost, train = found.row("lost"), found.row("train")
    assert lost is not None
    assert train is not None
    assert lost.amounts["flops"].value == 6
    assert train.amounts["flops"].value == 10
    assert found.undone_bills == 1
    assert found.total("seconds").value == 6


def test_the_wall_clock_leaves_out_the_time_between_processes() -> None:
    found = accounts(
        bill("startup", 1003, 3.0), bill("train", 1004),  # 4 s
        mark(1, 9000), bill("startup", 9002, 2.0), bill("train", 9003, 0.5),  # 3 s by the records
    )  # fmt: skip
    assert found.wall_s == pytest.approx(7.0)
    assert found.processes == 2
    assert found.coverage == pytest.approx(6.5 / 7.0)


def test_work_in_flight_at_a_crash_extends_the_clock_and_the_bills_alike() -> None:
    lost = bill("lost", 9000, 5.0, measured=False)
    found = accounts(bill("startup", 3, 3.0), mark(99, 9000), lost, bill("startup", 9002, 2.0))
    assert found.wall_s == pytest.approx(3 + 5 + 2)
    assert found.coverage == pytest.approx(1.0)
    row = found.row("lost")
    assert row is not None
    assert row.estimates == 1


def test_unknown_units_are_never_zero() -> None:
    found = accounts(bill("train", 1, 1.0), bill("eval", 2, None), bill("eval", 3, 2.0))
    train, evaluation = found.row("train"), found.row("eval")
    assert train is not None
    assert evaluation is not None
    assert train.amounts["joules"].value is None
    assert evaluation.amounts["seconds"].value == 2.0
    assert not evaluation.amounts["seconds"].is_exact
    assert found.total("joules").value is None


def test_a_ledger_without_times_or_bills_has_no_wall_clock() -> None:
    assert accounts().coverage is None
    assert accounts().rows == ()
    assert accounts(bill("train", None)).wall_s is None


def test_damaged_amounts_and_new_activities_are_shown_as_they_are() -> None:
    odd = {"kind": "bill", "what": "select", "seconds": -3, "flops": "many", "t": 5}
    found = accounts(odd)
    assert found.rows[0].label == "select"
    assert found.rows[0].amounts["seconds"].value is None
    assert found.rows[0].amounts["flops"].value is None


@given(
    st.lists(
        st.tuples(st.sampled_from(ACTIVITIES), st.none() | st.floats(0, 1e6), st.floats(0, 1e20)),
        max_size=20,
    ),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=3),
)
def test_totals_agree_with_the_ledger(
    tmp_path_factory: pytest.TempPathFactory,
    bills: list[tuple[str, float | None, float]],
    resumes: list[tuple[int, int]],
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    offsets = [0]
    with Ledger(path) as ledger:
        for i, (what, seconds, flops) in enumerate(bills):
            ledger.add(Bill("w", what, i, seconds=seconds, flops=flops))  # type: ignore[arg-type]
            offsets.append(ledger.offset)
            for at, back in resumes:
                if at == i:
                    ledger.resume(offsets[min(back, len(offsets) - 1)], step=back)
        expected = ledger.totals()
    found = add_up(load(path.parent).ledger)
    assert {r.activity for r in found.rows} == set(expected)
    for row in found.rows:
        for unit, total in expected[row.activity].items():
            part = row.amounts[unit]
            assert (part.known if part.is_exact else None) == pytest.approx(total)


def test_a_whole_run_is_accounted_for(full_run: Path) -> None:
    found = add_up(load(full_run).ledger)
    assert found.processes == 2
    assert found.coverage == pytest.approx(1.0, abs=1e-6)
    assert {r.activity for r in found.rows} == set(ACTIVITIES)

"""Every second of the process belongs to one activity, whatever order the laps come in.

The clock and the energy counter are moved by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.budget import Activity, Bill, Budget, Ledger
from eke.budget.meters import EnergyMeter
from eke.training import billing
from eke.training.billing import SMALL_S, Biller

AGE_S = 7.5
PRICE = Budget(price_per_hour=7200.0, currency="USD")  # 2 USD a second


class Hand:
    """A clock (seconds) and an energy counter (joules), both moved by hand."""

    source = "hand"

    def __init__(self) -> None:
        self.now_s, self.joules = 1000.0, 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def read(self) -> float:
        return self.joules

    def work(self, seconds: float, joules: float = 0.0) -> None:
        self.now_s += seconds
        self.joules += joules


class Billing(NamedTuple):
    biller: Biller
    ledger: Ledger
    hand: Hand


@contextlib.contextmanager
def billing_of(
    budget: Budget | None = None, ledger: Ledger | None = None, *, energy: bool = False
) -> Iterator[Billing]:
    hand, ledger = Hand(), ledger or Ledger()
    counters = [hand] if energy else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(billing, "time", hand)
        patch.setattr(billing, "process_age_s", lambda: AGE_S)
        patch.setattr(billing.EnergyMeter, "open", lambda: EnergyMeter(counters))  # type: ignore[arg-type]
        yield Billing(Biller(ledger, budget or Budget(), who="me"), ledger, hand)


laps = st.lists(
    st.tuples(
        st.sampled_from(["charge", "gather", "step", "flush", "carve"]),
        st.sampled_from(["train", "wait", "govern", "eval", "checkpoint"]),
        st.integers(0, 3000).map(lambda ms: ms / 1000),
        st.floats(0, 1e9),
    ),
    max_size=40,
)


@given(laps, st.booleans())
def test_bills_and_crumbs_add_up_to_the_process(
    moves: list[tuple[str, Activity, float, float]], energy: bool
) -> None:
    with billing_of(PRICE, energy=energy) as (biller, ledger, hand):
        flops_due, tokens_due = 0.0, 0
        for step, (kind, what, seconds, flops) in enumerate(moves):
            hand.work(seconds, joules=3 * seconds)
            if kind == "charge":
                assert biller.charge(what, step, flops) >= seconds - 1e-9
                flops_due += flops
            elif kind == "gather":
                biller.gather(what, step)
            elif kind == "carve":
                biller.carve(what, step, seconds * 0.75)
                continue
            elif kind == "step":
                biller.charge_step(step, useful_flops=flops / 3, flops=flops, tokens=step)
                flops_due += flops
                tokens_due += step
            else:
                biller.flush(step)
                continue
            # Right after a lap nothing is under way: all is billed, but for a crumb of each kind.
            pending_s = biller.spent()["seconds"] - (ledger.spent("seconds") or 0.0)
            assert -1e-9 <= pending_s <= 5 * SMALL_S
        biller.charge("govern", 99)
        biller.flush(99)
        age_s = AGE_S + hand.now_s - 1000.0
        assert biller.spent()["seconds"] == pytest.approx(age_s)
        assert ledger.spent("seconds") == pytest.approx(age_s)
        assert ledger.spent("money") == pytest.approx(2 * age_s)
        assert ledger.spent("flops") == pytest.approx(flops_due)
        assert ledger.spent("tokens") == tokens_due
        if energy:
            assert ledger.spent("joules") == pytest.approx(hand.joules)
        else:
            assert ledger.spent("joules") is None


def test_the_first_bill_reaches_back_to_the_start_of_the_process() -> None:
    with billing_of() as (biller, ledger, hand):
        hand.work(0.5)
        assert biller.charge("startup", 0) == AGE_S + 0.5
        assert ledger.bills[0].seconds == AGE_S + 0.5
        assert (ledger.bills[0].who, ledger.bills[0].what) == ("me", "startup")
        assert (ledger.bills[0].peak_bytes or 0) > 0


def test_crumbs_are_billed_when_enough_has_gathered() -> None:
    with billing_of() as (biller, ledger, hand):
        biller.charge("startup", 0)
        for _ in range(4):
            hand.work(SMALL_S / 4.5)
            biller.gather("wait", 1)
            hand.work(SMALL_S / 9)
            biller.gather("govern", 1)
        assert len(ledger.bills) == 1
        hand.work(SMALL_S / 4)
        biller.gather("wait", 2)
        assert [(b.what, b.step) for b in ledger.bills[1:]] == [("wait", 2)]
        assert ledger.bills[1].seconds == pytest.approx(SMALL_S * (4 / 4.5 + 1 / 4))
        biller.flush(3)
        assert [(b.what, b.step) for b in ledger.bills[2:]] == [("govern", 3)]
        biller.flush(4)
        assert len(ledger.bills) == 3


def test_a_step_is_split_by_flops() -> None:
    with billing_of(PRICE, energy=True) as (biller, ledger, hand):
        biller.charge("startup", 0)
        hand.work(8.0, joules=80.0)
        assert biller.charge_step(5, useful_flops=75.0, flops=100.0, tokens=12) == 8.0
        train, padding = ledger.bills[1:]
        assert (train.what, train.seconds, train.flops, train.tokens) == ("train", 6.0, 75.0, 12)
        assert (padding.what, padding.seconds, padding.flops) == ("padding", 2.0, 25.0)
        assert (train.joules, padding.joules, padding.tokens) == (60.0, 20.0, 0)
        assert (train.money, padding.money) == (12.0, 4.0)


@pytest.mark.parametrize(("useful", "flops"), [(100.0, 100.0), (101.0, 100.0), (0.0, 0.0)])
def test_a_step_without_padding_has_one_bill(useful: float, flops: float) -> None:
    with billing_of() as (biller, ledger, hand):
        hand.work(1.0)
        biller.charge_step(1, useful_flops=useful, flops=flops, tokens=3)
        assert [b.what for b in ledger.bills] == ["train"]


def test_earlier_processes_count(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.jsonl") as ledger:
        ledger.add(Bill("t", "train", 1, flops=5.0, seconds=100.0, joules=50.0))
    with (
        Ledger(tmp_path / "l.jsonl") as ledger,
        billing_of(PRICE, ledger, energy=True) as (biller, _, hand),
    ):
        hand.work(2.5, joules=4.0)
        spent = {"flops": 5.0, "seconds": 110.0, "joules": 54.0, "money": 220.0}
        assert biller.spent() == spent
        # A resume adds what the crash undid, after the clock was started.
        ledger.add(Bill("t", "lost", 1, flops=1.0, seconds=10.0, joules=6.0, measured=False))
        biller.recount()
        assert biller.spent() == {"flops": 6.0, "seconds": 120.0, "joules": 60.0, "money": 240.0}


def test_what_cannot_be_measured_is_left_out() -> None:
    with billing_of() as (biller, ledger, hand):
        hand.work(1.0)
        biller.charge("train", 1)
        assert biller.spent().keys() == {"flops", "seconds"}
        assert (ledger.bills[0].joules, ledger.bills[0].money) == (None, None)
        assert biller.energy_source == "unknown"


def test_the_real_clock_keeps_the_books_too() -> None:
    """No reading of it is foreseen; only that bills never exceed, and in the end meet, the age."""
    ledger = Ledger()
    biller = Biller(ledger, Budget())
    for step in range(50):
        biller.gather("govern", step)
        biller.charge("train", step)
        assert (ledger.spent("seconds") or 0.0) <= biller.spent()["seconds"]
    before = biller.spent()["seconds"]
    biller.charge("finish", 50)
    biller.flush(50)
    assert before <= (ledger.spent("seconds") or 0.0) <= biller.spent()["seconds"]


@pytest.mark.parametrize("energy", [True, False])
def test_a_stall_within_a_step_is_the_savers(energy: bool) -> None:
    with billing_of(energy=energy) as (biller, ledger, hand):
        biller.charge("startup", 0)
        hand.work(4.0, joules=8.0)
        biller.carve("checkpoint", 1, 3.0)
        hand.work(1.0, joules=2.0)
        assert biller.charge_step(1, useful_flops=1, flops=1, tokens=1) == pytest.approx(2.0)
        totals = ledger.totals()
        assert totals["checkpoint"]["seconds"] == pytest.approx(3.0)
        assert totals["train"]["seconds"] == pytest.approx(2.0)
        if energy:
            assert totals["checkpoint"]["joules"] == pytest.approx(6.0)
            assert totals["train"]["joules"] == pytest.approx(4.0)
        biller.carve("checkpoint", 2, 5.0)  # never more than the lap has
        biller.flush(2)
        assert ledger.totals()["checkpoint"]["seconds"] == pytest.approx(3.0)

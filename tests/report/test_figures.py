from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.budget.bill import ACTIVITIES, Bill
from eke.budget.jsonl import Record, effective
from eke.report import figures
from eke.report.accounting import Accounts, add_up
from eke.report.model import _cadence, build
from eke.report.records import load
from eke.report.render import render
from eke.report.view import (
    DecisionRow,
    EvalPoint,
    Lengths,
    Proof,
    RunView,
    StepPoint,
)

Check = Callable[[str], ET.Element]
UNITS = ("seconds", "flops", "tokens", "joules", "money")
known = st.floats(1e-3, 1e18)
spent = st.none() | st.just(0.0) | known


def view(**values: Any) -> RunView:
    """A run of which nothing is known but what is given."""
    empty = dict.fromkeys(
        ("steps", "undone", "evals", "decisions", "restarts", "phases", "limits", "config", "plan"),
        (),
    )
    unknown = dict.fromkeys(
        ("exit_code", "budget_used", "budget_end_x", "lengths", "proof", "began", "ended")
    )
    names = dict.fromkeys(
        ("name", "state", "reason", "model", "corpus", "eval_corpus", "currency"), ""
    )
    accounts: Accounts = values.pop("accounts", Accounts())
    given: dict[str, Any] = {**empty, **unknown, **names, "x_unit": "flops", **values}
    return RunView(accounts=accounts, **given)


def run_steps(count: int, **values: Any) -> tuple[StepPoint, ...]:
    usual: dict[str, Any] = {
        "loss": 2.0, "phase": "stable", "padding": None, "tokens_per_s": None, "tokens_total": None
    }  # fmt: skip
    usual.update(values)
    return tuple(StepPoint(step=i, x=1e12 * i, **usual) for i in range(1, count + 1))


def evaluation(step: int, loss: float | None, se: float | None) -> EvalPoint:
    return EvalPoint(step, 1e12 * step, loss, se, 64, False)


def ledger(*bills: dict[str, Any]) -> Accounts:
    """The accounts of bills, a second apart."""
    return add_up(
        Record(
            i, {"kind": "bill", "t": 100.0 + i, **Bill(**{"who": "w", "step": i, **b}).to_json()}
        )
        for i, b in enumerate(bills)
    )


def both_ways(figure: figures.Figure, check_svg: Check, wide: int = figures.WIDE) -> ET.Element:
    """Check both pictures of a figure; returns the wide one."""
    roots = [check_svg(figure.wide), check_svg(figure.narrow)]
    assert [float(r.attrib["viewBox"].split()[2]) for r in roots] == [wide, figures.NARROW]
    ids = [{e.attrib["id"] for e in root.iter() if "id" in e.attrib} for root in roots]
    assert not ids[0] & ids[1]
    return roots[0]


@given(st.integers(0, 700), st.integers(2, 250))
def test_rows_are_spread_evenly_with_both_ends(count: int, limit: int) -> None:
    rows = [(str(i),) for i in range(count)]
    kept = figures.spread(rows, limit)
    if count <= limit:
        assert kept == tuple(rows)
        return
    at = [int(text) for (text,) in kept]
    assert len(at) <= limit
    assert (at[0], at[-1]) == (0, count - 1)
    gaps = [b - a for a, b in pairwise(at)]
    assert len(set(gaps[:-1])) <= 1
    assert 1 <= gaps[-1] <= gaps[0]
    assert gaps[0] <= -(-count // (limit - 1))  # no thinner than the limit asks for


def test_a_table_says_when_rows_are_left_out() -> None:
    rows = [(str(i), "x") for i in range(201)]
    whole = figures.numbers("Losses", ("step", "loss"), rows[:200], (0, 1))
    assert (whole.caption, len(whole.rows)) == ("Losses", 200)
    cut = figures.numbers("Losses", ("step", "loss"), rows, (0, 1))
    assert cut.caption == "Losses (200 at most of 201)"
    assert len(cut.rows) <= 200
    assert cut.rows[-1] == rows[-1]


def test_the_loss_of_a_whole_run(full_run: Path, check_svg: Check) -> None:
    run = build(load(full_run))
    shown = figures.loss_figure(run)
    both_ways(shown, check_svg)
    held_out, training = shown.tables
    assert held_out.caption == "Held-out evaluations"
    assert len(held_out.rows) == len(run.evals)
    assert held_out.rows[-1][0] == "240"
    assert [row[-1] for row in held_out.rows].count("yes") == 1
    assert held_out.rows[-1][2] == f"{run.evals[-1].loss:.4f}"
    assert training.caption == "Training steps (200 at most of 240)"
    assert training.rows[-1][0] == "240"
    for table in shown.tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}
        assert "FLOPs" in table.columns
    assert shown.caption.startswith("The strong line is a centred mean of up to 13 steps.")
    assert "two standard errors" in shown.caption
    assert "Ticks along the top are decisions to go on." in shown.caption


GO_ON = DecisionRow(3, 3e12, "continue", "", (), ())


@pytest.mark.parametrize(
    ("note", "without", "with_"),
    [
        ("centred mean of up to 3 steps", {"steps": run_steps(39)}, {"steps": run_steps(40)}),
        ("of each of 1,000 equal", {"steps": run_steps(2000)}, {"steps": run_steps(2001)}),
        ("Bars", {"evals": (evaluation(1, 2.0, None), evaluation(2, None, 0.1))},
         {"evals": (evaluation(1, 2.0, 0.1),)}),
        ("Ticks along the top", {"decisions": (replace(GO_ON, action="decay"),)},
         {"decisions": (GO_ON,)}),
        ("had a loss that is not a number", {"steps": run_steps(5)},
         {"steps": (*run_steps(5), replace(run_steps(6)[-1], loss=None))}),
        ("off the axis", {"steps": run_steps(3000)},
         {"steps": (*run_steps(3000)[:-1], replace(run_steps(3000)[-1], loss=99.0))}),
    ],
)  # fmt: skip
def test_a_caption_says_what_is_drawn_and_nothing_else(
    note: str, without: dict[str, Any], with_: dict[str, Any]
) -> None:
    assert note not in figures.loss_figure(view(**without)).caption
    assert note in figures.loss_figure(view(**with_)).caption


def test_marks_without_a_text_are_counted() -> None:
    crowd = tuple(replace(GO_ON, action="decay", reason="w" * 200) for _ in range(9))
    few = figures.loss_figure(view(steps=run_steps(9), decisions=crowd[:1]))
    many = figures.loss_figure(view(steps=run_steps(9), decisions=crowd))
    assert "more marks" not in few.caption
    assert re.search(r"[1-9] more marks are named in the table of decisions", many.caption)


def test_a_run_without_losses_has_no_tables_and_still_a_picture(check_svg: Check) -> None:
    shown = figures.loss_figure(view())
    assert shown.tables == ()
    assert shown.caption == ""
    assert "no losses were recorded" in "".join(both_ways(shown, check_svg).itertext())


def bars(figure: figures.Figure) -> list[str]:
    """What the rows of a waterfall say, the total last."""
    said = ET.fromstring(figure.wide).findtext("{*}desc") or ""
    return re.split("; ", said.rstrip("."))


def test_the_shares_of_a_budget_add_up(full_run: Path, check_svg: Check) -> None:
    shown = figures.budget_figures(build(load(full_run)))
    for figure in shown:
        both_ways(figure, check_svg, wide=510)
    shares = [float(s) for s in re.findall(r"· ([\d.]+) %", " ".join(bars(shown[0])))]
    assert sum(shares) == pytest.approx(100, abs=0.06 * len(shares))
    assert [ET.fromstring(f.wide).findtext("{*}title") for f in shown] == [
        "Seconds by activity", "FLOPs by activity",
    ]  # fmt: skip


def test_a_bill_that_is_not_known_makes_sums_at_least_and_takes_their_shares_away() -> None:
    exact = {"what": "train", "seconds": 30.0}
    other = {"what": "eval", "seconds": 10.0}
    assert bars(figures.budget_figures(view(accounts=ledger(exact, other)))[0]) == [
        "useful training 30.0s · 75.0 %", "evaluation 10.0s · 25.0 %", "all 40.0s",
    ]  # fmt: skip
    in_part = ledger(exact, other, {"what": "eval", "seconds": None})
    assert bars(figures.budget_figures(view(accounts=in_part))[0]) == [
        "useful training 30.0s", "evaluation ≥ 10.0s", "all ≥ 40.0s",
    ]  # fmt: skip
    not_at_all = ledger({"what": "eval", "seconds": None})
    assert bars(figures.budget_figures(view(accounts=not_at_all))[0]) == [
        "evaluation unknown", "all unknown",
    ]  # fmt: skip
    assert bars(figures.budget_figures(view())[0]) == ["nothing was billed", "all no bills"]


@given(
    st.lists(
        st.fixed_dictionaries(
            {"what": st.sampled_from(ACTIVITIES), **dict.fromkeys(UNITS, spent)}
        ),
        max_size=12,
    )
)  # fmt: skip
def test_the_table_says_unknown_at_least_or_how_much(bills: list[dict[str, Any]]) -> None:
    table = figures.budget_table(view(accounts=ledger(*bills), currency="EUR"))
    assert {len(row) for row in table.rows} <= {len(table.columns)}
    assert table.numeric == tuple(range(1, len(table.columns)))
    priced = any(b["money"] is not None for b in bills)
    assert ("cost" in table.columns) == priced
    billed = {b["what"] for b in bills}
    assert len(table.rows) == (len(billed) + 1 if bills else 0)
    if not bills:
        return
    assert table.rows[-1][0] == "all"
    for unit, cell in zip(UNITS, table.rows[-1][1:], strict=False):
        values = [b[unit] for b in bills]
        if all(v is None for v in values):
            assert cell == "unknown"
        else:
            assert cell.startswith("at least ") == any(v is None for v in values)
            assert "unknown" not in cell


def test_an_estimated_bill_is_marked_in_the_table() -> None:
    table = figures.budget_table(
        view(accounts=ledger({"what": "lost", "measured": False}, {"what": "train"}))
    )
    assert [row[0] for row in table.rows] == [
        "useful training", "lost work (in part estimated)", "all",
    ]  # fmt: skip


def test_money_is_in_its_currency() -> None:
    priced = ledger({"what": "train", "money": 2.5})
    assert figures.budget_table(view(accounts=priced, currency="EUR")).rows[0][-1] == "2.5 EUR"


def test_coverage_of_a_run_that_crashed(full_run: Path) -> None:
    run = build(load(full_run))
    said = figures.coverage(run)
    assert run.accounts.coverage == pytest.approx(1, abs=1e-3)
    assert said.startswith("The bills account for 100 % of the wall clock: ")
    assert "in 2 processes." in said
    assert f"Lost work includes {run.accounts.undone_bills} bills" in said
    assert "do not know" not in said


def test_coverage_says_what_is_missing() -> None:
    assert figures.coverage(view()) == "The ledger holds no bills."
    bill = Record(0, {"kind": "bill", **Bill("w", "train", 1, seconds=3.0).to_json()})
    assert "wall clock is unknown" in figures.coverage(view(accounts=add_up([bill])))
    instant = ledger({"what": "train", "seconds": 0.0})
    assert instant.wall_s == 0
    assert "no time that could be measured" in figures.coverage(view(accounts=instant))
    one = figures.coverage(
        view(accounts=ledger({"what": "train", "seconds": 1.0}, {"what": "eval", "seconds": None}))
    )
    assert "100 % of the wall clock" not in one
    assert re.search(r"\b1 bills? do(es)? not know (their|its) seconds", one)
    assert "processes" not in one
    assert "Lost work" not in one


def test_what_was_not_recorded_has_no_figure() -> None:
    assert figures.length_figures(view(steps=run_steps(3))) == ()
    assert figures.length_figures(view(lengths=Lengths((0.0, 0.0), 512.0, 1, 0))) == ()
    assert figures.proof_figure(view()) is None


def test_lengths_padding_and_rate_of_a_whole_run(full_run: Path, check_svg: Check) -> None:
    run = build(load(full_run))
    lengths, padding, rate = figures.length_figures(run)
    for figure in (lengths, padding, rate):
        both_ways(figure, check_svg)
    assert lengths.caption == "11,520 samples of 240 steps."
    (table,) = lengths.tables
    assert len(table.rows) == 24
    assert table.rows[0][0].startswith("0 to ")
    assert table.rows[-1][0].endswith(" to 512")
    assert sum(int(row[1].replace(",", "")) for row in table.rows) == 240 * 48
    values = [s.padding for s in run.steps if s.padding is not None]
    low, high = 100 * min(values), 100 * max(values)
    assert f"Between {low:.1f} % and {high:.1f} % a step" in padding.caption
    assert padding.tables[0].caption.endswith("(200 at most of 240)")
    assert rate.caption.startswith("Between ")
    assert rate.tables[0].columns == ("step", "tokens per second")


def test_ranks_and_steps_of_a_whole_run(full_run: Path, check_svg: Check) -> None:
    run = build(load(full_run))
    shown = figures.batching_figure(run)
    assert shown is not None
    both_ways(shown, check_svg)
    assert "A column holds 3 steps." in shown.caption
    by_rank, by_step = shown.tables
    assert [row[0] for row in by_rank.rows] == ["rank 0", "rank 1"]
    assert (by_step.rows[0][0], by_step.rows[-1][0]) == ("1 to 3", "238 to 240")
    kept, _ = effective(load(full_run).metrics)
    steps = [r.value for r in kept if r.value["kind"] == "step"]
    said = figures.batching_lead(run)
    for name, part in (("padding", [1]), ("dummies included,", [2, 3]), ("(real tokens)", [0])):
        ends = []
        for ranks in ([s["fixed"]["ranks"] for s in steps], [s["ranks"] for s in steps]):
            rows = [row for of_step in ranks for row in of_step]
            ends.append(sum(row[i] for row in rows for i in part) / sum(map(sum, rows)))
        assert f"{name} {100 * ends[0]:.1f} % → {100 * ends[1]:.1f} %" in said
    assert "passes of a rank 1,440 → 960" in said
    assert "fixed batches of at most 4 samples" in said


def test_logs_of_earlier_versions_have_no_picture_of_ranks(full_run: Path) -> None:
    files = load(full_run)

    def earlier(record: Record) -> Record:
        value = {k: v for k, v in record.value.items() if k not in ("ranks", "fixed")}
        return record._replace(value=value)

    run = build(replace(files, metrics=tuple(map(earlier, files.metrics))))
    assert (figures.batching_figure(run), figures.batching_lead(run)) == (None, "")
    assert "batching-h" not in render(run)
    # A run that went on with a later version: its later steps are shown.
    some = tuple(earlier(r) if r.value.get("step", 99) <= 80 else r for r in files.metrics)
    shown = figures.batching_figure(build(replace(files, metrics=some)))
    assert shown is not None
    assert "80 steps without these figures are left out." in shown.caption


def test_steps_with_other_bins_are_counted() -> None:
    (shown,) = figures.length_figures(view(lengths=Lengths((3.0, 1.0), 100.0, 2, 5)))
    assert shown.caption == "4 samples of 2 steps. 5 steps with other bins are left out."
    assert shown.tables[0].rows == (("0 to 50", "3", "75.0 %"), ("50 to 100", "1", "25.0 %"))


def test_only_the_steps_that_know_a_rate_are_in_its_series() -> None:
    some = (*run_steps(2, tokens_per_s=500.0), replace(run_steps(3)[-1], tokens_per_s=None))
    (shown,) = figures.length_figures(view(steps=some))
    assert shown.tables[0].rows == (("1", "500"), ("2", "500"))
    assert shown.caption == "Between 500 and 500 a second."


def test_the_caption_keeps_the_case_of_units() -> None:
    (shown,) = figures.length_figures(view(steps=run_steps(3, tokens_per_s=2.5e7)))
    assert shown.caption == "Between 25 M and 25 M a second."


def test_a_long_series_says_that_it_is_thinned() -> None:
    for count, thinned in ((2000, False), (2001, True)):
        (shown,) = figures.length_figures(view(steps=run_steps(count, padding=0.25)))
        assert ("Drawn as the lowest and highest of 1,000 equal" in shown.caption) == thinned
        assert "25.0 % on average" in shown.caption


def test_the_proof_lists_both_losses_and_their_difference(check_svg: Check) -> None:
    made = Proof((1, 2, 3), (3.0, 2.0, None), (3.0, 2.5, 1.0), False, 2, 1, "Twice the same run.")
    shown = figures.proof_figure(view(proof=made))
    assert shown is not None
    both_ways(shown, check_svg)
    assert shown.caption == "Twice the same run."
    assert shown.tables[0].rows == (
        ("1", "3.0000", "3.0000", "0"),
        ("2", "2.0000", "2.5000", "0.5"),
        ("3", "not a number", "1.0000", "unknown"),
    )


def test_saves_are_shown_where_there_was_one(full_run: Path, check_svg: Check) -> None:
    shown = build(load(full_run))
    typical, worst = figures.save_figures(shown)
    cadence = {"seconds": 42.0, "cost_s": 0.02, "reason": "this loses least"}
    both_ways(typical, check_svg)
    both_ways(worst, check_svg)
    assert "61 ms" in worst.wide
    assert ("write", "write", "80 ms") in {row[1:] for row in worst.tables[0].rows}
    assert "waited 3.9 ms for a typical one and 61 ms for the worst" in figures.saves_lead(shown)
    assert "came to save every 42.0s, at a cost of 20ms a save: this loses" in figures.saves_lead(
        replace(shown, cadence=_cadence([cadence]))
    )
    assert _cadence([]) == _cadence([{"seconds": None}]) == ""
    assert figures.save_figures(view()) == ()
    assert figures.saves_lead(view()) == ""

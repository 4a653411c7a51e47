"""Which saves of a trace are shown, and what of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.budget.trace import read_trace
from eke.report.saves import saves_of


def end(step: int, stall_ms: float, state: str = "committed", pid: int = 0) -> dict[str, Any]:
    args = {"save": step, "began_us": 1e6 * step, "stall_ms": stall_ms, "total_ms": 500.0}
    return {"ph": "i", "pid": pid, "name": state, "ts": 1e6 * step + 5e5, "args": args}


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=20))
def test_the_worst_and_the_middle_of_the_others(stalls: list[float]) -> None:
    saves = saves_of([end(i, stall) for i, stall in enumerate(stalls)])
    assert saves is not None
    assert saves.stalls_ms == tuple(stalls)
    assert saves.worst.stall_ms == max(stalls)
    if len(stalls) == 1:
        assert saves.typical is None
        return
    assert saves.typical is not None
    middle = saves.typical.stall_ms
    others = sorted(stalls)[:-1]
    below, above = sum(s < middle for s in others), sum(s > middle for s in others)
    assert below <= len(others) // 2
    assert above <= len(others) // 2


def test_a_failed_save_is_never_typical() -> None:
    saves = saves_of([end(1, 5.0, "failed"), end(2, 9.0), end(3, 7.0, "failed")])
    assert saves is not None
    assert (saves.worst.step, saves.typical) == (2, None)


def test_a_trace_without_a_save_shows_none() -> None:
    assert saves_of([]) is None
    assert saves_of([end(1, 5.0, pid=3)]) is None  # another rank's


json = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(
        st.sampled_from(["ph", "pid", "ts", "dur", "args", "save", "began_us", "total_ms", "cat"]),
        x, max_size=5,
    ),
    max_leaves=8,
)  # fmt: skip


@given(st.lists(st.dictionaries(
    st.sampled_from(["ph", "pid", "ts", "dur", "args", "name", "cat"]), json
), max_size=4))  # fmt: skip
def test_what_is_no_event_is_passed_over(events: list[dict[str, Any]]) -> None:
    saves = saves_of([*events, end(7, 1.0)])
    assert saves is not None
    assert 7 in (saves.worst.step, getattr(saves.typical, "step", None))


def test_a_save_is_told_as_it_was(full_run: Path) -> None:
    saves = saves_of(read_trace(full_run / "trace.json"))
    assert saves is not None
    assert saves.stalls_ms == (4.1, 3.7, 61.0, 4.4, 3.9)
    worst, typical = saves.worst, saves.typical
    assert typical is not None
    assert (worst.step, worst.stall_ms, typical.stall_ms) == (30, 61.0, 3.9)
    assert sum(bit.ms for bit in worst.stalls) == pytest.approx(61.0)
    assert worst.busy_ms("write") == pytest.approx(4 * 80 + 50)
    assert worst.busy_ms("commit") == pytest.approx(30)
    assert [bit.name for bit in worst.steps] == ["step 30", "step 31", "step 32", "step 33"]
    assert worst.begin_ms < 0 < worst.total_ms < worst.end_ms
    every = [*worst.steps, *worst.phases, *worst.stalls, *sum(worst.lanes.values(), ())]
    assert all(worst.begin_ms <= b.begin_ms < b.end_ms <= worst.end_ms for b in every)

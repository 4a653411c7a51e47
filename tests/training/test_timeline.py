"""The timeline: a thinning choice of saves, slices that nest, and a file that is always whole."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from eke.budget.trace import read_trace
from eke.checkpoint import Checkpointer
from eke.training.timeline import EVERY_SAVE, FIRST_TURNS, Timeline, worth_keeping

Event = dict[str, Any]


def slices(events: list[Event], tid: int) -> list[Event]:
    return [e for e in events if e["ph"] == "X" and e["tid"] == tid]


def nested(events: list[Event]) -> bool:
    """Whether the slices of a lane nest or follow one another, as Perfetto asks."""
    open_: list[float] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        end = event["ts"] + event["dur"]
        while open_ and open_[-1] <= event["ts"] + 1:
            open_.pop()
        if open_ and end > open_[-1] + 1:  # a microsecond
            return False
        open_.append(end)
    return True


@given(st.integers(0, 10**7), st.floats(0, 10))
def test_the_saves_that_are_kept_thin_out(number: int, stall_s: float) -> None:
    assert worth_keeping(number, stall_s, worst_s=stall_s / 2) or stall_s == 0
    kept = worth_keeping(number, stall_s, worst_s=11.0)
    if number < EVERY_SAVE:
        assert kept
    every = next(2**k for k in range(40) if number < EVERY_SAVE * 2**k)
    assert kept == (number % every == 0)


def test_a_hundred_thousand_saves_are_a_few_hundred() -> None:
    kept = sum(worth_keeping(n, 1.0, worst_s=2.0) for n in range(100_000))
    assert EVERY_SAVE <= kept <= EVERY_SAVE * 8


class Loop:
    """A loop with a real optimizer, and a real checkpointer."""

    def __init__(self, root: Path, trace: Path | None = None) -> None:
        self.model = torch.nn.Linear(256, 256)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.saver = Checkpointer(root / "checkpoints", pool="64KiB", durability="none")
        self.saver.attach(model=self.model, optimizer=self.optimizer)
        self.timeline = Timeline(trace or root / "trace.json")
        self.timeline.lap("start")
        self.timeline.outside()
        self.step = 0

    def turns(self, count: int, save_at: int | None = None) -> None:
        for _ in range(count):
            self.timeline.lap("data")
            self.model(torch.ones(1, 256)).sum().backward()
            self.timeline.lap("forward and backward")
            self.optimizer.step()
            self.timeline.lap("optimizer")
            self.step += 1
            if self.step == save_at:
                self.timeline.saving(self.saver.save(self.step))
                self.timeline.lap("save")
            self.timeline.turn(self.step)

    def close(self) -> None:
        self.saver.close()
        self.timeline.close()


def test_steps_and_saves_lie_in_their_lanes(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.turns(3, save_at=2)
    loop.saver.wait()
    json.loads((tmp_path / "trace.json").read_text())  # whole in the middle of the run
    loop.turns(3)
    events = read_trace(tmp_path / "trace.json")
    (ended,) = (e for e in events if e["ph"] == "i")
    assert ended["name"] == "committed"
    assert ended["args"]["save"] == 2
    assert ended["args"]["stall_ms"] > 0
    loop.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    steps = [e["name"] for e in slices(events, 0) if e["name"].startswith("step ")]
    assert steps == [f"step {i}" for i in range(1, 7)]
    for tid, wanted in enumerate(({"save", "data", "optimizer", "forward and backward"},
                                  {"lazy copy"},
                                  {"objects", "write"}, {"commit", "retention"})):  # fmt: skip
        lane = slices(events, tid)
        assert wanted <= {e["name"] for e in lane}
        assert nested(lane)
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {"training", "capture", "write", "commit"}


def test_a_long_run_keeps_its_start_and_what_surrounds_saves(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.turns(FIRST_TURNS + 60, save_at=FIRST_TURNS + 20)
    loop.saver.wait()
    loop.turns(60)
    loop.close()
    events = read_trace(tmp_path / "trace.json")
    steps = [e["args"]["step"] for e in slices(events, 0) if e["name"].startswith("step ")]
    assert steps[:FIRST_TURNS] == list(range(1, FIRST_TURNS + 1))
    around = steps[FIRST_TURNS:]
    assert around[:4] == [FIRST_TURNS + i for i in (18, 19, 20, 21)]
    assert len(around) <= 34
    assert all(a < b for a, b in pairwise(steps))


def test_a_resumed_run_goes_on_in_the_same_picture(tmp_path: Path) -> None:
    for part in ("first", "second"):
        loop = Loop(tmp_path / part)
        loop.timeline.close()
        loop.timeline = Timeline(tmp_path / "trace.json")
        if part == "second":
            loop.step = 2
            loop.timeline.event("resumed", step=2)
        loop.turns(2)
        loop.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    assert sum(e["name"] == "clock" for e in events) == 1
    steps = [e for e in slices(events, 0) if e["name"].startswith("step ")]
    assert [e["args"]["step"] for e in steps] == [1, 2, 3, 4]
    starts = [e["ts"] for e in steps]
    assert starts == sorted(starts)
    (resumed,) = (e for e in events if e["ph"] == "i")
    assert steps[1]["ts"] + steps[1]["dur"] <= resumed["ts"] <= steps[2]["ts"] + steps[2]["dur"]

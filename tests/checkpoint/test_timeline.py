"""The marks of a save: against brute force on drawn marks, and on a real save."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eke.checkpoint import Checkpointer
from eke.checkpoint.timeline import LANES, MOST_SPANS, Marks, Span, include

drawn = st.lists(
    st.tuples(
        st.sampled_from(["eager copy", "lazy copy"]), st.integers(0, 200), st.integers(0, 30)
    ),
    max_size=80,
)


@given(drawn, st.integers(1, 12))
def test_spans_ascend_never_overlap_and_are_few(
    marks: list[tuple[str, int, int]], most: int
) -> None:
    spans: list[Span] = []
    for name, begin, length in marks:
        include(spans, Span("capture", name, begin, begin + length), most)
        assert len(spans) <= most
    assert all(a.end_s <= b.begin_s for a, b in pairwise(spans))
    if marks:
        first, last = min(b for _, b, _ in marks), max(b + n for _, b, n in marks)
        assert all(first <= s.begin_s <= s.end_s <= last for s in spans)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=60))
def test_one_worker_after_another_is_told_as_it_was(steps: list[tuple[int, int]]) -> None:
    """Marks that follow one another with gaps, and fit, come back unchanged."""
    spans: list[Span] = []
    given_spans, now = [], 0.0
    for gap, length in steps:
        span = Span("write", "write", now + gap, now + gap + length)
        include(spans, span, most=60)
        given_spans.append(span)
        now = span.end_s
    assert spans == given_spans


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 40)), max_size=60))
def test_one_name_covers_all_that_was_marked(marks: list[tuple[int, int]]) -> None:
    """Whoever copied, however they overlapped: what was marked is inside a span."""
    spans: list[Span] = []
    for begin, length in sorted(marks, key=sum):  # a mark is added when it ends
        include(spans, Span("capture", "lazy copy", begin, begin + length))
    covered = {t for s in spans for t in range(int(s.begin_s), int(s.end_s))}
    assert {t for b, n in marks for t in range(b, b + n)} <= covered


def test_threads_mark_at_once() -> None:
    marks = Marks()

    def work() -> None:
        for _ in range(500):
            marks.captured(time.perf_counter(), compare=False)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    spans = marks.spans
    assert 0 < len(spans) <= MOST_SPANS
    assert all(a.end_s <= b.begin_s for a, b in pairwise(spans))


def test_a_real_save_says_what_it_did(tmp_path: Path) -> None:
    """Thousands of blocks; the spans stay few, and tell the same stall as the ticket."""
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    with Checkpointer(tmp_path, pool="64KiB", durability="none") as saver:
        saver.attach(model=model, optimizer=optimizer, rng=True)
        ticket = saver.save(1)
        optimizer.step()  # waits for what it changes
        ticket.wait("committed", timeout=60)
    names = {lane: {s.name for s in ticket.spans if s.lane == lane} for lane in ("write", "commit")}
    assert names["write"] == {"objects", "write", "fsync"}
    assert names["commit"] == {"other ranks", "commit", "retention"}
    training = [s for s in ticket.spans if s.lane == "training"]
    assert training[0].name == "save"
    waited = sum(s.end_s - s.begin_s for s in training)
    assert waited == pytest.approx(ticket.stall_s, abs=2e-3)
    busy = ticket.marks.busy_s
    assert busy["capture", "eager copy"] > 0
    assert busy["capture", "lazy copy"] > 0
    assert busy["write", "write"] > 0
    assert len(ticket.spans) <= 4 * MOST_SPANS
    began = {lane: min(s.begin_s for s in ticket.spans if s.lane == lane) for lane in LANES}
    assert ticket.marks.began_s <= min(began.values()) + 1e-3
    assert began["commit"] == max(began.values())

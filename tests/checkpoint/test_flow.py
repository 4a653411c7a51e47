"""The state machine against a fake asynchronous device, which delays and reorders copies.

The fake device reads the live bytes only when a copy completes: the worst that real hardware may
do. Training changes a live tensor as soon as the machine says that it is captured.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eke.checkpoint import flow as module
from eke.checkpoint.flow import Check, Flow, Link, More, Spot

LANES = st.lists(st.integers(0, 5), min_size=1, max_size=4)


class World:
    """One save: live blocks, a pool, a device with copies in flight, a writer, a trainer."""

    def __init__(self, draw, lanes, slots, check, same, waits=True, known=None, device=False):
        self.draw, self.lanes, self.slots, self.waits = draw, lanes, slots, waits
        self.device, self.issuing, self.queued = device, [], set()
        known = len(lanes) if known is None else known
        self.flow = Flow(lanes[:known], [i for i in check if i < known], more=known < len(lanes))
        self.rest = (lanes[known:], [i for i in check if i >= known])
        self.finding = False
        self.same = same
        self.live = {(i, b): f"old{i}.{b}" for i, n in enumerate(lanes) for b in range(n)}
        self.wanted = dict(self.live)
        self.copying, self.held, self.checking, self.writing = [], {}, [], []
        self.files = {i: [] for i in range(len(lanes))}
        self.linked = set()
        self.barriers = [(i, n) for i, n in enumerate(lanes) if n]
        self.used = 0

    def moves(self):
        """Everything that may happen next."""
        moves = []
        due = self.flow.next_copy()
        if isinstance(due, (Check, More)) or (due is not None and self.used < self.slots):
            moves.append(("copy", due))
        moves += [("issue", i) for i in range(len(self.issuing))]
        moves += [("complete", i) for i in range(len(self.copying))]
        moves += [("checked", i) for i in range(len(self.checking))]
        moves += [("found", None)] * self.finding
        out = self.flow.next_write()
        if out is not None and not self.writing:
            moves.append(("write", out))
        if self.writing:
            moves.append(("written", None))
        if self.flow.grown:  # until then a barrier waits for the lanes to be known
            moves += [("update", i) for i in range(len(self.barriers))]
        return moves

    def step(self):
        kind, what = self.draw(st.sampled_from(self.moves()))
        if kind == "copy":
            if isinstance(what, More):
                self.flow.start_more()
                self.finding = True
            elif isinstance(what, Check):
                self.flow.start_check(what.lane)
                self.checking.append(what.lane)
            else:
                self.flow.start_copy(what)
                (self.issuing if self.device else self.copying).append(what)
                self.used += 1
        elif kind == "issue":
            self.copying.append(self.issuing.pop(what))
            self.flow.issue(self.copying[-1])
        elif kind == "complete":
            spot = self.copying.pop(what)
            self.held[spot] = self.live[spot]
            if spot in self.queued:  # training's stream has waited for the copy
                self.live[spot] = "new"
            self.flow.copied(spot)
        elif kind == "found":
            self.finding = False
            self.flow.grow(*self.rest)
        elif kind == "checked":
            lane = self.checking.pop(what)
            self.flow.checked(lane, same=lane in self.same)
        elif kind == "write":
            self.flow.start_write(what)
            self.writing.append(what)
        elif kind == "written":
            done = self.writing.pop()
            if isinstance(done, Link):
                self.linked.add(done.lane)
            else:
                self.files[done.lane].append(self.held.pop(done))
                self.used -= 1
            self.flow.written(done)
        else:
            lane, blocks = self.barriers[what]
            self.flow.want(lane, blocks)
            if self.device:
                self.flow.give_up_check(lane)
            safe = self.flow.issued if self.device else self.flow.captured
            if not self.waits or safe(lane, blocks):
                self.barriers.pop(what)
                for block in range(blocks):
                    if self.device and (lane, block) in self.copying:
                        self.queued.add((lane, block))
                    else:
                        self.live[lane, block] = "new"

    def run(self):
        for _ in range(600):
            if self.flow.all_written:
                break
            moves = [move for move in self.moves() if move[0] != "update"]
            assert moves, "nothing can happen any more: a deadlock"
            self.step()
        assert self.flow.all_written or self.barriers, "it does not end"
        while not self.flow.all_written:
            moves = [move for move in self.moves() if move[0] != "update"]
            assert moves, "nothing can happen any more: a deadlock"
            self.draw_fixed(moves[0])
        return self

    def draw_fixed(self, move):
        before, self.draw = self.draw, lambda _: move
        self.step()
        self.draw = before


@settings(max_examples=300, deadline=None)
@given(st.data(), LANES, st.integers(1, 6), st.booleans())
def test_every_order_of_events_writes_the_state_of_the_save(data, lanes, slots, device):
    indexes = st.sets(st.integers(0, len(lanes) - 1))
    check = data.draw(indexes)
    same = data.draw(indexes) & check
    known = data.draw(st.integers(0, len(lanes)))
    world = World(data.draw, lanes, slots, check, same, known=known, device=device).run()
    assert world.flow.all_captured
    assert world.flow.all_started
    assert world.used == 0
    linked = {lane for lane in same if lanes[lane]}
    assert world.linked == linked or not any(lanes) or (device and world.linked < linked)
    for lane, blocks in enumerate(lanes):
        expected = [] if lane in world.linked else [f"old{lane}.{b}" for b in range(blocks)]
        assert world.files[lane] == expected


def test_without_waiting_the_state_is_torn():
    """The same machine with a trainer that does not wait: the test above would notice."""

    class Script:
        def __init__(self):
            self.order = iter(["copy", "update", "complete", "write", "written"])

        def __call__(self, strategy):
            kind = next(self.order)
            return next(move for move in world.moves() if move[0] == kind)

    world = World(Script(), [1], 1, set(), set(), waits=False)
    for _ in range(5):
        world.step()
    assert world.files == {0: ["new"]}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.data())
def test_what_is_wanted_comes_first(lanes, data):
    lane = data.draw(st.integers(0, len(lanes) - 1))
    blocks = data.draw(st.integers(1, lanes[lane]))
    flow = Flow(lanes)
    flow.want(lane, blocks)
    for block in range(blocks):
        assert flow.next_copy() == Spot(lane, block)
        assert not flow.captured(lane, blocks)
        flow.start_copy(Spot(lane, block))
    for block in reversed(range(blocks)):
        assert not flow.captured(lane, blocks)
        flow.copied(Spot(lane, block))
    assert flow.captured(lane, blocks)


def test_one_file_is_finished_before_the_next_is_begun():
    flow = Flow([2, 2])
    for spot in [Spot(0, 0), Spot(1, 0), Spot(1, 1), Spot(0, 1)]:
        if flow.next_copy() != spot:
            flow.want(spot.lane, spot.block + 1)
        flow.start_copy(spot)
        flow.copied(spot)
    order = []
    while (what := flow.next_write()) is not None:
        flow.start_write(what)
        flow.written(what)
        order.append(what)
    assert order == [Spot(0, 0), Spot(0, 1), Spot(1, 0), Spot(1, 1)]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda flow: flow.copied(Spot(0, 0)),
        lambda flow: flow.start_copy(Spot(0, 1)),
        lambda flow: flow.start_copy(Spot(1, 0)),
        lambda flow: flow.start_write(Spot(0, 0)),
        lambda flow: flow.written(Spot(0, 0)),
        lambda flow: flow.checked(0, same=True),
        lambda flow: flow.start_more(),
        lambda flow: flow.grow([1]),
    ],
)
def test_events_that_cannot_be(wrong):
    flow = Flow([2, 2], check=[1])
    with pytest.raises(ValueError):
        wrong(flow)


def test_lanes_that_are_not_known_yet():
    flow = Flow([1], more=True)
    flow.want(0, 1)
    assert flow.next_copy() == Spot(0, 0)  # what is waited for comes first
    flow.start_copy(Spot(0, 0))
    flow.copied(Spot(0, 0))
    assert flow.captured(0, 1)
    assert flow.next_copy() == More(1)
    flow.start_more()
    assert flow.next_copy() is None
    flow.start_write(Spot(0, 0))
    flow.written(Spot(0, 0))
    assert not any((flow.grown, flow.all_started, flow.all_captured, flow.all_written))
    flow.grow([1], check=[1])
    assert flow.next_copy() == Check(1)
    assert flow.grown


def test_a_look_that_is_given_up_is_waited_for_at_the_end():
    flow = Flow([1, 1], check=[0, 1])
    flow.start_check(0)
    for lane in range(2):
        flow.want(lane, 1)
        flow.give_up_check(lane)
        assert flow.idle(lane)
        spot = Spot(lane, 0)
        assert flow.next_copy() == spot
        flow.start_copy(spot)
        assert not flow.issued(lane, 1)
        flow.issue(spot)
        assert flow.issued(lane, 1)
        assert not flow.captured(lane, 1)
        with pytest.raises(ValueError, match="is issued"):
            flow.issue(spot)
        flow.copied(spot)
        flow.start_write(spot)
        flow.written(spot)
    assert not flow.all_written  # somebody still reads the newest checkpoint for it
    flow.checked(0, same=True)
    assert flow.all_written
    assert flow.captured(0, 1)
    with pytest.raises(ValueError, match="not being checked"):
        flow.checked(0, same=True)


def test_to_give_up_a_check_can_be_cut_short_and_done_again(interrupt):
    for struck in range(4):
        for again in (False, True):
            flow = Flow([1], check=[0])
            flow.start_check(0)
            with interrupt(struck, module):
                flow.give_up_check(0)
            if again:
                flow.give_up_check(0)
            flow.checked(0, same=False)
            assert flow.next_copy() == Spot(0, 0)
            flow.start_copy(Spot(0, 0))
            flow.copied(Spot(0, 0))
            flow.start_write(Spot(0, 0))
            flow.written(Spot(0, 0))
            assert flow.all_written

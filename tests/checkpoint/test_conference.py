"""Waiting for another rank ends: with its value, with its end, or after its silence."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from eke.checkpoint.conference import Conference
from eke.checkpoint.owner import me, start_of
from eke.distributed import World
from eke.errors import EkeError


class Memory:
    """The store's three methods on a dict; values are JSON, as they are there."""

    def __init__(self):
        self.values = {}

    def put(self, key, value):
        self.values[key] = json.dumps(value)

    def get(self, key):
        return json.loads(self.values[key]) if key in self.values else None

    def drop(self, key):
        self.values.pop(key, None)


@pytest.fixture
def store():
    return Memory()


def ranks(store, size=2, patience_s=30.0, moved=lambda: None, token="save"):
    return [Conference(store, token, World(r, size), patience_s, moved) for r in range(size)]


def test_a_value_is_its_ranks_and_its_saves(store):
    first, second = ranks(store)
    (other, _) = ranks(store, token="another")
    second.tell("report", {"files": [1]})
    assert first.look("report", 1) == {"files": [1]} == first.hear(["report"], 1)
    assert first.look("report", 0) is None
    assert first.look("done", 1) is None
    assert other.look("report", 1) is None


def test_the_first_of_several_that_is_there(store):
    first, second = ranks(store)
    first.tell("done", {"error": "no"})
    assert second.hear(["begun", "done"], 0) == {"error": "no"}
    first.tell("begun", {})  # an empty value is a value
    assert second.hear(["begun", "done"], 0) == {}


def test_a_value_that_comes_later_is_waited_for(store):
    looks = []

    def moved():
        looks.append(None)
        if len(looks) == 3:
            second.tell("report", 5)

    first, second = ranks(store, moved=moved)
    assert first.hear(["report"], 1) == 5
    assert len(looks) == 3


def test_silence_ends_the_wait(store):
    first, _ = ranks(store, patience_s=0.05)
    with pytest.raises(EkeError, match=r"rank 1 has shown no progress for 0\.05 s"):
        first.hear(["report"], 1)


def test_beats_lengthen_the_wait_but_not_one_of_fixed_length(store):
    beats = []

    def moved():
        beats.append(len(beats))
        store.put("save/beat/1", len(beats))
        if len(beats) == 12:
            second.tell("report", "late")

    first, second = ranks(store, patience_s=0.4, moved=moved)
    assert first.hear(["report"], 1) == "late"  # the naps alone add up to more than 0.4 s
    assert len(beats) == 12
    with pytest.raises(EkeError, match=r"no progress for 0\.02 s"):
        first.hear(["bye"], 1, at_most_s=0.02)


def test_beats_are_rare(store):
    _, second = ranks(store)
    for _ in range(1000):
        second.beat()
    assert 1 <= store.get("save/beat/1") < 1000


@pytest.mark.parametrize("spoke", [False, True])
def test_a_process_that_ended_is_not_waited_for(store, spoke):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    first, _ = ranks(store, patience_s=1000.0)
    own = me()
    store.put("save/who/1", f"{own.host}.{own.boot}.{child.pid}.{start_of(child.pid)}.0")
    threading.Timer(0.1, child.communicate, [b"\n"]).start()
    if spoke:
        child.wait(30)
        store.put("save/report/1", "said")
        assert first.hear(["report"], 1) == "said"
    else:
        with pytest.raises(EkeError, match="rank 1 has ended before"):
            first.hear(["report"], 1)


def test_of_another_machine_no_process_is_known_to_have_ended(store):
    first, _ = ranks(store, patience_s=0.05)
    store.put("save/who/1", f"elsewhere.boot.{os.getpid()}.1.0")
    with pytest.raises(EkeError, match="no progress"):
        first.hear(["report"], 1)


def test_nothing_is_left_of_a_save_that_is_forgotten(store):
    everyone = ranks(store, size=3)
    store.put("other/who/0", 1)
    for one in everyone:
        one.beat()
        for what in ("begun", "report", "done", "bye"):
            one.tell(what, {})
    everyone[0].forget()
    assert list(store.values) == ["other/who/0"]


def test_the_time_that_this_process_is_stopped_is_not_the_other_ranks_silence(store, monkeypatch):
    first, second = ranks(store, patience_s=0.3)
    naps, sleep = [], time.sleep

    def nap(seconds):
        naps.append(seconds)
        sleep(0.5 if len(naps) == 1 else seconds)  # stopped in the first
        if len(naps) == 4:
            second.tell("report", "there")

    monkeypatch.setattr(time, "sleep", nap)
    assert first.hear(["report"], 1) == "there"

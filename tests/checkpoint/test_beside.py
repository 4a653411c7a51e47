"""Both pieces of work are over when `run` is, whatever they do."""

import os
import sys
import threading
import time

import pytest
import torch

from eke.checkpoint import Checkpointer
from eke.checkpoint.beside import Beside


@pytest.fixture
def beside():
    beside = Beside()
    yield beside
    beside.end()


def test_both_are_done_at_the_same_time_in_two_threads(beside):
    meet, threads = threading.Barrier(2), []

    def work():
        meet.wait(30)
        threads.append(threading.get_ident())

    for _ in range(50):
        beside.run(work, work)
    assert len(threads) == 100
    assert len(set(threads)) == 2


def test_the_helper_has_the_lowest_priority_and_ends(beside):
    found = []

    def work():
        found.append(threading.current_thread())
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    beside.run(work, lambda: None)
    helper, priority = found
    assert priority == 19
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # the helper gets on only while this thread waits for it
    try:
        beside.end()
        assert not helper.is_alive()
    finally:
        sys.setswitchinterval(interval)
    beside.end()


@pytest.mark.parametrize("where", ["aside", "here"])
def test_an_error_comes_out_when_the_other_is_done(beside, where):
    done = []

    def fails():
        raise OSError(5, "no")

    def slow():
        time.sleep(0.05)
        done.append(1)

    for _ in range(3):
        with pytest.raises(OSError, match="no"):
            beside.run(*((fails, slow) if where == "aside" else (slow, fails)))
    assert done == [1, 1, 1]
    beside.run(slow, slow)
    assert len(done) == 5


def test_where_no_thread_can_be_started_all_is_done_here(beside, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    threads = []
    for _ in range(2):
        beside.run(*[lambda: threads.append(threading.get_ident())] * 2)
    assert threads == [threading.get_ident()] * 4


def test_which_threads_a_save_has(tmp_path, faulty):
    """The engine's two, and one for a file of large blocks that ends with it."""

    def ours():
        return sorted(one.name for one in threading.enumerate() if one.name.startswith("eke-"))

    while_writing, write = [], faulty.write

    def look(fd, data):
        while_writing.append(ours())
        return write(fd, data)

    faulty.write = look
    with Checkpointer(tmp_path, pool="32MiB", storage=faulty) as saver:
        saver.attach(extra={"large": torch.nn.Linear(2000, 2000)})
        for step in (1, 2):
            with torch.no_grad():
                saver._providers["large"].module.weight.add_(1)
            saver.save(step).wait()
            assert ours() == ["eke-copier", "eke-writer"]
    assert ["eke-copier", "eke-hasher", "eke-writer"] in while_writing
    assert max(map(len, while_writing)) == 3
    assert ours() == []

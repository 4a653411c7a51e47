"""What the engine's threads share: patience that ends, and failures that are told once."""

import errno
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eke.checkpoint import Checkpointer, SaveError, Storage
from eke.checkpoint.desk import Desk, Running
from eke.checkpoint.flow import Flow
from eke.checkpoint.ticket import Ticket
from eke.errors import EkeError, InputError


def a_save(step=5):
    return SimpleNamespace(
        ticket=Ticket(step, Path("step")),
        flow=Flow([1]),
        doing="writing a file",
        failure=lambda error: SaveError(str(error)),
    )


def test_what_makes_no_progress_fails_and_is_told_once():
    desk, task = Desk(0.01), a_save()
    desk.tasks.append(task)
    with desk.turn:
        while not task.ticket.final:
            desk.pause(0.01)
        assert "no progress for 0.01 s; it is capturing, writing a file" in str(task.ticket.error)
        assert list(desk.errors) == [task.ticket]
        desk.fail(task, OSError("later"))
        assert "no progress" in str(task.ticket.error)
        desk.forget(task.ticket)
        assert not desk.errors


def test_what_was_heard_before_it_failed_is_not_kept():
    desk, task = Desk(10.0), a_save()
    with desk.turn:
        desk.forget(task.ticket)
        desk.fail(task, OSError("late"))
        assert not desk.errors
        assert task.ticket.state == "failed"


def test_a_save_that_has_failed_goes_no_further():
    desk, task = Desk(10.0), a_save()
    with desk.turn:
        desk.fail(task, OSError("gone"))
    for call in (Running(desk, task).persisted, Running(desk, task).decide):
        with pytest.raises(SaveError, match="gone"):
            call()
    assert task.ticket.state == "failed"
    assert desk.undecided is None


def test_whoever_waits_for_persisted_is_woken():
    desk, task = Desk(10.0), a_save()
    task.ticket.reach("captured")
    woken = threading.Event()

    def wait():
        with desk.turn:
            ready.set()
            desk.turn.wait(30)
        woken.set()

    ready = threading.Event()
    threading.Thread(target=wait).start()
    assert ready.wait(30)
    Running(desk, task).persisted()
    assert woken.wait(10)
    assert task.ticket.state == "persisted"


class Hangs(Storage):
    """A disk on which one call of a save's commit waits until the gate is open, then may fail."""

    def __init__(self, call):
        self.call, self.fails = call, False
        self.there, self.open_ = threading.Event(), threading.Event()
        self.open_.set()

    def _wait(self, call, path):
        if call == self.call and path.name.startswith(".tmp-step") and not self.open_.is_set():
            self.there.set()
            assert self.open_.wait(60)
            if self.fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    def answer(self, ck):
        """Open the gate, and let the writer find it open."""
        self.open_.set()
        deadline = time.monotonic() + 30
        while ck._engine._tasks and time.monotonic() < deadline:
            time.sleep(0.001)

    def sync_dir(self, path):
        self._wait("sync_dir", path)
        super().sync_dir(path)

    def rename(self, source, target):
        self._wait("rename", source)
        super().rename(source, target)


@pytest.fixture
def stuck(tmp_path):
    """A checkpointer with step 1 whose save of step 2 hangs in a call of its commit."""
    made = []

    def make(call):
        disk = Hangs(call)
        ck = Checkpointer(tmp_path, storage=disk, patience=0.5)
        made.append((ck, disk))
        ck.attach(model=torch.nn.Linear(3, 3))
        ck.save(1).wait()
        disk.open_.clear()
        ticket = ck.save(2)
        assert disk.there.wait(30)
        return ck, disk, ticket

    yield make
    for ck, disk in made:
        disk.open_.set()
        ck.close()


def test_a_save_that_was_given_up_before_its_rename_never_becomes_a_checkpoint(stuck):
    ck, disk, ticket = stuck("sync_dir")
    with pytest.raises(SaveError, match="no progress"):
        ticket.wait()
    assert ticket.state == "failed"
    assert ck.restore().step == 1
    with pytest.raises(EkeError, match="saving step 2 is stuck in the disk"):
        ck.discard_after(0)
    disk.answer(ck)
    ck.wait()
    assert ticket.state == "failed"
    assert ck.steps() == [1]
    assert ck.discard_after(0) == [1]
    assert ck.save(2).wait().state == "committed"


def test_a_save_that_hangs_in_its_rename_is_in_doubt_until_the_disk_answers(stuck):
    ck, disk, ticket = stuck("rename")
    for _ in range(2):
        with pytest.raises(SaveError, match="it may or may not become a checkpoint"):
            ticket.wait()
    assert ticket.state == "persisted"
    assert ck.restore(1).step == 1
    for doubtful in (ck.restore, lambda: ck.restore(2), lambda: ck.discard_after(1)):
        with pytest.raises(EkeError, match="stuck in the disk; it is persisted, and may yet"):
            doubtful()
    with pytest.raises(InputError, match="step 2 is being saved already"):
        ck.save(2)
    disk.answer(ck)
    assert ticket.wait().state == "committed"
    assert ticket.error is None
    assert ck.restore().step == 2
    assert ck.discard_after(1) == [2]


def test_a_save_in_doubt_may_fail_after_all(stuck):
    ck, disk, ticket = stuck("rename")
    with pytest.raises(SaveError, match="may or may not"):
        ck.restore()  # which is where it is heard
    disk.fails = True
    disk.answer(ck)
    ck.wait()
    assert ticket.state == "failed"
    with pytest.raises(SaveError, match="Input/output error"):
        ticket.wait()
    assert ck.steps() == [1]


def test_a_doubt_that_nobody_heard_of_is_not_told_once_it_is_over(stuck):
    ck, disk, ticket = stuck("rename")
    ck._engine.drain()
    assert ck._engine.unheard() is ticket
    disk.answer(ck)
    ck.wait()
    assert ticket.state == "committed"

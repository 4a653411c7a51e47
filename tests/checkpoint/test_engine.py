"""The engine on the checkpointer: bounded, and heard when something fails."""

import contextlib
import errno
import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from eke.checkpoint import Checkpointer, Keep, SaveError, Storage, engine, verify
from eke.errors import EkeError, InputError


class Gate(Storage):
    """A disk on which writes wait until the gate is open."""

    def __init__(self):
        self.open_ = threading.Event()
        self.at_write = threading.Event()

    def write(self, fd, data):
        self.at_write.set()
        self.open_.wait(60)
        return super().write(fd, data)


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open_.set()


def make(root, **more):
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ck = Checkpointer(root, **more)
    ck.attach(model=model, optimizer=optimizer)
    return ck, model, optimizer


def step(model, optimizer):
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()


def test_the_states_of_a_ticket(tmp_path, gate):
    ck, model, optimizer = make(tmp_path, storage=gate)
    ticket = ck.save(1)
    ticket.wait("captured", timeout=30)
    assert ticket.state == "captured"
    step(model, optimizer)  # all of it is in the pool: nothing to wait for
    with pytest.raises(EkeError, match=r"step 1 was not committed within 0\.05 s; it is captured"):
        ticket.wait("committed", timeout=0.05)
    assert ck.steps() == []
    gate.open_.set()
    assert ticket.wait().state == "committed"
    assert list(ticket.seconds) == ["captured", "persisted", "committed"]
    assert sorted(ticket.seconds.values()) == list(ticket.seconds.values())
    assert ticket.wait("captured") is ticket
    with pytest.raises(InputError, match="cannot be waited for"):
        ticket.wait("failed")
    ck.close()


def test_a_full_pool_holds_up_training_only_at_the_barrier(tmp_path, gate):
    ck, model, optimizer = make(tmp_path, storage=gate, pool="8KiB")
    ticket = ck.save(1)
    model(torch.randn(2, 64)).sum().backward()
    assert ticket.state == "capturing"
    threading.Timer(0.2, gate.open_.set).start()
    before = ticket.stall_s
    optimizer.step()
    assert ticket.stall_s > before + 0.01
    assert ticket.state != "capturing"
    assert ticket.bill.seconds == ticket.stall_s == ck.stall_s
    ck.close()


def test_a_third_save_waits_for_the_first(tmp_path, gate):
    ck, _, _ = make(tmp_path, storage=gate)
    first, second = ck.save(1), ck.save(2)
    assert not first.final
    threading.Timer(0.2, gate.open_.set).start()
    third = ck.save(3)
    assert first.state == "committed"
    third.wait()
    assert second.state == "committed"
    with pytest.raises(InputError, match="step 3 is committed already"):
        ck.save(3)
    ck.close()


def test_a_step_that_is_being_saved_is_not_saved_again(tmp_path, gate):
    ck, _, _ = make(tmp_path, storage=gate)
    ck.save(1)
    with pytest.raises(InputError, match="step 1 is being saved already"):
        ck.save(1)
    gate.open_.set()
    ck.close()


HEARD = {
    "save": lambda ck, run: ck.save(2),
    "barrier": lambda ck, run: ck.barrier(),
    "step": lambda ck, run: run.optimizer.step(),
    "restore": lambda ck, run: ck.restore(),
    "wait": lambda ck, run: ck.wait(),
    "close": lambda ck, run: ck.close(),
    "discard_after": lambda ck, run: ck.discard_after(0),
}


@pytest.mark.parametrize("call", HEARD)
def test_a_failure_is_heard_once_at_the_next_call(tmp_path, new_run, faulty, call):
    run = new_run()
    run.step()
    ck = run.attach_to(Checkpointer(tmp_path, storage=faulty))
    faulty.fail("sync", code=errno.EIO)
    ticket = ck.save(1)
    while not ticket.final:
        time.sleep(0.001)
    faulty.heal()
    with pytest.raises(SaveError, match="saving step 1 failed"):
        HEARD[call](ck, run)
    if call != "close":
        ck.barrier()
        assert ck.save(3).wait().state == "committed"
    ck.close()
    with pytest.raises(SaveError):
        ticket.wait()


def test_nobody_waits_for_old_checkpoints_to_be_deleted(tmp_path, new_run):
    class Slow(Storage):
        held = threading.Event()

        def remove_tree(self, path):
            assert self.held.wait(30)
            super().remove_tree(path)

    storage, run = Slow(), new_run()
    model = torch.nn.Linear(3, 3).requires_grad_(False)
    ck = run.attach_to(Checkpointer(tmp_path, storage=storage, keep=Keep(last=1)))
    ck.attach(extra={"frozen": model})
    ck.save(1).wait()
    first = ck.save(2).wait(timeout=30)
    assert first.state == "committed"
    inodes = {file.name: file.stat().st_ino for file in first.path.glob("*.safetensors")}
    second = ck.save(3).wait("captured", timeout=30)
    assert not any(span.name == "retention" for span in first.spans)
    assert second.state == "captured", "it is written when the deletion is done"
    storage.held.set()
    ck.wait()
    assert ck.steps() == [3]
    assert any(span.name == "retention" for span in first.spans)
    linked = [
        f.name for f in second.path.glob("*.safetensors") if f.stat().st_ino == inodes[f.name]
    ]
    assert linked, "what has not changed is found to be so also while the older one goes"
    ck.close()


def test_a_failure_that_was_waited_for_is_not_heard_again(tmp_path, new_run, faulty):
    faulty.fail("write")
    with new_run().attach_to(Checkpointer(tmp_path, storage=faulty)) as ck:
        with pytest.raises(SaveError):
            ck.save(1).wait()
        faulty.heal()


def test_warnings_instead_of_errors(tmp_path, new_run, faulty, caplog):
    faulty.fail("write")
    run = new_run()
    with run.attach_to(Checkpointer(tmp_path, storage=faulty, on_error="warn")) as ck:
        ticket = ck.save(1)
        while not ticket.final:
            time.sleep(0.001)
        with caplog.at_level(logging.WARNING, "eke.checkpoint"):
            run.step()
            ck.barrier()
        assert "saving step 1 failed" in caplog.text
        faulty.heal()
        ck.save(2).wait()
        with pytest.raises(SaveError):
            ticket.wait()


def test_an_error_on_its_way_is_not_hidden(tmp_path, new_run, faulty, caplog):
    faulty.fail("write")
    ck = new_run().attach_to(Checkpointer(tmp_path, storage=faulty))

    def train():
        with ck:
            ck.save(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert "saving step 1 failed" in caplog.text


def test_a_disk_that_hangs_is_given_up_within_bounds(tmp_path, gate):
    ck, model, optimizer = make(tmp_path, storage=gate, pool="8KiB", patience=1.0)
    ticket = ck.save(1)
    gate.at_write.wait(10)
    step(model, optimizer)  # waits for the pool, then goes on: the save has failed
    assert ticket.state == "failed"
    with pytest.raises(SaveError, match=r"step 1 has made no progress for 1 s"):
        ck.save(2)
    second = ck.save(2)
    with pytest.raises(SaveError, match="no progress"):
        ck.save(3)
    assert second.state == "failed"
    gate.open_.set()  # the disk is back, and so is the engine
    deadline = time.monotonic() + 30
    while ck._engine._tasks and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(SaveError):
        second.wait()
    assert ck.save(4).wait().state == "committed"
    assert ck.steps() == [4]
    ck.close()


def test_a_save_that_finds_no_room_tells_of_a_failure_once(tmp_path, gate):
    ck, _, _ = make(tmp_path, storage=gate, patience=0.5)
    ck.save(1)
    ck.save(2)
    with pytest.raises(SaveError, match="step 1 has made no progress"):
        ck.save(3)
    with pytest.raises(SaveError, match="step 2 has made no progress"):
        ck.barrier()
    ck.barrier()
    gate.open_.set()
    ck.close()


def test_a_close_that_is_interrupted_can_be_called_again(tmp_path, gate):
    ck, _, _ = make(tmp_path, storage=gate)
    ticket = ck.save(1)
    assert gate.at_write.wait(30)
    threads = list(ck._engine._threads)
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        ck.close()
    assert not ticket.final
    with pytest.raises(InputError, match="is closed"):
        ck.save(2)
    gate.open_.set()
    ck.close()
    assert ticket.state == "committed"
    assert not any(thread.is_alive() for thread in threads)


def test_an_engine_whose_first_save_is_interrupted_has_one_of_each_thread(tmp_path, interrupt):
    for struck in range(0, 80, 2):
        with make(tmp_path / str(struck))[0] as ck:
            with interrupt(struck, engine):
                ck.save(1)
            with contextlib.suppress(SaveError):
                ck.wait()
            ck.save(2).wait()
            assert sorted(t.name for t in ck._engine._threads) == ["eke-copier", "eke-writer"]


def test_the_time_that_a_process_is_stopped_does_not_count(tmp_path, gate):
    ck, _, _ = make(tmp_path, storage=gate, patience=2.0)
    ticket = ck.save(1)
    assert gate.at_write.wait(30)
    me = os.getpid()
    stop = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -STOP {me}; sleep 3; kill -CONT {me}"])

    def open_later():
        stop.wait(30)
        time.sleep(0.3)
        gate.open_.set()

    threading.Thread(target=open_later).start()
    assert ticket.wait(timeout=60).state == "committed"
    ck.close()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"pool": "4KiB"}, "pool is too small"),
        ({"pool": "many"}, "pool"),
        ({"patience": 0}, "patience"),
        ({"on_error": "ignore"}, '"raise" or "warn"'),
    ],
)
def test_wrong_arguments(tmp_path, arguments, match):
    with pytest.raises(InputError, match=match):
        Checkpointer(tmp_path, **arguments)


def test_a_hundred_saves_leave_memory_descriptors_and_threads_flat(tmp_path, new_run):
    run, process = new_run(), psutil.Process()
    ck = run.attach_to(Checkpointer(tmp_path, keep=Keep(last=2), durability="none"))

    def saves(numbers):
        for number in numbers:
            ck.save(number)
            run.step()
        ck.wait()
        gc.collect()
        return process.num_fds(), threading.active_count(), process.memory_info().rss

    fds, threads, rss = saves(range(20))
    after = saves(range(20, 120))
    assert after[:2] == (fds, threads)
    assert after[2] < rss + (4 << 20)
    ck.close()
    assert threading.active_count() == threads - 2


def test_dropped_without_close_the_threads_end(tmp_path):
    ck, _, _ = make(tmp_path)
    ck.save(1).wait()
    threads = list(ck._engine._threads)
    assert all(thread.is_alive() for thread in threads)
    del ck
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_background_threads_have_the_lowest_priority(tmp_path):
    ck, _, _ = make(tmp_path)
    ck.save(1).wait()
    nice = [os.getpriority(os.PRIO_PROCESS, t.native_id) for t in ck._engine._threads]
    assert nice == [19, 19]
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19
    ck.close()


def test_the_pool_is_ready_before_the_first_save(tmp_path):
    model = nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(tmp_path, pool="64MiB") as ck:
        ck.attach(model=model, optimizer=optimizer)
        for _ in range(2):
            assert ck._engine._pool is None  # a program that only restores takes no memory
            model(torch.ones(1, 1024)).sum().backward()
            optimizer.step()
        deadline = time.monotonic() + 60
        while ck._engine._pool.untouched(12 << 20) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert ck._engine._pool.untouched(12 << 20) == []
        assert ck._engine._pool.untouched(64 << 20) != []


def test_idle_threads_do_nothing(tmp_path):
    ck, _, _ = make(tmp_path)
    ck.save(1).wait()
    time.sleep(0.05)
    mine = {t.native_id for t in ck._engine._threads}

    def used():
        return sum(t.user_time + t.system_time for t in psutil.Process().threads() if t.id in mine)

    before = used()
    time.sleep(0.5)
    assert used() == before
    ck.close()


ENDS = """
    import os, sys, time
    import torch
    from eke.checkpoint import Checkpointer, Storage

    class Slow(Storage):
        def sync(self, fd):
            time.sleep(0.1)
            super().sync(fd)

    model = torch.nn.Linear(300, 300)
    ck = Checkpointer(sys.argv[1], storage=Slow())
    ck.attach(model=model, rng=True)
    ck.save(7)
    if sys.argv[2] == "fork":
        child = os.fork()
        if child == 0:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
    if sys.argv[2] == "exception":
        raise ZeroDivisionError
    if sys.argv[2] == "exit":
        sys.exit(5)
"""


@pytest.mark.parametrize(("how", "code"), [("end", 0), ("exception", 1), ("exit", 5), ("fork", 0)])
def test_however_a_process_ends_what_it_began_is_committed(tmp_path, how, code):
    script = [sys.executable, "-c", textwrap.dedent(ENDS), str(tmp_path / "ck"), how]
    done = subprocess.run(script, timeout=60, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert verify(tmp_path / "ck" / "step-000000007").ok
    assert [p.name for p in (tmp_path / "ck").iterdir()] == ["step-000000007"]


def test_an_unchanged_group_is_linked(tmp_path):
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())

    def save(ck, number):
        model(torch.randn(2, 300)).square().mean().backward()
        optimizer.step()
        ticket = ck.save(number).wait()
        assert verify(ticket.path).ok
        return ticket

    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=optimizer)
        first, second = save(ck, 1), save(ck, 2)
        assert second.bytes_written < 0.12 * first.bytes_written
        name = "rank00000.frozen.safetensors"
        assert (first.path / name).samefile(second.path / name)
        assert not (first.path / name.replace("frozen", "state")).samefile(
            second.path / name.replace("frozen", "state")
        )
        with torch.no_grad():
            ck.barrier()
            model[0].weight[0, 0] += 1
        assert not (save(ck, 3).path / name).samefile(second.path / name)
    with Checkpointer(tmp_path) as ck:  # another process would look at the disk, as this one does
        ck.attach(model=model, optimizer=optimizer)
        assert (save(ck, 4).path / name).samefile(tmp_path / "step-000000003" / name)


@pytest.mark.parametrize("gone", [False, True])
def test_where_there_are_no_links_the_file_is_copied(tmp_path, gone):
    class NoLinks(Storage):
        def link(self, source, target):
            if gone:
                source.unlink()
            raise OSError(errno.EOPNOTSUPP, "no links here")

    model = nn.Linear(300, 300).requires_grad_(False)
    with Checkpointer(tmp_path, storage=NoLinks()) as ck:
        ck.attach(model=model)
        first = ck.save(1).wait().path
        if gone:
            with pytest.raises(SaveError, match=r"frozen\.safetensors: No such file"):
                ck.save(2).wait()
            return
        second = ck.save(2).wait().path
        name = "rank00000.frozen.safetensors"
        assert not (first / name).samefile(second / name)
        assert (first / name).read_bytes() == (second / name).read_bytes()
        assert verify(second).ok


def test_a_file_system_without_direct_writes(tmp_path):
    """One says so at once, another only when it is written to."""

    class Refuses(Storage):
        def go_around_cache(self, fd, wanted):
            return False

    class Lies(Storage):
        direct = False

        def go_around_cache(self, fd, wanted):
            self.direct = wanted
            return True

        def write(self, fd, data):
            if self.direct:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return super().write(fd, data)

    class Short(Storage):
        def write(self, fd, data):
            return super().write(fd, data[: max(1, len(data) * 2 // 3)])

    model = nn.Linear(1000, 1000)
    for storage in (Refuses(), Lies(), Short(), Storage()):
        root: Path = tmp_path / type(storage).__name__
        with Checkpointer(root, storage=storage) as ck:
            ck.attach(model=model)
            assert verify(ck.save(1).wait().path).ok

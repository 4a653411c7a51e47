"""A checkpoint that is being read stays, whoever reads it, until the reader is done or dead."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import ExitStack

import psutil
import pytest
import torch
from torch import nn

from eke.checkpoint import Checkpointer, Keep, Storage, collect, load_tensors, verify
from eke.checkpoint.layout import step_name
from eke.checkpoint.lease import free, lease
from eke.checkpoint.opening import open_manifest
from eke.checkpoint.reader import Reader

READER = """
    import os, sys, time
    from eke.checkpoint import verify, Storage

    class Slow(Storage):
        '''Says that it reads, and then waits to be killed or told to go on.'''
        told = False
        def read_into(self, fd, buffer, offset):
            if offset and not self.told:
                self.told = True
                print("reading", flush=True)
                sys.stdin.readline()
            return super().read_into(fd, buffer, offset)

    print(verify(sys.argv[1], storage=Slow()).ok, flush=True)
"""


@pytest.fixture
def reader():
    """Start a process that is in the middle of `verify`."""
    started = []

    def start(path):
        command = [sys.executable, "-c", textwrap.dedent(READER), str(path)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "reading\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def saver(root, **more):
    model = nn.Linear(200, 20)
    ck = Checkpointer(root, keep=Keep(last=1), **more)
    ck.attach(model=model, extra={"notes": {"a": 1}})
    return ck, model


def save(ck, model, step):
    ck.barrier()
    with torch.no_grad():
        model.weight.add_(1)
    ticket = ck.save(step)
    ck.wait()
    return ticket.path


def test_retention_leaves_what_another_process_reads(tmp_path, reader):
    ck, model = saver(tmp_path)
    first = save(ck, model, 1)
    process = reader(first)
    save(ck, model, 2)
    assert ck.steps() == [1, 2]
    assert collect(tmp_path, Keep(last=1)) == []
    process.stdin.write("go on\n")
    process.stdin.flush()
    assert process.stdout.readline() == "True\n"
    process.wait(60)
    save(ck, model, 3)
    assert ck.steps() == [3]
    ck.close()


def test_a_reader_that_is_killed_leaves_no_lease(tmp_path, reader):
    ck, model = saver(tmp_path)
    process = reader(save(ck, model, 1))
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    save(ck, model, 2)
    assert ck.steps() == [2]
    assert sorted(p.name for p in tmp_path.iterdir()) == [step_name(2)]
    ck.close()


class Pausing(Storage):
    """Reads stop until they are let go on."""

    def __init__(self):
        self.reached, self.go_on = threading.Event(), threading.Event()

    def read_into(self, fd, buffer, offset):
        if offset:
            self.reached.set()
            assert self.go_on.wait(60)
        return super().read_into(fd, buffer, offset)


def _verify(root, storage):
    assert verify(root / step_name(1), storage=storage).ok


def _load(root, storage):
    assert load_tensors(root / step_name(1), storage=storage)


def _restore(root, storage):
    other, _ = saver(root, storage=storage)
    assert other.restore(1).step == 1
    other.close()


@pytest.mark.parametrize("read", [_verify, _load, _restore])
def test_every_reader_takes_a_lease(tmp_path, read):
    ck, model = saver(tmp_path)
    save(ck, model, 1)
    storage = Pausing()
    failed = []

    def work():
        try:
            read(tmp_path, storage)
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=work)
    thread.start()
    assert storage.reached.wait(60)
    save(ck, model, 2)
    assert ck.steps() == [1, 2]
    storage.go_on.set()
    thread.join(60)
    assert not failed
    save(ck, model, 3)
    assert ck.steps() == [3]
    ck.close()


def test_free_and_leased(saved):
    _, path = saved
    storage = Storage()
    with lease(path, storage), lease(path, storage), free(path, storage) as unread:
        assert not unread
    with free(path, storage) as unread:
        assert unread
        with free(path, storage) as twice:
            assert not twice
    with free(path / "absent", storage) as unread:
        assert unread
    with lease(path / "absent", storage):
        pass


def test_a_reader_waits_for_a_deletion_and_then_finds_nothing(saved):
    _, path = saved
    storage, entered = Storage(), threading.Event()

    def read():
        with lease(path, storage):
            entered.set()

    with free(path, storage):
        thread = threading.Thread(target=read)
        thread.start()
        assert not entered.wait(0.1)
        doomed = path.rename(path.parent / ".tmp-delete-000000003-a.b.1.2.c")
    thread.join(60)
    assert entered.is_set()
    with free(doomed, storage) as unread:
        assert unread, "the lease was not of what has another name now"


def test_a_reader_that_waited_holds_what_took_the_place(saved):
    _, path = saved
    storage, inside, leave = Storage(), threading.Event(), threading.Event()

    def read():
        with lease(path, storage):
            inside.set()
            leave.wait(60)

    with free(path, storage):
        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(0.05)
        path.rename(path.parent / "gone")
        shutil.copytree(path.parent / "gone", path)
    assert inside.wait(60)
    with free(path, storage) as unread:
        assert not unread
    leave.set()
    thread.join(60)


def test_a_forked_child_does_not_keep_the_lease(saved):
    """A loader's workers outlive a reader that is killed."""
    _, path = saved
    ready, done = os.pipe(), os.pipe()
    reader = os.fork()
    if reader == 0:
        with lease(path, Storage()):
            if os.fork() == 0:
                os.write(ready[1], str(os.getpid()).encode())
                os.close(done[1])
                os.read(done[0], 1)  # until the test closes the pipe
                os._exit(0)
            time.sleep(60)
        os._exit(1)
    child = int(os.read(ready[0], 20))
    try:
        with free(path, Storage()) as unread:
            assert not unread
        os.kill(reader, signal.SIGKILL)
        os.waitpid(reader, 0)
        os.kill(child, 0)
        with free(path, Storage()) as unread:
            assert unread
    finally:
        os.kill(child, signal.SIGKILL)
        for end in (*ready, *done):
            os.close(end)


def test_a_program_that_is_started_does_not_keep_the_lease(saved):
    _, path = saved
    with lease(path, Storage()):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with free(path, Storage()) as unread:
            assert unread
    finally:
        child.kill()
        child.wait()


def test_leaving_a_lease_in_a_child_ends_nothing(saved):
    _, path = saved
    with ExitStack() as held:
        held.enter_context(lease(path, Storage()))
        child = os.fork()
        if child == 0:
            held.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with free(path, Storage()) as unread:
            assert not unread


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF])
def test_where_there_are_no_locks_all_goes_on(tmp_path, code):
    class NoLocks(Storage):
        def lock(self, path, *, exclusive):
            path.stat()
            raise OSError(code, os.strerror(code))

    ck, model = saver(tmp_path, storage=NoLocks())
    first = save(ck, model, 1)
    assert verify(first, storage=NoLocks()).ok
    assert load_tensors(first, storage=NoLocks())
    assert ck.restore().step == 1
    save(ck, model, 2)
    assert ck.steps() == [2]
    ck.close()


def test_leases_leave_no_descriptors(saved):
    _, path = saved
    before = psutil.Process().num_fds()
    for _ in range(20):
        assert verify(path).ok
        with free(path, Storage()):
            pass
    assert psutil.Process().num_fds() == before


def test_a_file_that_may_only_be_read_can_be_leased_and_freed(saved):
    _, path = saved
    (path / "MANIFEST.json").chmod(0o444)
    with lease(path, Storage()), free(path, Storage()) as unread:
        assert not unread


def test_a_reader_opened_by_hand_keeps_its_checkpoint(saved):
    _, path = saved
    with Reader(path, open_manifest(path, Storage()), Storage()), free(path, Storage()) as unread:
        assert not unread

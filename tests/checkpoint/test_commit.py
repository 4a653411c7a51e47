import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from eke.checkpoint import Checkpointer, Keep, SaveError, Storage, steps, verify
from eke.checkpoint.commit import Attempt, clean, delete
from eke.checkpoint.layout import step_name, temporaries, temporary_name
from eke.checkpoint.owner import ABANDONED_AFTER_S, me, new_token
from eke.errors import EkeError

SAVERS = """
    import importlib.util, os, sys
    spec = importlib.util.spec_from_file_location("shared", sys.argv[1])
    shared = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shared)
    from eke.checkpoint import Checkpointer, Keep

    def save_for_ever():
        run = shared.Run()
        ck = run.attach_to(Checkpointer(sys.argv[2], keep=Keep(last=2)))
        report = ck.restore()
        step = report.step if report else 0
        print("at", step, os.getpid(), flush=True)
        while True:
            run.step()
            step += 1
            ck.save(step).wait()
            print("at", step, flush=True)

    shared.Run()
    for _ in sys.stdin:  # a process a line, forked so that everything is imported only once
        child = os.fork()
        if child == 0:
            save_for_ever()
        _, status = os.waitpid(child, 0)
        print("killed by", os.WTERMSIG(status), flush=True)
"""


def test_kill_9_at_random_moments_never_loses_a_committed_step(tmp_path, new_run):
    """Twenty-five kills of a process that does nothing but save, each at another moment."""
    root, luck = tmp_path / "ck", random.Random(7)
    reference = new_run()
    history = [reference.bits()]
    for _ in range(400):
        reference.step()
        history.append(reference.bits())
    kills_with_debris = newest = 0
    shared = str(Path(__file__).parent / "conftest.py")
    savers = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SAVERS), shared, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        for _ in range(25):
            savers.stdin.write("another\n")
            savers.stdin.flush()
            _, step, pid = savers.stdout.readline().split()
            announced = int(step)
            assert announced == newest, "it went on from the newest step"
            for _ in range(luck.randint(0, 3)):
                announced = int(savers.stdout.readline().split()[1])
            time.sleep(luck.random() * 0.02)
            os.kill(int(pid), signal.SIGKILL)
            while (line := savers.stdout.readline()).startswith("at"):
                announced = int(line.split()[1])
            assert line == f"killed by {signal.SIGKILL.value}\n"
            kills_with_debris += bool(temporaries(root))
            newest = max(steps(root), default=0)
            assert newest in (announced, announced + 1)
            if newest:
                assert verify(root / step_name(newest)).ok
                run = new_run(seed=99)
                assert run.attach_to(Checkpointer(root)).restore().step == newest
                assert run.bits() == history[newest]
    finally:
        savers.kill()
        savers.communicate()
    assert newest >= 25, "the runs got on"
    assert kills_with_debris, "at least one kill fell into a save"
    run = new_run()
    ck = run.attach_to(Checkpointer(root))
    ck.restore()
    ck.save(10_000).wait()
    assert temporaries(root) == []


class Killed(BaseException):
    """Stands for a process that ends between two system calls."""


class KillAt(Storage):
    """Does nothing more from the n-th changing call on, as if the process had been killed there."""

    CALLS = (
        "make_root",
        "make_dir",
        "create",
        "write",
        "sync",
        "sync_dir",
        "rename",
        "remove_tree",
    )

    def __init__(self, at):
        self.at, self.count = at, 0
        for name in self.CALLS:
            setattr(self, name, self._counted(getattr(self, name)))

    def _counted(self, method):
        def call(*arguments):
            self.count += 1
            if self.count >= self.at:
                raise Killed
            return method(*arguments)

        return call


def test_a_kill_before_every_single_call_leaves_a_sound_newest_checkpoint(tmp_path, new_run):
    run = new_run()
    run.step()
    root = tmp_path / "ck"
    run.attach_to(Checkpointer(root, keep=Keep(last=1))).save(0).wait()
    step, seen, at, finished, killed = 1, set(), 1, False, []
    while not finished:
        run.step()  # or files might be linked or written, whichever comes first, in other calls
        storage = KillAt(at)
        saver = run.attach_to(Checkpointer(root, keep=Keep(last=1), storage=storage))
        ticket = saver.save(step)
        try:
            ticket.wait()
        except SaveError:
            killed.append(ticket.error.__cause__)
        saver.wait()  # for retention, in which it may have been killed too
        finished = storage.count < at
        there = steps(root)
        assert there, f"killed before call {at}: nothing is left"
        assert all(verify(root / step_name(one)).ok for one in there)
        assert there[-1] in (step - 1, step)
        seen.add(tuple(there))
        if there[-1] == step:
            step += 1
        at += 1
    assert {type(cause) for cause in killed} == {Killed}
    assert at > 15, "a save is many calls"
    assert len(seen) > 3, seen
    with run.attach_to(Checkpointer(root, keep=Keep(last=1))) as saver:
        saver.save(step + 1)
    assert steps(root) == [step + 1]
    assert [p.name for p in root.iterdir()] == [step_name(step + 1)]


def make_debris(root, owner, purpose="step", step=4):
    path = root / temporary_name(purpose, step, new_token(owner))
    path.mkdir(parents=True)
    (path / "rank00000.state.safetensors").write_bytes(b"half")
    return path


def test_only_what_dead_owners_left_is_removed(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        from eke.checkpoint.owner import start_of

        here = me()
        alive = make_debris(tmp_path, here._replace(pid=child.pid, start=start_of(child.pid)))
        dead = make_debris(tmp_path, here._replace(pid=child.pid, start=1))
        old_boot = make_debris(tmp_path, here._replace(boot="00000000"))
        doomed = make_debris(tmp_path, here._replace(boot="00000000"), purpose="delete")
        elsewhere = make_debris(tmp_path, here._replace(host="00000000"))
        forgotten = make_debris(tmp_path, here._replace(host="00000001"))
        long_ago = time.time() - ABANDONED_AFTER_S - 60
        for path in (forgotten / "rank00000.state.safetensors", forgotten):
            os.utime(path, (long_ago, long_ago))
        mine = make_debris(tmp_path, here)
        at_work = Attempt(Storage(), tmp_path, 4, durable=False)
        at_work.begin()
        stranger = tmp_path / ".tmp-of-somebody-else"
        stranger.mkdir()
        removed = clean(Storage(), tmp_path)
        assert set(removed) == {dead, old_boot, doomed, forgotten, mine}
        assert set(tmp_path.iterdir()) == {alive, elsewhere, at_work.path, stranger}
        at_work.abort()
        assert not at_work.path.exists()
    finally:
        child.kill()
        child.wait()
        child.stdin.close()


def test_a_deletion_is_one_rename(saved, faulty):
    _, path = saved
    faulty.fail("remove_tree")
    delete(faulty, path.parent, 3, durable=True)
    assert not path.exists()
    assert [t.purpose for t in temporaries(path.parent)] == ["delete"]
    clean(Storage(), path.parent)
    assert list(path.parent.iterdir()) == []


def test_the_name_could_not_be_made_durable(tmp_path, faulty):
    attempt = Attempt(faulty, tmp_path, 1, durable=True)
    attempt.begin()
    faulty.fail("sync_dir", at=2)
    with pytest.raises(EkeError, match="may not outlive a loss of power"):
        attempt.commit(b"manifest")
    assert (tmp_path / "step-000000001" / "MANIFEST.json").read_bytes() == b"manifest"


def test_the_names_above_a_new_root_are_made_durable(tmp_path, faulty):
    made = []
    method = faulty.sync_dir
    faulty.sync_dir = lambda path: (made.append(path), method(path))
    Attempt(faulty, tmp_path / "runs" / "a" / "ck", 1, durable=True).begin()
    assert made == [tmp_path / "runs" / "a", tmp_path / "runs", tmp_path]

"""A file system that is really full, and one that is really read-only: a small tmpfs of our own."""

import os
import subprocess
import sys
import textwrap

SCRIPT = """
    import errno, resource, subprocess, sys
    from pathlib import Path
    import torch
    from eke.checkpoint import Checkpointer, Keep, SaveError, Storage, collect, verify

    root, how = Path(sys.argv[1]), sys.argv[2]
    MIB = 1 << 20
    if how == "mount":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", root], check=True)

    def fill(full):
        '''Without the right to mount: the kernel cuts files off and refuses what is beyond.'''
        if how == "limit":
            most = MIB // 2 if full else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    class Told(Storage):
        direct = []
        def go_around_cache(self, fd, wanted):
            self.direct.append(super().go_around_cache(fd, wanted))
            return self.direct[-1]

    model = torch.nn.Linear(512, 512)
    states = {}
    ck = Checkpointer(root, keep=Keep(last=9), pool="64KiB", storage=Told())
    ck.attach(model=model)

    def save(step):
        with torch.no_grad():
            ck.barrier()
            model.weight.uniform_()
        states[step] = model.weight.detach().clone()
        return ck.save(step).wait()

    save(1)
    save(2)
    there = sorted(path.name for path in root.iterdir())
    fill(True)
    for _ in range(2):  # nothing of the first attempt takes up the second one's space
        try:
            save(3)
        except SaveError as error:
            print(error.__cause__.errno, error)
        assert sorted(path.name for path in root.iterdir()) == there
    fill(False)
    assert verify(root / "step-000000001").ok and verify(root / "step-000000002").ok
    collect(root, Keep(last=1))
    assert save(3).state == "committed"
    assert Told.direct, "a file of a mebibyte is tried past the cache"
    if how == "mount":
        subprocess.run(["mount", "-o", "remount,ro", root], check=True)
        try:
            save(4)
        except SaveError as error:
            print(error.__cause__.errno, error)
        subprocess.run(["mount", "-o", "remount,rw", root], check=True)
        collect(root, Keep(last=1))
        save(4)
    with torch.no_grad():
        model.weight.zero_()
    report = ck.restore()
    assert torch.equal(model.weight, states[report.step])
    print("restored", report.step)
    ck.close()
"""


def ways():
    """How to have a file system of one's own; the last one needs no rights at all."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0:
        return ["unshare", "-rm"], "mount"
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0:
        return ["unshare", "-m"], "mount"
    return [], "limit"


def run(root, prefix, how):
    root.mkdir()
    done = subprocess.run(
        [*prefix, sys.executable, "-c", textwrap.dedent(SCRIPT), str(root), how],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def check_refusals(lines, number, cause):
    for line in lines:
        assert line.startswith(f"{number} saving step 3 failed: "), line
        assert "rank00000.state.safetensors: " + cause in line
        assert "older checkpoints are untouched" in line


def test_a_full_and_a_read_only_file_system(tmp_path):
    prefix, how = ways()
    lines = run(tmp_path / "ck", prefix, how)
    if how == "limit":
        check_refusals(lines[:2], 27, "File too large")
        assert lines[2:] == ["restored 3"]
        return
    check_refusals(lines[:2], 28, "No space left on device; ")
    assert "Free space there" in lines[0]
    assert lines[2].startswith("30 saving step 4 failed: ")
    assert "Read-only file system" in lines[2]
    assert "Make the file system writable" in lines[2]
    assert lines[3:] == ["restored 4"]


def test_a_file_that_the_kernel_cuts_off(tmp_path):
    """A short write that is followed by a refusal, both by the kernel."""
    lines = run(tmp_path / "ck", [], "limit")
    check_refusals(lines[:2], 27, "File too large")
    assert lines[2:] == ["restored 3"]

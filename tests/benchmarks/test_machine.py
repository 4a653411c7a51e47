"""What the kernel tells, compared with what was done; and when a measurement does not count."""

import os
import subprocess
import sys

import pytest
from benchmarks.machine import Contamination, Counters, contamination
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import machine

SECONDS = st.integers(0, 9999).map(lambda n: n / 8)


def counters(at_s, busy_s=0.0, steal_s=0.0, own_s=0.0, kernel_s=None):
    return Counters(at_s, busy_s, steal_s, own_s, kernel_s or {})


def test_only_what_others_did_contaminates():
    before = counters(10.0, busy_s=100.0, steal_s=5.0, own_s=40.0, kernel_s={2: 3.0, 9: 5.0})
    after = counters(20.0, busy_s=112.0, steal_s=5.2, own_s=49.0, kernel_s={2: 3.5, 30: 0.5})
    found = contamination(before, after)
    assert found.foreign_cores == pytest.approx(
        0.2
    )  # of 12 s, 9 were ours and 1 the kernel's; 9 is gone
    assert found.steal_cores == pytest.approx(0.02)
    assert not found.quiet


@pytest.mark.parametrize(
    ("foreign", "steal", "quiet"),
    [(0.0, 0.0, True), (0.15, 0.05, True), (0.16, 0.0, False), (0.0, 0.06, False)],
)
def test_what_counts(foreign, steal, quiet):
    assert Contamination(foreign, steal).quiet is quiet


@given(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS)
def test_it_is_never_negative_and_own_work_never_adds_to_it(wall, busy, own, kernel, steal):
    found = contamination(counters(0.0), counters(wall, busy, steal, own, {2: kernel}))
    assert min(found.foreign_cores, found.steal_cores) >= 0
    more = contamination(counters(0.0), counters(wall, busy, steal, own + 1, {2: kernel}))
    assert more.foreign_cores <= found.foreign_cores


def test_cpu_time_counts_threads_children_and_those_that_ended():
    before = machine.cpu_s()
    sum(range(2_000_000))
    here = machine.cpu_s()
    subprocess.run([sys.executable, "-c", "sum(range(5_000_000))"], check=True)
    assert before < here < machine.cpu_s()


def test_counters_only_grow():
    first, second = machine.counters(), machine.counters()
    assert second.at_s > first.at_s
    assert second.busy_s >= first.busy_s > 0
    assert second.own_s >= first.own_s > 0


PEAK = """
import os
from benchmarks import machine
block = bytearray(os.urandom(1) * (64 << 20))
del block
resident = machine.reset_peak()
before = machine.peak_bytes() - resident
block = bytearray(48 << 20)
block[::4096] = b"x" * len(block[::4096])
print(before, machine.peak_bytes() - resident, len(block))
"""


def test_the_peak_is_that_since_it_was_reset():
    # In a process of its own: what other tests have left there moves both figures.
    command = [sys.executable, "-c", PEAK]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    before, after, size = map(int, done.stdout.split())
    assert before < 32 << 20
    assert 40 << 20 < after < 2 * size


def test_two_links_to_one_file_are_one(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 10_000)
    os.link(tmp_path / "a", tmp_path / "b")
    (tmp_path / "c").symlink_to(tmp_path / "a")
    machine.sync_tree(tmp_path)
    found = machine.blocks_of(tmp_path)
    assert list(found) == [(tmp_path / "a").stat().st_ino]
    assert sum(found.values()) >= 10_000
    assert machine.blocks_of(tmp_path / "none") == {}


def test_files_are_the_same_after_they_were_read_and_evicted(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    for one in (tmp_path, tmp_path / "a"):
        machine.read_through(one)
        machine.evict(one)
    assert (tmp_path / "a").read_bytes() == b"x" * 100_000


def test_memory_is_touched_as_far_as_there_is_any():
    assert machine.touch_memory(0) == 0
    assert machine.touch_memory(1 << 20) == 1 << 20

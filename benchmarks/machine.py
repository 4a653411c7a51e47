"""What the kernel knows about a measurement: CPU time, peak memory and bytes written of a process
and its children, and what else the machine did meanwhile.

Pure: `contamination` and `Contamination.quiet`. All else reads /proc, so it needs Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
KTHREADD = 2
FOREIGN_CORES, STEAL_CORES = 0.15, 0.05
"""A measurement is repeated if, on average, more than this many cores were busy for others, or
were taken away by the host."""


@dataclass(frozen=True)
class Counters:
    """CPU seconds since the start of the machine, and of this process and its kin.

    Attributes:
        at_s: a clock.
        busy_s: user and system time of all cores. Interrupts are left out: those of the disk and
            of the clock are nobody's.
        steal_s: taken away by the host of this virtual machine.
        own_s: of this process and all its descendants.
        kernel_s: of each kernel thread by its id: they write back what these measurements write.
    """

    at_s: float
    busy_s: float
    steal_s: float
    own_s: float
    kernel_s: Mapping[int, float]


@dataclass(frozen=True)
class Contamination:
    """How many cores others kept busy on average, and how many the host took away."""

    foreign_cores: float
    steal_cores: float

    @property
    def quiet(self) -> bool:
        """Whether the measurement counts."""
        return self.foreign_cores <= FOREIGN_CORES and self.steal_cores <= STEAL_CORES


def contamination(before: Counters, after: Counters) -> Contamination:
    """What was not this process, its descendants or the kernel, per second between two counts."""
    wall_s = max(after.at_s - before.at_s, 1e-9)
    # Kernel threads come and go: one that is gone must not take back what it had used before.
    kernel_s = sum(max(0.0, s - before.kernel_s.get(pid, 0.0)) for pid, s in after.kernel_s.items())
    ours_s = (after.own_s - before.own_s) + kernel_s
    foreign_s = max(0.0, (after.busy_s - before.busy_s) - ours_s)
    return Contamination(foreign_s / wall_s, max(0.0, after.steal_s - before.steal_s) / wall_s)


def descendants() -> list[psutil.Process]:
    """All living processes that this one started, and theirs."""
    return psutil.Process().children(recursive=True)


def descendants_of(pid: int) -> list[psutil.Process]:
    """The same of another process; none if it has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def cpu_s() -> float:
    """User and system seconds of this process, what it waited for, and its living descendants."""
    ended = os.times()
    total = time.process_time() + ended.children_user + ended.children_system
    for child in descendants():
        try:
            total += sum(child.cpu_times()[:4])
        except psutil.Error:
            continue  # it ended between the two lines, and is counted above from now on
    return total


def counters() -> Counters:
    """Of now."""
    row = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _, _, _, _, steal = row[:8]
    kernel: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == KTHREADD:
            kernel[int(entry.name)] = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return Counters(
        at_s=time.perf_counter(),
        busy_s=(user + nice + system) / TICKS_PER_S,
        steal_s=steal / TICKS_PER_S,
        own_s=cpu_s(),
        kernel_s=kernel,
    )


def _status(pid: int | str, key: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def reset_peak() -> int:
    """Forget the peak of resident memory; returns what is resident now, in bytes.

    What was freed goes back to the kernel first: used again, it would hide what a save takes.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("self", "VmRSS")


def peak_bytes() -> int:
    """Peak resident memory of this process since `reset_peak`, and of its living descendants.

    What a descendant shares (libraries, staged tensors in shared memory) is not counted again.
    """
    total = _status("self", "VmHWM")
    for child in descendants():
        try:
            shared = _status(child.pid, "RssFile") + _status(child.pid, "RssShmem")
            total += max(0, _status(child.pid, "VmHWM") - shared)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def written_bytes() -> int:
    """Bytes that this process and its living descendants have sent towards the disk."""
    total = 0
    for pid in [os.getpid(), *(child.pid for child in descendants())]:
        try:
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += next(int(x.split()[1]) for x in lines if x.startswith("write_bytes:"))
    return total


def blocks_of(root: Path) -> dict[int, int]:
    """Inode -> bytes on disk of every file below `root`: two links to one file are one entry.

    What an arm is deleting meanwhile is not there any more.
    """
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                about = Path(folder, name).lstat()
                if stat.S_ISREG(about.st_mode):
                    found[about.st_ino] = about.st_blocks * 512
    if root.is_file():
        found[root.stat().st_ino] = root.stat().st_blocks * 512
    return found


def sync_tree(path: Path) -> None:
    """Make a file, or a directory with all that is in it, and its name durable."""
    for one in [*(path.rglob("*") if path.is_dir() else ()), path, path.parent]:
        fd = os.open(one, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def evict(path: Path) -> None:
    """Drop a tree's files from the page cache, so that reading them reads the disk."""
    os.sync()
    for one in [path, *path.rglob("*")] if path.is_dir() else [path]:
        if one.is_file():
            fd = os.open(one, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def read_through(path: Path) -> None:
    """Bring a tree's files into the page cache."""
    for one in [path, *path.rglob("*")] if path.is_dir() else [path]:
        if one.is_file():
            with one.open("rb", buffering=0) as file:
                while file.read(8 << 20):
                    pass


def touch_memory(nbytes: int) -> int:
    """Fill memory once, so that the host of a virtual machine has backed it; returns how much.

    The first use of a page that the host has not backed yet costs several times as much as later
    ones, and would be paid by whichever arm comes first.
    """
    nbytes = min(nbytes, int(psutil.virtual_memory().available * 0.8))
    if nbytes > 0:
        with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            for place in range(0, nbytes, mmap.PAGESIZE):
                memory[place] = 1
    return nbytes


def as_row(found: Contamination) -> dict[str, float]:
    """For JSON."""
    return asdict(found)

"""Meters: wall clock since the process began, energy where a counter exists, peak memory.

What cannot be measured is `None`, never 0: a missing counter must not look like a run for free.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from pathlib import Path
from types import ModuleType

import psutil

RAPL_ROOT = Path("/sys/class/powercap")


def process_age_s() -> float:
    """Seconds since this process was created, imports included."""
    if sys.platform != "linux":
        return max(0.0, time.time() - psutil.Process(os.getpid()).create_time())
    # Not by psutil, which knows the time of boot, and so of birth, to a whole second only.
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    born_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - born_s)


def resident_bytes() -> int:
    """The process's resident memory now."""
    return int(psutil.Process(os.getpid()).memory_info().rss)


def peak_resident_bytes() -> int:
    """The highest resident memory of the process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Rapl:
    """CPU package energy from the kernel's RAPL counters (microjoules that wrap around).

    Only zones named `package-N` count: `psys`, the whole platform, would count them twice.
    """

    source = "rapl"

    def __init__(self, root: Path = RAPL_ROOT) -> None:
        self._zones: list[tuple[Path, int]] = []
        for zone in sorted(root.glob("intel-rapl:?")) + sorted(root.glob("intel-rapl:??")):
            try:
                if not (zone / "name").read_text().startswith("package"):
                    continue
                limit = int((zone / "max_energy_range_uj").read_text())
                int((zone / "energy_uj").read_text())
            except (OSError, ValueError):
                continue  # present but not readable by this user: not a counter for us
            self._zones.append((zone / "energy_uj", limit))
        if not self._zones:
            raise OSError("no readable RAPL zone")
        self._last = [self._raw(path) for path, _ in self._zones]
        self._joules = 0.0

    @staticmethod
    def _raw(path: Path) -> int:
        return int(path.read_text())

    def read(self) -> float:
        """Joules since this meter was opened."""
        for i, (path, limit) in enumerate(self._zones):
            now = self._raw(path)
            step = now - self._last[i]
            self._joules += (step if step >= 0 else step + limit) / 1e6
            self._last[i] = now
        return self._joules


class Nvml:
    """GPU energy from NVML's counters: of all GPUs of the machine, whoever uses them.

    NVML does not heed `CUDA_VISIBLE_DEVICES`.
    """

    source = "nvml"

    def __init__(self, pynvml: ModuleType) -> None:
        self._pynvml = pynvml
        pynvml.nvmlInit()
        self._devices = [
            pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())
        ]
        if not self._devices:
            raise OSError("NVML sees no device")
        self._first = self._raw()

    def _raw(self) -> float:
        read = self._pynvml.nvmlDeviceGetTotalEnergyConsumption  # millijoules
        return float(sum(read(d) for d in self._devices)) / 1e3

    def read(self) -> float:
        """Joules since this meter was opened."""
        return self._raw() - self._first


class EnergyMeter:
    """Joules since it was opened, from every counter there is; `None` when there is none."""

    def __init__(self, counters: list[Rapl | Nvml]) -> None:
        self._counters = counters

    @classmethod
    def open(cls, rapl_root: Path = RAPL_ROOT) -> EnergyMeter:
        """Find the counters of this machine. NVML needs the extra `energy`."""
        counters: list[Rapl | Nvml] = []
        with contextlib.suppress(OSError):
            counters.append(Rapl(rapl_root))
        try:
            import pynvml
        except ImportError:
            return cls(counters)
        with contextlib.suppress(OSError, pynvml.NVMLError):
            counters.append(Nvml(pynvml))
        return cls(counters)

    @property
    def source(self) -> str:
        """Which counters are read: `rapl`, `nvml`, `rapl+nvml` or `unknown`."""
        return "+".join(c.source for c in self._counters) or "unknown"

    def read(self) -> float | None:
        """Joules since the meter was opened, or `None`."""
        return sum(c.read() for c in self._counters) if self._counters else None

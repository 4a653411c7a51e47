"""Meters: RAPL from a tree like the kernel's, NVML from a module like pynvml, real memory."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eke.budget.meters import (
    EnergyMeter,
    Nvml,
    Rapl,
    peak_resident_bytes,
    process_age_s,
    resident_bytes,
)


class Zone:
    """A RAPL zone: a counter of microjoules that wraps around."""

    def __init__(self, path: Path, name: str, limit: int, at: int = 0) -> None:
        self.path, self.limit = path, limit
        path.mkdir(parents=True, exist_ok=True)
        (path / "name").write_text(f"{name}\n")
        (path / "max_energy_range_uj").write_text(f"{limit}\n")
        self.set(at)

    def set(self, at: int) -> None:
        (self.path / "energy_uj").write_text(f"{at}\n")


FILES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)


@FILES
@given(
    st.integers(1000, 10**9).flatmap(
        lambda limit: st.tuples(
            st.just(limit),
            st.integers(0, limit - 1),
            st.lists(st.integers(0, limit - 1), max_size=8),
        )
    )
)
def test_rapl_counts_through_wrap_arounds(
    tmp_path: Path, drawn: tuple[int, int, list[int]]
) -> None:
    limit, start, steps = drawn
    zone = Zone(tmp_path / "intel-rapl:0", "package-0", limit, start)
    meter = Rapl(tmp_path)
    assert meter.read() == 0.0
    total = 0
    for step in steps:
        total += step
        zone.set((start + total) % limit)
        assert meter.read() == pytest.approx(total / 1e6)


def test_rapl_adds_packages_and_counts_nothing_twice(tmp_path: Path) -> None:
    zones = [
        Zone(tmp_path / "intel-rapl:0", "package-0", 10**9),
        Zone(tmp_path / "intel-rapl:10", "package-10", 10**9),
        Zone(tmp_path / "intel-rapl:0:0", "core", 10**9),  # within the package
        Zone(tmp_path / "intel-rapl:1", "psys", 10**9),  # around the package
    ]
    meter = Rapl(tmp_path)
    for zone in zones:
        zone.set(3_000_000)
    assert meter.read() == 6.0


def test_rapl_that_cannot_be_read_is_no_counter(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no readable RAPL zone"):
        Rapl(tmp_path)
    zone = Zone(tmp_path / "intel-rapl:0", "package-0", 10**9)
    (zone.path / "energy_uj").write_text("")
    with pytest.raises(OSError, match="no readable RAPL zone"):
        Rapl(tmp_path)


class NVMLError(Exception):
    """Like pynvml's."""


class FakeNvml(ModuleType):
    """What `Nvml` uses of pynvml; energy in millijoules by device."""

    NVMLError = NVMLError

    def __init__(self, millijoules: list[int], broken: str = "") -> None:
        super().__init__("pynvml")
        self.millijoules, self._broken, self.initialised = millijoules, broken, False

    def _call(self, name: str) -> None:
        if name == self._broken:
            raise NVMLError(name)

    def nvmlInit(self) -> None:
        self._call("init")
        self.initialised = True

    def nvmlDeviceGetCount(self) -> int:
        assert self.initialised
        return len(self.millijoules)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> tuple[str, int]:
        return ("handle", index)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: tuple[str, int]) -> int:
        self._call("energy")
        return self.millijoules[handle[1]]


def test_nvml_adds_devices_since_it_was_opened() -> None:
    pynvml = FakeNvml([5_000_000, 7_000])
    meter = Nvml(pynvml)
    assert meter.read() == 0.0
    pynvml.millijoules = [5_001_500, 7_250]
    assert meter.read() == pytest.approx(1.75)


def test_nvml_without_a_device_is_no_counter() -> None:
    with pytest.raises(OSError, match="no device"):
        Nvml(FakeNvml([]))


@pytest.mark.parametrize(
    ("pynvml", "rapl", "source"),
    [
        (FakeNvml([1]), True, "rapl+nvml"),
        (FakeNvml([1]), False, "nvml"),
        (FakeNvml([]), True, "rapl"),
        (FakeNvml([1], broken="init"), True, "rapl"),
        (FakeNvml([1], broken="energy"), False, "unknown"),
        (None, True, "rapl"),
        (None, False, "unknown"),
    ],
)
def test_the_meter_takes_every_counter_there_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pynvml: FakeNvml | None,
    rapl: bool,
    source: str,
) -> None:
    zone = Zone(tmp_path / "intel-rapl:0", "package-0", 10**9) if rapl else None
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    meter = EnergyMeter.open(tmp_path)
    assert meter.source == source
    if source == "unknown":
        assert meter.read() is None
        return
    assert meter.read() == 0.0
    if zone is not None:
        zone.set(2_000_000)
    joules = 2.0 if rapl else 0.0
    if pynvml is not None and "nvml" in source:
        before = pynvml.millijoules
        pynvml.millijoules = [before[0] + 500]
        joules += 0.5
    assert meter.read() == pytest.approx(joules)


def test_memory_is_seen_now_and_at_its_peak() -> None:
    before = resident_bytes()
    block = bytearray(b"x") * (64 * 2**20)
    held = resident_bytes()
    assert held > before + 50 * 2**20
    assert peak_resident_bytes() >= held - 2**20
    del block
    assert peak_resident_bytes() >= before + 50 * 2**20


def test_the_age_of_a_process_includes_its_start() -> None:
    script = (
        "import time; time.sleep(0.3)\n"
        "from eke.budget.meters import process_age_s; print(process_age_s())"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    # The kernel counts a process's start in hundredths of a second.
    assert 0.28 <= float(done.stdout) <= time.monotonic() - started + 0.02
    assert process_age_s() > 0

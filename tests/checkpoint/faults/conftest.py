from pathlib import Path

import psutil
import pytest


@pytest.fixture
def growth_bytes():
    """By how much this process's memory grows at most while something is done."""

    def measure(work):
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak starts anew
        before = psutil.Process().memory_info().rss
        work()
        [peak] = [
            int(line.split()[1]) * 1024
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmHWM:")
        ]
        return peak - before

    return measure

"""What benchmarks share: interleaved arms, median and spread, CSV with provenance."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import os
import platform
import random
import statistics
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "accelerate", "numpy", "safetensors")


def interleaved(
    arms: Mapping[str, Callable[[], float]], repetitions: int, seed: int = 0
) -> dict[str, list[float]]:
    """Measure every arm once a repetition, each time in another order."""
    rng, results = random.Random(seed), {name: [] for name in arms}
    for repetition in range(repetitions):
        for name in rng.sample(sorted(arms), len(arms)):
            value = arms[name]()
            results[name].append(value)
            print(
                f"  repetition {repetition + 1}/{repetitions}  {name:<24} {value:,.4g}", flush=True
            )
    return results


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """25th percentile, median, 75th percentile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def provenance() -> dict[str, Any]:
    """Machine, versions, commit, date and load: what a figure means nothing without."""
    versions = {p: importlib.metadata.version(p) for p in PACKAGES}
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **versions,
        "load_1m": round(os.getloadavg()[0], 2),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def report(
    name: str, workload: str, unit: str, results: Mapping[str, list[float]], baseline: str
) -> None:
    """Print a table with ratios to the baseline, and append it to `results/NAME.csv`."""
    RESULTS.mkdir(exist_ok=True)
    path, about = RESULTS / f"{name}.csv", provenance()
    base = statistics.median(results[baseline])
    print(f"\n{name}: {workload}")
    rows = []
    for arm, values in results.items():
        low, middle, high = quartiles(values)
        ratio = middle / base
        print(f"  {arm:<24} {middle:>12,.4g} {unit}  [{low:,.4g}, {high:,.4g}]  x{ratio:.3f}")
        rows.append(
            {
                "arm": arm,
                "unit": unit,
                "p25": low,
                "median": middle,
                "p75": high,
                "n": len(values),
                "ratio_to_" + baseline.replace(" ", "_"): round(ratio, 4),
                "workload": workload,
                **about,
            }
        )
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        if new:
            writer.writeheader()
        writer.writerows(rows)

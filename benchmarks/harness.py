"""What benchmarks share: interleaved arms, each in a process of its own, medians and spread, the
repetition of what another program disturbed, and CSV rows with provenance.
"""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import machine
from benchmarks.claims import MUSTS, deciding, verdicts
from benchmarks.stats import enough_time, schedule, summary

MIB = int(os.environ.get("EKE_BENCH_MIB", "0"))
SCALE = float(os.environ.get("EKE_BENCH_SCALE", MIB / 1192 if MIB else 1.0))
"""Sizes of all states, relative to what the claims are about; below 1 it is only a try-out."""
REPETITIONS = int(os.environ.get("EKE_BENCH_REPETITIONS", "5"))
MINUTES = float(os.environ.get("EKE_BENCH_MINUTES", "inf"))
SEED = int(os.environ.get("EKE_BENCH_SEED", "0"))
THREADS = int(os.environ.get("EKE_BENCH_THREADS", len(os.sched_getaffinity(0))))
"""Of torch in every measuring process, whatever OMP_NUM_THREADS says."""
_HERE = Path(__file__).parent
RESULTS = Path(
    os.environ.get("EKE_BENCH_RESULTS", _HERE / ("results" if SCALE == 1 else "results/tryout"))
)
PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "transformers",
    "accelerate",
    "torch_checkpointing",
    "torchsnapshot",
    "pytorch-lightning",
    "online-dynamic-batching",
    "lhotse",
    "trl",
    "datasets",
)
MARK = "RESULT "
TRIES = 3
"""A repetition that was disturbed is repeated until it was not, or was tried this often."""
LIMIT_S = 900.0


Key = tuple[str, str]
"""Workload and arm."""


@dataclass
class Found:
    """What was measured of one arm: values by metric, what failed, how much was repeated."""

    values: dict[str, list[float]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    repeated: int = 0
    disturbed: int = 0

    def add(self, metrics: Mapping[str, list[float]], quiet: bool) -> None:
        """One process's values, by metric."""
        for metric, values in metrics.items():
            self.values.setdefault(metric, []).extend(values)
        self.disturbed += not quiet


Results = dict[Key, Found]


def in_process(script: str, workload: str, arm: str) -> dict[str, Any]:
    """Measure one arm once, in a process of its own.

    Returns:
        `metrics` and `machine` (a `Contamination`), or `error`.
    """
    command = [sys.executable, "-m", f"benchmarks.{script}", "--measure", workload, arm]
    os.sync()
    with tempfile.TemporaryDirectory(
        prefix="eke-bench-", dir=os.environ.get("EKE_BENCH_DIR")
    ) as where:
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
                env={**os.environ, "EKE_BENCH_HERE": where, "OMP_NUM_THREADS": str(THREADS)},
            )
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {LIMIT_S:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return found
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return {"error": f"exit code {done.returncode}: {last[:300]}"}


def measuring(measure: Callable[[str, str], None]) -> bool:
    """Whether this process is one of `in_process`; it then measures, and never returns.

    Peers leave threads and processes behind that would keep an ordinary end waiting.
    """
    if len(sys.argv) != 4 or sys.argv[1] != "--measure":
        return False

    def failed(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        traceback.print_exception(kind, error, trace)
        _hand_over({"error": f"{kind.__name__}: {str(error).strip()[-300:]}"})

    sys.excepthook = failed
    measure(sys.argv[2], sys.argv[3])
    raise SystemError("a measurement ended without an answer")


def answer(metrics: Mapping[str, list[float]], found: machine.Contamination) -> None:
    """How a measuring process hands its result over. Ends the process."""
    _hand_over({"metrics": metrics, "machine": machine.as_row(found)})


def _hand_over(row: Mapping[str, Any]) -> None:
    print(MARK + json.dumps(row), flush=True)
    for child in machine.descendants():
        child.kill()
    os._exit(0)


def collect(
    script: str,
    times: Mapping[Key, int],
    seconds: Mapping[Key, float],
    minutes: float = MINUTES,
    tries: int = TRIES,
) -> Results:
    """Measure all arms, round by round, as long as whole rounds fit into the time.

    Args:
        script: the benchmark's module.
        times: how often to measure each workload and arm.
        seconds: about how long one takes, for the estimate printed first.
        tries: how often at most a measurement is made until it is not disturbed.
    """
    guess = sum(seconds[key] * times[key] for key in times) / 60
    touched = machine.touch_memory(int(16 * 2**30 * min(1.0, SCALE * 2)))
    print(
        f"{script}: {len(times)} arms, {sum(times.values())} processes, about {guess:.0f} minutes"
        + ("" if SCALE == 1 else f" at full size; this is scale {SCALE:.3g}, a try-out")
        + f"; load {os.getloadavg()[0]:.2f}; {touched / 2**30:.1f} GiB touched",
        flush=True,
    )
    results: Results = {key: Found() for key in times}
    began = time.perf_counter()
    rounds = schedule(times, SEED, last=times.keys() - deciding(script))
    done_s = 0.0
    for number, keys in enumerate(rounds):
        next_s = sum(seconds[key] for key in keys)
        if not enough_time(time.perf_counter() - began, done_s, next_s, minutes * 60):
            print(f"  stopped after {number} of {len(rounds)} rounds: the time is up", flush=True)
            break
        for key in keys:
            _measure(script, key, results[key], f"round {number + 1}/{len(rounds)}", tries)
        done_s += next_s
    return results


def _measure(script: str, key: Key, found: Found, where: str, tries: int) -> None:
    for attempt in range(tries):
        started = time.perf_counter()
        row = in_process(script, *key)
        took_s = time.perf_counter() - started
        label = f"  {where}  {key[0]:<9} {key[1]:<24} {took_s:5.1f} s  "
        if "error" in row:
            found.errors.append(row["error"])
            print(label + "FAILED " + row["error"], flush=True)
            return
        about = machine.Contamination(**row["machine"])
        if about.quiet or attempt == tries - 1 or SCALE != 1:
            found.add(row["metrics"], about.quiet)
            shown = "  ".join(
                f"{m} {statistics.median(v):.4g}" for m, v in row["metrics"].items() if v
            )
            print(label + shown + ("" if about.quiet else "  (disturbed)"), flush=True)
            return
        found.repeated += 1
        print(
            label + f"disturbed by {about.foreign_cores:.2f} cores, {about.steal_cores:.2f} "
            "stolen: again",
            flush=True,
        )


def provenance() -> dict[str, Any]:
    """Machine, versions, commit, date and load: what a figure means nothing without."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=_HERE,
    ).stdout.strip()
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    where = Path(os.environ.get("EKE_BENCH_DIR", tempfile.gettempdir())).resolve()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "scale": SCALE,
        "seed": SEED,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": THREADS,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "disk": _disk(where),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **versions,
        "load_1m": round(os.getloadavg()[0], 2),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _disk(where: Path) -> str:
    """File system and device that hold a directory."""
    holding = [p for p in psutil.disk_partitions(all=True) if where.is_relative_to(p.mountpoint)]
    best = max(holding, key=lambda p: len(p.mountpoint), default=None)
    return f"{best.fstype} on {best.device}" if best else "unknown"


def append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows to a CSV file, under a header made of the first row's keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        if new:
            writer.writeheader()
        writer.writerows(rows)


def publish(script: str, results: Results, units: Mapping[str, str]) -> bool:
    """Print every figure and every verdict, and append both to CSV files.

    Returns:
        Whether every claim of this script that could be computed is met.
    """
    about = provenance()
    rows = []
    print(f"\n{script}: median [quartiles] p95")
    for (workload, arm), found in results.items():
        common = {"workload": workload, "arm": arm}
        noise = {"repeated": found.repeated, "disturbed": found.disturbed}
        for metric, values in found.values.items():
            if not values:
                continue
            s = summary(values)
            print(
                f"  {workload:<9} {arm:<24} {metric:<11} {s['median']:>11,.4g} "
                f"[{s['p25']:,.4g}, {s['p75']:,.4g}] {s['p95']:,.4g} {units[metric]}"
            )
            raw = " ".join(f"{v:.6g}" for v in values)
            row = {**common, "metric": metric, "unit": units[metric], **s, "error": ""}
            rows.append({**row, **noise, "values": raw, **about})
        if found.errors:
            empty = dict.fromkeys(("min", "p25", "median", "p75", "p95", "max"), "")
            row = {**common, "metric": "failed", "unit": "processes", "n": len(found.errors)}
            print(f"  {workload:<9} {arm:<24} FAILED {len(found.errors)} x: {found.errors[-1]}")
            rows.append({**row, **empty, "error": found.errors[-1], **noise, "values": "", **about})
    append(RESULTS / f"{script}.csv", rows)
    return publish_claims(script, results, about)


def publish_claims(script: str, results: Results, about: Mapping[str, Any]) -> bool:
    """Print every verdict, and append it to a CSV file.

    Returns:
        Whether every claim of this script that could be computed is met.
    """
    values = {
        (workload, arm, metric): found
        for (workload, arm), one in results.items()
        for metric, found in one.values.items()
    }
    judged = verdicts(script, values)
    print(f"\n{script}: what must hold")
    rows = []
    for one in judged:
        print(f"  {one.word:<12} {one.claim.text:<74} {one.shown}")
        rows.append({**one.row(MUSTS[one.claim.row]), **about})
    append(RESULTS / f"{script}_claims.csv", rows)
    return all(one.met is not False for one in judged)


def interleaved(
    arms: Mapping[str, Callable[[], float]], repetitions: int, seed: int = 0
) -> dict[str, list[float]]:
    """Measure every arm in this process, once a repetition, each time in another order."""
    results: dict[str, list[float]] = {name: [] for name in arms}
    for number, names in enumerate(schedule(dict.fromkeys(arms, repetitions), seed)):
        for name in names:
            value = arms[name]()
            results[name].append(value)
            print(f"  repetition {number + 1}/{repetitions}  {name:<24} {value:,.4g}", flush=True)
    return results


def report(
    name: str, workload: str, unit: str, results: Mapping[str, list[float]], baseline: str
) -> None:
    """Print a table with ratios to the baseline, and append it to `results/NAME.csv`."""
    about, base = provenance(), statistics.median(results[baseline])
    print(f"\n{name}: {workload}")
    rows = []
    for arm, values in results.items():
        s = summary(values)
        ratio = s["median"] / base
        print(
            f"  {arm:<24} {s['median']:>12,.4g} {unit}  [{s['p25']:,.4g}, {s['p75']:,.4g}]  "
            f"x{ratio:.3f}"
        )
        raw = " ".join(f"{v:.6g}" for v in values)
        row = {"workload": workload, "arm": arm, "unit": unit, **s}
        rows.append({**row, "baseline": baseline, "ratio": round(ratio, 4), "values": raw, **about})
    append(RESULTS / f"{name}.csv", rows)


def arms_wanted(keys: Iterable[Key]) -> list[Key]:
    """Those that `EKE_BENCH_ONLY` names: workloads or arms, divided by commas; all without it."""
    only = [x.strip() for x in os.environ.get("EKE_BENCH_ONLY", "").split(",") if x.strip()]
    return [key for key in keys if not only or key[0] in only or key[1] in only]

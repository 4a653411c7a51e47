"""Claims: no job of ranks of any pace hangs, loses a sample or doubles one; and going on near the
end of a million samples costs what it costs near the beginning.

`simulated ranks`, `processes`: the slow tests of `tests/batching`, which draw jobs at random; what
is counted is jobs of tests that passed. They need `pytest` and what the tests import, and some
minutes. `1e6 samples`: CPU time of `load_state_dict` and the first step after it, and the samples
that they read, at two places of an epoch; the state is that of a first step, moved there.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.batching_claims import EARLY, JOBS, LATE, MILLION, PROCESSES, ROBUSTNESS, SIMULATED
from benchmarks.harness import REPETITIONS, SEED, Found, Results, arms_wanted, publish
from benchmarks.stats import schedule

UNITS = {"jobs": "jobs", "read": "samples", "resume": "ms"}
TESTS = Path(__file__).parent.parent / "tests" / "batching"
DRAWN = {
    SIMULATED: {"test_10_000_random_jobs": 1000},
    PROCESSES: {"test_180_random_runs": 60, "test_20_killed_runs": 20},
}
"""Workload -> test -> jobs of each of its cases."""
SAMPLES, WINDOW = 1_000_000, 1024
CURSORS = {EARLY: 10 * WINDOW, LATE: 900 * WINDOW}


def plan(repetitions: int) -> dict[tuple[str, str], int]:
    """How often each workload and arm is measured."""
    jobs = {(workload, JOBS): 1 for workload in DRAWN}
    return jobs | {(MILLION, arm): repetitions for arm in CURSORS}


# ---------------------------------------------------------------------- jobs


def passed(report: str, workload: str) -> int:
    """Jobs of the cases that passed, by pytest's XML report; pure."""
    jobs = 0
    for case in ET.fromstring(report).iter("testcase"):
        name = re.sub(r"\[.*", "", case.get("name", ""))
        if all(case.find(kind) is None for kind in ("failure", "error", "skipped")):
            jobs += DRAWN[workload].get(name, 0)
    return jobs


def run_jobs(workload: str) -> Found:
    """All of one kind."""
    found = Found()
    if importlib.util.find_spec("pytest") is None:
        found.errors.append("pytest is not installed here")
        return found
    with tempfile.TemporaryDirectory(prefix="eke-bench-") as where:
        report = Path(where) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow"]
        command += ["-k", " or ".join(DRAWN[workload]), f"--junitxml={report}", str(TESTS)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=TESTS.parent.parent,
        )
        if done.returncode not in (0, 1):
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            found.errors.append(f"pytest ended with {done.returncode}: {last}")
            return found
        found.add({"jobs": [float(passed(report.read_text(), workload))]}, quiet=True)
    return found


# ---------------------------------------------------------------------- resume


class Counted:
    """A million samples of 100 tokens, and how many were read."""

    def __init__(self) -> None:
        self.read = 0
        self._item = {"input_ids": np.ones(100, np.int64), "labels": np.ones(100, np.int64)}

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return self._item


def resumed(arm: str) -> dict[str, list[float]]:
    """One resume."""
    from eke.batching import DynamicLoader

    dataset = Counted()
    settings = {"micro_tokens": 4096, "per_step": "tokens:16384", "window": WINDOW}
    with DynamicLoader(dataset, **settings) as loader:  # type: ignore[arg-type]
        state = {**next(loader.blocks()).position, "cursor": CURSORS[arm]}
        state |= {"taken": 0, "delivered": [], "waiting": []}
    with DynamicLoader(dataset, **settings) as loader:  # type: ignore[arg-type]
        dataset.read, began = 0, time.process_time()
        loader.load_state_dict(state)
        next(loader.blocks())
        return {
            "resume": [1e3 * (time.process_time() - began)],
            "read": [float(dataset.read)],
        }


def main() -> None:
    wanted = set(arms_wanted(plan(1)))
    results: Results = {}
    resumes = {
        key: n + 1 for key, n in plan(REPETITIONS).items() if key in wanted and key[0] == MILLION
    }
    for number, keys in enumerate(schedule(resumes, SEED)):
        for key in keys:
            metrics = resumed(key[1])
            if number:  # the first warms up
                results.setdefault(key, Found()).add(metrics, quiet=True)
    for workload in DRAWN:
        if (workload, JOBS) in wanted:
            print(f"  {workload}: the slow tests", flush=True)
            results[workload, JOBS] = run_jobs(workload)
    publish(ROBUSTNESS, results, UNITS)


if __name__ == "__main__":
    main()

"""Two real processes under gloo and DDP, with and without workers of each start method."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest


def run_job(start_ranks: Any, scenarios: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """What each rank saw, by scenario. A job that hangs is killed and fails the test."""
    script = Path(__file__).with_name("two_processes.py")
    ranks = start_ranks(2, script, *scenarios)
    try:
        outputs = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    lines = zip(*(out.splitlines() for out, _ in outputs), strict=True)
    return {
        scenario: [json.loads(line) for line in pair]
        for scenario, pair in zip(scenarios, lines, strict=True)
    }


def check_in_step(results: list[dict[str, Any]], usable: list[int]) -> None:
    assert results[0]["steps"] == results[1]["steps"] != []
    assert results[0]["gradient"] == results[1]["gradient"]
    seen = sorted(tuple(uid) for result in results for uid in result["uids"])
    assert seen == [(epoch, i) for epoch in range(2) for i in usable]
    assert [result["children"] for result in results] == [0, 0]


def check_same_error(results: list[dict[str, Any]]) -> None:
    text = "rank 1 of 2: sample 33: ValueError: torn record."
    assert [result["error"] for result in results] == [text, text]
    assert results[0]["steps"] == results[1]["steps"] != []
    assert [result["children"] for result in results] == [0, 0]


def test_two_processes_stay_in_step_and_fail_together(start_ranks: Any) -> None:
    results = run_job(
        start_ranks,
        ["uneven:none", "bad_item:none", "one_rank_empty:none", "bad_item:fork", "uneven:fork"],
    )
    check_in_step(results["uneven:none"], list(range(75)))
    check_same_error(results["bad_item:none"])
    check_in_step(results["one_rank_empty:none"], [0, 2, 4])
    assert [result["dummies"] > 0 for result in results["one_rank_empty:none"]] == [False, True]
    check_same_error(results["bad_item:fork"])
    assert results["uneven:fork"] == results["uneven:none"]


@pytest.mark.slow
def test_workers_that_do_not_fork(start_ranks: Any) -> None:
    results = run_job(
        start_ranks, ["uneven:none", "uneven:spawn", "bad_item:spawn", "uneven:forkserver"]
    )
    assert results["uneven:spawn"] == results["uneven:forkserver"] == results["uneven:none"]
    check_in_step(results["uneven:none"], list(range(75)))
    check_same_error(results["bad_item:spawn"])

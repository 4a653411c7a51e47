"""Real processes under gloo, with and without workers of each start method: in training under DDP,
in random runs, and with a rank killed."""

from __future__ import annotations

import json
import random
import runpy
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

PLAN_OF = runpy.run_path(str(Path(__file__).with_name("random_jobs.py")))["plan_of"]


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
        [
            "uneven:none", "bad_item:none", "one_rank_empty:none", "bad_item:fork", "uneven:fork",
            "stream_uneven:none", "stream_bad_item:none", "stream_uneven:fork",
            "stream_bad_item:fork",
        ],
    )  # fmt: skip
    check_in_step(results["uneven:none"], list(range(75)))
    check_same_error(results["bad_item:none"])
    check_in_step(results["one_rank_empty:none"], [0, 2, 4])
    assert [result["dummies"] > 0 for result in results["one_rank_empty:none"]] == [False, True]
    check_same_error(results["bad_item:fork"])
    assert results["uneven:fork"] == results["uneven:none"]
    check_in_step(results["stream_uneven:none"], list(range(75)))
    check_same_error(results["stream_bad_item:none"])
    check_same_error(results["stream_bad_item:fork"])
    assert results["stream_uneven:fork"] == results["stream_uneven:none"]


@pytest.mark.slow
def test_workers_that_do_not_fork(start_ranks: Any) -> None:
    results = run_job(
        start_ranks,
        [
            "uneven:none", "uneven:spawn", "bad_item:spawn", "uneven:forkserver",
            "stream_uneven:none", "stream_uneven:spawn", "stream_uneven:forkserver",
        ],
    )  # fmt: skip
    assert results["uneven:spawn"] == results["uneven:forkserver"] == results["uneven:none"]
    check_in_step(results["uneven:none"], list(range(75)))
    check_same_error(results["bad_item:spawn"])
    streams = [results[f"stream_uneven:{m}"] for m in ("none", "spawn", "forkserver")]
    assert streams[0] == streams[1] == streams[2]
    check_in_step(streams[0], list(range(75)))


# ------------------------------------------------------------------ random runs, rank by rank


def run_random(
    start_ranks: Any,
    size: int,
    runs: Sequence[str],
    killed: int | None = None,
    limit_s: float = 100,
) -> dict[int, list[list[dict[str, Any]]]]:
    """The lines of each run, rank by rank."""
    script = Path(__file__).with_name("random_jobs.py")
    ranks = start_ranks(size, script, *runs)
    try:
        outputs = [rank.communicate(timeout=limit_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    expected = [-signal.SIGKILL if rank == killed else 0 for rank in range(size)]
    assert [rank.returncode for rank in ranks] == expected, outputs
    told: dict[int, list[list[dict[str, Any]]]] = {}
    for rank, (out, _) in enumerate(outputs):
        for line in map(json.loads, out.splitlines()):
            told.setdefault(line["run"], [[] for _ in range(size)])[rank].append(line)
    return told


def usable(plan: dict[str, Any]) -> list[tuple[int, int]]:
    skip = plan["settings"]["overlength"] == "skip"
    cap = plan["settings"]["micro_tokens"]
    good = [i for i, n in enumerate(plan["lengths"]) if n and not (skip and n > cap)]
    return [(epoch, i) for epoch in range(plan["epochs"]) for i in good]


def delivered(ranks: Sequence[Sequence[dict[str, Any]]], steps: int) -> list[tuple[int, int]]:
    """What all ranks saw in their first steps, which must be alike but for the samples."""
    for lines in zip(*(rank[:steps] for rank in ranks), strict=True):
        assert len({(line["length"], json.dumps(line["state"])) for line in lines}) == 1
    return [tuple(uid) for rank in ranks for line in rank[:steps] for uid in line["uids"]]


def check_whole_run(number: int, ranks: Sequence[Sequence[dict[str, Any]]]) -> None:
    plan = PLAN_OF(number)
    ends = [rank[-1] for rank in ranks]
    assert [(end["error"], end["left"], end["closed_soon"]) for end in ends] == (
        [("", [], True)] * len(ends)
    )
    assert len({len(rank) for rank in ranks}) == 1
    assert sorted(delivered(ranks, len(ranks[0]) - 1)) == usable(plan)
    beside = Counter(tuple(uid) for end in ends for uid in end["beside"])
    assert beside <= Counter(usable(plan))
    assert bool(beside) == plan["second"]


def check_killed_and_resumed(
    start_ranks: Any, folder: Path, number: int, size: int, step: int, victim: int, size_after: int
) -> bool:
    """The survivors name the rank; from the last step that all finished another job goes on.

    Returns:
        Whether they asked it for anything: a rank that is killed in the last round of the run has
        given all that the others need, and they end as if it lived.
    """
    plan = PLAN_OF(number)
    runs = [f"{number}:kill:{step}:{victim}"]
    ranks = run_random(start_ranks, size, runs, victim)[number]
    asked, ended = set(), []
    for rank, lines in enumerate(ranks):
        if rank != victim:
            end = lines.pop()
            asked.add(bool(end["error"]))
            if end["error"]:
                assert f"rank {victim} of {size}" in end["error"]
            else:
                assert lines[-1]["state"]["epoch"] == plan["epochs"]
                ended.append(lines)
            assert (end["left"], end["closed_soon"]) == ([], True)
    if ended:  # alike, and nothing twice
        assert len(set(map(len, ended))) == 1
        alone = Counter(delivered(ended, len(ended[0])))
        assert alone <= Counter(usable(plan))
    done = min(map(len, ranks))
    assert done == step + 1
    before = delivered(ranks, done)
    state = folder / f"{number}.json"
    state.write_text(json.dumps(ranks[0][done - 1]["state"]))
    after = run_random(start_ranks, size_after, [f"from:{state}", str(number)])[number]
    assert [rank[-1]["error"] for rank in after] == [""] * size_after
    assert sorted(before + delivered(after, len(after[0]) - 1)) == usable(plan)
    return asked == {True}


def test_random_runs_deliver_every_sample_once(start_ranks: Any) -> None:
    """Without workers, forked ones and a server's; five epochs, breaks, a second loader."""
    for number, ranks in run_random(start_ranks, 2, ["12", "13", "16", "25"]).items():
        check_whole_run(number, ranks)


def test_a_killed_rank_is_named_and_its_samples_are_not_lost(
    start_ranks: Any, tmp_path: Path
) -> None:
    assert check_killed_and_resumed(
        start_ranks, tmp_path, 21, size=3, step=2, victim=1, size_after=2
    )


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_180_random_runs(start_ranks: Any, size: int) -> None:
    numbers = [str(1000 * size + i) for i in range(60)]
    for number, ranks in run_random(start_ranks, size, numbers, limit_s=2900).items():
        check_whole_run(number, ranks)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_20_killed_runs(start_ranks: Any, tmp_path: Path) -> None:
    named = 0
    for number in range(20):
        rng = random.Random(number)
        size = rng.randint(2, 4)
        # Without workers or with forked ones, so that 40 jobs take minutes.
        run, victim = 5000 + 5 * number + rng.randint(0, 1), rng.randrange(size)
        after = rng.randint(1, 4)
        named += check_killed_and_resumed(start_ranks, tmp_path, run, size, 1, victim, after)
    assert named >= 12

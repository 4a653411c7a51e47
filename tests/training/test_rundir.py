"""A run's directory: one owner, whole files, and no other run in it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.budget import Bill, Ledger
from eke.budget.jsonl import Record, effective, read_records
from eke.errors import EkeError, InputError
from eke.training.config import RunConfig
from eke.training.rundir import (
    FREE_KEYS,
    FREE_SECTIONS,
    RunDir,
    continued,
    differences,
    read_status,
    silent_starts,
)


def config_with(**sections: dict[str, Any]) -> RunConfig:
    return RunConfig.from_mapping({"run": {"name": "r", **sections.pop("run", {})}, **sections})


# ---------------------------------------------------------------------- the lock

HOLDER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from eke.errors import InputError
    from eke.training.rundir import RunDir

    run = RunDir(Path(sys.argv[1]))
    try:
        run.open()
    except InputError as error:
        print(error, flush=True)
        sys.exit(2)
    print("open", flush=True)
    sys.stdin.read()
    """
)


def start_holder(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    first = start_holder(tmp_path / "r")
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "open\n"
        with pytest.raises(InputError, match=r"another process is training in this .*run\.name"):
            RunDir(tmp_path / "r").open()
        second = start_holder(tmp_path / "r")
        out, _ = second.communicate(timeout=60)
        assert second.returncode == 2
        assert "another process" in out
    finally:
        first.kill()  # as hard as it gets: the lock goes with the process
        first.communicate(timeout=60)
    run = RunDir(tmp_path / "r")
    run.open()
    run.close()
    third = start_holder(tmp_path / "r")
    out, _ = third.communicate(timeout=60)  # closing its stdin lets it go
    assert (third.returncode, out) == (0, "open\n")


def test_a_damaged_log_leaves_the_directory_unlocked(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("nonsense\n{}\n")
    with pytest.raises(EkeError, match=r"line 1 of a run's log is damaged"):
        RunDir(tmp_path).open()
    (tmp_path / "metrics.jsonl").unlink()
    holder = start_holder(tmp_path)
    out, _ = holder.communicate(timeout=60)
    assert (holder.returncode, out) == (0, "open\n")


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write to the run's directory .*Choose another"):
        RunDir(tmp_path / "file" / "r").open()


# ---------------------------------------------------------------------- which run it is

RESOLVED = config_with(
    run={"device": "cpu"},
    model={"dtype": "fp32"},
    data={"max_length": 512, "overlength": "truncate", "eval_examples": 32, "workers": 1},
    budget={"steps": 100},
    batch={"per_step": "tokens:512", "micro_tokens": 512, "order_seed": 0},
    optimizer={"lr": 0.001, "warmup_steps": 5},
)


def test_what_is_left_to_eke_agrees_with_anything() -> None:
    assert differences(RESOLVED, config_with(budget={"steps": 100})) == []
    assert differences(RESOLVED, RESOLVED) == []


def test_every_key_that_differs_is_listed() -> None:
    asked = config_with(
        budget={"steps": 200, "tokens": 900},
        optimizer={"lr": 0.1},
        model={"tokenizer": "x"},
        log={"every": 7},
    )
    assert differences(RESOLVED, asked) == [
        ("model.tokenizer", None, "x"),
        ("budget.tokens", None, 900.0),
        ("optimizer.lr", 0.001, 0.1),
    ]


def test_a_limit_that_is_gone_is_a_difference() -> None:
    assert differences(RESOLVED, config_with()) == [("budget.steps", 100, None)]


# A value other than RESOLVED's, for every key that eke does not fill in with None.
OTHER: dict[str, dict[str, Any]] = {
    "run": {"name": "s", "dir": "d", "seed": 1, "deterministic": False, "device": "cuda"},
    "model": {"source": "s", "tokenizer": "t", "dtype": "bf16"},
    "data": {
        "train": "t.jsonl",
        "eval": "e.jsonl",
        "format": "chat",
        "max_length": 256,
        "overlength": "skip",
        "eval_examples": 64,
        "workers": 4,
    },
    "budget": {
        "memory": "9GiB",
        "wall_time": "1h",
        "flops": 1e15,
        "tokens": "1M",
        "steps": 9,
        "epochs": 2,
        "energy": "1MJ",
        "price_per_hour": "1 USD",
    },
    "batch": {"per_step": "samples:8", "micro_tokens": 1024, "window": 7, "order_seed": 3},
    "optimizer": {
        "lr": 0.1,
        "betas": (0.8, 0.9),
        "eps": 1e-6,
        "weight_decay": 0.0,
        "clip": 0.0,
        "warmup_steps": 1,
    },
    "governor": {
        "actions": (),
        "epsilon": 0.1,
        "min_gain": 0.1,
        "patience": 3,
        "reserve": 0.2,
        "eval_every": "9 steps",
        "eval_share": 0.1,
    },
    "checkpoint": {"every": "9 steps", "keep_last": 9, "keep_every": "9 steps", "mtbf": "1h"},
    "log": {"every": 9},
}
ALL_KEYS = [(s, k) for s, keys in OTHER.items() for k in keys]


@given(st.sets(st.sampled_from(ALL_KEYS), max_size=5))
def test_a_change_is_a_difference_or_is_free(keys: set[tuple[str, str]]) -> None:
    values: dict[str, dict[str, Any]] = {}
    for section, key in keys:
        values.setdefault(section, {})[key] = OTHER[section][key]
    changed = RESOLVED.with_values(values)
    free = {(s, k) for s, k in keys if s in FREE_SECTIONS or (s, k) in FREE_KEYS}
    free |= keys & {("budget", "steps")}  # a limit that is there may be raised
    found = {name for name, _, _ in differences(RESOLVED, changed)}
    assert found == {f"{s}.{k}" for s, k in keys - free}
    if keys == free:
        assert continued(RESOLVED, changed) == changed
        assert continued(changed, RESOLVED) == RESOLVED


def test_what_is_left_open_goes_on_as_it_was() -> None:
    asked = config_with(run={"dir": "moved"}, log={"every": 3}, budget={"steps": 100})
    going_on = continued(RESOLVED, asked)
    assert (going_on.run.dir, going_on.log.every) == ("moved", 3)
    assert going_on.data.workers == 1
    assert differences(RESOLVED, going_on) == []


# ---------------------------------------------------------------------- stored_config


def test_a_new_or_empty_directory_has_no_configuration(tmp_path: Path) -> None:
    assert RunDir(tmp_path / "none").stored_config(RESOLVED) is None
    assert RunDir(tmp_path).stored_config(RESOLVED) is None
    (tmp_path / ".DS_Store").write_text("")
    assert RunDir(tmp_path).stored_config(RESOLVED) is None


def test_a_file_or_foreign_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"holds something that is not a run.*new or empty"):
        RunDir(tmp_path).stored_config(RESOLVED)
    with pytest.raises(InputError, match=r"is a file; got '.*thesis\.tex'\. Choose another"):
        RunDir(tmp_path / "thesis.tex").stored_config(RESOLVED)


def test_the_stored_configuration_comes_back(tmp_path: Path) -> None:
    RunDir(tmp_path).write_config(RESOLVED)
    assert RunDir(tmp_path).stored_config(config_with(budget={"steps": 100})) == RESOLVED


def test_another_configuration_is_refused_with_each_key(tmp_path: Path) -> None:
    RunDir(tmp_path).write_config(RESOLVED)
    asked = config_with(budget={"steps": 200, "tokens": 900}, optimizer={"lr": 0.1})
    with pytest.raises(InputError) as caught:
        RunDir(tmp_path).stored_config(asked)
    message = str(caught.value)
    assert "budget.tokens was None, is now 900" in message
    assert "optimizer.lr was 0.001, is now 0.1" in message
    assert f"train from {tmp_path / 'run.toml'}" in message
    assert "--set run.name=" in message


# ---------------------------------------------------------------------- files


def test_status_and_json_are_written_whole(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert read_status(tmp_path) == {}
    run.write_status("running", step=3, pid=1)
    status = read_status(tmp_path)
    assert (status["state"], status["step"]) == ("running", 3)
    run.write_json("plan.json", {"a": [1, 2]})
    assert json.loads((tmp_path / "plan.json").read_text()) == {"a": [1, 2]}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.json", "status.json"]
    (tmp_path / "status.json").write_text('{"state": "run')
    assert read_status(tmp_path) == {}


def test_going_back_marks_what_came_after_as_undone(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.open()
    run.ledger.add(Bill("t", "train", 1, seconds=1.0))
    run.metrics.append({"kind": "step", "step": 1})
    run.decisions.append({"kind": "decision", "step": 1})
    offsets = run.offsets()
    run.ledger.add(Bill("t", "train", 2, seconds=2.0))
    run.metrics.append({"kind": "step", "step": 2})
    run.decisions.append({"kind": "decision", "step": 2})
    run.rewind(offsets, step=1)
    run.metrics.append({"kind": "step", "step": 2, "again": True})
    assert run.ledger.totals()["train"]["seconds"] == 1
    assert run.ledger.totals()["lost"]["seconds"] == 2
    assert run.ledger.spent("seconds") == 3
    run.close()
    kept, undone = effective(read_records(tmp_path / "metrics.jsonl"))
    assert [r.value for r in kept] == [
        {"kind": "step", "step": 1},
        {"kind": "step", "step": 2, "again": True},
    ]
    assert [r.value["step"] for r in undone] == [2]
    kept, undone = effective(read_records(tmp_path / "decisions.jsonl"))
    assert ([r.value["step"] for r in kept], [r.value["step"] for r in undone]) == ([1], [2])
    with Ledger(tmp_path / "ledger.jsonl") as again:
        assert again.totals()["lost"]["seconds"] == 2


def test_discarding_a_new_directory_removes_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "r")
    run.open()
    run.write_config(RESOLVED)
    run.discard()
    assert not (tmp_path / "runs" / "r").exists()
    assert (tmp_path / "runs").is_dir()


def test_discarding_leaves_what_was_there_before(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("precious")
    run = RunDir(tmp_path)
    assert run.stored_config(RESOLVED) is None
    run.open()
    run.write_config(RESOLVED)
    (run.checkpoints / "step").mkdir(parents=True)
    run.discard()
    assert [p.name for p in tmp_path.iterdir()] == [".git"]
    assert (tmp_path / ".git" / "HEAD").read_text() == "precious"


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.close()
    run.open()
    run.close()
    run.close()


def test_a_run_that_met_too_long_a_sample_may_be_told_what_to_do_with_it() -> None:
    def with_policy(policy: str) -> RunConfig:
        return RunConfig.from_mapping({"data": {"overlength": policy}})

    assert differences(with_policy("error"), with_policy("skip")) == []
    assert continued(with_policy("error"), with_policy("skip")).data.overlength == "skip"
    assert continued(with_policy("error"), with_policy("auto")).data.overlength == "error"
    changed = differences(with_policy("skip"), with_policy("truncate"))
    assert [key for key, _, _ in changed] == ["data.overlength"]


def test_starts_that_were_killed_are_counted_until_one_is_billed() -> None:
    def counted(*kinds: str) -> int:
        values = [
            {"kind": "opened"} if k == "opened" else {"kind": "bill", "what": k} for k in kinds
        ]
        return silent_starts([Record(i, value) for i, value in enumerate(values)])

    assert counted() == 0
    assert counted("opened", "startup", "train") == 0
    assert counted("opened", "startup", "train", "opened", "opened") == 2
    assert counted("opened", "opened", "startup") == 0
    assert counted("opened") == 1


def test_a_first_start_that_was_killed_does_not_bar_the_next(tmp_path: Path) -> None:
    killed = RunDir(tmp_path / "run")
    killed.open()
    killed.close()
    again = RunDir(tmp_path / "run")
    assert again.stored_config(RunConfig()) is None
    again.open()
    assert again.silent_starts == 1
    again.close()

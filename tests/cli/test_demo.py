"""The demonstration: how it prepares, waits and compares; and the whole of it, really run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from eke.budget import Ledger
from eke.budget.jsonl import JsonlFile
from eke.cli import demo
from eke.cli.demo import LEAST_FLOPS, Kill, Story, comparable
from eke.errors import EkeError, InputError
from eke.training.config import RunConfig


def story(folder: Path, flops: str = "4e12") -> Story:
    return Story(folder, flops, Console(quiet=True))


def record(step: int, loss: float, phase: str = "stable") -> dict[str, Any]:
    return {"kind": "step", "step": step, "loss": loss, "phase": phase}


def logged(run: Path, *records: dict[str, Any]) -> None:
    with JsonlFile(run / "metrics.jsonl") as file:
        for each in records:
            file.append(each)


def commit(run: Path, step: int) -> None:
    folder = run / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "MANIFEST.json").write_text("{}")


def begin_save(run: Path, step: int, size: int) -> None:
    folder = run / "checkpoints" / f".tmp-step-{step:06d}-abc"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(size))


# ---------------------------------------------------------------------- preparing


@pytest.mark.parametrize(
    ("flops", "words"),
    [
        ("much", "cannot read --flops"),
        ("0", "too small"),
        (f"{LEAST_FLOPS * 0.99:g}", f"Use --flops {LEAST_FLOPS:g} or more"),
    ],
)
def test_a_budget_that_cannot_do_is_refused_before_anything_is_touched(
    tmp_path: Path, flops: str, words: str
) -> None:
    with pytest.raises(InputError) as caught:
        story(tmp_path / "new", flops)
    assert words in str(caught.value)
    assert not (tmp_path / "new").exists()


FILES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
NAMES = st.text(
    st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="/~"),
    min_size=1,
    max_size=12,
).filter(lambda name: name.strip(". ") != "" and len(name.encode()) < 200)


@FILES
@given(NAMES, st.sampled_from(["4e12", "4 TFLOP", "5T"]))
def test_its_configuration_is_one_whatever_the_folder_is_called(
    tmp_path: Path, name: str, flops: str
) -> None:
    tale = story(tmp_path / name, flops)
    tale.prepare()
    config = RunConfig.load(tmp_path / name / "demo.toml")
    assert config.run_dir == tmp_path / name / "demo" == tale.run
    assert config.budget.parse().flops == tale.flops


def test_an_earlier_demonstration_is_cleared_away_and_nothing_else(tmp_path: Path) -> None:
    for name in ("demo", "demo-reference", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.toml").write_text("")
    story(tmp_path).prepare()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["demo.toml", "mine"]


def test_something_else_at_its_place_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="holds something that is not a run") as caught:
        story(tmp_path).prepare()
    assert str(tmp_path / "demo") in str(caught.value)
    assert (tmp_path / "demo" / "thesis.tex").read_text() == "years of work"


def test_a_place_that_cannot_be_written(tmp_path: Path, eke: Callable[..., Any]) -> None:
    (tmp_path / "file").write_text("")
    ended = eke("demo", "--dir", tmp_path / "file")
    assert ended.code == 2
    assert f"cannot write to {tmp_path / 'file'}" in ended.err


# ---------------------------------------------------------------------- waiting for a save


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that would go on for long."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    yield process
    process.kill()
    process.wait()


def test_it_waits_for_the_first_bytes_of_a_save_after_two_committed(
    tmp_path: Path, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    tale = story(tmp_path)
    stages = iter(
        [
            lambda: begin_save(tale.run, 20, 100),  # under way, but nothing is committed yet
            lambda: commit(tale.run, 10),
            lambda: commit(tale.run, 15),
        ]
    )
    begin_save(tale.run, 12, 0)  # an attempt without a byte

    def next_stage(_: float) -> None:
        next(stages)()

    monkeypatch.setattr(demo.time, "sleep", next_stage)
    assert tale._wait_for_a_save(child) == 20
    assert demo._committed(tale.run) == [10, 15]


def test_training_that_ends_first_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    tale = story(tmp_path)
    (tmp_path / "demo.log").write_text("error: the disk is full.\n")
    done = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    done.wait()
    with pytest.raises(EkeError, match="ended before it could be killed: error: the disk is full"):
        tale._wait_for_a_save(done)


def test_a_save_that_won_the_race_is_tried_again_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tale = story(tmp_path)
    attempts: list[int] = []

    def wait(child: subprocess.Popen[bytes]) -> int:
        attempts.append(child.pid)
        assert demo._committed(tale.run) == []
        logged(tale.run, record(1, 4.0), record(2, 3.0))
        for step in (20, 25) if len(attempts) == 2 else (20, 25, 40):
            commit(tale.run, step)
        return 40

    monkeypatch.setattr(tale, "_command", lambda: [sys.executable, "-c", "input()"])
    monkeypatch.setattr(tale, "_wait_for_a_save", wait)
    assert tale._train_and_kill() == Kill(saving_step=40, committed=[20, 25], last_step=2)
    assert len(set(attempts)) == 2
    assert len(set(attempts)) == 2


def test_saves_that_always_win_the_race_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tale = story(tmp_path)
    attempts: list[int] = []

    def wait(child: subprocess.Popen[bytes]) -> int:
        attempts.append(child.pid)
        commit(tale.run, 20)
        return 20

    monkeypatch.setattr(tale, "_command", lambda: [sys.executable, "-c", "input()"])
    monkeypatch.setattr(tale, "_wait_for_a_save", wait)
    with pytest.raises(EkeError, match="was committed before the kill came"):
        tale._train_and_kill()
    assert len(attempts) == demo.ATTEMPTS


# ---------------------------------------------------------------------- comparing


def test_losses_are_compared_bit_by_bit_after_the_resume(tmp_path: Path) -> None:
    tale = story(tmp_path)
    steps = [record(s, 5.0 - s / 7) for s in range(1, 11)]
    logged(tale.run, *steps)
    logged(tale.reference, *steps[:8])
    proof = tale._compare(Kill(7, [2, 4], 6), 4, 8)
    assert proof["bit_identical"]
    assert proof["steps"] == [5, 6, 7, 8]
    assert json.loads((tale.run / "resume_proof.json").read_text()) == proof
    assert (proof["killed_at_step"], proof["resumed_from_step"]) == (6, 4)


@pytest.mark.parametrize(("step", "identical"), [(4, True), (5, False), (8, False), (9, True)])
def test_one_bit_in_one_loss_is_seen(tmp_path: Path, step: int, identical: bool) -> None:
    tale = story(tmp_path)
    steps = [record(s, 0.3) for s in range(1, 11)]
    logged(tale.reference, *steps)
    steps[step - 1] = record(step, 0.1 + 0.2)  # the next float after 0.3
    logged(tale.run, *steps)
    assert tale._compare(Kill(7, [2, 4], 6), 4, 8)["bit_identical"] is identical


def test_nothing_to_compare_is_no_proof(tmp_path: Path) -> None:
    tale = story(tmp_path)
    logged(tale.run, record(1, 1.0))
    logged(tale.reference, record(1, 1.0))
    assert tale._compare(Kill(7, [4], 6), 4, 8)["bit_identical"] is False


def test_undone_steps_are_not_compared(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    logged(run, record(1, 4.0))
    with JsonlFile(run / "metrics.jsonl") as file:
        saved = file.offset
        file.append(record(2, 99.0))
        file.mark_resume(saved)
        file.append(record(2, 3.0))
        file.append({"kind": "eval", "step": 2, "loss": 3.5})
    assert [r["loss"] for r in demo._steps(run)] == [4.0, 3.0]


@given(
    st.lists(st.sampled_from(["warmup", "stable"]), max_size=30),
    st.integers(0, 10),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sets(st.integers(1, 40)),
)
def test_what_can_be_compared(
    phases: list[str], decaying: int, resumed_from: int, last: int, reference: set[int]
) -> None:
    phases = phases + ["decay"] * decaying
    steps = [record(s, 1.0, phase) for s, phase in enumerate(phases, 1)]
    found = comparable(steps, reference, resumed_from, last)
    assert found == sorted(found)
    assert set(found) == {
        s for s in reference
        if resumed_from < s <= last and s <= len(phases) and phases[s - 1] != "decay"
    }  # fmt: skip


@given(
    st.lists(
        st.lists(st.integers(1, 50), min_size=1, max_size=8).map(
            lambda lengths: {
                "tokens": sum(lengths), "samples": len(lengths), "length_max": max(lengths)
            }
        ),
        min_size=1,
        max_size=8,
    )
)  # fmt: skip
def test_naive_padding_is_a_share(steps: list[dict[str, Any]]) -> None:
    padding = demo._naive_padding(steps)
    assert 0 <= padding < 1
    cells = sum(s["samples"] * s["length_max"] for s in steps)
    assert round((1 - padding) * cells) == sum(s["tokens"] for s in steps)


def test_naive_padding_by_hand() -> None:
    short_and_long = {"tokens": 40, "samples": 2, "length_max": 30}
    assert demo._naive_padding([short_and_long]) == pytest.approx(1 / 3)


# ---------------------------------------------------------------------- the whole


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_story(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eke", "demo", "--dir", str(tmp_path), "--flops", "3.5e12"],
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, done
    assert "bit-identical: yes" in done.stdout
    run = tmp_path / "demo"
    proof = json.loads((run / "resume_proof.json").read_text())
    assert proof["bit_identical"]
    assert len(proof["steps"]) >= 6
    assert proof["resumed_losses"] == proof["reference_losses"]
    assert proof["resumed_from_step"] < proof["killed_at_step"]
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "finished"
    assert status["step"] > proof["steps"][-1]
    with Ledger(run / "ledger.jsonl") as ledger:
        assert 0.8 * 3.5e12 < (ledger.spent("flops") or 0) <= 3.5e12
        assert ledger.totals()["lost"]["seconds"]
    assert (run / "model" / "config.json").is_file()
    assert str(run / "report.html") in done.stdout
    assert (run / "report.html").is_file()

"""Every kind of bad input: one paragraph on stderr, the right exit code, nothing lost."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eke.cli import main

GOOD_ROW = {"prompt": "What is a spam filter?", "response": "Something that keeps spam away."}
Edit = Callable[[Path], dict[str, Any]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from eke.data import builtin_tokenizer, open_source

    where = tmp_path_factory.mktemp("model")
    rows = where / "rows.jsonl"
    rows.write_text(json.dumps(GOOD_ROW) + "\n")
    tokenizer = builtin_tokenizer(open_source(str(rows)), 300, cache_dir=where / "cache")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(where / "llama")
    tokenizer.save_pretrained(where / "llama")
    return where / "llama"


def toml(where: Path, folder: Path, /, **changes: dict[str, Any]) -> Path:
    """A configuration that works, with changes by section."""
    import tomli_w

    rows = where / "rows.jsonl"
    if not rows.exists():
        rows.write_text(
            "".join(
                json.dumps({**GOOD_ROW, "prompt": f"{GOOD_ROW['prompt']} ({i})"}) + "\n"
                for i in range(40)
            )
        )
    config: dict[str, Any] = {
        "run": {"name": "run", "dir": str(where / "runs")},
        "model": {"source": str(folder)},
        "data": {"train": str(rows), "workers": 0, "eval_examples": 3},
        "budget": {"steps": 2},
        "batch": {"per_step": "samples:4", "micro_tokens": 256},
    }
    for section, keys in changes.items():
        config.setdefault(section, {}).update(keys)
    path = where / "run.toml"
    path.write_text(tomli_w.dumps(config))
    return path


@pytest.fixture
def eke(start_python: Any) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command in a process of its own, to its end."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        process = start_python("-m", "eke", *arguments)
        out, err = process.communicate(timeout=100)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    return run


def eke_here(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> subprocess.CompletedProcess[str]:
    """The same command in this process: a tenth of the time, and most of it is importing."""
    monkeypatch.setattr(sys, "argv", ["eke", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return subprocess.CompletedProcess(arguments, int(str(ended.value.code)), out, err)


def assert_one_error(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    error = done.stderr[done.stderr.index("error: ") :].strip()
    assert "\n" not in error
    for word in words:
        assert word in error


def bad_rows(where: Path, text: str) -> dict[str, Any]:
    (where / "bad.jsonl").write_text(text)
    return {"data": {"train": str(where / "bad.jsonl")}}


GOOD_LINE = json.dumps(GOOD_ROW) + "\n"
OTHER_LINES = "".join(json.dumps({**GOOD_ROW, "prompt": str(i)}) + "\n" for i in range(30))
CASES: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "missing file": (lambda w: {"data": {"train": str(w / "nowhere.jsonl")}}, ("nowhere.jsonl",)),
    "empty dataset": (lambda w: bad_rows(w, ""), ("bad.jsonl", "holds no rows")),
    "row without its fields": (
        lambda w: bad_rows(w, GOOD_LINE * 2 + '{"question": "?"}\n'),
        ("bad.jsonl:3", "question", "prompt"),
    ),
    "row that is not JSON": (
        lambda w: bad_rows(w, GOOD_LINE + "{nonsense\n"),
        ("bad.jsonl:2", "JSON"),
    ),
    "sample over max_length": (
        lambda w: bad_rows(w, OTHER_LINES + json.dumps({**GOOD_ROW, "response": "spam " * 200})),
        ("bad.jsonl:31", "max_length", "truncate"),
    ),
    "unknown key": (lambda w: {"budget": {"flop": "1e12"}}, ("budget.flop", "flops")),
    "unknown section": (lambda w: {"bugdet": {"flops": "1e12"}}, ("bugdet", "budget")),
    "wrong unit": (lambda w: {"budget": {"wall_time": "3 parsecs"}}, ("wall_time", "30m")),
    "FLOP budget smaller than one step": (
        lambda w: {"budget": {"flops": "1e3"}},
        ("FLOP budget", "smaller than one step"),
    ),
    "token budget smaller than one step": (
        lambda w: {"budget": {"tokens": 3}},
        ("token budget", "smaller than one step"),
    ),
    "wall-time budget smaller than one step": (
        lambda w: {"budget": {"wall_time": "1s"}},
        ("wall-time budget", "smaller than one step"),
    ),
    "memory too small for the model": (
        lambda w: {"budget": {"memory": "10MiB"}, "batch": {"micro_tokens": "auto"}},
        ("does not fit", "10 MiB"),
    ),
    "no such model": (lambda w: {"model": {"source": "builtin:huge"}}, ("builtin:tiny",)),
    "no such folder": (lambda w: {"model": {"source": "./nowhere"}}, ("nowhere",)),
    "no such GGUF file": (lambda w: {"model": {"source": "gguf:./no.gguf"}}, ("no.gguf",)),
    "impossible combination": (
        lambda w: {"budget": {"cost": "5 USD"}},
        ("budget.cost", "price_per_hour"),
    ),
    "nothing to learn from": (
        lambda w: bad_rows(
            w,
            "".join(
                json.dumps({"messages": [{"role": "user", "content": f"Hello {i}?"}]}) + "\n"
                for i in range(40)
            ),
        ),
        ("nothing to learn from", "supervised"),
    ),
    "no energy counter": (lambda w: {"budget": {"energy": "1MJ"}}, ("energy", "wall_time")),
    "no CUDA": (lambda w: {"run": {"device": "cuda"}}, ("cuda", "auto")),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_error_and_leaves_nothing_behind(
    name: str,
    tmp_path: Path,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch

    from eke.budget.meters import EnergyMeter

    edit, words = CASES[name]
    if name == "no CUDA" and torch.cuda.is_available():
        return
    if name == "no energy counter" and EnergyMeter.open().source != "unknown":
        return
    path = toml(tmp_path, model_dir, **edit(tmp_path))
    assert_one_error(eke_here(["train", str(path)], monkeypatch, capsys), 2, *words)
    assert not (tmp_path / "runs" / "run").exists()


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, model_dir: Path, eke: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.add_tokens([f"<extra{i}>" for i in range(50)])
    tokenizer.save_pretrained(tmp_path / "other")
    path = toml(tmp_path, model_dir, model={"tokenizer": str(tmp_path / "other")})
    assert_one_error(eke("train", str(path)), 2, "tokenizer", "embedding rows")


def test_a_directory_of_another_configuration_is_refused_and_kept(
    tmp_path: Path, model_dir: Path, eke: Any
) -> None:
    assert eke("train", str(toml(tmp_path, model_dir))).returncode == 0
    run = tmp_path / "runs" / "run"
    before = (run / "metrics.jsonl").read_bytes()
    path = toml(tmp_path, model_dir, optimizer={"lr": 0.5}, run={"seed": 7})
    done = eke("train", str(path))
    assert_one_error(done, 2, "optimizer.lr", "0.5", "run.seed", "run.name")
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_directory_that_is_no_run_is_refused_and_kept(
    tmp_path: Path, model_dir: Path, eke: Any
) -> None:
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    (run / "thesis.txt").write_text("precious")
    assert_one_error(eke("train", str(toml(tmp_path, model_dir))), 2, "not a run")
    assert (run / "thesis.txt").read_text() == "precious"


def test_no_space_left_is_one_error_and_the_run_goes_on_afterwards(
    tmp_path: Path, model_dir: Path, eke: Any
) -> None:
    """A limit on file sizes: the kernel refuses the write, as it does on a full disk."""
    path = toml(tmp_path, model_dir, checkpoint={"every": "1 steps"}, budget={"steps": 6})

    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    done = subprocess.run(
        [sys.executable, "-m", "eke", "train", str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=small_files,
    )
    assert_one_error(done, 1, "step 1")
    run = tmp_path / "runs" / "run"
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    assert not list((run / "checkpoints").glob(".tmp-*"))
    assert eke("train", str(path)).returncode == 0
    assert (run / "model" / "model.safetensors").exists()


def test_a_run_directory_inside_a_file_is_one_error(
    tmp_path: Path, model_dir: Path, eke: Any
) -> None:
    (tmp_path / "file").write_text("")
    path = toml(tmp_path, model_dir, run={"dir": str(tmp_path / "file")})
    assert_one_error(eke("train", str(path)), 2, "file")


def test_other_data_is_refused_and_costs_nothing(
    tmp_path: Path, model_dir: Path, eke: Any, start_python: Any
) -> None:
    path = toml(tmp_path, model_dir, budget={"steps": 60}, checkpoint={"every": "1 steps"})
    run, rows = tmp_path / "runs" / "run", tmp_path / "rows.jsonl"
    process = start_python("-m", "eke", "train", path)
    deadline = time.monotonic() + 60
    while not list((run / "checkpoints").glob("step-*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    good = rows.read_text()
    rows.write_text(good + json.dumps({**GOOD_ROW, "prompt": "one more"}) + "\n")
    assert_one_error(eke("train", str(path)), 2, "training data", "run.name")
    assert json.loads((run / "status.json").read_text())["state"] == "interrupted"
    rows.write_text(good)
    done = eke("train", str(path))
    assert done.returncode == 0, done.stderr
    bills = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    # The refused start is billed as what it was, and no work counts as lost.
    assert [b["what"] for b in bills if b.get("what") in ("startup", "lost")] == ["startup"] * 3


def test_a_closed_pipe_does_not_end_a_run(tmp_path: Path, model_dir: Path) -> None:
    path = toml(tmp_path, model_dir, budget={"steps": 30}, log={"every": 1})
    process = subprocess.Popen(
        [sys.executable, "-m", "eke", "train", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.wait(60)
    status = json.loads((tmp_path / "runs" / "run" / "status.json").read_text())
    assert status["state"] == "finished"
    assert status["step"] == 30

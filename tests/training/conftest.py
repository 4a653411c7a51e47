"""A model small enough to train in a second, on real text, and real processes to train it in."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import sysconfig
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from eke.budget.jsonl import effective, read_records

RUN_TOML = """\
[model]
source = "{model}"
[data]
train = "{data}"
max_length = 48
overlength = "truncate"
workers = {workers}
eval_examples = 24
[budget]
{budget}
[batch]
per_step = "tokens:256"
micro_tokens = 128
[optimizer]
lr = 0.003
warmup_steps = 2
[governor]
eval_every = "{eval_every}"
[checkpoint]
every = "{save_every}"
[run]
name = "run"
dir = "{dir}"
"""


def docstrings(wanted: int) -> list[tuple[str, str]]:
    """(name, first line of the docstring) of functions of the standard library."""
    found: list[tuple[str, str]] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                found.append((f"{path.stem}.{node.name}", text.splitlines()[0]))
        if len(found) >= wanted:
            break
    return found[:wanted]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 prompt and response rows made from the standard library's docstrings."""
    path = tmp_path_factory.mktemp("corpus") / "rows.jsonl"
    rows = [{"prompt": f"What does {n} do?", "response": d} for n, d in docstrings(600)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture(scope="session")
def model_dir(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama of 35 k parameters and its tokenizer. It has dropout, so that a
    resume that forgets the random generators is noticed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from eke.data import builtin_tokenizer, open_source

    path = tmp_path_factory.mktemp("model") / "llama"
    tokenizer = builtin_tokenizer(
        open_source(str(corpus)), 512, cache_dir=tmp_path_factory.mktemp("cache")
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        attention_dropout=0.1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def write_toml(corpus: Path, model_dir: Path) -> Callable[..., Path]:
    """Write a run.toml for the small model: `write_toml(directory, budget="steps = 30")`."""

    def write(
        directory: Path,
        *,
        budget: str = "steps = 30",
        eval_every: str = "10 steps",
        save_every: str = "4 steps",
        workers: int = 0,
        data: Path = corpus,
        more: str = "",
    ) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "run.toml"
        text = RUN_TOML.format(
            model=model_dir,
            data=data,
            budget=budget,
            eval_every=eval_every,
            save_every=save_every,
            workers=workers,
            dir=directory / "runs",
        )
        path.write_text(text + more)
        return path

    return write


def train_here(toml: str, overrides: list[str]) -> None:
    """Train in this process; its exit code is the run's."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    from eke.errors import EkeError
    from eke.training import RunConfig, Trainer

    try:
        result = Trainer(RunConfig.load(toml, overrides), whole_process=True).train()
    except EkeError as error:
        print(error, flush=True)
        os._exit(error.exit_code)
    os._exit(result.exit_code)


@pytest.fixture(scope="session")
def start_training() -> Iterator[Callable[..., BaseProcess]]:
    """Start training in a real process, forked from one that has imported what that takes."""
    context = multiprocessing.get_context("forkserver")
    started: list[BaseProcess] = []

    def start(toml: Path, *overrides: str) -> BaseProcess:
        process = context.Process(target=train_here, args=(str(toml), list(overrides)))
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        if process.is_alive():
            process.kill()
        process.join(10)


@pytest.fixture(scope="session")
def run_training(start_training: Callable[..., BaseProcess]) -> Callable[..., int]:
    """Train in a real process to its end; returns the exit code."""

    def run(toml: Path, *overrides: str) -> int:
        process = start_training(toml, *overrides)
        process.join(100)
        assert process.exitcode is not None, "training did not end within 100 s"
        return process.exitcode

    return run


@pytest.fixture(scope="session")
def standing() -> Callable[[Path, str], list[dict[str, Any]]]:
    """The records of a kind that no resume undid."""

    def read(run: Path, kind: str) -> list[dict[str, Any]]:
        name = "decisions" if kind == "decision" else "metrics"
        kept, _ = effective(read_records(run / f"{name}.jsonl"))
        return [r.value for r in kept if r.value.get("kind") == kind]

    return read

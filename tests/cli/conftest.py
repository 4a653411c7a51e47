"""The command as a user runs it, and one small run that was really trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from eke.cli import main

RUN_TOML = """
[run]
name = "small"
dir = "."

[data]
train = "text.jsonl"
max_length = 48
overlength = "truncate"
eval_examples = 4

[batch]
per_step = "samples:4"
micro_tokens = 200

[budget]
flops = "3e10"
"""


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


def _run(*arguments: object, cwd: Path | None = None) -> Outcome:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "EKE_CACHE": str((cwd or Path()) / "cache")},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def python() -> Callable[..., Outcome]:
    """Run Python with arguments, in a process of its own."""
    return _run


@pytest.fixture
def eke(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """The command in this process: its exit code and what it printed."""

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["eke", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Outcome(ended.value.code, printed.out, printed.err)

    return call


@pytest.fixture(scope="session")
def eke_process(start_python: Callable[..., Any]) -> Callable[..., Outcome]:
    """The command in a process of its own, to its end."""

    def run(*arguments: object, cwd: Path) -> Outcome:
        env = {**os.environ, "EKE_CACHE": str(cwd / "cache")}
        process = start_python("-m", "eke", *arguments, cwd=cwd, env=env)
        out, err = process.communicate(timeout=110)
        return Outcome(process.returncode, out, err)

    return run


@dataclass(frozen=True)
class Trained:
    """A run that `eke train` made: its folder, its run.toml, and what was printed."""

    folder: Path
    outcome: Outcome

    @property
    def run(self) -> Path:
        """The run's directory."""
        return self.folder / "small"


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with real text and a run.toml that trains on it."""
    folder = tmp_path_factory.mktemp("workplace")
    rows = [json.dumps({"text": topics[name][:400]}) for name in sorted(topics)[:60]]
    (folder / "text.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "run.toml").write_text(RUN_TOML)
    return folder


@pytest.fixture(scope="session")
def trained(workplace: Path) -> Trained:
    """The run that `run.toml` describes, trained by `eke train`."""
    return Trained(workplace, _run("-m", "eke", "train", "run.toml", cwd=workplace))

"""Real ranks: processes with torchrun's environment, killed when they take too long."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

RunRanks = Callable[..., "list[Ended]"]


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def run_ranks(tmp_path: Path, start_ranks: Any) -> RunRanks:
    """Run a script on `size` ranks; a job longer than `limit_s` fails the test."""

    def run(script: str, *, size: int = 2, limit_s: float = 60.0, **more: str) -> list[Ended]:
        file = tmp_path / "script.py"
        file.write_text(textwrap.dedent(script))
        ranks = start_ranks(size, file, **more)
        try:
            output = [rank.communicate(timeout=limit_s) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return [Ended(rank.returncode, *texts) for rank, texts in zip(ranks, output, strict=True)]

    return run

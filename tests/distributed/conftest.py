"""Real ranks: processes with torchrun's environment, killed when they take too long."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

RunRanks = Callable[..., "list[Ended]"]


@dataclass(frozen=True)
class Ended:
    """How a rank ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def run_ranks(tmp_path: Path, free_port: int) -> RunRanks:
    """Run a script on `size` ranks; a job longer than `limit_s` fails the test."""

    def run(script: str, *, size: int = 2, limit_s: float = 60.0, **more: str) -> list[Ended]:
        file = tmp_path / "script.py"
        file.write_text(textwrap.dedent(script))
        ranks = [
            subprocess.Popen(
                [sys.executable, str(file)],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "WORLD_SIZE": str(size),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(free_port),
                    **more,
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            output = [rank.communicate(timeout=limit_s) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return [Ended(rank.returncode, *texts) for rank, texts in zip(ranks, output, strict=True)]

    return run

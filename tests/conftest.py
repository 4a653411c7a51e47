"""What all tests share: real processes that need not import torch first, and no time limits on
Hypothesis examples."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes is the machine's business; pytest-timeout ends what hangs.
settings.register_profile("eke", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("eke")

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "torch.distributed.distributed_c10d",
        "torch.nn.parallel.distributed",
        "transformers.models.llama.modeling_llama",
        "eke.cli.train",
        "eke.report",
        "eke.training.trainer",
    ]
)


def _become(program: Sequence[str], cwd: str, env: Mapping[str, str], out: str, err: str) -> None:
    """Be `python PROGRAM...` in this process: a script, or `-m` and a module."""
    for path, stream in ((out, 1), (err, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, stream)
        os.close(opened)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    import torch

    torch.set_num_threads(1)
    if program[0] == "-m":
        sys.argv[:] = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = program
        sys.path.insert(0, str(Path(program[0]).parent))
        runpy.run_path(program[0], run_name="__main__")


class Running:
    """A program under way, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, process: BaseProcess, folder: Path) -> None:
        self._process, self._folder = process, folder
        assert process.pid is not None
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float = 100.0) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        return self._process.exitcode

    def communicate(self, timeout: float = 100.0) -> tuple[str, str]:
        self.wait(timeout)
        return self.out, self.err

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return (self._folder / "out").read_text() if (self._folder / "out").exists() else ""

    @property
    def err(self) -> str:
        return (self._folder / "err").read_text() if (self._folder / "err").exists() else ""

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Start = Callable[..., Running]


@pytest.fixture(scope="session")
def start_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start `python ARGUMENTS...` as a process of its own, forked from one in which torch,
    transformers and eke are imported already: `start_python("-m", "eke", "plan", path)`.

    For what is about what a program does. Where the start itself is the point (what is imported,
    pipes, the interpreter's own exit), use `subprocess`.
    """
    started: list[Running] = []

    def start(
        *program: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> Running:
        folder = tmp_path_factory.mktemp("process")
        process = FORKS.Process(
            target=_become,
            args=(
                [str(part) for part in program],
                str(cwd or Path.cwd()),
                {**(os.environ if env is None else env), "OMP_NUM_THREADS": "1"},
                str(folder / "out"),
                str(folder / "err"),
            ),
        )
        process.start()
        started.append(Running(process, folder))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.wait(10)


StartRanks = Callable[..., "list[Running]"]


@pytest.fixture(scope="session")
def start_ranks(start_python: Start) -> StartRanks:
    """Start a program on several ranks, with the environment that torchrun gives them."""

    def start(size: int, *program: object, cwd: Path | None = None, **more: str) -> list[Running]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        job = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return [
            start_python(
                *program,
                cwd=cwd,
                env={**os.environ, **job, "RANK": str(r), "LOCAL_RANK": str(r), **more},
            )
            for r in range(size)
        ]

    return start

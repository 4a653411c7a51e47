"""What all tests share: real processes that need not import torch first, no time limits on
Hypothesis examples, and pages of docs that name tests."""

from __future__ import annotations

import ast
import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import re
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

# A shell without job control starts what is in its background with Ctrl-C ignored, for all that it
# starts in turn; some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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


TESTS = Path(__file__).resolve().parent


class Pages:
    """Pages of docs that name the tests of what they say, held against the tests that there are."""

    named = re.compile(r"`(?:[\w/]+/)?(test_\w+)(?:\.py)?`")
    numbered = re.compile(r"_(?:pr)?(\d{2,})(?=_)")

    def text(self, page: str) -> str:
        return (TESTS.parent / "docs" / page).read_text()

    def functions(self, path: Path) -> set[str]:
        """The test functions of a file."""
        tree = ast.parse(path.read_text()).body
        names = {node.name for node in tree if isinstance(node, ast.FunctionDef)}
        return {name for name in names if name.startswith("test_")}

    def there(self) -> set[str]:
        """Every test function, and every file of tests."""
        paths = list(TESTS.rglob("test_*.py"))
        return {path.stem for path in paths}.union(*map(self.functions, paths))

    def rows(self, page: str) -> list[list[str]]:
        """The rows of every table, as cells."""
        lines = [line for line in self.text(page).splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
        heads = [i + 1 for i, row in enumerate(cells) if set(row[0]) == {"-"}]
        return [row for i, row in enumerate(cells) if i + 1 not in heads and i + 2 not in heads]

    def check_names(self, page: str, *, at_least: int) -> None:
        """Every test that the page names is there."""
        named = set(self.named.findall(self.text(page)))
        assert len(named) >= at_least
        assert named <= self.there(), sorted(named - self.there())

    def check_rows(self, page: str, *, at_least: int) -> None:
        """Every fault has a test, or cannot arise."""
        table = self.rows(page)
        assert len(table) >= at_least
        for row in table:
            assert self.named.search(row[-1]) or "cannot arise" in row[-2], row

    def check_tests(self, page: str, folder: Path, *, numbers: int) -> None:
        """Every test of a reported fault (those in `folder`) is on the page, and so is every number
        in the name of a test that is on the page."""
        text, paths = self.text(page), folder.glob("test_*.py")
        wanted: set[str] = set().union(*(self.functions(p) for p in paths if p.stem != "test_page"))
        named = set(self.named.findall(text))
        assert wanted <= named, sorted(wanted - named)
        found = {number for name in named for number in self.numbered.findall(name)}
        assert len(found) >= numbers
        assert found <= set(re.findall(r"#(\d+)", text)), found


@pytest.fixture(scope="session")
def pages() -> Pages:
    return Pages()

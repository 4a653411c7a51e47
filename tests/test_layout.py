"""The layout of the project, read from its syntax trees: nothing here runs what it looks at."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC, TESTS = ROOT / "src" / "eke", ROOT / "tests"
SOURCES = sorted(SRC.rglob("*.py"))
MOST_LINES = 500
WITHOUT_TESTS = {"__init__.py", "__main__.py", "version.py"}
"""Names and one line each; what they do is seen in the tests of what they name."""
UNSAFE = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
UNSAFE |= {"torch.load", "torch.save", "torch.serialization"}


def names_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module or attribute that a file refers to by a full name, aliases resolved.

    `import torch.distributed as d; d.barrier` gives `torch.distributed` and `d.barrier` in full.
    """
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                aliases[alias.asname or first] = alias.name if alias.asname else first
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = full
                yield full, node.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts: list[str] = []
            inner: ast.expr = node
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in aliases:
                yield ".".join([aliases[inner.id], *reversed(parts)]), node.lineno


def uses(text: str, forbidden: set[str]) -> list[tuple[str, int]]:
    """The forbidden names, or names below them, that a file refers to, and where."""
    return [
        (name, line)
        for name, line in names_in(ast.parse(text))
        if any(name == each or name.startswith(f"{each}.") for each in forbidden)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import barrier as wait",
        "import torch\ndef f(): return torch.distributed.barrier()",
        "import torch as t\nt.distributed.barrier()",
        "def f():\n    from torch.distributed.fsdp import FSDP",
    ],
)
def test_every_way_to_use_a_module_is_seen(text: str) -> None:
    assert uses(text, {"torch.distributed"})


@pytest.mark.parametrize(
    "text", ["import torch", "from eke import distributed", "torch.distributed = 1", "'pickle'"]
)
def test_what_is_not_a_use_is_not_seen(text: str) -> None:
    assert not uses(text, {"torch.distributed", *UNSAFE})


def where(forbidden: set[str], *, allowed: Path | None = None) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SOURCES
        if allowed is None or not path.is_relative_to(allowed)
        for name, line in uses(path.read_text(), forbidden)
    ]


def test_only_eke_distributed_uses_torch_distributed() -> None:
    assert where({"torch.distributed"}, allowed=SRC / "distributed") == []
    assert uses((SRC / "distributed" / "world.py").read_text(), {"torch.distributed"})


def test_nothing_is_pickled_or_unpickled() -> None:
    """But for the one file that writes, for others to read, what `torch.load` reads."""
    writer = SRC / "checkpoint" / "export_torch.py"
    assert where(UNSAFE, allowed=writer) == []
    assert {name for name, _ in uses(writer.read_text(), UNSAFE)} == {"torch.save"}


def test_no_file_is_long() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in SOURCES
        if (lines := len(path.read_text().splitlines())) > MOST_LINES
    }
    assert long == {}


def test_every_source_file_has_its_test_file() -> None:
    missing = [
        f"{path.relative_to(ROOT)} has no {test.relative_to(ROOT)}"
        for path in SOURCES
        if path.name not in WITHOUT_TESTS
        and not (test := TESTS / path.relative_to(SRC).parent / f"test_{path.name}").is_file()
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("module", ["eke", "eke.cli.app", "eke.training.config", "eke.report"])
def test_importing_it_does_not_import_torch(module: str) -> None:
    script = f"import sys, {module}; print([n for n in ('torch', 'numpy') if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_public_names_are_found_when_they_are_first_used() -> None:
    script = (
        "import sys, eke\n"
        "assert 'torch' not in sys.modules\n"
        "print(all(getattr(eke, name) is not None for name in eke.__all__))\n"
        "print(sorted(set(eke.__all__) - set(eke._HOMES)))\n"
        "try: eke.nonsense\n"
        "except AttributeError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.splitlines() == [
        "True",
        "['__version__', 'checkpoint', 'testing']",
        "module 'eke' has no attribute 'nonsense'",
    ]

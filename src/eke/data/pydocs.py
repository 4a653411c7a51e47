"""The built-in corpus: what Python's own documentation says about its functions and classes.

Prompt and response pairs from the docstrings of the standard library and of the scientific
packages that are installed, so that eke can train on real text of natural lengths without a
network. The files are parsed (`ast`), never imported or run.

Properties, each tested: the corpus is a function of the files and the recipe (same files, same
bytes); no two pairs have the same response or the same prompt; a response has `MIN_CHARS` to
`MAX_CHARS` characters and ends where a paragraph ends; work is bounded per package, whatever
is installed. The fingerprint of the pairs tells which corpus a run saw: another version of
Python or of a package gives another one.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import os
import platform
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from eke.data.base import Row, Source
from eke.data.cache import cache_folder, read_checked, write_checked
from eke.data.lines import JsonlSource
from eke.errors import InputError

NAME = "builtin:pydocs"
RECIPE = 1
"""Raised whenever the same files would give other pairs, so that old caches are not used."""

MIN_CHARS, MAX_CHARS = 40, 1200
PACKAGES = {  # import name: distribution name
    "numpy": "numpy",
    "scipy": "scipy",
    "torch": "torch",
    "transformers": "transformers",
    "pandas": "pandas",
    "sklearn": "scikit-learn",
    "matplotlib": "matplotlib",
    "sympy": "sympy",
    "networkx": "networkx",
}
_SKIPPED_FOLDERS = re.compile(
    r"^(tests?|testing|_?vendor(ed)?|_vendored_packages|site-packages|dist-packages|idlelib|lib2to3"
    r"|lib-dynload|ensurepip|__pycache__|config-.*|turtledemo|pydoc_data|\..*)$"
)
_PHRASINGS = (
    "Describe what `{name}{signature}` does.",
    "What does `{name}{signature}` do?",
    "Explain the Python {kind} `{name}{signature}`.",
    "Write the documentation of this {kind}:\n\n{keyword} {short}{signature}:",
)


@dataclass(frozen=True)
class Root:
    """A package to read: its name, its version, and the folder that holds it."""

    name: str
    version: str
    path: Path


@dataclass(frozen=True)
class Limits:
    """How much is read of each package; twice as much of the first one, Python itself."""

    pairs: int = 400
    source_bytes: int = 2_000_000
    file_bytes: int = 200_000
    pairs_per_file: int = 16


def installed_roots() -> list[Root]:
    """The standard library, then those of `PACKAGES` that are installed, in that order."""
    roots = [Root("python", platform.python_version(), Path(sysconfig.get_path("stdlib")))]
    for module, distribution in PACKAGES.items():
        try:
            found = importlib.metadata.distribution(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        path = Path(str(found.locate_file(module)))
        if path.is_dir():
            roots.append(Root(module, found.version, path))
    return roots


class PydocsSource(Source):
    """The corpus, read from its cached file.

    Attributes:
        info: how it was made: the packages with their versions and pairs, the files read and
            the files that could not be parsed.
    """

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        self.name, self.info = NAME, info
        self._rows = JsonlSource(path, NAME)

    def __len__(self) -> int:
        return len(self._rows) - 1  # the header's line

    def _row(self, i: int) -> Row:
        return self._rows[i + 1]

    def origin(self, i: int) -> str:
        """`builtin:pydocs:line` of the cached file."""
        return self._rows.origin(i + 1)

    @property
    def fingerprint(self) -> str:
        """xxh3-128 of the pairs."""
        return str(self.info["xxh3_128"])


def open_pydocs(
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    roots: Sequence[Root] | None = None,
    limits: Limits | None = None,
) -> PydocsSource:
    """The corpus from the cache, or made now (a few seconds) and kept there.

    Args:
        cache_dir: default `$EKE_CACHE`, else `~/.cache/eke`.
        roots: the packages; default `installed_roots()`.
        limits: how much of each.

    Raises:
        InputError: the packages hold no usable docstring.
        EkeError: the cache cannot be written.
    """
    roots = installed_roots() if roots is None else list(roots)
    limits = Limits() if limits is None else limits
    made_of = [RECIPE, platform.python_version(), repr(limits)]
    made_of += [[root.name, root.version, str(root.path)] for root in roots]
    key = xxhash.xxh3_64_hexdigest(json.dumps(made_of).encode())
    path = cache_folder(cache_dir) / f"pydocs-{RECIPE}-{key}.jsonl"
    cached = read_checked(path)
    if cached is None:
        info, body = build_pydocs(roots, limits)
        write_checked(path, info, body)
        cached = read_checked(path)
        if cached is None:
            raise InputError(f"{path} does not hold what was written to it", fix="Check the disk")
    return PydocsSource(path, cached[0])


def build_pydocs(roots: Sequence[Root], limits: Limits) -> tuple[dict[str, Any], bytes]:
    """The corpus as JSON lines, and an account of how it was made. Reads files, writes none.

    Raises:
        InputError: the packages hold no usable docstring.
    """
    lines: list[str] = []
    prompts: set[str] = set()
    responses: set[str] = set()
    files: Counter[str] = Counter(read=0, not_parsed=0)
    packages = []
    for number, root in enumerate(roots):
        before = len(lines)
        share = 2 if number == 0 else 1
        wanted = limits.pairs * share
        for prompt, response in _package_pairs(root, limits, share * limits.source_bytes, files):
            if prompt in prompts or response in responses:
                continue
            prompts.add(prompt)
            responses.add(response)
            pair = {"prompt": prompt, "response": response}
            lines.append(json.dumps(pair, ensure_ascii=False))
            if len(lines) - before >= wanted:
                break
        packages.append([root.name, root.version, len(lines) - before])
    if not lines:
        raise InputError(
            f"{NAME} found no docstrings",
            value=[str(root.path) for root in roots],
            fix="Train on files of your own; this Python has been stripped of its sources",
        )
    info = {"corpus": NAME, "recipe": RECIPE, "packages": packages, "files": dict(files)}
    return info, ("\n".join(lines) + "\n").encode()


def _package_pairs(
    root: Root, limits: Limits, left: int, files: Counter[str]
) -> Iterator[tuple[str, str]]:
    """Pairs file by file, from at most `left` bytes of source.

    The files come in the order of a hash of their paths, so that the first of them are drawn
    from all over the package, and are mostly the same ones in its next version.
    """
    found = sorted(
        _python_files(root.path), key=lambda p: (xxhash.xxh3_64_intdigest(p.encode()), p)
    )
    for relative in found:
        path = root.path / relative
        try:
            size = path.stat().st_size
            if size > limits.file_bytes:
                continue
            if size > left:
                return
            left -= size
            source = path.read_bytes()
        except OSError:
            files["not_parsed"] += 1
            continue
        pairs = docstring_pairs(source, module_name(root, relative))
        files["read" if pairs is not None else "not_parsed"] += 1
        yield from (pairs or [])[: limits.pairs_per_file]


def _python_files(folder: Path) -> Iterator[str]:
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not _SKIPPED_FOLDERS.match(name)]
        inside = Path(where).relative_to(folder)
        yield from ((inside / name).as_posix() for name in names if name.endswith(".py"))


def module_name(root: Root, relative: str) -> str:
    """`scipy.stats._qmc` for `stats/_qmc.py` of scipy; the standard library has no prefix."""
    parts = relative.removesuffix(".py").split("/")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts if root.name == "python" else [root.name, *parts])


def docstring_pairs(source: bytes, module: str) -> list[tuple[str, str]] | None:
    """Prompt and response for each public function and class with a docstring, in file order.

    None when the file cannot be parsed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's files
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    pairs = []
    for name, node in _definitions(tree.body, module):
        response = first_paragraphs(ast.get_docstring(node, clean=False) or "")
        if response is not None:
            pairs.append((_prompt(name, node), response))
    return pairs


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _definitions(body: list[ast.stmt], outer: str) -> Iterator[tuple[str, _Definition]]:
    for node in body:
        if isinstance(node, _Definition) and not node.name.startswith("_"):
            name = f"{outer}.{node.name}" if outer else node.name
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node.body, name)


def first_paragraphs(
    docstring: str, min_chars: int = MIN_CHARS, max_chars: int = MAX_CHARS
) -> str | None:
    """As many whole paragraphs from the start as fit; None if too short or not valid text."""
    text = inspect.cleandoc(docstring).strip()
    kept = ""
    for paragraph in re.split(r"\n\s*\n", text):
        longer = f"{kept}\n\n{paragraph}" if kept else paragraph
        if len(longer) > max_chars:
            break
        kept = longer
    kept = kept.rstrip()
    valid = "\0" not in kept and not any("\ud800" <= c <= "\udfff" for c in kept)
    return kept if len(kept) >= min_chars and valid else None


def _prompt(name: str, node: _Definition) -> str:
    if isinstance(node, ast.ClassDef):
        kind = keyword = "class"
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        signature = f"({bases})" if bases else ""
    else:
        kind = "function"
        keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        signature = f"({ast.unparse(node.args)})"
    if len(signature) > 240:
        signature = "(...)"
    phrasing = _PHRASINGS[xxhash.xxh3_64_intdigest(name.encode()) % len(_PHRASINGS)]
    return phrasing.format(
        name=name, short=node.name, signature=signature, kind=kind, keyword=keyword
    )

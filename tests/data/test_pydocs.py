from __future__ import annotations

import ast
import json
import multiprocessing
import re
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eke.data import open_source, pydocs
from eke.data.pydocs import (
    MAX_CHARS,
    MIN_CHARS,
    Limits,
    Root,
    build_pydocs,
    docstring_pairs,
    first_paragraphs,
    installed_roots,
    module_name,
    open_pydocs,
)
from eke.errors import InputError

TINY = Limits(pairs=20, source_bytes=600_000)


@pytest.fixture
def roots(package: Path) -> list[Root]:
    return [Root("pack", "1.0", package)]


def test_the_pairs_of_a_package(roots: list[Root], tmp_path: Path) -> None:
    source = open_pydocs(cache_dir=tmp_path / "cache", roots=roots)
    assert sorted(row["response"].splitlines()[0] for row in source) == [
        "A box that holds things, and can be opened and closed.",
        "Compute the area of a rectangle from its two sides.",
        "Open the box, and say whether that was possible at all.",
    ]
    prompts = " ".join(row["prompt"] for row in source)
    assert "area(width, height=1.0)" in prompts
    assert "open(self, *, gently: bool=True)" in prompts
    assert "Box(Base)" in prompts
    assert source.info["files"] == {"read": 2, "not_parsed": 1}
    assert source.info["packages"] == [["pack", "1.0", 3]]
    assert source.name == "builtin:pydocs"
    assert source.origin(0) == "builtin:pydocs:2"
    assert len(list(source)) == len(source) == 3
    with pytest.raises(IndexError):
        source[3]


def test_the_same_files_give_the_same_bytes_and_the_cache_is_used(
    roots: list[Root], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_pydocs(cache_dir=tmp_path / "a", roots=roots)
    again = open_pydocs(cache_dir=tmp_path / "b", roots=roots)
    (a,), (b,) = (tmp_path / "a").iterdir(), (tmp_path / "b").iterdir()
    assert a.name == b.name
    assert a.read_bytes() == b.read_bytes()
    assert first.fingerprint == again.fingerprint
    monkeypatch.setattr(pydocs, "build_pydocs", lambda *_: pytest.fail("built again"))
    cached = open_pydocs(cache_dir=tmp_path / "a", roots=roots)
    assert list(cached) == list(first)
    assert cached.info == first.info


def test_the_fingerprint_and_the_key_follow_the_content(roots: list[Root], tmp_path: Path) -> None:
    first = open_pydocs(cache_dir=tmp_path / "c", roots=roots)
    (roots[0].path / "more.py").write_text(
        'def more():\n    """One more function, with a description of some length."""\n'
    )
    newer = [Root("pack", "1.1", roots[0].path)]
    second = open_pydocs(cache_dir=tmp_path / "c", roots=newer)
    assert len(second) == len(first) + 1
    assert second.fingerprint != first.fingerprint
    assert len(list((tmp_path / "c").iterdir())) == 2


@pytest.mark.parametrize("damage", [lambda data: data[:-5], lambda data: b"", lambda data: b"{}\n"])
def test_a_damaged_cache_is_built_again(roots: list[Root], tmp_path: Path, damage: Any) -> None:
    first = open_pydocs(cache_dir=tmp_path / "c", roots=roots)
    (path,) = (tmp_path / "c").iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert list(open_pydocs(cache_dir=tmp_path / "c", roots=roots)) == list(first)
    assert path.read_bytes() == whole


def _open(arguments: tuple[Path, list[Root]]) -> list[Any]:
    source = open_pydocs(cache_dir=arguments[0], roots=arguments[1])
    return [source.fingerprint, *source]


def test_processes_that_build_at_the_same_time(roots: list[Root], tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        results = pool.map(_open, [(tmp_path / "c", roots)] * 6, chunksize=1)
    assert all(result == results[0] for result in results)
    assert len(list((tmp_path / "c").iterdir())) == 1


def test_limits_bound_what_is_read(tmp_path: Path) -> None:
    package = tmp_path / "many"
    package.mkdir()
    for i in range(30):
        functions = "".join(
            f"def f{i}_{j}():\n    '''Function number {j} of the module number {i}, in words.'''\n"
            for j in range(10)
        )
        (package / f"m{i:02}.py").write_text(functions)
    size = (package / "m00.py").stat().st_size
    root, other = Root("many", "1", package), Root("other", "1", package)

    def built(roots: list[Root], **limits: int) -> tuple[Any, int]:
        info, body = build_pydocs(roots, Limits(**limits))
        return info, body.count(b"\n")

    assert built([root], pairs=10)[1] == 20  # twice as many of the first
    info, count = built([root], source_bytes=5 * size, pairs_per_file=4)
    assert info["files"]["read"] in (9, 10, 11)
    assert count == 4 * info["files"]["read"]
    assert built([root, other], pairs=10)[0]["packages"] == [["many", "1", 20], ["other", "1", 10]]
    # What both say counts for the first.
    assert built([root, other], pairs=200)[0]["packages"] == [["many", "1", 300], ["other", "1", 0]]
    with pytest.raises(InputError, match="found no docstrings"):
        built([root], file_bytes=10)


def test_the_standard_library(tmp_path: Path) -> None:
    stdlib = installed_roots()[0]
    assert stdlib.path == Path(sysconfig.get_path("stdlib"))
    source = open_pydocs(cache_dir=tmp_path, roots=[stdlib], limits=TINY)
    rows = list(source)
    assert len(rows) == 2 * TINY.pairs
    assert len({row["prompt"] for row in rows}) == len({row["response"] for row in rows}) == 40
    sizes = [len(row["response"]) for row in rows]
    assert MIN_CHARS <= min(sizes) < max(sizes) <= MAX_CHARS
    assert len({row["prompt"].split("`")[0] for row in rows}) >= 3  # phrasings differ
    modules = {name for row in rows for name in re.findall(r"`(\w+)\.", row["prompt"])}
    assert len(modules) >= 3  # not one module alone
    assert not modules & {"test", "idlelib", "site-packages"}


def test_open_source_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stdlib = installed_roots()[:1]
    monkeypatch.setattr(pydocs, "installed_roots", lambda: stdlib)
    monkeypatch.setattr(pydocs, "Limits", lambda: TINY)
    source = open_source("builtin:pydocs", cache_dir=tmp_path)
    assert set(source[0]) == {"prompt", "response"}
    monkeypatch.setenv("EKE_CACHE", str(tmp_path))
    assert open_source("builtin:pydocs").fingerprint == source.fingerprint


def test_installed_packages_are_found_without_importing_them() -> None:
    roots = installed_roots()
    names = [root.name for root in roots]
    assert names[0] == "python"
    assert {"numpy", "torch"} <= set(names)
    assert all(root.path.is_dir() and root.version for root in roots)


@pytest.mark.parametrize(
    ("relative", "name"),
    [("a/b.py", "pack.a.b"), ("__init__.py", "pack"), ("a/__init__.py", "pack.a")],
)
def test_module_name(relative: str, name: str) -> None:
    assert module_name(Root("pack", "1", Path()), relative) == name
    assert module_name(Root("python", "3", Path()), "json/decoder.py") == "json.decoder"


@pytest.mark.parametrize(
    "source", [b"def f(:", b"\x00", b"\xff\xfe", b"# coding: nope\n", b"(" * 500]
)
def test_files_that_do_not_parse_are_told_apart(source: bytes) -> None:
    assert docstring_pairs(source, "m") is None
    assert docstring_pairs(b"x = 1", "m") == []


def test_a_long_signature_and_odd_characters() -> None:
    arguments = ", ".join(f"argument_{i}: int = {i}" for i in range(40))
    text = "A function with {braces} and many, many arguments."
    ((prompt, response),) = (
        docstring_pairs(f"def f({arguments}):\n '''{text}'''".encode(), "m") or []
    )
    assert "f(...)" in prompt
    assert response == text
    half = 'def g():\n "A docstring with half a character \\ud800 in it, of some length."'
    assert docstring_pairs(half.encode(), "m") == []


paragraphs = st.lists(st.text("ab .\n", min_size=1, max_size=40), max_size=6).map("\n\n".join)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(docstring=paragraphs, least=st.integers(1, 20), most=st.integers(20, 60))
def test_responses_are_whole_paragraphs_from_the_start(
    docstring: str, least: int, most: int
) -> None:
    import inspect

    text = first_paragraphs(docstring, least, most)
    whole = inspect.cleandoc(docstring).strip()
    pieces = [p.strip() for p in "\n".join(x.rstrip() for x in whole.split("\n")).split("\n\n")]
    pieces = [p for p in pieces if p]
    if text is None:
        assert not pieces or len(pieces[0]) < least or len(pieces[0]) > most or len(whole) < least
        return
    assert least <= len(text) <= most
    kept = [p.strip() for p in "\n".join(x.rstrip() for x in text.split("\n")).split("\n\n")]
    kept = [p for p in kept if p]
    assert kept == pieces[: len(kept)]


def test_signatures_are_python() -> None:
    source = (
        b"async def f(a, /, b: int = 1, *c, d='x', **e) -> None:\n '''" + b"word " * 20 + b"'''"
    )
    ((prompt, _),) = docstring_pairs(source, "m") or []
    signature = prompt[prompt.index("(") : prompt.rindex(")") + 1]
    ast.parse(f"def f{signature}: ...")
    json.dumps(prompt)

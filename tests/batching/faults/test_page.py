"""docs/batching-faults.md and docs/batching-guarantees.md name tests that are there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "batching-faults.md"
NAMED = re.compile(r"`(?:[\w/]+/)?(test_\w+)(?:\.py)?`")


def there():
    """Every test function, and every file of tests."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        found.add(path.stem)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.add(node.name)
    return found


def rows(text):
    """The rows of every table, as cells."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    heads = [i + 1 for i, row in enumerate(cells) if set(row[0]) == {"-"}]
    return [row for i, row in enumerate(cells) if i + 1 not in heads and i + 2 not in heads]


@pytest.mark.parametrize("page", ["batching-faults.md", "batching-guarantees.md"])
def test_every_test_that_a_page_names_is_there(page):
    named = set(NAMED.findall((ROOT / "docs" / page).read_text()))
    assert len(named) > 15
    assert named <= there(), sorted(named - there())


def test_every_fault_has_a_test_or_a_reason():
    table = rows(PAGE.read_text())
    assert len(table) > 40
    for row in table:
        assert NAMED.search(row[-1]) or "cannot arise" in row[-2], row


def test_every_test_of_a_reported_fault_is_on_the_page():
    text = PAGE.read_text()
    for path in Path(__file__).parent.glob("test_*.py"):
        if path != Path(__file__):
            for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE):
                assert f"`{name}`" in text, f"{name} is not on the page"


def test_numbers_in_names_are_numbers_on_the_page():
    text = PAGE.read_text()
    names = re.findall(r"`test_[a-z_0-9]*?(\d{3,})_\w+`", text)
    assert len(names) > 20
    for number in names:
        assert f"#{number}" in text, number

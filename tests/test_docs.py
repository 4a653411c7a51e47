"""The documentation is true: its code runs, its configurations are valid, no key is left out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from eke.training.config import RunConfig, tomllib

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_run_in_order(page: Path, tmp_path: Path) -> None:
    code = blocks(page, "python")
    if code:
        script = tmp_path / "page.py"
        script.write_text("\n".join(code))
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_toml_blocks_are_valid_configurations(page: Path) -> None:
    for block in blocks(page, "toml"):
        RunConfig.from_mapping(tomllib.loads(block), origin=page.name)


def test_every_key_of_the_configuration_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    for name, section in RunConfig.model_fields.items():
        assert f"## [{name}]" in text
        part = text.split(f"## [{name}]")[1].split("\n## ")[0]
        assert section.annotation is not None
        for key in section.annotation.model_fields:
            assert f"`{key}`" in part, f"{name}.{key} is not documented"


def test_relative_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
        for target in re.findall(r'<(?:img|source)[^>]+(?:src|srcset)="([^"]+)"', page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} shows {target}"


def test_every_command_is_documented() -> None:
    from eke.cli.app import app

    text = (ROOT / "docs" / "cli.md").read_text()
    names = [c.name for c in app.registered_commands] + [g.name for g in app.registered_groups]
    for name in names:
        assert f"`eke {name}" in text

"""The documentation is true: its code runs, its configurations are valid, no key is left out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def test_the_loop_of_the_readme_runs_under_two_ranks(start_ranks: Any, tmp_path: Path) -> None:
    (loop,) = [text for text in blocks(ROOT / "README.md", "python") if "DynamicLoader" in text]
    told = (
        "print(json.dumps([loader.stats.blocks, loader.stats.samples, loader.stats.micro_batches,"
        " sorted(uids), [float(p.double().sum()) for p in model.parameters()]]))"
    )
    noted = "            uids += batch.uids\n"
    assert loop.count("            logits = model(") == 1
    loop = loop.replace("            logits = model(", noted + "            logits = model(")
    head = "import json, eke, torch\nuids = []\ntorch.manual_seed(0)\n"
    script = tmp_path / "loop.py"
    script.write_text(head + loop + told)
    ranks = start_ranks(2, script)
    try:
        outputs = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    zero, one = (json.loads(out.splitlines()[-1]) for out, _ in outputs)
    assert sorted(zero.pop(3) + one.pop(3)) == [[0, i] for i in range(55)]
    assert zero == one
    assert zero[:2] == [zero[0], 55]
    assert zero[0] > 1


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

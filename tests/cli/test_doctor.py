"""Doctor: thresholds of each row, and the whole as text and as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from eke.budget.meters import EnergyMeter
from eke.cli import doctor
from eke.cli.doctor import Row


@pytest.mark.parametrize(
    ("version", "mark"),
    [((3, 9, 19), "fail"), ((3, 10, 0), "ok"), ((3, 13, 1), "ok"), ((2, 99, 0), "fail")],
)
def test_python(version: tuple[int, ...], mark: str) -> None:
    row = doctor.python_row(version)
    assert row.mark == mark
    assert row.value.startswith(".".join(map(str, version)))


@pytest.mark.parametrize(
    ("package", "version", "needed", "mark"),
    [
        ("torch", None, True, "fail"),
        ("torch", "2.13.0", True, "ok"),
        ("gguf", None, False, "warn"),
        ("lightning", "2.6.2", False, "fail"),
        ("lightning", "2.6.3", False, "fail"),
        ("lightning", "2.6.4", False, "ok"),
    ],
)
def test_packages(package: str, version: str | None, needed: bool, mark: str) -> None:
    row = doctor.package_row(package, version, needed=needed, purpose="reading models")
    assert row.mark == mark
    assert (mark == "ok") or row.fix


def test_installed_versions_are_found() -> None:
    assert doctor.version_of("torch") == importlib.metadata.version("torch")
    assert doctor.version_of("no-such-package-anywhere") is None
    assert {r.name for r in doctor.packages()} >= {"torch", "transformers", "pyarrow", "gguf"}


@pytest.mark.parametrize(("free", "mark"), [(2**30, "ok"), (2**30 - 1, "fail"), (2**40, "ok")])
def test_memory(monkeypatch: pytest.MonkeyPatch, free: int, mark: str) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    assert doctor.memory_row().mark == mark


@pytest.mark.parametrize(
    ("cores", "asked", "mark"),
    [(4, None, "ok"), (4, "4", "ok"), (4, "5", "warn"), (4, "4,2", "ok"), (1, "2", "warn")],
)
def test_threads(monkeypatch: pytest.MonkeyPatch, cores: int, asked: str | None, mark: str) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    row = doctor.threads_row()
    assert row.mark == mark
    assert row.value.startswith(str(cores))


def test_no_accelerator_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.device_row() == Row("device", "ok", "cpu (no CUDA device)")


@pytest.mark.parametrize(("free", "mark"), [(41, "ok"), (40, "warn"), (0, "warn")])
def test_an_accelerator_should_be_half_free(
    monkeypatch: pytest.MonkeyPatch, free: int, mark: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    row = doctor.device_row()
    assert row.mark == mark
    assert row.value == f"Some GPU, {free} {'GiB' if free else 'B'} of 80 GiB free"


def test_a_torch_that_cannot_be_imported_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "eke.distributed", None)
    for row in (doctor.device_row(), doctor.gloo_row()):
        assert row.mark == "fail"
        assert "torch cannot be imported" in row.value


@pytest.mark.parametrize(
    ("free", "mark"), [(5 * 2**30, "warn"), (5 * 2**30 + 1, "ok"), (0, "warn")]
)
def test_disk_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, mark: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert doctor.disk_rows(tmp_path)[0].mark == mark


@pytest.mark.parametrize(("seconds", "mark"), [(0.499, "ok"), (0.5, "warn"), (30.0, "warn")])
def test_commits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: float, mark: str
) -> None:
    monkeypatch.setattr(doctor, "commit_seconds", lambda _: seconds)
    assert doctor.disk_rows(tmp_path)[1].mark == mark


def test_the_disk_is_tried_where_the_folder_will_be_and_left_as_it_was(tmp_path: Path) -> None:
    rows = doctor.disk_rows(tmp_path / "not" / "yet")
    assert [r.name for r in rows] == ["disk", "commit"]
    assert str(tmp_path.resolve()) in rows[0].value
    assert list(tmp_path.iterdir()) == []
    assert doctor.commit_seconds(tmp_path) > 0


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    row = doctor.disk_rows(tmp_path / "file")[1]
    assert row.mark == "fail"
    assert "cannot write there" in row.value


@pytest.mark.parametrize(("source", "mark"), [("unknown", "warn"), ("rapl+nvml", "ok")])
def test_energy(monkeypatch: pytest.MonkeyPatch, source: str, mark: str) -> None:
    monkeypatch.setattr(EnergyMeter, "open", lambda: SimpleNamespace(source=source))
    row = doctor.energy_row()
    assert row.mark == mark
    assert row.value.startswith(source)


def test_ranks() -> None:
    assert doctor.gloo_row(available=True).mark == "ok"
    assert doctor.gloo_row(available=False).mark == "warn"
    assert doctor.gloo_row().mark == "ok"


def test_only_a_failure_is_unhealthy(capsys: pytest.CaptureFixture[str]) -> None:
    good, odd = Row("a", "ok", "1", "2", "unused"), Row("bcd", "warn", "3", "4", "mend it")
    bad = Row("e", "fail", "5", "", "replace it")
    assert doctor.healthy([good, odd])
    assert not doctor.healthy([good, bad])
    doctor.show([good, odd, bad])
    assert capsys.readouterr().out == (
        "✓ a    1  (2)\n! bcd  3  (4)\n       → mend it\n✗ e    5\n       → replace it\n"
    )


def test_as_json(eke_process: Callable[..., Any], tmp_path: Path) -> None:
    ended = eke_process("doctor", "--json", "--dir", tmp_path, cwd=tmp_path)
    found = json.loads(ended.out)
    assert ended.err == ""
    assert found.keys() == {"ok", "rows"}
    for row in found["rows"]:
        assert row.keys() == {"name", "mark", "value", "threshold", "fix"}
        assert row["mark"] in doctor.SYMBOLS
        assert all(isinstance(value, str) for value in row.values())
        assert row["name"]
        assert row["value"]
    names = [row["name"] for row in found["rows"]]
    assert names[:2] == ["python", "torch"]
    assert {"memory", "cores", "device", "disk", "commit", "energy", "ranks"} < set(names)
    assert found["ok"] == all(row["mark"] != "fail" for row in found["rows"])
    assert ended.code == (0 if found["ok"] else 1)


def test_as_text_with_a_failure(eke: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = eke("doctor", "--dir", tmp_path / "file")
    assert ended.code == 1
    assert "✗ commit" in ended.out
    assert "→ Choose another --dir" in ended.out


def test_a_busy_machine_is_told_of() -> None:
    assert doctor.load_row(0.9, 2).mark == "ok"
    assert doctor.load_row(1.1, 2).mark == "warn"
    assert "OMP_NUM_THREADS" in doctor.load_row(1.1, 2).fix

from __future__ import annotations

from pathlib import Path

import pytest

from eke.errors import EkeError, InputError
from eke.report.records import load


def test_a_directory_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InputError, match=r"not a run directory.*run\.toml"):
        load(tmp_path)
    with pytest.raises(InputError, match="no such run directory"):
        load(tmp_path / "absent")
    with pytest.raises(InputError, match="no such run directory"):
        load(tmp_path / "notes.txt")


def test_any_one_of_the_files_makes_a_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    files = load(tmp_path)
    assert files.name == tmp_path.name
    assert files.metrics == files.ledger == files.decisions == ()
    assert files.config == {}
    assert files.notices == ()


def test_torn_last_lines_are_dropped_and_torn_tables_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind":"step","step":1}\n{"kind":"st')
    (tmp_path / "run.toml").write_text('[run]\nname = "x')
    (tmp_path / "plan.json").write_text('{"parameters": ')
    (tmp_path / "status.json").write_text("[1, 2]")
    (tmp_path / "resume_proof.json").write_bytes(b"\xff\xfe")
    files = load(tmp_path)
    assert [r.value["step"] for r in files.metrics] == [1]
    assert files.config == files.plan == files.status == files.proof == {}
    assert [n.split()[0] for n in files.notices] == [
        "run.toml", "plan.json", "status.json", "resume_proof.json",
    ]  # fmt: skip


def test_damage_before_the_last_line_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text('{"a":1}\nrubbish\n{"a":2}\n')
    with pytest.raises(EkeError, match=r"ledger\.jsonl: line 2 .* damaged"):
        load(tmp_path)


def test_a_resume_mark_without_a_place_is_damage(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind":"resume","step":3}\n')
    with pytest.raises(EkeError, match="resume mark does not say from where"):
        load(tmp_path)

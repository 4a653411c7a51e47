"""The command line: answers at once, errors of one paragraph, exit codes that mean something."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer

from eke.cli import doctor
from eke.errors import EkeError
from eke.version import __version__

COMMANDS = ("demo", "doctor", "plan", "train", "report", "checkpoint")
HEAVY = ("torch", "numpy", "transformers", "pyarrow", "jinja2")


def test_help_lists_the_commands_and_imports_nothing_heavy(python: Callable[..., Any]) -> None:
    ended = python("-X", "importtime", "-m", "eke", "--help")
    assert ended.code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in ended.out
    imported = {line.rsplit("|", 1)[-1].strip() for line in ended.err.splitlines()}
    assert "typer" in imported
    assert not {name for name in imported if name.split(".")[0] in HEAVY}


def test_the_help_of_every_command_imports_nothing_heavy(python: Callable[..., Any]) -> None:
    script = (
        "import contextlib, sys\n"
        "from eke.cli import main\n"
        f"for command in {COMMANDS!r}:\n"
        "    sys.argv = ['eke', command, '--help']\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main()\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    ended = python("-c", script)
    assert ended.out.count("Usage: eke") == len(COMMANDS)
    assert ended.out.endswith("\n[]\n")


def test_version(eke: Callable[..., Any]) -> None:
    ended = eke("--version")
    assert (ended.code, ended.out) == (0, f"eke {__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["checkpoint"]])
def test_without_a_command_it_shows_its_help(eke: Callable[..., Any], arguments: list[str]) -> None:
    ended = eke(*arguments)
    assert ended.code in (0, 2)  # by the release of typer
    assert (ended.out + ended.err).startswith("Usage: eke")
    assert "error:" not in ended.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nosuch"], "No such command 'nosuch'. See: eke --help"),
        (["train"], "See: eke train --help"),
        (["train", "--foo", "x.toml"], "No such option: --foo"),
        (["train", "x.toml", "--set"], "'--set' requires an argument"),
        (["train", "absent.toml"], "no such configuration file"),
        (["plan", "."], "the configuration is a folder"),
        (["report", "absent"], "no such run directory"),
        (["demo", "--flops", "much"], "cannot read --flops"),
    ],
)
def test_bad_input_is_one_paragraph_and_exit_code_2(
    eke: Callable[..., Any], arguments: list[str], words: str
) -> None:
    ended = eke(*arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err.startswith("error: ")
    assert words in ended.err
    assert ended.err.count("\n") == 1


def test_a_failure_is_one_paragraph_and_exit_code_1(
    eke: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text("oops\n{}\n")
    ended = eke("report", tmp_path)
    assert ended.code == 1
    assert ended.err.startswith("error: ")
    assert "line 1 of a run's log is damaged" in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_debug_shows_the_traceback_wherever_it_stands(eke: Callable[..., Any], place: int) -> None:
    arguments = ["train", "absent.toml"]
    arguments.insert(place, "--debug")
    ended = eke(*arguments)
    assert ended.code == 2
    assert ended.err.startswith("Traceback (most recent call last):")
    assert "eke.errors.InputError: there is no such configuration file" in ended.err


def test_as_a_process(python: Callable[..., Any], tmp_path: Path) -> None:
    ended = python("-m", "eke", "train", "absent.toml", cwd=tmp_path)
    assert ended.code == 2
    assert ended.out == ""
    assert ended.err == (
        "error: there is no such configuration file; got 'absent.toml'. "
        "Give the path of a run.toml.\n"
    )
    ended = python("-m", "eke", "train", "absent.toml", "--debug", cwd=tmp_path)
    assert ended.code == 2
    assert "Traceback" in ended.err


@pytest.mark.parametrize(
    ("outcome", "code", "words"),
    [
        (typer.Exit(3), 3, ""),
        (typer.Exit(130), 130, ""),
        (typer.Abort(), 130, "error: interrupted\n"),
        (KeyboardInterrupt(), 130, ""),
        (EkeError("the disk is full"), 1, "error: the disk is full.\n"),
    ],
)
def test_exit_codes_of_commands_are_passed_on(
    eke: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    outcome: BaseException,
    code: int,
    words: str,
) -> None:
    def examine(_: Path) -> NoReturn:
        raise outcome

    monkeypatch.setattr(doctor, "examine", examine)
    ended = eke("doctor")
    assert ended.code == code
    assert words in ended.err
    assert "Traceback" not in ended.err


def test_a_defect_of_eke_keeps_its_traceback(
    eke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def examine(_: Path) -> NoReturn:
        raise ZeroDivisionError

    monkeypatch.setattr(doctor, "examine", examine)
    with pytest.raises(ZeroDivisionError):
        eke("doctor")

import ast
import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.checkpoint import errors
from eke.checkpoint.errors import (
    KINDS,
    CorruptCheckpoint,
    Problem,
    SaveError,
    disk_error,
    printable,
    reading,
    worst,
)
from eke.errors import EkeError, InputError

PROBLEMS = st.builds(
    Problem, st.text(), st.none() | st.text(), st.sampled_from(KINDS), st.text(max_size=20)
)


@given(st.lists(PROBLEMS, min_size=1), st.randoms())
def test_corrupt_before_incomplete_before_foreign(problems, rng):
    kinds = {problem.kind for problem in problems}
    expected = (
        "corrupt" if "corrupt" in kinds else "incomplete" if "incomplete" in kinds else "foreign"
    )
    assert worst(problems) == expected
    rng.shuffle(problems)
    assert worst(iter(problems)) == expected


@given(PROBLEMS)
def test_a_problem_survives_json(problem):
    assert Problem(**json.loads(json.dumps(problem.to_json()))) == problem


def test_a_problem_says_where():
    assert str(Problem("a.bin", None, "corrupt", "it is short")) == "a.bin: it is short"
    assert str(Problem("a.bin", "w", "corrupt", "x")) == "a.bin, tensor w: x"


@given(st.lists(PROBLEMS, min_size=1, max_size=4))
def test_the_error_names_the_kind_the_first_problem_and_how_many_more(problems):
    error = CorruptCheckpoint("/ck/step-000000003", problems)
    assert error.path == "/ck/step-000000003"
    assert error.problems == tuple(problems)
    start = f"the checkpoint /ck/step-000000003 is {worst(problems)}: {problems[0]}"
    assert error.what.startswith(start)
    more = error.what[len(start) :]
    assert more == ("" if len(problems) == 1 else f" (and {len(problems) - 1} more problems)")
    assert str(error).endswith("restore(fallback=True) take the newest sound one.")


def test_its_problems_are_its_own():
    problems = [Problem("f", None, "corrupt", "x")]
    error = CorruptCheckpoint("/ck", problems)
    problems.clear()
    assert len(error.problems) == 1


def test_they_are_failures_while_running_and_not_bad_input():
    for error in (CorruptCheckpoint("/ck", [Problem("f", None, "foreign", "x")]), SaveError("x")):
        assert isinstance(error, EkeError)
        assert not isinstance(error, InputError)
        assert error.exit_code == 1


def test_a_failed_save_has_a_ticket_of_its_own():
    one, other = SaveError("x"), SaveError("y")
    one.ticket = "a ticket"
    assert other.ticket is None


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        (errno.ENOSPC, "Free space there"),
        (errno.EDQUOT, "in your quota"),
        (errno.EROFS, "file system writable"),
        (errno.EACCES, "the right to write"),
        (errno.EPERM, "the right to write"),
        (errno.EIO, "system's log"),
        (errno.EMFILE, "See to the disk"),
    ],
)
def test_each_refusal_of_the_disk_has_its_cure(code, fix):
    error = disk_error("saving step 5", OSError(code, os.strerror(code), "/ck/f"))
    assert type(error) is EkeError
    assert error.what == f"saving step 5 failed: /ck/f: {os.strerror(code)}"
    assert error.fix is not None
    assert fix in error.fix


def test_a_refusal_without_a_file_or_a_number():
    nameless = disk_error("saving", OSError(errno.ENOSPC, "No space left on device"))
    assert nameless.what == "saving failed: the disk: No space left on device"
    bare = disk_error("saving", OSError("the tape is torn"))
    assert str(bare) == (
        "saving failed: the disk: the tape is torn. See to the disk, then try again."
    )


def test_a_real_refusal_while_reading(tmp_path):
    missing = tmp_path / "gone"
    with pytest.raises(EkeError) as caught, reading(tmp_path):
        missing.read_bytes()
    assert str(caught.value).startswith(
        f"reading {tmp_path} failed: {missing}: {os.strerror(errno.ENOENT)}. "
    )
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_reading_changes_nothing_else():
    with reading("/ck"):
        value = 5
    assert value == 5
    for error in (CorruptCheckpoint("/ck", [Problem("f", None, "corrupt", "x")]), KeyError("k")):
        with pytest.raises(type(error)) as caught, reading("/ck"):
            raise error
        assert caught.value is error


@given(st.text(st.characters(), max_size=400), st.integers(0, 400))
def test_what_is_shown_is_one_harmless_line(text, longest):
    shown = printable(text, longest)
    assert shown.isprintable()
    assert len(shown) <= 10 * longest + 3
    shown.encode()
    if text.isprintable() and len(text) <= longest:
        assert shown == text


def test_escapes_are_shown_as_such():
    assert printable("a\x1b[31m\n\u202eb\ud800") == "a\\x1b[31m\\n\\u202eb\\ud800"


def test_every_refusal_of_input_says_what_to_do():
    files = sorted(Path(errors.__file__).parent.glob("*.py"))
    calls = [
        (file.name, node)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "InputError"
    ]
    assert len(calls) > 50
    silent = [
        (name, node.lineno) for name, node in calls if "fix" not in {k.arg for k in node.keywords}
    ]
    assert silent == []

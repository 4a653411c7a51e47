from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eke.batching.arguments import MOST, flag, one_of, seconds, whole_number
from eke.errors import InputError


@pytest.mark.parametrize("value", [2, 7, MOST, np.int32(7), np.uint64(7)])
def test_whole_numbers_of_any_kind_become_pythons(value: Any) -> None:
    number = whole_number("window", value, 2)
    assert (number, type(number)) == (value, int)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("8", "window is not a whole number; got '8'; it is at least 2"),
        (8.0, "window is not a whole number; got 8.0"),
        (None, "window is not a whole number; got None"),
        ([8], "window is not a whole number"),
        (True, "window is not a whole number; got True"),
        (1, "window is too small; got 1; it is at least 2"),
        (MOST + 1, "window is too large"),
    ],
)
def test_what_is_no_whole_number_in_range_is_refused(value: Any, text: str) -> None:
    with pytest.raises(InputError) as caught:
        whole_number("window", value, 2)
    assert str(caught.value).startswith(text)


def test_a_number_may_have_no_largest_one() -> None:
    assert whole_number("seed", 2**80, 0, most=None) == 2**80


def test_a_flag_is_true_or_false() -> None:
    assert flag("packing", True)
    assert not flag("packing", False)
    for value in ("no", 0, None, 1):
        with pytest.raises(InputError, match=r"packing is wrong; got .*; it is True or False"):
            flag("packing", value)


@pytest.mark.parametrize("value", ["d", None, ["a"], {}, 1, np.array(["a", "b"])])
def test_what_is_not_among_the_names_is_refused(value: Any) -> None:
    one_of("it is unknown", "a", ("a", "b"))
    with pytest.raises(InputError, match=r"it is unknown; got .*; it is one of a, b"):
        one_of("it is unknown", value, ("a", "b"))


@pytest.mark.parametrize("value", [0, -1, "100000d", float("inf"), float("nan")])
def test_a_duration_that_nobody_waits_for_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match="patience"):
        seconds("the patience", value)


def test_a_duration_is_in_seconds() -> None:
    assert (seconds("the patience", "10m"), seconds("the patience", 2)) == (600.0, 2.0)

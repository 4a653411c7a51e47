"""Errors: one paragraph that says what, which value, the rule, and what to do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.errors import EkeError, InputError, MissingExtraError

SENTENCES = st.text("abc ,=", min_size=1, max_size=12)


def test_all_four_parts_in_order() -> None:
    error = EkeError("the disk is full", value="/runs", rule="a save needs 1 GiB", fix="Free some")
    assert str(error) == "the disk is full; got '/runs'; a save needs 1 GiB. Free some."


@given(SENTENCES, st.none() | SENTENCES, st.none() | SENTENCES, st.booleans())
def test_parts_may_be_left_out_and_full_stops_are_not_doubled(
    what: str, rule: str | None, fix: str | None, stops: bool
) -> None:
    stop = "." if stops else ""
    error = EkeError(
        what + stop,
        rule=None if rule is None else rule + stop,
        fix=None if fix is None else fix + stop,
    )
    expected = what + ("" if rule is None else f"; {rule}") + "."
    assert str(error) == expected + ("" if fix is None else f" {fix}.")


def test_none_false_and_zero_are_values_too() -> None:
    assert str(EkeError("no path", value=None)) == "no path; got None."
    assert str(EkeError("too few", value=0)) == "too few; got 0."
    assert "got False" in str(EkeError("not a number", value=False))


def test_no_value_goes_on_into_an_error_made_of_another() -> None:
    first = EkeError("the disk is full")
    assert str(EkeError("saving failed", value=first.value)) == "saving failed."


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EkeError("x"), 1),
        (InputError("x"), 2),
        (MissingExtraError("pyarrow", "train", "reading Parquet"), 2),
    ],
)
def test_exit_codes(error: EkeError, code: int) -> None:
    assert error.exit_code == code


def test_a_missing_extra_says_how_to_install_it() -> None:
    error = MissingExtraError("pyarrow", "train", "reading Parquet")
    assert str(error) == (
        "reading Parquet needs the package 'pyarrow', which is not installed. "
        "Install it with: pip install 'eke[train]'."
    )
    assert (error.package, error.extra) == ("pyarrow", "train")

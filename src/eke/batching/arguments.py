"""What a user gave, checked: one clear error instead of whatever Python would say later on."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from eke.budget.units import parse_duration
from eke.errors import InputError

MOST = 2**48
"""No number of tokens or samples is larger, so that sums of them stay whole numbers of 64 bits."""


def whole_number(name: str, value: Any, least: int, most: int | None = MOST) -> int:
    """The whole number; one of numpy's, which JSON would not take, becomes Python's.

    Raises:
        InputError: it is none, or out of its range.
    """
    try:
        number = operator.index(value)
    except TypeError as error:
        raise InputError(
            f"{name} is not a whole number", value=value, rule=f"it is at least {least}"
        ) from error
    if isinstance(value, bool):
        rule = f"it is a whole number of at least {least}"
        raise InputError(f"{name} is not a whole number", value=value, rule=rule)
    if number < least:
        raise InputError(f"{name} is too small", value=value, rule=f"it is at least {least}")
    if most is not None and number > most:
        raise InputError(f"{name} is too large", value=value, rule=f"it is at most {most}")
    return number


def flag(name: str, value: Any) -> bool:
    """The truth value.

    Raises:
        InputError: it is none; "no" would pass for true.
    """
    if not isinstance(value, bool):
        raise InputError(f"{name} is wrong", value=value, rule="it is True or False")
    return value


def one_of(what: str, value: Any, names: Sequence[Any]) -> None:
    """Refuse what is not among `names`.

    Raises:
        InputError: it is not.
    """
    if not isinstance(value, str | None) or value not in names:
        rule = f"it is one of {', '.join(map(str, names))}"
        raise InputError(what, value=value, rule=rule)


def seconds(name: str, value: float | str) -> float:
    """The duration, "10m" for example, in seconds.

    Raises:
        InputError: it is none, or out of its range.
    """
    found = parse_duration(value, name)
    if not 0 < found < 1e9:
        rule = "it is above 0 and below 30 years"
        raise InputError(f"{name} is out of range", value=value, rule=rule)
    return found

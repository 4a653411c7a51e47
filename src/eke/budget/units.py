"""Amounts as people write them: `20GiB`, `30m`, `2e17`, `1.5 MJ`, `5 USD`.

Properties: parsing what `format_*` printed gives the amount back within the printed precision;
a bare number is taken in the base unit; an amount is finite; anything else is an `InputError` that
shows an example.
"""

from __future__ import annotations

import math
import re
import sys

from eke.errors import InputError

_NUMBER = r"([0-9]+(?:[_,][0-9]{3})*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?)"
_AMOUNT = re.compile(rf"\s*{_NUMBER}\s*([A-Za-z$€£µ/]*)\s*\Z")

_BYTES = {"": 1, "b": 1}
for _i, _letter in enumerate("kmgtp", 1):
    _BYTES[f"{_letter}b"] = 1000**_i
    _BYTES[f"{_letter}ib"] = _BYTES[_letter] = 1024**_i

_COUNT = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "p": 1e15, "e": 1e18}
_FLOPS = {k: v for k, v in _COUNT.items() if k != "b"}
_JOULES = {"": 1.0, "j": 1.0, "kj": 1e3, "mj": 1e6, "gj": 1e9, "wh": 3600.0, "kwh": 3.6e6}
_SECONDS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0}
_SECONDS |= {"h": 3600.0, "hr": 3600.0, "d": 86400.0}
_SYMBOLS = {"$": "USD", "€": "EUR", "£": "GBP"}


def _split(text: str) -> tuple[float, str] | None:
    match = _AMOUNT.match(text)
    if match is None:
        return None
    number = _float(match.group(1))
    return (number, match.group(2)) if math.isfinite(number) else None


def _float(digits: str) -> float:
    """A number as `_NUMBER` matches it."""
    return float(digits.replace("_", "").replace(",", ""))


def _scaled(
    what: str, value: object, scale: dict[str, float], example: str, given: object = None
) -> float:
    """`value` in the base unit; an error shows it as it was `given`."""
    amount: float | None = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # An int can be too large for a float, which is as good as infinite here.
        amount = float(value) if abs(value) <= sys.float_info.max else math.inf
    elif isinstance(value, str) and (parts := _split(value)) is not None:
        factor = scale.get(parts[1].lower())
        amount = None if factor is None else parts[0] * factor
    if amount is None or not 0 <= amount < math.inf:
        raise InputError(
            f"cannot read {what}",
            value=value if given is None else given,
            rule=f"it is a number of at least 0 with a unit, such as {example}",
            fix=f"Write it like {example}",
        )
    return amount


def parse_bytes(value: object, what: str = "a size") -> int:
    """Bytes from `20GiB`, `512 MB` or a number. `G`, `GiB` are 1024-based, `GB` is 1000-based."""
    return int(_scaled(what, value, {k: float(v) for k, v in _BYTES.items()}, '"20GiB"'))


def parse_count(value: object, what: str = "a count") -> float:
    """A count from `10B`, `500k`, `2e9`, optionally followed by the word `tokens`."""
    given = value
    if isinstance(value, str):
        value = re.sub(r"(?i)\s*(tokens?|steps?)\s*\Z", "", value)
    return _scaled(what, value, _COUNT, '"10M"', given)


def parse_flops(value: object, what: str = "FLOPs") -> float:
    """Floating-point operations from `2e17`, `200 PFLOP`, `1.5T`."""
    given = value
    if isinstance(value, str):
        value = re.sub(r"(?i)\s*(flops?)\s*\Z", "", value)
    return _scaled(what, value, _FLOPS, '"2e17" or "200 PFLOP"', given)


def parse_energy(value: object, what: str = "an energy") -> float:
    """Joules from `1MJ`, `0.3 kWh` or a number."""
    return _scaled(what, value, _JOULES, '"1MJ" or "0.3 kWh"')


def parse_duration(value: object, what: str = "a duration") -> float:
    """Seconds from `30m`, `1h30m`, `90s`, `2d` or a number of seconds."""
    if isinstance(value, str) and not _is_number(value):
        text = value.strip()
        pieces = re.findall(rf"{_NUMBER}\s*([A-Za-z]+)\s*", text)
        if pieces and re.sub(rf"{_NUMBER}\s*[A-Za-z]+\s*", "", text) == "":
            units = [_SECONDS.get(unit.lower()) for _, unit in pieces]
            if all(s is not None for s in units):
                seconds = sum(
                    _float(n) * (s or 0.0) for (n, _), s in zip(pieces, units, strict=True)
                )
                if math.isfinite(seconds):
                    return seconds
        raise InputError(
            f"cannot read {what}",
            value=value,
            rule='it is a number with a unit of time, such as "30m" or "1h30m"',
            fix='Write it like "90s", "30m", "1h30m" or "2d"',
        )
    return _scaled(what, value, {"": 1.0}, '"30m"')


def _is_number(text: str) -> bool:
    parts = _split(text)
    return parts is not None and parts[1] == ""


def parse_money(value: object, what: str = "an amount of money") -> tuple[float, str]:
    """Amount and three-letter currency from `5 USD`, `2.50 EUR` or `$5`."""
    if isinstance(value, str):
        text = value.strip()
        for symbol, code in _SYMBOLS.items():
            if text.startswith(symbol):
                text = f"{text[len(symbol) :]} {code}"
        parts = _split(text)
        if parts is not None and re.fullmatch(r"[A-Za-z]{3}", parts[1]):
            return parts[0], parts[1].upper()
    raise InputError(
        f"cannot read {what}",
        value=value,
        rule="it is a number and a three-letter currency",
        fix='Write it like "5 USD"',
    )


def format_bytes(n: float) -> str:
    """`1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(n) < 1024 or unit == "TiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.4g} {unit}"
        n /= 1024
    raise AssertionError


def format_count(n: float, unit: str = "") -> str:
    """`12.3 M`, with SI prefixes, followed by `unit`."""
    if not math.isfinite(n):
        return f"{n} {unit}".rstrip()
    for factor, prefix in (
        (1e18, "E"),
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
        (1e3, "k"),
    ):
        if abs(n) >= factor * 0.9995:
            return f"{n / factor:.3g} {prefix}{unit}"
    return f"{n:.3g} {unit}".rstrip()


def format_duration(seconds: float) -> str:
    """`1h02m`, `3m20s`, `12.3s`, `45ms`."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"

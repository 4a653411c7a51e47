"""Amounts and foreign strings as a reader sees them.

Properties: `clean` returns text that is legal in XML and in UTF-8 whatever came in; `fit` never
returns more than the width it was given (by its own estimate); a value that is unknown prints as
`unknown`, and no finite or infinite float makes a formatter fail.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from eke.budget.units import format_count, format_duration

UNKNOWN = "unknown"

# What XML 1.0 forbids, lone surrogates (JSON can hold them), and marks that reverse the text.
_FORBIDDEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]"
)
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LAST_SECOND = 253402300799.0  # 9999-12-31, the last that datetime can hold


def clean(value: object, limit: int = 4000) -> str:
    """Any value as text without characters that XML, UTF-8 or a reader's eyes stumble over."""
    text = _FORBIDDEN.sub(
        "\N{REPLACEMENT CHARACTER}", value if isinstance(value, str) else str(value)
    )
    return text if len(text) <= limit else text[: limit - 1] + "…"


def number(value: object) -> float | None:
    """A finite float, or None for anything else (absent, text, NaN, infinite, above 1e100).

    The bound keeps sums and differences of such numbers finite.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        return None
    return as_float if abs(as_float) <= 1e100 else None


def whole(value: object) -> int | None:
    """An integer, or None for anything else."""
    as_float = number(value)
    return None if as_float is None or as_float != int(as_float) else int(as_float)


def text_width(text: str, size_px: float) -> float:
    """An upper estimate of the width of `text` in a system sans-serif font (pixels)."""
    total = 0.0
    for char in text:
        code = ord(char)
        if code > 0x2E80:
            total += 1.05
        elif char in "mwMW@%—…×":
            total += 0.95
        elif char in "iljtf.,:;'|!()[] ":
            total += 0.36
        elif char.isupper():
            total += 0.72
        else:
            total += 0.59
    return total * size_px


def fit(text: str, width_px: float, size_px: float) -> str:
    """`text`, cut with an ellipsis so that it is at most `width_px` wide; empty if none fits."""
    if text_width(text, size_px) <= width_px:
        return text
    for length in range(len(text) - 1, 0, -1):
        cut = text[:length].rstrip() + "…"
        if text_width(cut, size_px) <= width_px:
            return cut
    return ""


def count(value: float | None) -> str:
    """`12,345`; large ones as `1.23 G`."""
    if value is None:
        return UNKNOWN
    if abs(value) >= 1e7 or value != int(value):
        return power(value) if abs(value) >= 1e21 else format_count(value)
    return f"{int(value):,}"


def power(value: float | None, digits: int = 2) -> str:
    """`2.10×10¹⁵`, plain below 10,000."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return "out of range"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.{digits + 2}g}"
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa}×10{str(int(exponent)).translate(_SUPERSCRIPT)}"


def decade(value: float) -> str:
    """An axis label: `10¹⁵`, `2×10¹⁵`."""
    mantissa, exponent = f"{value:.0e}".split("e")
    ten = f"10{str(int(exponent)).translate(_SUPERSCRIPT)}"
    return ten if mantissa == "1" else f"{mantissa}×{ten}"


def duration(seconds: float | None) -> str:
    """`1h02m`, `3m20s`, `12.3s`, `45ms`."""
    if seconds is None:
        return UNKNOWN
    if not abs(seconds) < 1e12:
        return f"{power(seconds)}s"
    return "0s" if seconds == 0 else format_duration(seconds)


def share(part: float | None) -> str:
    """`12.3 %`, with enough digits to tell a small share from none."""
    if part is None:
        return UNKNOWN
    percent = 100 * part
    if not math.isfinite(percent) or abs(percent) >= 1e6:
        return f"{power(percent)} %"
    if percent and abs(percent) < 0.1:
        return "< 0.1 %" if percent > 0 else "> −0.1 %"
    return f"{percent:.1f} %" if abs(percent) < 99.95 else f"{percent:.0f} %"


def loss(value: float | None) -> str:
    """Nats per token, to four decimals."""
    if value is None:
        return "not a number"
    return f"{value:.4f}" if abs(value) < 1e4 else power(value)


def amount(unit: str, value: float | None, currency: str = "") -> str:
    """An amount of one of a bill's units."""
    if value is None:
        return UNKNOWN
    if unit == "seconds":
        return duration(value)
    if unit == "flops":
        return power(value)
    if unit == "joules":
        return f"{power(value)} J" if abs(value) >= 1e21 else format_count(value, "J")
    if unit == "money":
        return f"{value:,.4g} {currency}".strip()
    return count(value)


def moment(unix_s: float | None) -> str:
    """`2026-03-01 14:05 UTC`."""
    if unix_s is None or not 0 < unix_s < _LAST_SECOND:
        return UNKNOWN
    return datetime.fromtimestamp(unix_s, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def plain(value: Any) -> str:
    """A configuration or evidence value, short and readable."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "none"
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return f"{value:.6g}" if 1e-4 <= abs(value) < 1e6 or value == 0 else power(value)
    if isinstance(value, int):
        as_float = number(value)
        return power(as_float) if as_float is None or abs(as_float) >= 1e15 else f"{value:,}"
    if isinstance(value, str):
        return clean(value, 600)
    if isinstance(value, (list, tuple)) and all(not isinstance(v, (list, dict)) for v in value):
        shown = ", ".join(plain(v) for v in value[:12])
        return f"{shown}, … ({len(value)} in all)" if len(value) > 12 else shown or "(none)"
    return clean(json.dumps(value, default=str), 600)


def flatten(tree: Mapping[str, Any], prefix: str = "", depth: int = 6) -> list[tuple[str, str]]:
    """Nested tables as `a.b.c` -> text, in their own order."""
    rows: list[tuple[str, str]] = []
    for key, value in tree.items():
        name = f"{prefix}{clean(key, 200)}"
        if isinstance(value, Mapping) and value and depth > 0:
            rows += flatten(value, f"{name}.", depth - 1)
        else:
            rows.append((name, plain(value)))
    return rows

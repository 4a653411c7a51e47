"""Amounts: what is printed can be read again, and what cannot be read is one clear error."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.budget.units import (
    format_bytes,
    format_count,
    format_duration,
    parse_bytes,
    parse_count,
    parse_duration,
    parse_energy,
    parse_flops,
    parse_money,
)
from eke.errors import InputError

PARSERS: list[Callable[[object], object]] = [
    parse_bytes,
    parse_count,
    parse_duration,
    parse_energy,
    parse_flops,
    parse_money,
]
AMOUNTS = st.floats(0, 1e21, allow_subnormal=False)


@given(st.floats(0, 2.0**60))
def test_bytes_come_back_within_the_printed_precision(n: float) -> None:
    assert parse_bytes(format_bytes(n)) == pytest.approx(n, rel=5e-4, abs=1)


@given(AMOUNTS)
def test_counts_come_back_within_the_printed_precision(n: float) -> None:
    assert parse_count(format_count(n)) == pytest.approx(n, rel=5.1e-3)
    assert parse_flops(format_count(n, "FLOP")) == pytest.approx(n, rel=5.1e-3)


@given(st.floats(1e-6, 1e7))
def test_durations_come_back_within_the_printed_precision(seconds: float) -> None:
    printed = format_duration(seconds)
    shown = {"ms": 6e-3 * seconds, "h": 60.0, "m": 0.5}
    precision = next((shown[unit] for unit in ("ms", "h", "m") if unit in printed), 0.05)
    assert parse_duration(printed) == pytest.approx(seconds, abs=precision + 1e-9)


@given(st.integers(0, 2**53), st.sampled_from([parse_bytes, parse_count, parse_flops]))
def test_a_bare_number_is_in_the_base_unit(n: int, parse: Callable[[object], float]) -> None:
    assert parse(n) == parse(str(n)) == parse(f"  {n} ") == parse(f"{n:,}") == parse(f"{n:_}") == n


@given(st.floats(0, 1e9), st.sampled_from(["USD", "EUR", "GBP", "chf"]))
def test_money_has_an_amount_and_a_currency(amount: float, currency: str) -> None:
    assert parse_money(f"{amount} {currency}") == (amount, currency.upper())


@given(st.text(max_size=12) | st.floats() | st.lists(st.integers()) | st.booleans())
def test_anything_else_is_an_input_error(value: object) -> None:
    for parse in PARSERS:
        message, amount = "", None
        try:
            result = parse(value)
            amount = result[0] if isinstance(result, tuple) else result
        except InputError as error:
            message = str(error)
        if message:
            assert repr(value) in message
        else:
            assert isinstance(amount, (int, float))
            assert 0 <= amount < math.inf
            assert not isinstance(value, bool)


@pytest.mark.parametrize(
    ("parse", "text", "amount"),
    [
        (parse_bytes, "20GiB", 20 * 2**30),
        (parse_bytes, "20g", 20 * 2**30),
        (parse_bytes, "512 MB", 512_000_000),
        (parse_bytes, ".5k", 512),
        (parse_count, "10B", 1e10),
        (parse_count, "500k tokens", 5e5),
        (parse_count, "10 Tokens", 10),
        (parse_count, "50 steps", 50),
        (parse_count, "1_000,000", 1e6),
        (parse_flops, "200 PFLOP", 2e17),
        (parse_flops, "2e17", 2e17),
        (parse_flops, "1.5T", 1.5e12),
        (parse_energy, "1MJ", 1e6),
        (parse_energy, "0.3 kWh", 0.3 * 3.6e6),
        (parse_duration, "1h30m", 5400),
        (parse_duration, " 1h 30m ", 5400),
        (parse_duration, "2d", 172_800),
        (parse_duration, "1,000s", 1000),
        (parse_duration, "45ms", 0.045),
        (parse_duration, "1e3", 1000),
        (parse_duration, 12, 12),
        (parse_money, "$5", (5, "USD")),
        (parse_money, "2.50 eur", (2.5, "EUR")),
        (parse_money, "£ 3", (3, "GBP")),
    ],
)
def test_as_people_write_them(
    parse: Callable[[object], object], text: object, amount: object
) -> None:
    assert parse(text) == amount


@pytest.mark.parametrize(
    ("parse", "value"),
    [
        (parse_bytes, "20 miles"),
        (parse_bytes, "1,5 GB"),
        (parse_bytes, "-1"),
        (parse_bytes, -1),
        (parse_bytes, "1e308P"),
        (parse_bytes, 10**400),
        (parse_bytes, math.inf),
        (parse_count, math.nan),
        (parse_count, "tokens"),
        (parse_flops, "2e17 FLOP/s"),
        (parse_flops, "10B"),
        (parse_flops, "1e300E"),
        (parse_duration, "1m30"),
        (parse_duration, "5 parsecs"),
        (parse_duration, "-5m"),
        (parse_duration, "1e400s"),
        (parse_duration, "1e308d"),
        (parse_duration, ""),
        (parse_money, "5"),
        (parse_money, 5),
        (parse_money, "5 dollars"),
        (parse_money, "$5 USD"),
        (parse_energy, "1 kg"),
    ],
)
def test_errors_show_the_value_as_it_was_given_and_an_example(
    parse: Callable[[object, str], object], value: object
) -> None:
    with pytest.raises(InputError, match=r"cannot read budget\.x") as caught:
        parse(value, "budget.x")
    assert repr(value) in str(caught.value)
    assert "Write it like" in str(caught.value)


@pytest.mark.parametrize(
    ("printed", "text"),
    [
        (format_bytes(0), "0 B"),
        (format_bytes(1.5 * 2**30), "1.5 GiB"),
        (format_bytes(5000 * 2**40), "5000 TiB"),
        (format_count(12_345_678), "12.3 M"),
        (format_count(999.7), "1 k"),
        (format_count(3e9, "FLOP/s"), "3 GFLOP/s"),
        (format_count(7), "7"),
        (format_count(math.inf), "inf"),
        (format_duration(0.045), "45ms"),
        (format_duration(0.9999), "1.0s"),
        (format_duration(59.97), "1m00s"),
        (format_duration(200), "3m20s"),
        (format_duration(3599.6), "1h00m"),
        (format_duration(3720), "1h02m"),
    ],
)
def test_as_people_read_them(printed: str, text: str) -> None:
    assert printed == text

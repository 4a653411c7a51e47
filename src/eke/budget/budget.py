"""The budget: hard limits, and pure arithmetic on what is left of them.

Two kinds of limits, by what a crash does to them:

* `flops`, `wall_time`, `energy` and `cost` count *everything* that was spent, work that a crash
  undid included, because it was spent.
* `tokens`, `steps` and `epochs` count *progress*: what the finished model has learned from. Work
  done again after a crash is the same progress, so a run that was killed ends with the same
  model as one that was not.

Properties: `passes` is None exactly when spending the given cost leaves every limit unpassed;
`share` is the largest share used of any limit and grows with spending.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eke.budget.units import (
    parse_bytes,
    parse_count,
    parse_duration,
    parse_energy,
    parse_flops,
    parse_money,
)
from eke.errors import InputError

SPENT_UNITS = ("flops", "seconds", "joules", "money")
PROGRESS_UNITS = ("tokens", "steps", "epochs")


@dataclass(frozen=True)
class Budget:
    """Hard limits of a run; `None` means that the unit is not limited.

    Attributes:
        memory_bytes: what the training process may hold.
        seconds: wall-clock time, from the start of the process, over all restarts.
        flops: floating-point operations, all ranks together.
        joules: energy; needs a counter (NVML or RAPL).
        money, currency, price_per_hour: a limit on cost, and the price that turns time into it.
        tokens: real training tokens that the model learns from, all ranks together.
        steps: optimizer steps.
        epochs: passes over the training data.
    """

    memory_bytes: int | None = None
    seconds: float | None = None
    flops: float | None = None
    joules: float | None = None
    money: float | None = None
    tokens: float | None = None
    steps: int | None = None
    epochs: int | None = None
    currency: str | None = None
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        for unit in ("memory_bytes", *SPENT_UNITS, *PROGRESS_UNITS, "price_per_hour"):
            amount = getattr(self, unit)
            if amount is not None and not amount > 0:
                raise InputError(
                    f"a budget's {unit} is not more than zero",
                    value=amount,
                    fix="Give it an amount, or None for no limit",
                )
        if self.money is not None and self.price_per_hour is None:
            raise InputError(
                "a budget's money has no price to count with",
                value=self.money,
                fix="Give it a price_per_hour",
            )

    @classmethod
    def parse(
        cls,
        *,
        memory: object = None,
        wall_time: object = None,
        flops: object = None,
        tokens: object = None,
        steps: object = None,
        epochs: object = None,
        energy: object = None,
        cost: object = None,
        price_per_hour: object = None,
    ) -> Budget:
        """A budget from amounts as people write them (see `eke.budget.units`).

        Raises:
            InputError: an amount cannot be read or is zero, a number of steps or epochs is not
                whole, or a cost has no price.
        """

        def positive(name: str, amount: float) -> float:
            if amount <= 0:
                raise InputError(
                    f"budget.{name} is zero",
                    rule="a limit is more than zero",
                    fix=f"Give it an amount, or leave budget.{name} out for no limit",
                )
            return amount

        parsed: dict[str, Any] = {}
        for key, name, value, parse in (
            ("memory_bytes", "memory", memory, parse_bytes),
            ("seconds", "wall_time", wall_time, parse_duration),
            ("flops", "flops", flops, parse_flops),
            ("tokens", "tokens", tokens, parse_count),
            ("steps", "steps", steps, parse_count),
            ("epochs", "epochs", epochs, parse_count),
            ("joules", "energy", energy, parse_energy),
        ):
            if value is not None:
                parsed[key] = positive(name, parse(value, f"budget.{name}"))
        for whole in ("steps", "epochs"):
            if whole in parsed:
                if parsed[whole] % 1:
                    raise InputError(
                        f"budget.{whole} is not a whole number",
                        value=parsed[whole],
                        fix=f"Give it a whole number of {whole}",
                    )
                parsed[whole] = int(parsed[whole])
        if price_per_hour is not None:
            price, parsed["currency"] = parse_money(price_per_hour, "budget.price_per_hour")
            parsed["price_per_hour"] = positive("price_per_hour", price)
        if cost is not None:
            money, currency = parse_money(cost, "budget.cost")
            parsed["money"] = positive("cost", money)
            if price_per_hour is None:
                raise InputError(
                    "budget.cost has no price to count with",
                    value=cost,
                    fix='Add budget.price_per_hour, such as "2 USD"',
                )
            if currency != parsed["currency"]:
                raise InputError(
                    "budget.cost and budget.price_per_hour are in different currencies",
                    value=f"{currency} and {parsed['currency']}",
                    fix="Use one currency for both",
                )
        return cls(**parsed)

    def limits(self) -> dict[str, float]:
        """The limited units and their totals, by the unit's name in a bill."""
        named = {u: getattr(self, u) for u in (*SPENT_UNITS, *PROGRESS_UNITS)}
        return {unit: float(total) for unit, total in named.items() if total is not None}

    def remaining(self, spent: Mapping[str, float]) -> dict[str, float]:
        """What is left of each limit; never below 0."""
        return {u: max(0.0, total - spent.get(u, 0.0)) for u, total in self.limits().items()}

    def share(self, spent: Mapping[str, float]) -> tuple[float, str | None]:
        """The largest share used of any limit, and of which; `(0.0, None)` without limits."""
        shares = [(spent.get(u, 0.0) / total, u) for u, total in self.limits().items()]
        return max(shares, default=(0.0, None), key=lambda pair: pair[0])

    def passes(self, spent: Mapping[str, float], cost: Mapping[str, float]) -> str | None:
        """The first limit that `cost` on top of `spent` would pass, or None."""
        for unit, total in self.limits().items():
            # One part in 10^12: sums of floats in another order must not decide.
            if spent.get(unit, 0.0) + cost.get(unit, 0.0) > total * (1 + 1e-12):
                return unit
        return None

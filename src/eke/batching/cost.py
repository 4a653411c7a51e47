"""What a micro-batch costs: how long it takes, and what it may not exceed. Pure.

Two different things are kept apart. *Caps* are hard: tokens, and any other resource the user
measures (image patches, audio frames). *Time* is a model that plans balance; being wrong about
it costs speed, never memory.

    padded, B samples of at most L tokens:   t = d + B * (a*L + b*L**2 + s) + sum(c_i * load_i)
    packed, samples of l_1 .. l_B tokens:    t = d + sum(a*l + b*l**2 + s)  + sum(c_i * load_i)

Property: a plan only ever sees whole numbers, computed element by element, so that every rank
computes the same plan whatever its processor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eke.errors import InputError

Integers = NDArray[np.int64]

_GRAIN = 1024
"""Whole units of time in the time of one token, for a model that is not tokens alone."""

_MOST = 2**61
"""Less than half of the largest whole number: times of samples and of loads together stay below."""

_MOST_LOAD = 2**40
"""The most that a sample takes of a load, so that sums over a round stay whole numbers."""


class Load(NamedTuple):
    """A resource besides tokens.

    Attributes:
        cap: the most of it in one micro-batch.
        time: how long one of it takes, in the unit of `CostModel.per_token`.
    """

    cap: int
    time: float = 0.0


@dataclass(frozen=True)
class CostModel:
    """How long a micro-batch takes, in any one unit, and what else than tokens is capped.

    Attributes:
        per_token: a, the time of one token.
        per_token_squared: b, the time of one pair of positions of a sample (attention).
        per_sample: s, the time of a sample however short.
        per_micro_batch: d, the time of a micro-batch however small; without it, one sample at a
            time would look best, for nothing is padded then.
        loads: further resources by name.
        measure: from an item of the dataset, how much of each resource it takes.
    """

    per_token: float = 1.0
    per_token_squared: float = 0.0
    per_sample: float = 0.0
    per_micro_batch: float = 256.0
    loads: Mapping[str, Load] = field(default_factory=dict)
    measure: Callable[[Any], Mapping[str, int]] | None = None

    def __post_init__(self) -> None:
        times = [self.per_token, self.per_token_squared, self.per_sample, self.per_micro_batch]
        times += [load.time for load in self.loads.values()]
        if not all(0 <= time < np.inf for time in times) or self.per_token <= 0:
            raise InputError(
                "a cost model's times are wrong",
                value=times,
                rule="they are finite, none is below 0, and per_token is above 0",
            )
        if max(times) / self.per_token > 1e30:
            raise InputError(
                "a cost model's times are too far apart",
                value=times,
                rule="none is more than 1e30 times per_token",
            )
        if any(load.cap < 1 for load in self.loads.values()):
            raise InputError(
                "a load's cap is too small", value=dict(self.loads), rule="it is at least 1"
            )
        if bool(self.loads) != (self.measure is not None):
            raise InputError(
                "a cost model's loads cannot be measured",
                value=", ".join(self.loads) or "no loads",
                rule="`loads` and `measure` are given together",
            )

    @classmethod
    def tokens(cls) -> CostModel:
        """Time is tokens: what is right while attention's share is small."""
        return cls()

    @classmethod
    def fit(
        cls, shapes: Sequence[tuple[int, int]], seconds: Sequence[float]
    ) -> tuple[CostModel, float]:
        """The padded model that comes closest to measured times of (B, L) micro-batches.

        Least squares of relative errors over non-negative a, b, s and a constant for each
        micro-batch, by leaving out the terms that would be negative.

        Returns:
            The model, in seconds, and R² of its times.

        Raises:
            InputError: fewer than 4 shapes, or times that are not above 0.
        """
        if len(shapes) < 4 or len(shapes) != len(seconds) or min(seconds, default=0.0) <= 0:
            raise InputError(
                "a cost model needs more measurements",
                value=f"{len(shapes)} shapes, {len(seconds)} times",
                rule="at least 4 shapes, each with a time above 0",
            )
        size, length = np.array(shapes, dtype=np.float64).T
        time = np.array(seconds, dtype=np.float64)
        columns = np.stack([size * length, size * length**2, size, np.ones_like(size)], axis=1)
        kept = [0, 1, 2, 3]
        while True:
            scaled = columns[:, kept] / time[:, None]
            units = np.linalg.norm(scaled, axis=0)
            found = np.linalg.lstsq(scaled / units, np.ones_like(time), rcond=None)[0] / units
            if (found >= 0).all():
                break
            kept.pop(int(np.argmin(found * units)))
        factors = np.zeros(4)
        factors[kept] = found
        error = columns @ factors - time
        r_squared = 1 - float(error @ error) / float(((time - time.mean()) ** 2).sum() or 1.0)
        # Every other time is counted in tokens', so one must not be next to nothing.
        token = max(float(factors[0]), 1e-3 * float(factors[1]) * float(length.mean()), 1e-12)
        pair, sample, fixed = map(float, factors[1:])
        return cls(token, pair, sample, fixed), r_squared

    def name(self) -> str:
        """Equal for models that plan alike; what `measure` does is not in it."""
        loads = [f"{name}:{load.cap}:{load.time!r}" for name, load in self.loads.items()]
        times = (self.per_token, self.per_token_squared, self.per_sample, self.per_micro_batch)
        return " ".join([*map(repr, times), *loads])

    def weights(self, lengths: Integers) -> Integers:
        """Each sample's time in whole units; the longer a sample, the larger.

        A padded micro-batch takes its size times its longest sample's weight.
        """
        if self._grain == 1:
            return np.maximum(lengths, 1)
        tokens = lengths.astype(np.float64)
        squares = tokens * tokens * (self.per_token_squared / self.per_token)
        samples = self.per_sample / self.per_token
        return np.maximum(_whole((tokens + squares + samples) * _GRAIN), 1)

    def loads_of(self, item: Any) -> tuple[int, ...]:
        """How much of each load an item of the dataset takes, in the order of `loads`.

        Raises:
            InputError: `measure` does not say it for every load in whole numbers.
        """
        if self.measure is None:
            return ()
        found = self.measure(item)
        if found.keys() != self.loads.keys() or not all(map(_is_load, found.values())):
            raise InputError(
                "the cost model's measure does not say what a sample takes",
                value=dict(found),
                rule=f"one whole number for each of {', '.join(self.loads)}, at most {_MOST_LOAD}",
            )
        return tuple(int(found[name]) for name in self.loads)

    def load_weights(self, loads: Integers) -> Integers:
        """Each sample's time for its loads `[n, len(self.loads)]`, in the same whole units."""
        total = np.zeros(len(loads), dtype=np.int64)
        for column, load in enumerate(self.loads.values()):
            time = loads[:, column] * (load.time / self.per_token * self._grain)
            total += _whole(time, len(self.loads))
        return total

    @property
    def fixed(self) -> int:
        """The time of a micro-batch however small, in the same whole units."""
        return round(self.per_micro_batch / self.per_token * self._grain)

    @property
    def _grain(self) -> int:
        """Whole units of time in the time of one token."""
        return 1 if self.per_token_squared == 0 and self.per_sample == 0 else _GRAIN

    def caps(self) -> list[int]:
        """The cap of each load, in the order of `loads`."""
        return [load.cap for load in self.loads.values()]


def _whole(times: NDArray[np.floating[Any]], parts: int = 1) -> Integers:
    """Times in whole units, none so long that `parts` times all of them are no whole number."""
    most = _MOST // (parts * max(1, len(times)))
    whole: Integers = np.minimum(np.rint(times), float(most)).astype(np.int64)
    return whole


def _is_load(n: Any) -> bool:
    return bool(0 <= n <= _MOST_LOAD and int(n) == n)

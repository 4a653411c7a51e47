"""Axes and series, as plain arithmetic: ticks, linear and logarithmic scales, thinning, smoothing.

Properties: ticks ascend, lie inside the range and are multiples of 1, 2 or 5 times a power of
ten; a scale is monotone and never leaves its output range; `thin` returns at most `limit`
points, each of them one of the given, in their order, the lowest and the highest among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Point = tuple[float, float]

LIMIT_POINTS = 2000
"""A series longer than this is thinned before it is drawn."""


@dataclass(frozen=True)
class Scale:
    """Maps `[low, high]` to pixels `[start, end]`; values outside are put on the nearest end.

    The ends are at most 1e300, so that their difference is finite. A logarithmic scale needs
    `0 < low < high`; values at or below 0 go to `start`.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(f"a scale needs low < high, and 0 < low if log; got {self}")

    def __call__(self, value: float) -> float:
        clamped = min(max(value, self.low), self.high)
        if self.log:
            # Logs of the parts: the ratio of two floats can overflow.
            share = (math.log(clamped) - math.log(self.low)) / (
                math.log(self.high) - math.log(self.low)
            )
        else:
            share = (clamped - self.low) / (self.high - self.low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def widen(low: float, high: float) -> tuple[float, float]:
    """A range that is not empty: one value gets room on both sides."""
    if high > low and (high / 2 - low / 2) > 1e-12 * max(abs(low), abs(high)):
        return low, high
    room = max(abs(low), abs(high)) * 0.05 or 1.0
    return low - room, high + room


def linear_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values inside `[low, high]`, about `about` of them.

    Source: Heckbert, "Nice numbers for graph labels", Graphics Gems, 1990.
    """
    if not low < high or about < 1:
        return []
    raw = (high / 2 - low / 2) / about * 2
    if raw <= 0 or not math.isfinite(raw):
        return []
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next((m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw * 0.999), raw)
    if step <= 0 or not math.isfinite(step):
        return []
    first, last = math.ceil(low / step), math.floor(high / step)
    ticks = [i * step for i in range(first, min(last, first + 4 * about) + 1)]
    return [0.0 if abs(t) < step / 1e6 else t for t in ticks if low <= t <= high]


def log_ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Powers of ten inside `[low, high]`, every k-th where there are many; 2 and 5 where few."""
    if not 0 < low < high:
        return []
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = [float(f"1e{e}") for e in range(first, last + 1) if -307 <= e <= 307]
    inside = [d for d in decades if low <= d <= high]
    if len(inside) > about:
        every = math.ceil(len(inside) / about)
        return inside[::every]
    for multiples in ((1, 2, 5), (1, 2, 3, 4, 5, 6, 7, 8, 9)):
        if len(inside) >= 3:
            break
        finer = [m * d for d in decades for m in multiples if low <= m * d <= high]
        if len(finer) > 2 * about:
            break
        inside = finer
    return inside if len(inside) >= 2 else linear_ticks(low, high, about)


def thin(
    points: Sequence[Point],
    limit: int = LIMIT_POINTS,
    key: Callable[[float], float] = lambda x: x,
) -> list[Point]:
    """At most `limit` points that draw the same line: the lowest and highest of equal buckets.

    Args:
        points: in ascending order of x.
        limit: at least 4.
        key: maps x to the axis along which the buckets have equal width.
    """
    if limit < 4:
        raise ValueError(f"thin needs room for at least 4 points; got {limit}")
    if len(points) <= limit:
        return list(points)
    buckets = limit // 2
    start, end = key(points[0][0]), key(points[-1][0])
    width = (end - start) / buckets
    members: dict[int, list[int]] = {}
    for index, (x, _) in enumerate(points):
        # Without any width (all x equal) buckets go by position instead.
        bucket = (key(x) - start) / width if width > 0 else index * buckets / len(points)
        members.setdefault(min(max(int(bucket), 0), buckets - 1), []).append(index)
    chosen: list[int] = []
    for indices in members.values():
        extremes = {
            min(indices, key=lambda i: points[i][1]),
            max(indices, key=lambda i: points[i][1]),
        }
        chosen += sorted(extremes)
    return [points[i] for i in sorted(chosen)]


def smooth(values: Sequence[float], half_width: int) -> list[float]:
    """The centred mean over at most `half_width` values on each side.

    Early on the window is at most as wide as what lies before it: a wider one would bend the
    steep start of a curve. Each mean lies between the lowest and the highest value.
    """
    if half_width < 1 or not values:
        return list(values)
    # Scaled, so that a sum of large values stays finite.
    scale = max(abs(v) for v in values) or 1.0
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value / scale)
    low, high = min(values), max(values)
    means = []
    for i in range(len(values)):
        first, last = i - min(half_width, i // 2), i + min(half_width, i // 2, len(values) - 1 - i)
        mean = (sums[last + 1] - sums[first]) / (last + 1 - first) * scale
        means.append(min(max(mean, low), high))
    return means


def quantile_along(
    points: Sequence[Point], q: float, key: Callable[[float], float] = lambda x: x
) -> float:
    """The value that the curve stays at or below on a share `q` of its axis.

    Each point stands for half the way to its neighbours, so that on a logarithmic axis the first
    steps weigh as much as they are wide.

    Args:
        points: at least one, in ascending order of x.
    """
    places = [key(x) for x, _ in points]
    last = len(points) - 1
    widths = [places[min(i + 1, last)] - places[max(i - 1, 0)] for i in range(len(points))]
    if sum(widths) <= 0:
        widths = [1.0] * len(points)
    ranked = sorted(zip((y for _, y in points), widths, strict=True))
    target, so_far = q * sum(widths), 0.0
    for value, width in ranked:
        so_far += width
        if so_far >= target:
            return value
    return ranked[-1][0]

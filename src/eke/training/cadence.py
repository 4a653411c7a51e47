"""How often to save: pure arithmetic over what saves cost and how often machines fail.

Properties, for every input: the interval loses least time to saves and failures together (Young
1974), unless that would be below one of three floors: `LEAST_S`, saving for more than `MOST_SHARE`
of the time, or a save under way for more than `BACKGROUND_SHARE` of it. The reason that is given
is the floor that holds, or "failures".
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

LEAST_S = 5.0
"""`every = "auto"` never saves more often than this."""
MOST_SHARE = 0.02
"""Nor so often that saves cost training more than this share of its time."""
BACKGROUND_SHARE = 0.1
"""Nor so often that a save is under way in the background for more than this share of the time."""
CALM_STEPS = 20
"""Steps without a save that the speed of those with one is held against."""
SAVES = 5
"""Saves that what they cost is taken from, by the median."""

COPY_BYTES_PER_S = 2e9
"""What a plan assumes of copying memory, in the background."""
WRITE_BYTES_PER_S = 200e6
"""What a plan assumes of a disk."""
EAGER_S = 0.005
"""What a plan assumes of what cannot wait: objects, random generators, buffers."""

WHY = {
    "failures": "this loses least to saves and failures together",
    "share": f"more often, saves would cost more than {MOST_SHARE:.0%} of the time",
    "background": f"more often, a save would be under way for over {BACKGROUND_SHARE:.0%} of it",
    "least": f"no save comes sooner than {LEAST_S:g} s after another",
}


@dataclass(frozen=True)
class Interval:
    """Seconds between the starts of two saves, what it rests on, and why (a key of `WHY`).

    Attributes:
        stall_s: how long training waits for a save.
        background_s: how much longer its steps take while a save is under way, beyond that.
        save_s: from the start of a save to its commit.
    """

    seconds: float
    why: str
    stall_s: float
    background_s: float
    save_s: float
    mtbf_s: float

    @property
    def cost_s(self) -> float:
        """What one save costs training."""
        return self.stall_s + self.background_s

    @property
    def share(self) -> float:
        """The share of time that saving takes."""
        return self.cost_s / self.seconds

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "cost_s": self.cost_s, "share": self.share}


def auto_interval(
    stall_s: float, mtbf_s: float, *, background_s: float = 0.0, save_s: float = 0.0
) -> Interval:
    """The interval that loses least: sqrt(2 x cost of a save x time between failures), floored.

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly
    2006 gives the same where a save costs far less than the time between failures.
    """
    cost_s = stall_s + background_s
    bounds = {
        "failures": math.sqrt(2.0 * cost_s * mtbf_s),
        "share": cost_s / MOST_SHARE,
        "background": save_s / BACKGROUND_SHARE,
        "least": LEAST_S,
    }
    why = max(bounds, key=lambda name: bounds[name])
    return Interval(bounds[why], why, stall_s, background_s, save_s, mtbf_s)


def expected_save(
    state_bytes: int, pool_bytes: int, step_s: float | None
) -> tuple[float | None, float]:
    """What a plan expects of a save before one is measured: its stall and its length (seconds).

    What the pool holds is copied at memory's speed, the rest as fast as the disk frees the pool;
    both go on under the next step, and only what outlasts it is waited for. The stall is None
    where the length of a step is not known.
    """
    held = min(state_bytes, pool_bytes)
    capture_s = held / COPY_BYTES_PER_S + (state_bytes - held) / WRITE_BYTES_PER_S
    stall_s = None if step_s is None else EAGER_S + max(0.0, capture_s - step_s)
    return stall_s, EAGER_S + state_bytes / WRITE_BYTES_PER_S


class SlowDown:
    """How much longer steps take while a save is under way, beyond what they wait for it.

    Property: steps that are as fast with a save as the median of those without cost nothing; the
    answer is never below 0, and does not depend on the sizes of the steps.
    """

    def __init__(self) -> None:
        self._calm: deque[float] = deque(maxlen=CALM_STEPS)
        self._extra: deque[float] = deque(maxlen=SAVES)
        self._saving: tuple[float, float] | None = None

    def began(self) -> None:
        """A save has begun."""
        self._saving = (0.0, 0.0)

    def step(self, seconds: float, flops: float) -> None:
        """A step was trained: its time without the stalls, and what it computed."""
        if self._saving is not None:
            self._saving = (self._saving[0] + seconds, self._saving[1] + flops)
        elif flops > 0:
            self._calm.append(seconds / flops)

    def ended(self) -> None:
        """The save is over. Without calm steps to hold it against it says nothing."""
        if self._saving is not None and self._calm:
            seconds, flops = self._saving
            self._extra.append(max(0.0, seconds - median(self._calm) * flops))
        self._saving = None

    @property
    def background_s(self) -> float:
        """For the median of the last saves (seconds a save); 0 before one is measured."""
        return median(self._extra) if self._extra else 0.0

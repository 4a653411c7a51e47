"""How long nothing may happen before somebody gives up, as told by whoever waits.

A process that is stopped (Ctrl-Z, a scheduler that suspends the job), or that does not get the
processor, cannot make progress, and cannot see that of others: that time does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Patience:
    """Counts the time since the last progress.

    Property: of a sleep no more than what was asked for counts, however long it took.

    Args:
        most_s: how long there may be none.
        clock: seconds that never go back.
    """

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most_s, self._clock = most_s, clock
        self._since = clock()

    def moved(self) -> None:
        """There is progress."""
        self._since = self._clock()

    @property
    def over(self) -> bool:
        """Whether there has been none for too long."""
        return self._clock() - self._since > self.most_s

    def sleep(self, sleep: Callable[[float], object], asked_s: float) -> None:
        """Let this thread sleep: `sleep(asked_s)`, or shorter."""
        began = self._clock()
        sleep(asked_s)
        now = self._clock()
        # Several may have slept through the same stop: it counts for none, and not backwards.
        self._since = min(now, self._since + max(0.0, now - began - asked_s))

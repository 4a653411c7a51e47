"""A lock, and a place to sleep until something happens, that outlive an interrupt.

Python raises `KeyboardInterrupt` in the main thread between any two of its steps. A
`threading.Condition` is written in Python, so one that is entered with `with` may be left locked
for good. The lock itself is entered and left in one step.
"""

from __future__ import annotations

import threading


class Turn(threading.Condition):
    """A condition whose `lock` is to be entered: `with turn.lock:`.

    Property: an interrupt leaves the lock as it was at its `with`, also one that strikes in `wait`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        super().__init__(self.lock)

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep, without the lock, until somebody notifies or the time is over."""
        try:
            return super().wait(timeout)
        except BaseException:
            if not self._is_owned():  # type: ignore[attr-defined]
                self.lock.acquire()
            raise

"""One piece of work done ahead, in a thread, whose outcome is taken later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """Runs `work` in a daemon thread; `take` gives its result, or raises what it raised."""

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work: Callable[[], T] | None = work
        self._result: list[T] = []
        self._error: BaseException | None = None
        # An interrupted `join` may take the thread for ended; an event can be waited for again.
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        assert self._work is not None
        try:
            self._result.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is taken
            self._error = error
        finally:
            self._work = None
            self._done.set()

    def wait(self) -> None:
        """Wait for the result. Where an interrupt breaks this off, it can be waited for again."""
        self._done.wait()
        self._thread.join()

    def take(self) -> T:
        """The result; waits for it. It can be taken once.

        Raises:
            BaseException: what the work raised.
        """
        self.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._result.pop()

    def ended(self, within_s: float) -> bool:
        """Whether the thread is over, after waiting so long at most."""
        if not self._done.wait(within_s):
            return False
        self._thread.join()
        return True

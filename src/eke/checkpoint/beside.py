"""Computing beside a disk: a thread that hashes memory while the one that owns it writes.

There is one for each file of large blocks, started with its first block and ended with the file, in
every save: so beside the engine's two threads a save has one more for each file it has open.

What it is given touches memory only and cannot hang, so all that can go wrong with a disk stays in
the thread that writes, and waiting for the helper is short.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[], None]


def step_aside() -> None:
    """Lowest priority for this thread alone, so that training never waits for the processor."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


class Beside:
    """One helper; its thread begins with the first `run` and is gone after `end`.

    Property: when `run` returns or raises, both pieces of work are over.
    """

    def __init__(self) -> None:
        self._given: SimpleQueue[Work | None] = SimpleQueue()
        self._over: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._alone = False

    def run(self, aside: Work, here: Work) -> None:
        """Do `aside` in the helper's thread and `here` in this one; raises what either raised."""
        if self._thread is None and not self._alone:
            self._begin()
        if self._alone:
            aside()
            here()
            return
        self._given.put(aside)
        try:
            here()
        finally:
            error = self._over.get()
        if error is not None:
            raise error

    def _begin(self) -> None:
        thread = threading.Thread(target=self._loop, name="eke-hasher", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # a process that is ending starts no threads, but finishes its saves
            self._alone = True
        else:
            self._thread = thread

    def _loop(self) -> None:
        step_aside()
        while (work := self._given.get()) is not None:
            error: BaseException | None = None
            try:
                work()
            except BaseException as caught:  # noqa: BLE001 - raised where it is waited for
                error = caught
            del work
            self._over.put(error)

    def end(self) -> None:
        """End the thread; when this returns it is gone. Ending twice is harmless."""
        if self._thread is not None:
            self._given.put(None)
            self._thread.join()
            self._thread = None
        self._alone = True

"""Small values between ranks that need no collective: any thread may leave and look for them.

One TCP store of eke's own, served by rank 0, apart from the one that torch's process groups use.
Nothing here waits for another rank: a look returns at once, so that a thread can wait as long as it
likes and no longer, and a value that is not there yet is no error. Values are JSON.
"""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from eke.errors import EkeError


class Store:
    """The job's values by key.

    Args:
        host: where rank 0 runs.
        port: where its store listens; 0 to serve it here.
        timeout_s: how long rank 0 may take to answer.
    """

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._lock = threading.Lock()
        self._store = TCPStore(
            host,
            port,
            is_master=port == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
        self.port: int = self._store.port

    def put(self, key: str, value: Any) -> None:
        """Leave a value.

        Raises:
            EkeError: rank 0 is gone.
            TypeError: the value is not JSON.
        """
        data = json.dumps(value)
        try:
            with self._lock:
                self._store.set(key, data)
        except RuntimeError as error:
            raise _lost(error) from error

    def get(self, key: str) -> Any | None:
        """The value, or None if there is none yet.

        Raises:
            EkeError: rank 0 is gone.
        """
        try:
            with self._lock:
                if not self._store.check([key]):
                    return None
                data = self._store.get(key)
        except RuntimeError as error:
            raise _lost(error) from error
        return json.loads(data)

    def drop(self, key: str) -> None:
        """Forget a value; none is no error.

        Raises:
            EkeError: rank 0 is gone.
        """
        try:
            with self._lock:
                self._store.delete_key(key)
        except RuntimeError as error:
            raise _lost(error) from error


def _lost(error: RuntimeError) -> EkeError:
    return EkeError(
        f"rank 0 does not answer: {str(error).splitlines()[0]}",
        fix="See in its log how rank 0 ended; start the job again to resume",
    )

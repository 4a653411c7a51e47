"""What the ranks tell one another about one save, from background threads.

Never a collective: training may be in one. Values go through the job's key-value store; whoever
waits looks again and again, sleeping in between, and gives up within a bounded time.

Property: waiting for a rank ends when its value is there; at once with an error that names the
rank when its process (on this machine) has ended; or after `patience_s` in which the rank showed
no sign of progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from eke.checkpoint.owner import Owner, me, parse_token, start_of
from eke.checkpoint.patience import Patience
from eke.distributed import Store, World
from eke.errors import EkeError

FIRST_NAP_S, LONGEST_NAP_S = 0.002, 0.1
BEAT_S = 1.0


class Conference:
    """One save's conversation.

    Args:
        store: where values go.
        token: the save's own; every rank has the same.
        here: this rank.
        patience_s: how long another rank may be silent.
        moved: called again and again while this rank waits for another.
    """

    def __init__(
        self,
        store: Store,
        token: str,
        here: World,
        patience_s: float,
        moved: Callable[[], None],
    ) -> None:
        self._store, self._token, self._here = store, token, here
        self._patience_s, self._moved = patience_s, moved
        self._beats, self._last_beat = 0, 0.0
        self._owners: dict[int, Owner | None] = {}
        own = me()
        self._host = own.host
        self.tell("who", f"{own.host}.{own.boot}.{own.pid}.{own.start}.0")

    def _key(self, what: str, rank: int) -> str:
        return f"{self._token}/{what}/{rank}"

    def tell(self, what: str, value: Any) -> None:
        """Leave a value for the others.

        Raises:
            EkeError: rank 0 is gone.
        """
        self._store.put(self._key(what, self._here.rank), value)

    def beat(self) -> None:
        """Show progress; cheap enough to be called for every block."""
        now = time.monotonic()
        if now - self._last_beat >= BEAT_S:
            self._last_beat = now
            self._beats += 1
            self.tell("beat", self._beats)

    def look(self, what: str, rank: int) -> Any | None:
        """A rank's value, None if it is not there yet."""
        return self._store.get(self._key(what, rank))

    def hear(self, whats: Sequence[str], rank: int, *, at_most_s: float | None = None) -> Any:
        """Wait for the first of several values of a rank.

        Raises:
            EkeError: the rank has ended, or was silent for too long.
        """
        nap, seen = FIRST_NAP_S, None
        patience = Patience(self._patience_s if at_most_s is None else at_most_s)
        while True:
            for what in whats:
                value = self.look(what, rank)
                if value is not None:
                    return value
            if self._ended(rank):
                # It may have spoken between our look and its end.
                spoken = [v for v in (self.look(w, rank) for w in whats) if v is not None]
                if spoken:
                    return spoken[0]
                raise EkeError(
                    f"rank {rank} has ended before it had said that its part is done",
                    fix="See how it ended in its own log; start the job again to resume",
                )
            beat = self.look("beat", rank)
            if beat != seen and at_most_s is None:
                seen = beat
                patience.moved()
            self._moved()  # this wait has a bound of its own
            if patience.over:
                raise EkeError(
                    f"rank {rank} has shown no progress for {patience.most_s:g} s",
                    fix="See whether its disk answers and its process lives",
                )
            patience.sleep(time.sleep, nap)
            nap = min(2 * nap, LONGEST_NAP_S)

    def _ended(self, rank: int) -> bool:
        """Whether the rank's process is known to be gone; of another machine it never is."""
        if self._owners.get(rank) is None:
            who = self.look("who", rank)
            self._owners[rank] = None if who is None else parse_token(who)
        owner = self._owners[rank]
        if owner is None or owner.host != self._host:
            return False
        return start_of(owner.pid) != owner.start

    def forget(self) -> None:
        """Remove every rank's values; rank 0 does this when all have heard the end."""
        for rank in range(self._here.size):
            for what in ("who", "beat", "begun", "report", "done", "bye"):
                self._store.drop(self._key(what, rank))

"""The handle of one save, and the states that it goes through.

    capturing --> captured --> persisted --> committed
         \\____________\\_____________\\________--> failed

Properties: the state only moves forward; `committed` and `failed` are final; and whoever waits for
a state returns when it or a later one is reached, or raises what the save failed with.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from eke.budget.bill import Bill
from eke.budget.units import parse_duration
from eke.checkpoint.timeline import Marks, Span
from eke.errors import EkeError, InputError

if TYPE_CHECKING:
    from eke.checkpoint.engine import Engine

State = Literal["capturing", "captured", "persisted", "committed", "failed"]
"""`capturing`: live tensors are still being copied. `captured`: they may all change. `persisted`:
this rank's files are written (and durable, unless asked otherwise). `committed`: it is a
checkpoint. `failed`: it never will be; on a rank that has lost rank 0, as far as it knows."""

_ORDER = get_args(State)


def reaches(state: State, wanted: State) -> bool:
    """Whether a save in `state` has got as far as `wanted`; a failed one has only failed."""
    if "failed" in (state, wanted):
        return state == wanted
    return _ORDER.index(state) >= _ORDER.index(wanted)


class Ticket:
    """One save. Made by `Checkpointer.save`.

    Attributes:
        step: which step.
        path: the checkpoint's directory, whether or not it comes to be.
        bytes_written: what all ranks wrote, once committed: the length of all files but those that
            were linked because they had not changed.
        error: what it failed with; or, before it is final, why nobody knows yet whether it will:
            the disk does not answer.
        serial: which `save` of its checkpointer it is, from 1; alike on all ranks.
        heard: whether its failure was reported on this rank, or will have been by another's word.
        seconds: when each state was reached, in seconds since `save` was called.
        stall_s: how long training has waited for it on this rank, up to now.
        marks: where its time went; `spans` are what it has marked so far.
    """

    def __init__(
        self, step: int, path: Path, engine: Engine | None = None, serial: int = 0
    ) -> None:
        self.step, self.path, self.serial = step, path, serial
        self.heard = False
        self.bytes_written = 0
        self.error: EkeError | None = None
        self.seconds: dict[State, float] = {}
        self.stall_s = 0.0
        self._state: State = "capturing"
        self._engine = engine
        self.marks = Marks()
        self._began = self.marks.began_s

    @property
    def state(self) -> State:
        """How far it is."""
        return self._state

    @property
    def final(self) -> bool:
        """Whether it is committed or failed."""
        return self._state in ("committed", "failed")

    @property
    def spans(self) -> tuple[Span, ...]:
        """What training, capture, writing and commit did for it on this rank, up to now."""
        return self.marks.spans

    @property
    def bill(self) -> Bill:
        """What it has cost training on this rank so far: measured seconds of waiting."""
        return Bill(who="checkpoint", what="checkpoint", step=self.step, seconds=self.stall_s)

    def reach(self, state: State) -> None:
        """Move on to a later state; the engine calls this."""
        if self.final or (state != "failed" and reaches(self._state, state)):
            raise ValueError(f"a save that is {self._state} cannot become {state}")
        # Whoever sees a state may ask at once when it was reached.
        self.seconds[state] = time.perf_counter() - self._began
        self._state = state

    def wait(self, state: State = "committed", timeout: float | str | None = None) -> Ticket:
        """Wait until it has got as far as `state`; returns itself.

        Args:
            state: "captured", "persisted" or "committed".
            timeout: how long to wait at most: seconds, or "10m" for example; None without end.

        Raises:
            InputError: `state` is none of the three, `timeout` is no duration, or this is a forked
                child.
            SaveError: the save failed; or the disk has not answered for so long that nobody knows
                whether it will.
            EkeError: `timeout` was not enough; the save goes on.
        """
        if state not in ("captured", "persisted", "committed"):
            raise InputError(
                "a save cannot be waited for in this state",
                value=state,
                rule='it is "captured", "persisted" or "committed"',
                fix='Write wait("committed"), or wait()',
            )
        most_s = None if timeout is None else parse_duration(timeout, "how long to wait")
        if self._engine is not None:
            self._engine.wait(self, state, most_s)
        return self

    def __repr__(self) -> str:
        return f"Ticket(step={self.step}, state={self._state!r}, path={str(self.path)!r})"

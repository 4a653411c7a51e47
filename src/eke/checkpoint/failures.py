"""How several ranks hear of a failed save: all of them, at the same place, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eke.checkpoint.engine import Engine
from eke.checkpoint.errors import SaveError


def unheard(engine: Engine) -> dict[str, Any] | None:
    """This rank's oldest failure that nobody has heard of, in JSON for the other ranks."""
    ticket = engine.unheard()
    if ticket is None:
        return None
    return {"serial": ticket.serial, "step": ticket.step, "text": str(ticket.error)}


def hear(engine: Engine, rows: Sequence[dict[str, Any] | None]) -> None:
    """Raise the oldest failure that a rank has not heard of, on all ranks and once.

    A failure comes to the ranks at different times: one may still be writing the save of which
    another knows that it has failed.

    Args:
        rows: every rank's `unheard`, in rank order.

    Raises:
        SaveError: there is one; this rank's own, if it has failed here too.
    """
    told = [(row["serial"], rank, row) for rank, row in enumerate(rows) if row is not None]
    if not told:
        return
    serial, rank, row = min(told, key=lambda one: one[:2])
    ticket = engine.heard(serial)
    if ticket is not None and ticket.error is not None:
        raise ticket.error
    error = SaveError(f"saving step {row['step']} failed on rank {rank}: {row['text']}")
    error.ticket = ticket
    raise error

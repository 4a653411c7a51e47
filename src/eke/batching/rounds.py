"""What the ranks tell one another in a round, and what they conclude from it: pure functions.

Every round, each rank makes an *offer*: where it stands, what it wishes, and the sizes of the
samples that it fetched. All ranks get all offers and conclude the same from them, so nothing has to
be agreed on afterwards.

Properties: `conclude` depends on the offers alone, so all ranks that have them return, or raise,
the same; a fault, a difference and a wish to stop are each named with the rank they come from, and
they rank in this order; `read(offer.data())` is the offer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eke.errors import EkeError, InputError

_HEAD = 4
"""Bytes that say how long the text of an offer is."""


@dataclass(frozen=True)
class Offer:
    """One rank's part of a round.

    Attributes:
        standing: settings and place, by name; ranks that differ in any cannot go on together.
        sizes: of each fetched sample its length before truncation, its label tokens and its
            loads: int64 `[n, 2 + loads]`.
        stop: why this rank wishes to stop after the rounds so far; "" if it does not.
        fault: what went wrong here; "" if nothing did.
        input_fault: whether that is the user's to mend.
        begins: a digest of the sample that an iterable's epoch begins with; "" where it was not
            read, as by a rank that only reads on, or that wishes to stop.
    """

    standing: dict[str, Any]
    sizes: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    stop: str = ""
    fault: str = ""
    input_fault: bool = False
    begins: str = ""

    def data(self) -> bytes:
        """As bytes for the other ranks."""
        told = {
            "standing": self.standing,
            "width": self.sizes.shape[1],
            "stop": self.stop,
            "fault": self.fault,
            "input_fault": self.input_fault,
            "begins": self.begins,
        }
        text = json.dumps(told, separators=(",", ":")).encode()
        return len(text).to_bytes(_HEAD, "little") + text + self.sizes.astype("<i8").tobytes()


def read(data: bytes) -> Offer:
    """The offer whose `data()` this is."""
    end = _HEAD + int.from_bytes(data[:_HEAD], "little")
    told = json.loads(data[_HEAD:end])
    width = told.pop("width")
    sizes = np.frombuffer(data, dtype="<i8", offset=end).reshape(-1, width)
    return Offer(sizes=sizes, **told)


def conclude(offers: Sequence[Offer]) -> str:
    """Why all ranks stop now, with the rank that wished it; "" if they go on.

    Raises:
        InputError: a rank has a fault that is the user's, or two ranks stand differently.
        EkeError: a rank has another fault; the lowest such rank and its fault are named.
    """
    size = len(offers)
    for rank, offer in enumerate(offers):
        if offer.fault:
            kind = InputError if offer.input_fault else EkeError
            raise kind(offer.fault if size == 1 else f"rank {rank} of {size}: {offer.fault}")
    first = offers[0].standing
    for rank, offer in enumerate(offers):
        keys = first.keys() | offer.standing.keys()
        differing = sorted(k for k in keys if first.get(k) != offer.standing.get(k))
        if differing:
            raise InputError(
                f"the loaders of rank 0 and rank {rank} differ",
                value={key: offer.standing.get(key) for key in differing},
                rule=f"rank 0 has { ({key: first.get(key) for key in differing})!r}",
                fix="Give all ranks the same data, the same settings and the same state",
            )
    begun = [(rank, offer.begins) for rank, offer in enumerate(offers) if offer.begins]
    for rank, begins in begun:
        if begins != begun[0][1]:
            raise InputError(
                f"the datasets of rank {begun[0][0]} and rank {rank} begin with different samples",
                rule="an iterable gives all its samples, in one order, on every rank",
                fix="Take its order from a seed and the epoch, and leave sharing out to the loader",
            )
    stops = [(rank, offer.stop) for rank, offer in enumerate(offers) if offer.stop]
    if not stops:
        return ""
    return stops[0][1] if size == 1 else f"rank {stops[0][0]}: {stops[0][1]}"

"""The order of an epoch, and a place in it, independent of the number of ranks.

Properties: the order of epoch e is a permutation that depends on the seed and e alone, so a
place in it is a few integers; windows taken one after another from any place cover what is
left of the epoch exactly once, whatever their sizes. The order of an iterable is its own; of its
windows some numbers may turn out not to be there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eke.errors import EkeError


@dataclass(frozen=True)
class Place:
    """A place in the run's sequence of samples.

    What is left of the epoch is `pending`, then the permutation from `cursor` on. `pending`
    holds indices from before the cursor that were taken but not delivered: the end of a window
    that did not fill a step, or the rest of a window that a different number of ranks began.

    Of an iterable, `ended` are the parts that were found to have no sample at the cursor or beyond.
    """

    epoch: int = 0
    cursor: int = 0
    pending: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()


class Order:
    """The permutations of a dataset of `n` samples."""

    shuffles_rounds = False
    """Whether the samples of a round are shuffled once they are there."""

    def __init__(self, n: int, seed: int, shuffle: bool) -> None:
        self.n, self._seed, self._shuffle = n, seed, shuffle
        self._epoch = -1
        self._permutation = np.arange(n)

    def window(self, place: Place, count: int) -> tuple[list[int], Place]:
        """The next `count` indices of the epoch, fewer at its end, and the place after them."""
        head, tail = place.pending[:count], place.pending[count:]
        stop = min(place.cursor + count - len(head), self.n)
        body = self._epoch_order(place.epoch)[place.cursor : stop].tolist()
        return [*head, *body], Place(place.epoch, stop, tail)

    def is_exhausted(self, place: Place) -> bool:
        """True if nothing of the epoch is left at `place`."""
        return place.cursor == self.n and not place.pending

    def deal(self, indices: Sequence[int], ranks: int) -> list[list[int]]:
        """Whose each sample of a window is, rank by rank."""
        return [list(indices[rank::ranks]) for rank in range(ranks)]

    def ended(self, place: Place, absent: Iterable[int], present: Iterable[int]) -> Place:
        """The same place: all samples are known to be there."""
        return place

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if self._shuffle and epoch != self._epoch:
            # Sorting raw Philox words: numpy promises the stability of a bit generator's
            # stream over its releases, but not that of Generator.permutation.
            words = np.random.Philox(np.random.SeedSequence((self._seed, epoch))).random_raw(self.n)
            self._permutation = np.argsort(words, kind="stable")
            self._epoch = epoch
        return self._permutation


class StreamOrder:
    """The numbers of an iterable in `parts` parts, of which nobody knows how long they are.

    Number i is sample i // parts of part i % parts, so an epoch takes from its parts in turns. It
    is over once each part was found to end.
    """

    n = None

    def __init__(self, parts: int, shuffle: bool) -> None:
        self._parts, self.shuffles_rounds = parts, shuffle

    def window(self, place: Place, count: int) -> tuple[list[int], Place]:
        """The next `count` numbers of the parts that have not ended, and the place after them."""
        head, tail = place.pending[:count], place.pending[count:]
        live = [part for part in range(self._parts) if part not in place.ended]
        body: list[int] = []
        row = place.cursor // self._parts
        while live and len(body) < count - len(head):
            numbers = (row * self._parts + part for part in live)
            body += [number for number in numbers if number >= place.cursor]
            row += 1
        del body[count - len(head) :]
        cursor = body[-1] + 1 if body else place.cursor
        return [*head, *body], Place(place.epoch, cursor, tail, place.ended)

    def is_exhausted(self, place: Place) -> bool:
        """True if nothing of the epoch is left at `place`, as far as is known."""
        return len(place.ended) == self._parts and not place.pending

    def deal(self, indices: Sequence[int], ranks: int) -> list[list[int]]:
        """Whose each number of a window is, rank by rank.

        Number i is always rank i % ranks's: so parts need not be read by more ranks than one, and
        what is taken again has been read where it is asked for.
        """
        return [[i for i in indices if i % ranks == rank] for rank in range(ranks)]

    def ended(self, place: Place, absent: Iterable[int], present: Iterable[int]) -> Place:
        """The place, with the parts that have ended.

        Args:
            absent, present: numbers that were asked for, and are not there, or are.

        Raises:
            EkeError: one is there, although an earlier one of its part is not.
        """
        first: dict[int, int] = {}
        for i in absent:
            part = i % self._parts
            first[part] = min(i, first.get(part, i))
        for i in present:
            if i > first.get(i % self._parts, i):
                position, part = divmod(i, self._parts)
                raise EkeError(
                    "the dataset does not end at the same place for all that read it",
                    value=f"sample {position} of its part {part} is there, "
                    f"sample {first[part] // self._parts} is not",
                    rule="on every rank and in every worker it gives all its samples, in one order",
                    fix="Do not let it share itself out over ranks or workers: the loader does",
                )
        return replace(place, ended=tuple(sorted({*place.ended, *first})))


AnyOrder = Order | StreamOrder

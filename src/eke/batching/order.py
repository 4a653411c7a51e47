"""The order of an epoch, and a place in it, independent of the number of ranks.

Properties: the order of epoch e is a permutation that depends on the seed and e alone, so a
place in it is a few integers; windows taken one after another from any place cover what is
left of the epoch exactly once, whatever their sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Place:
    """A place in the run's sequence of samples.

    What is left of the epoch is `pending`, then the permutation from `cursor` on. `pending`
    holds indices from before the cursor that were taken but not delivered: the end of a window
    that did not fill a step, or the rest of a window that a different number of ranks began.
    """

    epoch: int = 0
    cursor: int = 0
    pending: tuple[int, ...] = ()


class Order:
    """The permutations of a dataset of `n` samples."""

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

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if self._shuffle and epoch != self._epoch:
            # Sorting raw Philox words: numpy promises the stability of a bit generator's
            # stream over its releases, but not that of Generator.permutation.
            words = np.random.Philox(np.random.SeedSequence((self._seed, epoch))).random_raw(self.n)
            self._permutation = np.argsort(words, kind="stable")
            self._epoch = epoch
        return self._permutation

"""The pool: the memory that all captured bytes pass through, and all that saving ever adds.

One anonymous mapping, cut into equal slots that start at multiples of a page. Slots are taken and
given back in any order; the one given back last is taken first, so a small state touches a small
part of the pool, and memory that was filled before (four to five times faster to fill than fresh
memory) is filled again. A forked child does not inherit the mapping: it would cost a copy of every
page that is written after the fork.

Not thread-safe, but for `pin`: the engine takes and gives back slots under its own lock.

Property: an interrupt at any instant of `take` or `give_back` loses no slot: it is free, or its
owner's, who finds it by `owned` and may give it back (again).
"""

from __future__ import annotations

import mmap
import threading
import weakref
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from eke.budget.units import format_bytes
from eke.checkpoint.device import Device
from eke.errors import InputError

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
MAX_SLOT_BYTES = 8 << 20
LEAST_SLOTS = 2


def slot_size(pool_bytes: int) -> int:
    """The slot of a pool: an eighth of it, in whole pages, at most `MAX_SLOT_BYTES`.

    Raises:
        InputError: the pool would not hold two slots of a page.
    """
    if pool_bytes < LEAST_SLOTS * PAGE_BYTES:
        raise InputError(
            "the checkpoints' pool is too small",
            value=pool_bytes,
            rule=f"it has at least {LEAST_SLOTS * PAGE_BYTES} bytes",
            fix='Leave it at "512MiB"',
        )
    return max(PAGE_BYTES, min(MAX_SLOT_BYTES, pool_bytes // 8 // PAGE_BYTES * PAGE_BYTES))


class Pool:
    """`pool_bytes` of memory in slots of `slot_bytes`.

    Attributes:
        slot_bytes: the length of one slot.
        slots: how many there are.

    Raises:
        InputError: it is too small, or more than the system gives.
    """

    def __init__(self, pool_bytes: int) -> None:
        self.slot_bytes = slot_size(pool_bytes)
        self.slots = pool_bytes // self.slot_bytes
        try:
            memory = mmap.mmap(-1, self.slots * self.slot_bytes, flags=mmap.MAP_PRIVATE)
            memory.madvise(mmap.MADV_DONTFORK)
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise InputError(
                f"the checkpoints' pool cannot be had from the system: {why}",
                value=format_bytes(pool_bytes),
                rule="it is memory of this machine",
                fix='Name a smaller one, such as pool="512MiB"; a state may be many times as large',
            ) from error
        if self.slot_bytes >= HUGE_PAGE_BYTES:
            with suppress(OSError):  # it is a hint, which some kernels do not know
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
        self._free = list(range(self.slots))[::-1]
        self._owners: dict[int, object] = {}
        self._touched: set[int] = set()
        self._pinning = threading.Lock()
        self._pinned: set[Device] = set()

    @property
    def free(self) -> int:
        """How many slots can be taken now."""
        return self.slots - len(self._owners)

    def take(self, owner: object = None) -> int | None:
        """A free slot, the one given back last if there is one; None when all are taken."""
        while self._free:
            slot = self._free[-1]
            stale = slot in self._owners  # who took it, or gave it back, was interrupted
            if not stale:
                self._touched.add(slot)
                self._owners[slot] = owner
            self._free.pop()
            if not stale:
                return slot
        return None

    def owned(self, owner: object) -> list[int]:
        """The slots that were taken for `owner`, also if it was interrupted before it knew."""
        return [slot for slot, one in self._owners.items() if one is owner]

    def give_back(self, slot: int) -> None:
        """Let a slot be taken again.

        Raises:
            ValueError: it is not taken.
        """
        if slot not in self._owners:
            raise ValueError(f"slot {slot} is not taken")
        self._free.append(slot)
        del self._owners[slot]

    def array(self, slot: int) -> npt.NDArray[np.uint8]:
        """The slot's memory."""
        return self._bytes[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def pin(self, device: Device | None) -> None:
        """Before a device copies here for the first time: pin all of the memory, which takes it
        from the system at once. It is let go with the pool."""
        if device is None or device in self._pinned:
            return
        with self._pinning:
            if device not in self._pinned:
                undo = device.pin(self._bytes.ctypes.data, self._bytes.nbytes)
                if undo is not None:
                    weakref.finalize(self, undo).atexit = False
                self._pinned.add(device)

    def untouched(self, nbytes: int) -> list[int]:
        """The slots, of those that a state of `nbytes` will use first, that are still fresh."""
        wanted = min(self.slots, -(-nbytes // self.slot_bytes))
        return [slot for slot in range(wanted) if slot not in self._touched]

    def prefault(self, slot: int) -> None:
        """Make the kernel provide a fresh slot's pages, so that the first save need not wait."""
        self.array(slot)[::PAGE_BYTES] = 0
        self._touched.add(slot)

"""Bytes between all ranks, from any thread: a gloo group of one user's own.

A channel is opened by all ranks together, in the same order, from the main thread; after that one
thread at a time may use it, beside whatever else the job's other groups do. Whoever leaves, dies or
hangs makes the others' pending call fail: no rank finishes a call that another one does not join.

Property: every call ends, within `patience_s`, with an answer or with an error that names the
rank at fault and what became of it. A rank that dies in the middle of a call may have answered
some ranks and not others; those that were answered fail in their next call.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from eke.distributed.world import store as job_store
from eke.distributed.world import world
from eke.errors import EkeError, InputError

_numbers = itertools.count()


class Channel:
    """Gathers and swaps bytes among the ranks of the job.

    Args:
        name: what it is for, for messages; "batching".
        patience_s: how long a rank may keep the others waiting.

    Raises:
        InputError: there is one rank.
        EkeError: the other ranks did not open theirs.
    """

    def __init__(self, name: str, patience_s: float) -> None:
        here, store = world(), job_store()
        if store is None:
            raise InputError("a channel needs several ranks", value=here.size)
        self.rank, self.size = here.rank, here.size
        self._name, self._patience_s, self._store = name, patience_s, store
        self._key = f"channel/{next(_numbers)}"
        self._calls = 0
        try:
            self._group: dist.ProcessGroup | None = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=patience_s)
            )
        except (RuntimeError, ValueError) as error:
            raise EkeError(f"the ranks' channel for {name} could not be opened: {error}") from error

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order. A collective.

        Raises:
            EkeError: a rank left, died, or kept the others waiting too long; it is named.
        """
        group = self._begin()
        try:
            sizes = torch.zeros((self.size, 1), dtype=torch.int64)
            dist.all_gather(list(sizes), torch.tensor([len(data)]), group=group)
            longest = int(sizes.max())
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(data)] = _tensor(data)
            out = torch.zeros((self.size, longest), dtype=torch.uint8)
            dist.all_gather(list(out), padded, group=group)
        except (RuntimeError, ValueError) as error:
            raise self._lost(error) from error
        return [row[: int(n)].numpy().tobytes() for row, n in zip(out, sizes, strict=True)]

    def swap(self, outgoing: Sequence[bytes]) -> list[bytes]:
        """Give rank r `outgoing[r]`; what each rank gave to this one. A collective.

        Raises:
            EkeError: as for `gather`.
        """
        group = self._begin()
        try:
            sent = torch.tensor([len(data) for data in outgoing], dtype=torch.int64)
            received = torch.zeros(self.size, dtype=torch.int64)
            dist.all_to_all_single(received, sent, group=group)
            data = _tensor(b"".join(outgoing))
            out = torch.zeros(int(received.sum()), dtype=torch.uint8)
            dist.all_to_all_single(out, data, received.tolist(), sent.tolist(), group=group)
        except (RuntimeError, ValueError) as error:
            raise self._lost(error) from error
        stops = np.cumsum(received.numpy()).tolist()
        flat = out.numpy()
        starts = [0, *stops[:-1]]
        return [flat[a:b].tobytes() for a, b in zip(starts, stops, strict=True)]

    def leave(self, why: str) -> None:
        """Take no part any more: the others' next call fails, with this reason. Not a collective.

        Harmless when repeated, or while another thread is in a call, which then fails.
        """
        group, self._group = self._group, None
        if group is None:
            return
        with contextlib.suppress(EkeError):  # rank 0 is gone with its store: nobody is there
            self._store.put(f"{self._key}/left/{self.rank}", why)
        dist.destroy_process_group(group)

    def _begin(self) -> dist.ProcessGroup:
        self._calls += 1
        if self._group is None:
            raise EkeError(f"this rank has left the channel for {self._name}")
        self._store.put(f"{self._key}/at/{self.rank}", self._calls)
        return self._group

    def _lost(self, error: Exception) -> EkeError:
        """Who is at fault: whoever has left, else whoever has not come to this call."""
        if self._group is None:
            return EkeError(f"this rank has left the channel for {self._name}")
        left, late = {}, []
        for rank in range(self.size):
            if rank != self.rank:
                why = self._store.get(f"{self._key}/left/{rank}")
                if why is not None:
                    left[rank] = str(why)
                elif (self._store.get(f"{self._key}/at/{rank}") or 0) < self._calls:
                    late.append(rank)
        if left:
            rank, why = min(left.items())
            return EkeError(f"rank {rank} of {self.size} has left: {why}")
        first = str(error).splitlines()[0]
        timed_out = "imed out" in first or "imeout" in first
        if late and timed_out:
            return EkeError(
                f"rank {late[0]} of {self.size} kept the others waiting for "
                f"{self._patience_s:g} s ({self._name})",
                fix="See in its log what it is doing; start the job again to resume",
            )
        who = f"rank {late[0]} of {self.size}" if late else "a rank"
        return EkeError(
            f"{who} is gone ({self._name}): {first}",
            fix="See in its log how it ended; start the job again to resume",
        )


def _tensor(data: bytes) -> torch.Tensor:
    """The bytes as uint8; an own copy, since a tensor must not share read-only memory."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)

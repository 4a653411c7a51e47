"""Bytes between all ranks, from any thread: a gloo group of one user's own.

A channel is opened by all ranks together, in the same order; after that one thread at a time may
use it, beside whatever else the job's other groups do. Whoever leaves, dies or hangs makes the
others' pending call fail: no rank finishes a call that another one does not join.

Property: every call ends, within `patience_s` and a few seconds, with an answer or with an error
that names the rank at fault and what became of it. A rank that dies in the middle of a call may
have answered some ranks and not others; those that were answered fail in their next call.

A gloo call cannot be interrupted, so none is waited for: it is begun, and then looked at every now
and then, beside the store, where a rank that leaves says so, and beside the processes of this
machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import psutil
import torch
import torch.distributed as dist

from eke.distributed.world import store as job_store
from eke.distributed.world import world
from eke.errors import EkeError, InputError

LOOK_S = 0.25
"""How often a rank that waits looks whether the others are still there."""
STORE_S = 3.0
"""How long the store may take; a stopped rank 0 would never answer."""

T = TypeVar("T")
_numbers = itertools.count()


class Channel:
    """Gathers and swaps bytes among the ranks of the job.

    Args:
        name: what it is for, for messages; "batching".
        patience_s: how long a rank may keep the others waiting.

    Raises:
        InputError: there is one rank.
        EkeError: the other ranks did not open theirs; one that did not come is named.
    """

    def __init__(self, name: str, patience_s: float) -> None:
        here, store = world(), job_store()
        if store is None:
            raise InputError("a channel needs several ranks", value=here.size)
        self.rank, self.size = here.rank, here.size
        self._name, self._patience_s, self._store = name, patience_s, store
        self._key = f"channel/{next(_numbers)}"
        self._calls = self._done = 0  # calls that were begun, and that came to their end
        self._lost = ""
        self._group: dist.ProcessGroup | None = None
        self._pending: dist.Work | None = None
        self._left = threading.Event()
        self._peers: list[dict[str, Any]] = []
        self._post({f"at/{self.rank}": 0})
        try:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience_s))
        except (RuntimeError, ValueError) as error:
            absent = [r for r, at in (self._look("at") or {}).items() if at is None]
            who = f"rank {absent[0]} of {self.size} did not come" if absent else str(error)
            raise EkeError(f"the ranks' channel for {name} could not be opened: {who}") from error
        try:
            self._peers = [json.loads(data) for data in self.gather(json.dumps(_me()).encode())]
        except BaseException:
            self.leave("it did not open it")
            raise

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order. A collective.

        Raises:
            EkeError: a rank left, died, or kept the others waiting too long; it is named.
        """
        group = self._begin()
        sizes = torch.zeros((self.size, 1), dtype=torch.int64)
        mine = torch.tensor([len(data)])
        self._end(lambda: dist.all_gather(list(sizes), mine, group=group, async_op=True))
        longest = int(sizes.max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = _tensor(data)
        out = torch.zeros((self.size, longest), dtype=torch.uint8)
        if longest:
            self._end(lambda: dist.all_gather(list(out), padded, group=group, async_op=True))
        self._done = self._calls
        return [row[: int(n)].numpy().tobytes() for row, n in zip(out, sizes, strict=True)]

    def swap(self, outgoing: Sequence[bytes]) -> list[bytes]:
        """Give rank r `outgoing[r]`; what each rank gave to this one. A collective.

        Raises:
            EkeError: as for `gather`.
        """
        group = self._begin()
        sent = torch.tensor([len(data) for data in outgoing], dtype=torch.int64)
        received = torch.zeros(self.size, dtype=torch.int64)
        self._end(lambda: dist.all_to_all_single(received, sent, group=group, async_op=True))
        data = _tensor(b"".join(outgoing))
        out = torch.zeros(int(received.sum()), dtype=torch.uint8)
        splits = received.tolist(), sent.tolist()
        self._end(lambda: dist.all_to_all_single(out, data, *splits, group=group, async_op=True))
        self._done = self._calls
        stops = np.cumsum(received.numpy()).tolist()
        flat = out.numpy()
        starts = [0, *stops[:-1]]
        return [flat[a:b].tobytes() for a, b in zip(starts, stops, strict=True)]

    def leave(self, why: str) -> None:
        """Take no part any more: the others' pending or next call fails, with this reason. Not a
        collective.

        Harmless when repeated, or while another thread is in a call, which then fails.
        """
        self._left.set()
        group, self._group = self._group, None
        if group is None:
            return
        # Whoever leaves because of another passes on who that was.
        why = self._lost or f"rank {self.rank} of {self.size} left: {why}"
        self._post({f"left/{self.rank}": [why, self._done], "left": True})
        with contextlib.suppress(ValueError, AssertionError):  # the whole job was left before
            dist.destroy_process_group(group)
        pending, self._pending = self._pending, None
        if pending is not None and not pending.is_completed():
            _hold(pending, group)

    # ------------------------------------------------------------------ one call

    def _begin(self) -> dist.ProcessGroup:
        if self._left.is_set() or self._group is None:
            raise EkeError(f"this rank has left the channel for {self._name}")
        if self._lost:
            raise EkeError(self._lost)
        if self._done < self._calls:
            # The others may be in the middle of it: another call would get its answer.
            self._lost = f"rank {self.rank} of {self.size} broke off a call ({self._name})"
            raise EkeError(self._lost, fix="Close what uses the channel and open it anew")
        self._calls += 1
        self._post({f"at/{self.rank}": self._calls})
        return self._group

    def _end(self, begin: Callable[[], Any]) -> None:
        """Begin a call and wait for it; meanwhile see whether the others can still come."""
        deadline = time.monotonic() + self._patience_s
        look = time.monotonic() + 2 * LOOK_S
        gone = ""
        try:
            self._pending = pending = begin()
        except (RuntimeError, ValueError) as error:
            self._fail(str(error))
        while True:
            now = time.monotonic()
            if self._left.is_set():
                raise EkeError(f"this rank has left the channel for {self._name}")
            try:
                if _is_done(pending, max(0.001, min(LOOK_S, deadline - now))):
                    self._pending = None
                    return
            except RuntimeError as error:
                self._fail(str(error))
            if gone:  # what it sent before would have come by now
                self._lost = gone
                raise EkeError(gone)
            now = time.monotonic()
            if now > deadline:
                self._fail("")
            if now > look:
                look = now + 2 * LOOK_S
                gone = self._who_is_gone()

    def _fail(self, error: str) -> NoReturn:
        """Raise who is at fault: whoever has left or ended, else whoever has not come.

        Args:
            error: what torch says; "" if the others took too long.
        """
        gone = self._who_is_gone()
        if gone:
            self._lost = gone
            raise EkeError(gone)
        at = self._look("at")
        late = [rank for rank, calls in (at or {}).items() if (calls or 0) < self._calls]
        if at is None:
            # Rank 0 serves the store. If it has just given up itself, who kept it waiting is seen.
            others = (rank for rank in range(len(self._peers)) if rank != self.rank)
            late = [rank for rank in others if self._state(rank) == "stopped"] or [0]
        if not error or "imed out" in error.splitlines()[0]:
            who = f"rank {late[0]} of {self.size}" if late else "a rank"
            stopped = (
                f", its process {self._peers[late[0]]['pid']} is stopped"
                if (late and self._state(late[0]) == "stopped")
                else ""
            )
            self._lost = (
                f"{who} kept the others waiting for {self._patience_s:g} s ({self._name}{stopped})"
            )
            raise EkeError(
                self._lost, fix="See in its log what it is doing; start the job again to resume"
            )
        who = f"rank {late[0]} of {self.size}" if late else "a rank"
        self._lost = f"{who} is gone ({self._name}): {error.splitlines()[0]}"
        raise EkeError(self._lost, fix="See in its log how it ended; start the job again to resume")

    # ------------------------------------------------------------------ the others

    def _who_is_gone(self) -> str:
        """Who has left or ended without an answer to this call, and why; "" for none.

        A rank that went with the answer did its part: the call ends without it.
        """
        # One look for all ranks: if each looked for each, the store would have too much to do.
        if not _within(STORE_S, lambda: self._store.get(f"{self._key}/left")):
            return self._who_ended(set())
        told = {rank: one for rank, one in (self._look("left") or {}).items() if one is not None}
        for why, done in told.values():
            if done < self._calls:
                return str(why)
        return self._who_ended(told.keys())

    def _who_ended(self, answered: Set[int]) -> str:
        """Ranks of this machine whose process is over, named; "" for none.

        All of them, and then those too whose process is stopped: one that ended because of another
        may be seen together with it, and if it is rank 0, nobody can read any more why it left.
        """
        others = [r for r in range(len(self._peers)) if r != self.rank and r not in answered]
        seen = {rank: self._state(rank) for rank in others}
        if "ended" not in seen.values():
            return ""
        said = {"ended": f"is gone ({self._name}): its process {{}} has ended"}
        said["stopped"] = "does not answer: its process {} is stopped"
        return "; ".join(
            f"rank {rank} of {self.size} {said[state].format(self._peers[rank]['pid'])}"
            for rank, state in seen.items()
            if state
        )

    def _state(self, rank: int) -> str:
        """ "ended", "stopped" or "": what is seen of a rank's process, if it is on this machine."""
        peer = self._peers[rank] if self._peers else {}
        if not peer or peer["machine"] != self._peers[self.rank]["machine"]:
            return ""
        try:
            process = psutil.Process(peer["pid"])
            if abs(process.create_time() - peer["started"]) > 1:
                return "ended"
            status = process.status()
        except psutil.NoSuchProcess:
            return "ended"
        except psutil.Error:
            return ""
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return "ended"
        return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else ""

    def _post(self, what: Mapping[str, Any]) -> None:
        """Tell the others, if rank 0 still serves the store: without it nobody is there to hear."""

        def put() -> None:
            for name, value in what.items():
                self._store.put(f"{self._key}/{name}", value)

        _within(STORE_S, put)

    def _look(self, name: str) -> dict[int, Any] | None:
        """What the other ranks told, by rank; None if rank 0 does not answer."""

        def look() -> dict[int, Any]:
            others = (rank for rank in range(self.size) if rank != self.rank)
            return {rank: self._store.get(f"{self._key}/{name}/{rank}") for rank in others}

        return _within(STORE_S, look)


def _is_done(pending: dist.Work, within_s: float) -> bool:
    """Whether a call has come to its end, after waiting so long at most.

    Raises:
        RuntimeError: it failed.
    """
    try:
        pending.wait(timedelta(seconds=within_s))
    except RuntimeError:
        if not pending.is_completed():
            return False
        pending.wait()  # the call may have ended just after the time had: then nothing is wrong
    return True


def _hold(pending: dist.Work, group: dist.ProcessGroup) -> None:
    """Keep a group until what is under way on it has ended: torch would wait for it wherever the
    last reference goes. It ends when the others leave too, or when their patience does."""

    def wait() -> None:
        while not pending.is_completed():
            time.sleep(LOOK_S)
        held.clear()

    held = [group]
    try:
        threading.Thread(target=wait, name="eke-channel-end", daemon=True).start()
    except RuntimeError:  # Python is ending, and from 3.12 on starts none: keep it to the very end
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def _within(seconds: float, work: Callable[[], T]) -> T | None:
    """The result; None if it does not come in time, if the store is gone, or if Python is ending
    and starts no threads any more.

    torch's store waits without end for a process that is stopped.
    """
    done: list[T] = []

    def run() -> None:
        with contextlib.suppress(EkeError):
            done.append(work())

    thread = threading.Thread(target=run, name="eke-channel-store", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    thread.join(seconds)
    return done[0] if done else None


def _me() -> dict[str, Any]:
    """This process, so that others on the same machine can see what becomes of it."""
    machine = [psutil.boot_time() if not Path("/proc").exists() else ""]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            link = Path(path)
            machine.append(str(link.readlink()) if link.is_symlink() else link.read_text().strip())
    me = psutil.Process()
    return {"machine": machine, "pid": me.pid, "started": me.create_time()}


def _tensor(data: bytes) -> torch.Tensor:
    """The bytes as uint8; an own copy, since a tensor must not share read-only memory."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)

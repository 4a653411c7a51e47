"""Who is making an attempt, and whether that process can still be alive.

An attempt's directory carries its owner in its name, `HOST.BOOT.PID.START.RANDOM`, so that the
owner is known from the instant the directory exists. Process ids are reused; the start time
within one boot tells two holders of one id apart.

Property: `verdict` says "dead" of an owner on this machine only if no process with its id and
start time exists in this boot; of another machine it never says so before a day has passed.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
import xxhash

from eke.errors import InputError

ABANDONED_AFTER_S = 24 * 3600.0
"""An attempt of another machine (or container) that nothing has touched for so long is debris."""


class Owner(NamedTuple):
    """A process: where it runs, since which boot, its id, and when it started."""

    host: str
    boot: str
    pid: int
    start: int


def _short(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())[:8]


def start_of(pid: int) -> int | None:
    """When a process started, in a unit fixed for this boot; None if there is none that runs."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        if Path("/proc/self/stat").exists():
            # The name in parentheses may hold anything; state and start are fields 3 and 22.
            fields = stat.read_text().rpartition(")")[2].split()
            return None if fields[0] in "ZX" else int(fields[19])
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time())
    except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
        return None


def me() -> Owner:
    """This process."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = Path("/proc/self/ns/pid")
    host = socket.gethostname() + (str(space.readlink()) if space.is_symlink() else "")
    since = boot.read_text() if boot.exists() else str(int(psutil.boot_time()))
    return Owner(_short(host), _short(since), os.getpid(), start_of(os.getpid()) or 0)


class Home:
    """The process in which something with threads and memory of its own was made: a forked child
    has the object, and neither."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def here(self) -> bool:
        """Whether that is this process."""
        return os.getpid() == self._pid

    def require(self) -> None:
        """Refuse to be used elsewhere, before any lock is taken: whoever held it is not there.

        Raises:
            InputError: this is another process.
        """
        if not self.here:
            raise InputError(
                "this checkpointer belongs to another process",
                value=f"made in {self._pid}, used in {os.getpid()}",
                rule="a forked child has neither its threads nor its pool",
                fix="Make a new one in this process, with a root of its own",
            )


def new_token(owner: Owner) -> str:
    """A token that no other attempt has."""
    return f"{owner.host}.{owner.boot}.{owner.pid}.{owner.start}.{secrets.token_hex(4)}"


def parse_token(token: str) -> Owner | None:
    """Whose token it is; None if it is not one of ours."""
    parts = token.split(".")
    if len(parts) != 5 or not (parts[2].isdigit() and parts[3].isdigit()):
        return None
    return Owner(parts[0], parts[1], int(parts[2]), int(parts[3]))


def verdict(
    owner: Owner | None,
    here: Owner,
    idle_s: float,
    start: Callable[[int], int | None] = start_of,
) -> Literal["mine", "alive", "dead", "unknown"]:
    """Whether the owner of an attempt may still be at work on it.

    Args:
        owner: from `parse_token`.
        here: this process.
        idle_s: seconds since anything in the attempt changed.
        start: the start time of a process of this machine, or None.
    """
    if owner == here:
        return "mine"
    if owner is None or owner.host != here.host:
        return "dead" if idle_s > ABANDONED_AFTER_S else "unknown"
    if owner.boot != here.boot:
        return "dead"
    return "alive" if start(owner.pid) == owner.start else "dead"

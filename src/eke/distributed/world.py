"""The job's ranks: found from torchrun's environment, one gloo group for control messages.

Two groups exist when there is more than one rank: torch's default group (gloo on CPU, nccl on
CUDA), which DDP uses, and a gloo group of eke's own for the small control messages of the
loader, the checkpoint and the loop, so that they never interleave with gradient traffic. A
key-value store serves threads that must not be in a collective (see `store`).
Control messages are JSON: nothing that arrives from another process is unpickled.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from eke.distributed.keyvalue import Store
from eke.errors import EkeError, InputError

TIMEOUT_S = 600.0
"""How long a rank waits for the others before it gives up with an error that names the rank."""


@dataclass(frozen=True)
class World:
    """Who this process is: its rank among `size` ranks, and its device index on the node."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """True on the rank that writes files and prints."""
        return self.rank == 0


_world = World()
_control: dist.ProcessGroup | None = None
_store: Store | None = None
_owns_default_group = False


def world() -> World:
    """This process's place in the job; a single process before or without `init`."""
    return _world


def init(device: torch.device | str = "cpu", timeout_s: float = TIMEOUT_S) -> World:
    """Join the job that torchrun describes in the environment; alone, do nothing.

    A process group that exists already is used, and left as it is by `shutdown`.

    Raises:
        InputError: the environment names a world but not this process's place in it.
        EkeError: the other ranks did not come within `timeout_s`.
    """
    global _world, _control, _store, _owns_default_group
    if _control is not None:
        return _world
    joined = dist.is_available() and dist.is_initialized()
    if joined:
        size = dist.get_world_size()
    else:
        size = _number("WORLD_SIZE") if "WORLD_SIZE" in os.environ else 1
    if size == 1:
        return _world
    needed = ["RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
    if joined:  # the group knows all but the device
        needed = ["LOCAL_RANK"] if torch.device(device).type == "cuda" else []
    missing = [k for k in needed if k not in os.environ]
    if missing:
        raise InputError(
            f"WORLD_SIZE is {size} but {', '.join(missing)} is not set",
            fix="Start with `torchrun --nproc-per-node N -m eke train ...`, or unset WORLD_SIZE",
        )
    rank = dist.get_rank() if joined else _number("RANK")
    local_rank = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank
    if not 0 <= rank < size:
        raise InputError(
            "RANK does not fit WORLD_SIZE",
            value=rank,
            rule=f"it is at least 0 and less than WORLD_SIZE = {size}",
            fix="Start with torchrun, which sets both",
        )
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
    timeout = timedelta(seconds=timeout_s)
    try:
        if not dist.is_initialized():
            dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timeout)
            _owns_default_group = True
        _control = dist.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise EkeError(
            f"rank {rank} of {size} could not join the others: {error}",
            fix="Check that all ranks started and reach MASTER_ADDR:MASTER_PORT",
        ) from error
    _world = World(rank, size, local_rank)
    _store = _open_store(timeout_s)
    return _world


def _open_store(timeout_s: float) -> Store:
    """Rank 0 serves the store at a port of its own and tells the others. A collective."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")  # absent only where a group was there before
    try:
        served = Store(host, 0, timeout_s) if _world.is_main else None
        port = gather_objects(None if served is None else served.port)[0]
        return served or Store(host, port, timeout_s)
    except (RuntimeError, OSError) as error:
        raise EkeError(
            f"rank {_world.rank} of {_world.size} cannot reach rank 0's store: {error}",
            fix="Let the ranks reach one another at MASTER_ADDR, on any port",
        ) from error


def ranks_around() -> int:
    """How many ranks there seem to be, whether or not this process has joined them with `init`.

    Raises:
        InputError: WORLD_SIZE in the environment is not a whole number.
    """
    size = _number("WORLD_SIZE") if "WORLD_SIZE" in os.environ else 1
    if dist.is_available() and dist.is_initialized():
        size = max(size, dist.get_world_size())
    return size


def store() -> Store | None:
    """The job's key-value store, for any thread; None when there is one rank."""
    return _store


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError as error:
        raise InputError(
            f"{name} in the environment is not a whole number",
            value=os.environ[name],
            fix=f"Start with torchrun, which sets it, or unset {name}",
        ) from error


def shutdown() -> None:
    """Leave the job; harmless when there is none."""
    global _world, _control, _store, _owns_default_group
    control, _control = _control, None
    _store = None
    if _owns_default_group:
        _owns_default_group = False
        dist.destroy_process_group()
    elif control is not None:
        dist.destroy_process_group(control)
    _world = World()


def gather_objects(value: Any) -> list[Any]:
    """Every rank's JSON value, in rank order, on every rank.

    A collective: all ranks call it, equally often and in the same order.

    Raises:
        EkeError: a rank is gone or late.
        TypeError: the value is not JSON.
    """
    if _control is None:
        return [json.loads(json.dumps(value))]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = torch.zeros((_world.size, 1), dtype=torch.int64)
    try:
        dist.all_gather(list(sizes), torch.tensor([data.numel()]), group=_control)
        longest = int(sizes.max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        out = torch.zeros((_world.size, longest), dtype=torch.uint8)
        dist.all_gather(list(out), padded, group=_control)
    except RuntimeError as error:
        raise EkeError(
            f"rank {_world.rank} of {_world.size} lost the other ranks: {error}",
            fix="See which rank ended first in its own log; start the job again to resume",
        ) from error
    return [json.loads(bytes(row[: int(n)].numpy())) for row, n in zip(out, sizes, strict=True)]


def barrier() -> None:
    """Wait for all ranks."""
    gather_objects(None)


def wrap(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """The model under DistributedDataParallel when there are several ranks, else as it is.

    Buffers are not broadcast: every rank computes the same ones, and a broadcast would hide
    it if they did not.
    """
    if _control is None:
        return model
    ids = [device.index] if device.type == "cuda" else None
    return torch.nn.parallel.DistributedDataParallel(
        model, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True
    )


def gloo_available() -> bool:
    """Whether this build of torch can run several ranks on a CPU."""
    return dist.is_available() and dist.is_gloo_available()

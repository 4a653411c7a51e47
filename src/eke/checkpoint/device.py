"""How bytes come from memory that the processor cannot read, while that device computes on.

A device has streams: queues of operations, each done in order, that know nothing of each other.
Training puts its operations into the *compute* stream. Copies go into a *side* stream, which first
waits for what training had asked for when `save` was called. An *event* is a point in the side
stream: the processor can wait for it, and so can the compute stream, which costs the processor
nothing.

    save:     side waits for compute
    capture:  side: copy, copy, event, copy, event ..           (`issuing`, `copy`, `event`)
    barrier:  compute waits for the last event that it needs    (`Event.hold`)

Nothing that was asked of a compute stream after `hold` runs before the copy, and nothing that was
asked before `begin` runs after it: so a copy sees the state at the save, whenever it runs.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

log = logging.getLogger("eke.checkpoint")

_PORTABLE = 1
"""cudaHostRegisterPortable: the memory counts as pinned for every GPU."""


class Event(Protocol):
    """A point in a side stream."""

    def done(self) -> bool:
        """Whether all copies before it are complete, or have failed."""
        ...

    def wait(self) -> None:
        """Sleep until they are. Raises what the device says when one has failed."""
        ...

    def hold(self) -> None:
        """Let this thread's compute stream go on only after it. Returns at once."""
        ...


class Device(Protocol):
    """A kind of device whose memory is copied in streams; for any thread.

    Attributes:
        type: of its `torch.device`s.
    """

    type: str

    def claims(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is copied this way."""
        ...

    def begin(self, places: Collection[torch.device]) -> None:
        """A save begins: copies issued from now on see what this thread has asked for so far."""
        ...

    def pin(self, address: int, nbytes: int) -> Callable[[], None] | None:
        """Make host memory a target of copies that do not hold up who issues them.

        Returns what undoes it; None if that cannot be, so that copies are slower.
        """
        ...

    def issuing(self, place: torch.device) -> AbstractContextManager[object]:
        """What this thread asks of torch meanwhile goes into the side stream of `place`."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Issue a copy; inside `issuing`. Both live until an event after it is done."""
        ...

    def event(self, place: torch.device) -> Event:
        """A point after all that was issued for `place` so far."""
        ...

    def settle(self, place: torch.device) -> None:
        """Sleep until all that was issued for `place` is over, where no event can be had."""
        ...


class Issued(NamedTuple):
    """A block of which copies are under way.

    Attributes:
        events: after which it is copied.
        check: raises if torch has counted a change of one of its tensors since the save. Keeps the
            tensors alive.
    """

    events: list[Event]
    check: Callable[[], None]

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return all(event.done() for event in self.events)

    def wait(self) -> None:
        """Sleep until no copy is under way; then raise what the first failed with, if one did."""
        error: Exception | None = None
        for event in self.events:
            try:
                event.wait()
            except Exception as caught:  # noqa: BLE001 - raised below: the others still write
                error = error or caught
        if error is not None:
            raise error

    def hold(self) -> None:
        """Let this thread's compute streams go on only after it."""
        for event in self.events:
            event.hold()


class Cuda:
    """Nvidia's GPUs, and AMD's, which torch gives the same name.

    Sources:
        CUDA C++ Programming Guide, "Asynchronous Concurrent Execution": streams, events, and that
        a copy to memory that is not pinned holds up who issues it.
        PyTorch, "CUDA semantics": `record_stream`, and memory that is used in another stream.

    A thread that has chosen no GPU is on the first one, and a call to the runtime there begins to
    use it: hundreds of megabytes of its memory for every process of the machine. So whoever calls
    the runtime is on the GPU that the call is about meanwhile, whatever thread that is.
    """

    type = "cuda"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sides: dict[torch.device, torch.cuda.Stream] = {}

    def _side(self, place: torch.device) -> torch.cuda.Stream:
        with self._lock:
            if place not in self._sides:
                self._sides[place] = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
            return self._sides[place]

    def claims(self, tensor: torch.Tensor) -> bool:
        """See `Device`."""
        return tensor.is_cuda

    def begin(self, places: Collection[torch.device]) -> None:
        """See `Device`."""
        for place in places:
            if place.type == self.type:
                self._side(place).wait_stream(torch.cuda.current_stream(place))

    def pin(self, address: int, nbytes: int) -> Callable[[], None] | None:
        """See `Device`."""
        with self._lock:
            place = next(iter(self._sides), None)  # one that saves are of, for it serves them all
        error = "no answer"
        try:
            with torch.cuda.device(place):
                runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                code = int(runtime.cudaHostRegister(address, nbytes, _PORTABLE))
                if code != 0:
                    error = f"CUDA's error {code}"
                    _forget_error()
            if code == 0:
                owner = os.getpid()

                def undo() -> None:
                    if os.getpid() == owner:  # a forked child has no part in it
                        with torch.cuda.device(place):
                            runtime.cudaHostUnregister(address)

                return undo
        except (AssertionError, RuntimeError) as caught:
            error = str(caught)
        log.warning(
            "the checkpoints' pool of %d bytes cannot be pinned (%s): whoever copies from a GPU "
            "now waits for each copy. A smaller `pool`, or a larger `ulimit -l`, may help",
            nbytes,
            error,
        )
        return None

    def issuing(self, place: torch.device) -> AbstractContextManager[object]:
        """See `Device`."""
        return torch.cuda.stream(self._side(place))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Device`."""
        target.copy_(source, non_blocking=True)
        # Whoever issued it holds the tensor until the copy is done. That does not keep the memory
        # of a storage that is resized away under it; this does.
        source.record_stream(torch.cuda.current_stream(source.device))

    def event(self, place: torch.device) -> Event:
        """See `Device`."""
        return _CudaEvent(self._side(place), place)

    def settle(self, place: torch.device) -> None:
        """See `Device`."""
        with torch.cuda.device(place):
            self._side(place).synchronize()


class _CudaEvent:
    def __init__(self, side: torch.cuda.Stream, place: torch.device) -> None:
        self._place = place
        with torch.cuda.device(place):
            # Blocking: it sleeps in `wait`, and does not spin.
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(side)

    def done(self) -> bool:
        try:
            with torch.cuda.device(self._place):
                return bool(self._event.query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True  # `wait` raises it

    def wait(self) -> None:
        with torch.cuda.device(self._place):
            self._event.synchronize()

    def hold(self) -> None:
        torch.cuda.current_stream(self._place).wait_event(self._event)


def _forget_error() -> None:
    """CUDA keeps a failed call's error for the thread's next kernel: let one of ours have it."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        log.debug("after a pool that cannot be pinned: %s", error)


_devices: list[Device] = [Cuda()]


def device_of(tensor: torch.Tensor) -> Device | None:
    """What copies a tensor; None if that is nothing but the processor (see also `foreign`)."""
    for device in _devices:
        if device.claims(tensor):
            return device
    return None


def wait_until_over(device: Device, place: torch.device) -> None:
    """Sleep until no copy that was issued for a place is under way.

    Raises what the device says when one has failed, or no event could be had. They are over then.
    """
    try:
        event = device.event(place)
    except BaseException:
        device.settle(place)
        raise
    event.wait()


def foreign(place: torch.device) -> bool:
    """Whether tensors of a place can be copied only while training waits."""
    return place.type != "cpu" and all(device.type != place.type for device in _devices)


def begin_save(places: Collection[torch.device]) -> None:
    """A save begins, on the thread that trains: see `Device.begin`."""
    for device in _devices:
        device.begin(places)

"""The bytes of a live tensor, as they will lie in a file, copied piece by piece.

Copies are plain moves of memory with the interpreter's lock released: no torch operator, so no
OpenMP thread is ever started beside the training's own. A tensor that does not lie in memory as it
will in the file (transposed, channels last, a view) is copied box by box, so that it needs no
second copy of itself either.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from eke.checkpoint.device import Device, device_of, wait_until_over
from eke.checkpoint.plan import boxes

_SMALL_BYTES = 1 << 16
"""A copy shorter than this keeps the interpreter's lock: getting it back from a thread that
computes takes up to 5 ms, a thousand times the copy."""

_move_small = ctypes.PyDLL(None).memmove
_move_small.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_small.restype = ctypes.c_void_p
_move = ctypes.CDLL(None).memmove
_move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move.restype = ctypes.c_void_p

_PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def move(target: int, source: int, nbytes: int) -> None:
    """Copy memory from one address to another."""
    (_move_small if nbytes < _SMALL_BYTES else _move)(target, source, nbytes)


class Changed(Exception):
    """A tensor was changed before it was captured."""


class Seen(NamedTuple):
    """What tells that a tensor is still the one, and what it was.

    Attributes:
        version: torch's count of its changes in place; None if it has none.
        pointer: where its first element is.
    """

    version: int | None
    pointer: int


def seen(tensor: torch.Tensor) -> Seen:
    """As it is now."""
    return Seen(None if tensor.is_inference() else tensor._version, tensor.data_ptr())


class Source:
    """A live tensor that can be captured piece by piece.

    The tensor's memory is kept alive, and read at the time of `fill`. A conjugated or negated view
    is copied at once, here. From a device (`device`) it is copied in the device's side stream, from
    any other place but host memory at once.

    Attributes:
        device: what copies it, if the processor does not.
        place: where it is.
        nbytes: how many bytes it has.

    Args:
        tensor: the live tensor.
        then: what it was when the save began, if that is not now.

    Raises:
        Changed: it is not what it was then.
    """

    def __init__(self, tensor: torch.Tensor, then: Seen | None = None) -> None:
        if then is not None and seen(tensor) != then:
            raise Changed
        plain = tensor.detach()
        self.device, self.place = device_of(tensor), tensor.device
        if plain.is_conj() or plain.is_neg():
            with self._issuing():
                plain = plain.resolve_conj().resolve_neg()
        self._foreign = self.device is None and plain.device.type != "cpu"
        if self._foreign:
            plain = plain.contiguous()
        self._version = None if plain.is_inference() else plain._version
        if plain.is_complex():
            plain = torch.view_as_real(plain)
        self._tensor = plain
        self.nbytes = plain.numel() * plain.element_size()
        self._whole = plain.is_contiguous()
        self._pointer = plain.data_ptr()
        self._storage_bytes = plain.untyped_storage().nbytes()
        if self.nbytes and not self._storage_bytes:
            raise Changed  # its memory was taken away

    def _issuing(self) -> AbstractContextManager[object]:
        return nullcontext() if self.device is None else self.device.issuing(self.place)

    def check(self) -> None:
        """Whether the tensor is still what it was when this was made.

        torch counts the changes that it makes in place; a fused optimizer and writes through
        `.data` or numpy are not counted, so this finds many mistakes but not all.

        Raises:
            Changed: it was changed, or its memory was taken away.
        """
        if self._version is not None and self._tensor._version != self._version:
            raise Changed
        if self._tensor.untyped_storage().nbytes() != self._storage_bytes:
            raise Changed

    def fill(self, target: npt.NDArray[np.uint8], begin: int, end: int) -> None:
        """Copy bytes `begin` to `end` to the start of `target`; both on an element's border.

        With a device the copy is only issued: it is there, and may be under way also when this
        raises, until an event of the device is done.

        Raises:
            Changed: the tensor is not what it was. Then what was copied is of no use.
        """
        self.check()
        if self.device is not None:
            with self._issuing():
                self._issue(self.device, torch.from_numpy(target[: end - begin]), begin, end)
        elif self._foreign:
            flat = self._tensor.reshape(-1).view(torch.uint8)
            torch.from_numpy(target[: end - begin]).copy_(flat[begin:end])
        elif self._whole:
            move(target.ctypes.data, self._pointer + begin, end - begin)
        else:
            self._gather(target, begin, end)
        self.check()

    def _issue(self, device: Device, out: torch.Tensor, begin: int, end: int) -> None:
        if self._whole:
            device.copy(out, self._tensor.reshape(-1).view(torch.uint8)[begin:end])
            return
        size, done = self._tensor.element_size(), 0
        live, out = self._tensor.view(_PLAIN[size]), out.view(_PLAIN[size])
        for box in boxes(tuple(live.shape), begin // size, end // size):
            part = live[box]
            device.copy(out[done : done + part.numel()].view(part.shape), part)
            done += part.numel()

    def _gather(self, target: npt.NDArray[np.uint8], begin: int, end: int) -> None:
        size = self._tensor.element_size()
        live = self._tensor.view(_PLAIN[size]).numpy()
        out = target[: end - begin].view(live.dtype)
        done = 0
        for box in boxes(live.shape, begin // size, end // size):
            part = live[box]
            np.copyto(out[done : done + part.size].reshape(part.shape), part)
            done += part.size

    def digest(self, scratch: npt.NDArray[np.uint8]) -> str:
        """The xxh3-128 of all its bytes; through `scratch` where they are not in order.

        Raises:
            Changed: the tensor is not what it was.
        """
        self.check()
        total, step = xxhash.xxh3_128(), len(scratch)
        if self._whole and self.nbytes and not self._foreign and self.device is None:
            live = self._tensor.reshape(-1).view(torch.uint8).numpy()
            for begin in range(0, self.nbytes, step):
                total.update(live[begin : begin + step].data)
        else:
            for begin in range(0, self.nbytes, step):
                end = min(begin + step, self.nbytes)
                try:
                    self.fill(scratch, begin, end)
                finally:
                    if self.device is not None:
                        wait_until_over(self.device, self.place)
                total.update(scratch[: end - begin].data)
        self.check()
        return total.hexdigest()


def storage_of(tensor: torch.Tensor) -> tuple[torch.device, int]:
    """What two tensors have in common if changing one may change the other."""
    return tensor.device, tensor.untyped_storage().data_ptr()

"""Element types: torch's name, and how safetensors stores it. Plain data, no torch.

Types that safetensors cannot hold everywhere are stored as something it can: a complex number
as its real and imaginary parts in one more, last dimension of 2; an unusual 8-bit float as its
byte. The manifest keeps the true type, so both come back exactly.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple


class Stored(NamedTuple):
    """How a type lies in a file: safetensors' name, bytes an element, and parts (2 if complex)."""

    name: str
    itemsize: int
    parts: int = 1


STORED: dict[str, Stored] = {
    "float64": Stored("F64", 8),
    "float32": Stored("F32", 4),
    "float16": Stored("F16", 2),
    "bfloat16": Stored("BF16", 2),
    "int64": Stored("I64", 8),
    "int32": Stored("I32", 4),
    "int16": Stored("I16", 2),
    "int8": Stored("I8", 1),
    "uint64": Stored("U64", 8),
    "uint32": Stored("U32", 4),
    "uint16": Stored("U16", 2),
    "uint8": Stored("U8", 1),
    "bool": Stored("BOOL", 1),
    "float8_e4m3fn": Stored("F8_E4M3", 1),
    "float8_e5m2": Stored("F8_E5M2", 1),
    "float8_e4m3fnuz": Stored("U8", 1),
    "float8_e5m2fnuz": Stored("U8", 1),
    "float8_e8m0fnu": Stored("U8", 1),
    "complex128": Stored("F64", 8, 2),
    "complex64": Stored("F32", 4, 2),
    "complex32": Stored("F16", 2, 2),
}
"""torch's dtype name -> how it is stored."""


def stored_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in the file of a tensor with this true type and shape."""
    return (*shape, 2) if STORED[dtype].parts == 2 else shape


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """How many bytes such a tensor takes in the file."""
    stored = STORED[dtype]
    return prod(shape) * stored.itemsize * stored.parts

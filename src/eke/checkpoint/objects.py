"""Python objects as tagged JSON: exact, closed, and never executable.

A JSON object whose only key starts with `$` is a tag; every other JSON object is a dict whose
keys are strings that do not start with `$`. Tensors and arrays are not in the JSON: they are
named there, and lie in the tensor files.

Properties: `decode(encode(x)) == x` with every type, order of keys and bit of every float kept,
for every x that `encode` accepts; the same value always encodes to the same JSON, whatever order
a set is in; what is not in the table is refused with the path to it; and decoding creates values
of the types in the table only.

    $int "-0x1f.."  a whole number beyond 2**53   $float "7ff8.." bits of nan or an infinity
    $bytes base64                               $tuple, $set, $frozenset, $size [..]
    $dict, $odict, $counter [[key, value]..]    $dtype "bfloat16"   $device "cuda:0"
    $numpy, $torch [dtype, hex bytes]  scalars  $ndarray, $tensor "NAME in the tensor files"
"""

from __future__ import annotations

import base64
import gc
import json
import math
import os
import struct
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import orjson
import torch

from eke.checkpoint.checks import ManifestError
from eke.checkpoint.dtypes import STORED
from eke.checkpoint.tags import MAX_DEPTH
from eke.checkpoint.tensors import as_bytes, dtype_name, from_bytes, refuse_unusual
from eke.errors import InputError

EXACT_INT = 2**53
_ARRAYS = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
    | {"float16", "float32", "float64", "complex64", "complex128"}
)
"""numpy's dtypes that torch has too, by the same name."""

_DICTS: dict[type, str] = {dict: "$dict", OrderedDict: "$odict", Counter: "$counter"}
_SEQUENCES: dict[type, str] = {
    tuple: "$tuple",
    torch.Size: "$size",
    set: "$set",
    frozenset: "$frozenset",
}


def canonical(tree: object) -> str:
    """One text for equal trees."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":"))


def encode(value: object, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """The value as JSON values, and the tensors that it names there.

    Args:
        value: what to encode; it must not change until its tensors are written.
        name: what tensor names start with, and how errors call the value.

    Raises:
        InputError: something inside is not of a type in the table.
    """
    encoder = _Encoder(name)
    with _no_collections():
        return encoder.encode(value, None, 0), encoder.tensors


def to_json(tree: Any) -> bytes:
    """The text of JSON values, in UTF-8; `json.loads` gives them back."""
    try:
        return orjson.dumps(tree)
    except orjson.JSONEncodeError:
        # Strings that UTF-8 has no bytes for (half a surrogate pair), or a very deep tree.
        return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()


_pausing = threading.Lock()


def _go_on_in_child() -> None:
    """A process that is forked meanwhile would never search for garbage again."""
    if _pausing.locked():
        _pausing.release()
        gc.enable()


os.register_at_fork(after_in_child=_go_on_in_child)


@contextmanager
def _no_collections() -> Iterator[None]:
    """No search for garbage meanwhile: what is made here is kept, and so many new containers set
    off searches of everything that the process has, a tenth of a second each."""
    paused = False
    # An interrupt may come after any call: the search goes on all the same.
    try:
        paused = gc.isenabled() and _pausing.acquire(blocking=False)
        if paused:
            gc.disable()
        yield
    finally:
        if paused:
            try:
                gc.enable()
            finally:
                _pausing.release()


class Ready(NamedTuple):
    """A part of a value that is encoded already, and names no tensors."""

    tree: Any


_WORDS = frozenset({type(None), bool, str})
_SCALARS = _WORDS | {int, float}
_NUMBERS = frozenset({int, float})
_FEW = 16
"""In a container of so few, looking at each value takes less than loops in C over all."""

_Path = tuple[Any, object] | None
"""Where a value is: where its container is, and its key there. Made for every value, read only when
something has to be named."""


def _keys_to(path: _Path) -> list[str]:
    found: list[str] = []
    while path is not None:
        path, key = path
        found.append(str(key) if isinstance(key, (str, int, float)) else f"key {key!r}")
    return found[::-1]


def _are_json(values: Collection[Any], kinds: set[type]) -> bool:
    """Whether all scalars among values of these types are such that JSON has them as they are; may
    say no where they are. Loops in C: most large states are long rows of plain values."""
    numbers = kinds & _NUMBERS
    if not numbers:
        return True
    found = [*values] if kinds <= _NUMBERS else [v for v in values if type(v) in numbers]
    try:
        # It refuses whole numbers of 2**53 and more, and writes `null` for what is not finite.
        return b"null" not in orjson.dumps(found, option=orjson.OPT_STRICT_INTEGER)
    except orjson.JSONEncodeError:
        return False


def _are_names(keys: Mapping[Any, Any]) -> bool:
    """Whether all keys are strings that do not start with `$`."""
    if len(keys) <= _FEW:
        return all(type(key) is str and key[:1] != "$" for key in keys)
    if set(map(type, keys)) != {str}:
        return False
    joined = "\n".join(keys)  # in C again; a key may have "\n$" inside
    return ("\n$" not in joined and joined[:1] != "$") or all(key[:1] != "$" for key in keys)


class _Encoder:
    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: object, path: _Path, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is dict and depth <= MAX_DEPTH:
            return self._dict(value, kind, path, depth)
        if depth > MAX_DEPTH:
            raise InputError(
                f"{self._where(_keys_to(path)[:8])}... is nested more than {MAX_DEPTH} levels deep",
                fix="Flatten it, or see whether it contains itself",
            )
        if isinstance(value, int) and kind is int:
            return value if -EXACT_INT <= value <= EXACT_INT else {"$int": hex(value)}
        if isinstance(value, float) and kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if isinstance(value, bytes) and kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if kind is list:
            return self._items(value, path, depth)
        if isinstance(value, Ready):
            return value.tree
        if kind in _SEQUENCES:
            items = self._items(value, path, depth)
            ordered = kind in (tuple, torch.Size)
            return {_SEQUENCES[kind]: items if ordered else sorted(items, key=canonical)}
        if kind in _DICTS:
            return self._dict(value, kind, path, depth)
        if isinstance(value, torch.dtype):
            return {"$dtype": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, (np.generic, np.ndarray)):
            return self._numpy(value, path)
        raise self._refuse(value, path)

    def _items(self, value: Any, path: _Path, depth: int) -> list[Any]:
        if depth < MAX_DEPTH and len(value) > _FEW:
            kinds = set(map(type, value))
            if kinds <= _SCALARS and _are_json(value, kinds):
                return list(value)
        found = []
        for i, item in enumerate(value):
            # What most values are is seen to here, for a call costs more.
            kind = type(item)
            if depth < MAX_DEPTH and (
                kind in _WORDS
                or (kind is int and -EXACT_INT <= item <= EXACT_INT)
                or (kind is float and item - item == 0)
            ):
                found.append(item)
            else:
                found.append(self.encode(item, (path, i), depth + 1))
        return found

    def _dict(self, value: Any, kind: type, path: _Path, depth: int) -> Any:
        encode, below = self.encode, depth + 1
        if kind is dict and _are_names(value):
            if len(value) > _FEW and below <= MAX_DEPTH:
                kinds = set(map(type, value.values()))
                if _are_json(value.values(), kinds):
                    return self._mixed(value, kinds - _SCALARS, path, below)
            found = {}
            for key, item in value.items():
                kind = type(item)
                if below <= MAX_DEPTH and (
                    kind in _WORDS
                    or (kind is int and -EXACT_INT <= item <= EXACT_INT)
                    or (kind is float and item - item == 0)
                ):
                    found[key] = item
                else:
                    found[key] = encode(item, (path, key), below)
            return found
        return self._pairs(value, path, below)

    def _mixed(self, value: dict[str, Any], others: set[type], path: _Path, below: int) -> Any:
        """A dict of scalars that JSON has, and values of other types."""
        found: dict[str, Any] = dict(value)
        if tuple in others and below < MAX_DEPTH and self._are_plain(value.values()):
            rows = {k: {"$tuple": [*v]} for k, v in value.items() if type(v) is tuple}
            found.update(rows)
            others = others - {tuple}
        for key, item in value.items() if others else ():
            if type(item) in others:
                found[key] = self.encode(item, (path, key), below)
        return found

    def _are_plain(self, values: Iterable[Any]) -> bool:
        """Whether all tuples among the values are of scalars that JSON has."""
        inner = [*chain.from_iterable([value for value in values if type(value) is tuple])]
        kinds = set(map(type, inner))
        return kinds <= _SCALARS and _are_json(inner, kinds)

    def _pairs(self, value: Any, path: _Path, below: int) -> Any:
        encode, pairs = self.encode, []
        for key, item in value.items():
            if isinstance(key, (torch.Tensor, np.ndarray)):
                raise self._refuse(key, path)
            # A key is encoded like any value; what it cannot be, the table has no hashable of.
            pairs.append([encode(key, (path, key), below), encode(item, (path, key), below)])
        return {_DICTS[type(value)]: pairs}

    def _tensor(self, value: torch.Tensor, path: _Path) -> Any:
        refuse_unusual(value, self._where(_keys_to(path)))
        if value.dim() == 0:
            return {"$torch": [dtype_name(value.dtype), bytes(as_bytes(value)).hex()]}
        return {"$tensor": self._name(value, path)}

    def _numpy(self, value: np.generic[Any] | np.ndarray[Any, Any], path: _Path) -> Any:
        # A scalar never has a byte order of its own; an array may, and would lose it.
        if value.dtype.name not in _ARRAYS or not value.dtype.isnative:
            raise self._refuse(value, path)
        if isinstance(value, np.generic):
            return {"$numpy": [value.dtype.name, value.tobytes().hex()]}
        if type(value) is not np.ndarray:
            raise self._refuse(value, path)
        # A copy, because torch takes neither read-only arrays nor negative strides.
        return {"$ndarray": self._name(torch.from_numpy(np.array(value, order="C")), path)}

    def _name(self, tensor: torch.Tensor, path: _Path) -> str:
        stem = "/".join((self.name, *(_keys_to(path) or ("value",))))
        stem = stem.encode("utf-8", "backslashreplace").decode()
        name, number = stem, 1
        while name in self.tensors:
            number += 1
            name = f"{stem}~{number}"
        self.tensors[name] = tensor
        return name

    def _where(self, keys: Iterable[str]) -> str:
        return self.name + "".join(f"[{key!r}]" for key in keys)

    def _refuse(self, value: object, path: _Path) -> InputError:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        return InputError(
            f"{self._where(_keys_to(path))} is a {kind}, which a checkpoint cannot hold",
            rule="objects are made of None, bool, int, float, str, bytes, list, tuple, set, dict, "
            "numpy and torch scalars, arrays, tensors, dtype, device and Size",
            fix="Leave it out of the object's state_dict(), or attach an "
            "eke.checkpoint.ObjectProvider(get, set) whose `get` returns it in terms of these",
        )


def decode(tree: object, tensor: Callable[[str], torch.Tensor], depth: int = 0) -> Any:
    """The value that `encode` was given.

    Args:
        tree: JSON values.
        tensor: returns the tensor of a name; called once for each place that names it.
        depth: how many values it lies inside of.

    Raises:
        ManifestError: the tree is not one that `encode` makes.
    """
    if depth > MAX_DEPTH:
        raise ManifestError(f"an object is nested more than {MAX_DEPTH} levels deep")
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if isinstance(tree, list):
        return [decode(item, tensor, depth + 1) for item in tree]
    if not isinstance(tree, Mapping):
        raise ManifestError(f"an object holds a {type(tree).__name__}")
    tag = next((key for key in tree if key.startswith("$")), None)
    if tag is None:
        return {key: decode(item, tensor, depth + 1) for key, item in tree.items()}
    if len(tree) != 1:
        raise ManifestError(f"an object has the tag {tag!r} next to other keys")
    try:
        return _decode_tag(tag, tree[tag], tensor, depth + 1)
    except ManifestError:
        raise
    except (
        *(ValueError, TypeError, RuntimeError, AttributeError),
        *(ArithmeticError, IndexError, struct.error),
    ) as error:
        raise ManifestError(f"an object has a malformed {tag!r} ({error})") from error


def _decode_tag(tag: str, body: Any, tensor: Callable[[str], torch.Tensor], depth: int) -> Any:
    if tag == "$int":
        return int(body, 16)
    if tag == "$float":
        return struct.unpack(">d", bytes.fromhex(body))[0]
    if tag == "$bytes":
        return base64.b64decode(body, validate=True)
    for kind, name in _SEQUENCES.items():
        if tag == name:
            return kind(decode(item, tensor, depth) for item in body)
    for kind, name in _DICTS.items():
        if tag == name:
            pairs = [(decode(k, tensor, depth), decode(v, tensor, depth)) for k, v in body]
            return kind(dict(pairs)) if kind is Counter else kind(pairs)
    if tag == "$dtype":
        if body not in _dtype_names():
            raise ManifestError(f"an object names the unknown dtype {body!r}")
        return getattr(torch, body)
    if tag == "$device":
        return torch.device(body)
    if tag == "$tensor":
        return tensor(body)
    if tag == "$ndarray":
        return tensor(body).numpy()
    if tag == "$numpy":
        name, data = body
        if name not in _ARRAYS:
            raise ManifestError(f"an object has a numpy scalar of type {name!r}")
        return np.frombuffer(bytes.fromhex(data), dtype=name)[0]
    if tag == "$torch":
        name, data = body
        if name not in STORED:
            raise ManifestError(f"an object has a torch scalar of type {name!r}")
        raw = torch.frombuffer(bytearray.fromhex(data), dtype=torch.uint8)
        return from_bytes(raw, name, ())
    raise ManifestError(f"an object has the unknown tag {tag!r}")


def _dtype_names() -> set[str]:
    return {dtype_name(v) for v in vars(torch).values() if isinstance(v, torch.dtype)}

"""Checks on values from a file that may be damaged or hostile. Pure, no files, no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import isfinite, prod
from typing import Any

from eke.checkpoint.errors import Kind

MAX_NATURAL = 2**62
MOST_TANGLED = 64
"""Shards of a tensor that may lie so that no straight cut separates any of them."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a part of a tensor."""

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
_DIGEST = re.compile(r"[0-9a-f]{32}")


class ManifestError(ValueError):
    """A manifest, a header or an object file says something that cannot be."""

    def __init__(
        self,
        detail: str,
        file: str | None = None,
        tensor: str | None = None,
        kind: Kind = "corrupt",
    ) -> None:
        super().__init__(detail)
        self.detail, self.file, self.tensor, self.kind = detail, file, tensor, kind


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key occurs twice")
    return values


def _finite(digits: str) -> float:
    value = float(digits)
    if not isfinite(value):
        raise ValueError("a number is too large")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def strict_json(data: bytes) -> Any:
    """Parse JSON as the standard has it: no NaN, no key twice, not nested without end.

    Raises:
        ValueError: it is not that.
    """
    try:
        return json.loads(
            data.decode(),
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def unicode(name: str) -> str:
    """A name that is whole text: JSON can also spell halves of characters, which nothing prints."""
    if any("\ud800" <= c <= "\udfff" for c in name):
        raise ManifestError(f"the name {name!r:.80} is not Unicode")
    return name


def record(value: object, what: str) -> Mapping[str, Any]:
    """The value, if it is a JSON object."""
    if not isinstance(value, dict):
        raise ManifestError(f"{what} is not a JSON object")
    return value


def natural(values: Mapping[str, Any], key: str) -> int:
    """A whole number from 0 to 2**62."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_NATURAL:
        raise ManifestError(f"`{key}` is not a whole number from 0 to 2**62")
    return value


def naturals(values: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """A list of such numbers."""
    value = values.get(key)
    if not isinstance(value, list) or len(value) > 64:
        raise ManifestError(f"`{key}` is not a list of at most 64 numbers")
    return tuple(natural({key: item}, key) for item in value)


def text(values: Mapping[str, Any], key: str) -> str:
    """A string."""
    value = values.get(key)
    if not isinstance(value, str):
        raise ManifestError(f"`{key}` is not a string")
    return value


def flag(values: Mapping[str, Any], key: str) -> bool:
    """True or False."""
    value = values.get(key)
    if not isinstance(value, bool):
        raise ManifestError(f"`{key}` is not true or false")
    return value


def digest_value(values: Mapping[str, Any], key: str) -> str:
    """A 128-bit hash in lower-case hexadecimal."""
    value = text(values, key)
    if _DIGEST.fullmatch(value) is None:
        raise ManifestError(f"`{key}` is not 32 lower-case hexadecimal digits")
    return value


def file_name(value: object) -> str:
    """A name that stays in its directory: no separators, not hidden, no `..`."""
    if not isinstance(value, str) or _FILE_NAME.fullmatch(value) is None:
        raise ManifestError(f"{value!r} is not a plain file name")
    return value


def check_ranges(file: str, ranges: Sequence[tuple[str, int, int]]) -> None:
    """Whether (tensor, begin, end) ranges, in order of `begin`, are disjoint.

    Raises:
        ManifestError: two overlap.
    """
    last = 0
    for name, begin, end in ranges:
        if begin < last:
            raise ManifestError("shares bytes with another tensor", file, name)
        last = max(last, end)


def check_box_cover(
    name: str,
    shape: tuple[int, ...],
    boxes: Sequence[Box],
) -> None:
    """Whether (offset, shape) boxes cover a tensor of `shape` exactly once.

    Raises:
        ManifestError: a box is outside, two overlap, or something is left uncovered.
    """
    if not boxes:
        raise ManifestError("has no shards", tensor=name)
    for offset, size in boxes:
        inside = len(offset) == len(size) == len(shape) and all(
            o + s <= whole for o, s, whole in zip(offset, size, shape, strict=True)
        )
        if not inside:
            raise ManifestError("a shard reaches outside the tensor", tensor=name)
    if sum(prod(size) for _, size in boxes) != prod(shape):
        raise ManifestError("its shards do not add up to it", tensor=name)
    # Equal volume and no overlap together mean an exact cover.
    _check_disjoint(name, [box for box in boxes if prod(box[1])])


def _check_disjoint(name: str, boxes: list[Box]) -> None:
    """Cut straight through between boxes, again and again, until each is alone.

    Every way in which meshes cut tensors comes apart like that in a few rounds. What does not is
    compared in pairs, if it is little: nobody shall keep a reader busy with a small file.
    """
    work = 1000 + 64 * len(boxes)
    groups = [boxes]
    while groups:
        group = groups.pop()
        work -= len(group)
        if len(group) < 2:
            continue
        parts = next((p for axis in range(len(group[0][0])) if len(p := _cut(group, axis)) > 1), [])
        if parts and work > 0:
            groups += parts
        elif len(group) > MOST_TANGLED or work <= 0:
            raise ManifestError("is cut into shards in no orderly way", tensor=name)
        else:
            for index, (offset, size) in enumerate(group):
                for other, other_size in group[:index]:
                    if all(
                        o < p + q and p < o + s
                        for o, s, p, q in zip(offset, size, other, other_size, strict=True)
                    ):
                        raise ManifestError("two of its shards overlap", tensor=name)


def _cut(boxes: list[Box], axis: int) -> list[list[Box]]:
    """The boxes in groups, between any two of which a plane across `axis` touches none."""
    parts: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box[0][axis]):
        begin = box[0][axis]
        if not parts or begin >= end:
            parts.append([])
        parts[-1].append(box)
        end = max(end, begin + box[1][axis])
    return parts

"""Which rows are held out for evaluation: decided by content alone.

Properties of `split_by_content`, each tested: every row is on one side; equal rows are on the
same side, so a duplicate never carries an evaluation row into training; the side of a row does
not depend on the order of the rows; and while no bound binds, rows that are appended change
no other row's side.

Each distinct content gets a place in [0, 1) from its hash and the seed, and the contents with
a place below `eval_fraction` are held out. Where that gives fewer rows than `min_eval`, the
next places are added; where it gives more than `max_eval`, or than half of all rows, the
highest places are given back. Contents with so many copies that they would break the upper
bound stay in training. So a bound that binds moves few rows: those next to the limit.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash

from eke.errors import InputError


def content_hash(value: Any) -> int:
    """A 128-bit hash of JSON values; the order of an object's fields does not count."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=repr)
    return xxhash.xxh3_128_intdigest(text.encode())


def split_by_content(
    rows: Iterable[int | Mapping[str, Any]],
    eval_fraction: float = 0.05,
    min_eval: int = 1,
    max_eval: int = 512,
    seed: int = 0,
) -> tuple[list[int], list[int]]:
    """Indices for training and for evaluation, each ascending.

    Evaluation gets none where there is no room: of a single row, or of equal rows only.

    Args:
        rows: the rows, or hashes of their content (see `content_hash`, `check_rows`).
        eval_fraction: the expected share of distinct contents held out, in [0, 1).
        min_eval: hold out at least so many rows, where half of the rows allows it.
        max_eval: hold out at most so many rows.
        seed: another seed holds out other rows.

    Raises:
        InputError: a bound makes no sense.
    """
    if not 0 <= eval_fraction < 1:
        raise InputError("eval_fraction must be in [0, 1)", value=eval_fraction)
    if not 0 <= min_eval <= max_eval:
        raise InputError(
            "the bounds of the evaluation set must be 0 <= min_eval <= max_eval",
            value=(min_eval, max_eval),
        )
    keys = [row if isinstance(row, int) else content_hash(row) for row in rows]
    copies = Counter(keys)
    room = min(max_eval, len(keys) // 2)
    held_out: set[int] = set()
    count = 0
    for place, key in sorted((_place(key, seed), key) for key in copies):
        if count >= room or (place >= eval_fraction and count >= min_eval):
            break
        if count + copies[key] <= room:
            held_out.add(key)
            count += copies[key]
    train = [i for i, key in enumerate(keys) if key not in held_out]
    evaluation = [i for i, key in enumerate(keys) if key in held_out]
    return train, evaluation


def _place(key: int, seed: int) -> float:
    return xxhash.xxh3_64_intdigest(str(key).encode(), seed=seed % 2**64) / 2**64

"""Samples as bytes, for the way from one rank to another.

Property: `opened(parcel(samples))` are the samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from eke.batching.batch import Tokens


def parcel(samples: Sequence[tuple[int, Tokens]]) -> bytes:
    """Samples, each with its dataset index; empty for none."""
    if not samples:
        return b""
    rows = [[i, len(t.ids), t.full_length, t.label_tokens, *t.loads] for i, t in samples]
    parts = [np.array([len(samples), len(rows[0])], dtype="<i8"), np.array(rows, dtype="<i8")]
    parts += [t.ids.astype("<i8") for _, t in samples]
    parts += [t.labels.astype("<i8") for _, t in samples]
    return b"".join(part.tobytes() for part in parts)


def opened(parcels: Iterable[bytes]) -> dict[int, Tokens]:
    """The samples of all parcels by dataset index."""
    found: dict[int, Tokens] = {}
    for data in parcels:
        if not data:
            continue
        flat = np.frombuffer(data, dtype="<i8")
        count, width = flat[:2].tolist()
        rows = flat[2 : 2 + count * width].reshape(count, width)
        ids, labels = np.split(flat[2 + count * width :], 2)
        at = 0
        for index, length, full_length, label_tokens, *loads in rows.tolist():
            part = slice(at, at + length)
            found[index] = Tokens(ids[part], labels[part], full_length, label_tokens, tuple(loads))
            at += length
    return found

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eke.batching.batch import Tokens
from eke.batching.parcel import opened, parcel

NUMBERS = st.integers(-(2**62), 2**62)


@st.composite
def samples(draw: st.DrawFn, loads: int) -> Tokens:
    n = draw(st.integers(0, 5))
    ids, labels = (draw(st.lists(NUMBERS, min_size=n, max_size=n)) for _ in range(2))
    extra = tuple(draw(st.lists(st.integers(0, 99), min_size=loads, max_size=loads)))
    return Tokens(
        np.array(ids, dtype=np.int64), np.array(labels, dtype=np.int64), n + 3, n // 2, extra
    )


@given(st.data(), st.integers(0, 2), st.lists(st.integers(0, 9), max_size=4))
def test_what_is_sent_arrives(data: st.DataObject, loads: int, counts: list[int]) -> None:
    sent, number = [], 0
    for count in counts:
        one = [(number + i, data.draw(samples(loads))) for i in range(count)]
        number += count
        sent.append(one)
    found = opened(parcel(one) for one in sent)
    expected = dict(pair for one in sent for pair in one)
    assert list(found) == list(expected)
    for index, tokens in expected.items():
        again = found[index]
        assert again.ids.tolist() == tokens.ids.tolist()
        assert again.labels.tolist() == tokens.labels.tolist()
        assert (again.full_length, again.label_tokens) == (tokens.full_length, tokens.label_tokens)
        assert again.loads == tokens.loads


def test_no_samples_are_no_bytes() -> None:
    assert parcel([]) == b""

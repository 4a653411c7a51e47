from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.batching.rounds import Offer, conclude, read
from eke.errors import EkeError, InputError

STANDING = {"seed": 3, "position": {"epoch": 0, "cursor": 4}}
OFFERS = st.builds(
    Offer,
    standing=st.sampled_from([STANDING, {**STANDING, "seed": 4}]),
    stop=st.sampled_from(["", "", "a", "ü"]),
    fault=st.sampled_from(["", "", "torn", "bad \udcff byte"]),
    input_fault=st.booleans(),
    begins=st.sampled_from(["", "ab"]),
)


@given(
    OFFERS,
    st.integers(2, 5).flatmap(
        lambda width: st.lists(
            st.lists(st.integers(0, 2**40), min_size=width, max_size=width), min_size=1, max_size=9
        )
    ),
)
def test_an_offer_is_read_as_it_was_made(offer: Offer, rows: list[list[int]]) -> None:
    sizes = np.array(rows, dtype=np.int64)
    again = read(replace(offer, sizes=sizes).data())
    assert again.sizes.tolist() == rows
    assert again.sizes.dtype == np.int64
    names = ("standing", "stop", "fault", "input_fault", "begins")
    assert [getattr(again, n) for n in names] == [getattr(offer, n) for n in names]
    assert read(offer.data()).sizes.shape == (0, 2)


@given(st.lists(OFFERS, min_size=1, max_size=4))
def test_faults_come_first_then_differences_then_stops(offers: list[Offer]) -> None:
    def named(rank: int, text: str) -> str:
        return text if len(offers) == 1 else f"rank {rank} of {len(offers)}: {text}"

    faulty = [(rank, offer) for rank, offer in enumerate(offers) if offer.fault]
    if faulty:
        rank, offer = faulty[0]
        with pytest.raises(EkeError) as caught:
            conclude(offers)
        assert type(caught.value) is (InputError if offer.input_fault else EkeError)
        assert str(caught.value) == f"{named(rank, offer.fault)}."
        return
    other = [rank for rank, offer in enumerate(offers) if offer.standing != offers[0].standing]
    if other:
        with pytest.raises(InputError) as caught:
            conclude(offers)
        assert f"rank 0 and rank {other[0]} differ" in str(caught.value)
        assert "{'seed': 3}" in str(caught.value)
        assert "{'seed': 4}" in str(caught.value)
        assert "position" not in str(caught.value)
        return
    stops = [(rank, offer.stop) for rank, offer in enumerate(offers) if offer.stop]
    if not stops:
        assert conclude(offers) == ""
    elif len(offers) == 1:
        assert conclude(offers) == stops[0][1]
    else:
        assert conclude(offers) == f"rank {stops[0][0]}: {stops[0][1]}"


def test_a_setting_that_one_rank_lacks_is_a_difference() -> None:
    with pytest.raises(InputError, match=r"{'packing': None}"):
        conclude([Offer({"packing": True}), Offer({})])


def test_ranks_whose_data_begin_differently_are_named() -> None:
    """One that wishes to stop has read nothing, and is no different for that."""
    offers = [Offer(STANDING, stop="enough"), *(Offer(STANDING, begins=b) for b in "aab")]
    assert conclude(offers[:3]) == "rank 0: enough"
    with pytest.raises(InputError, match="of rank 1 and rank 3 begin with different samples"):
        conclude(offers)

"""Which exchange a job gets, and that the exchange among threads keeps its promises: tests of the
protocol rest on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st

from eke.batching import Alone, Exchange
from eke.batching.exchange import exchange_of_job
from eke.errors import EkeError, InputError

RunRanks = Callable[[int, Callable[[Exchange], Any]], list[Any]]


@settings(max_examples=30)
@given(st.lists(st.lists(st.binary(max_size=9), min_size=3, max_size=3), min_size=3, max_size=3))
def test_bytes_arrive_where_they_are_sent(run_ranks: RunRanks, sent: list[list[bytes]]) -> None:
    def run(exchange: Exchange) -> Any:
        mine = sent[exchange.rank]
        return exchange.gather(mine[0]), exchange.swap(mine)

    for rank, (gathered, swapped) in enumerate(run_ranks(3, run)):
        assert gathered == [one[0] for one in sent]
        assert swapped == [one[rank] for one in sent]


def test_a_rank_that_leaves_fails_the_others_calls(run_ranks: RunRanks) -> None:
    def run(exchange: Exchange) -> Any:
        if exchange.rank == 1:
            exchange.leave("it went home")
        return exchange.gather(b"x")

    results = run_ranks(3, run)
    assert [str(r) for r in results] == [
        "rank 1 of 3 has left: it went home.",
        "this rank has left.",
        "rank 1 of 3 has left: it went home.",
    ]


def test_alone_everything_is_ones_own() -> None:
    alone = exchange_of_job(1.0)
    assert isinstance(alone, Alone)
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.gather(b"ab") == alone.swap([b"ab"]) == [b"ab"]
    alone.leave("done")
    for call in (lambda: alone.gather(b""), lambda: alone.swap([b""])):
        with pytest.raises(EkeError, match="this rank has left"):
            call()


def test_ranks_that_were_not_joined_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"there are 2 ranks .*Call eke\.distributed\.init\(\)"):
        exchange_of_job(1.0)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(InputError, match="WORLD_SIZE in the environment is not a whole number"):
        exchange_of_job(1.0)
    # Ranks that mp.spawn started know of one another without a word in the environment.
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(InputError, match="there are 4 ranks"):
        exchange_of_job(1.0)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eke.batching import Ranks
from eke.errors import EkeError, InputError

RunRanks = Callable[[int, Callable[[Ranks], Any]], list[Any]]


def test_contents_come_in_rank_order(run_ranks: RunRanks) -> None:
    results = run_ranks(3, lambda ranks: ranks.agree({"a": 1}, {"rank": ranks.rank}))
    assert results == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


@pytest.mark.parametrize("kind", [EkeError, InputError])
def test_a_fault_on_one_rank_is_raised_on_all(run_ranks: RunRanks, kind: type[EkeError]) -> None:
    def run(ranks: Ranks) -> Any:
        return ranks.agree({}, {}, kind("sample 3: bad") if ranks.rank == 1 else None)

    results = run_ranks(3, run)
    assert {type(result) for result in results} == {kind}
    assert {str(result) for result in results} == {"rank 1 of 3: sample 3: bad."}


def test_ranks_with_different_headers_are_told_the_difference(run_ranks: RunRanks) -> None:
    results = run_ranks(2, lambda ranks: ranks.agree({"seed": ranks.rank, "window": 4}, {}))
    for result in results:
        assert isinstance(result, InputError)
        assert "rank 0 and rank 1 differ" in str(result)
        assert "{'seed': 1}" in str(result)
        assert "window" not in str(result)


def test_alone_without_a_job() -> None:
    ranks = Ranks.of_job()
    assert (ranks.rank, ranks.size) == (0, 1)
    assert ranks.agree({}, {"x": [1]}) == [{"x": [1]}]


def test_a_job_that_was_not_joined_fails_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"WORLD_SIZE is 2 .*eke.distributed.world.init"):
        Ranks.of_job()

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eke.batching import DynamicLoader, Exchange
from eke.batching.planner import BlockPlan, PerStep, Rules, Sample, plan_round
from eke.batching.round_maker import Round, undelivered
from eke.errors import EkeError

MakeDataset = Callable[[Sequence[int]], Any]
RunRanks = Callable[[int, Callable[[Exchange], Any]], list[Any]]

RULES = Rules(16, PerStep("tokens", 40))


def summary(made: Round) -> Any:
    return made.plans, made.after, made.waiting, sorted(made.samples), made.progress


@settings(max_examples=40)
@given(
    size=st.integers(1, 3),
    lengths=st.lists(st.integers(0, 16), min_size=12, max_size=40),
    per_step=st.sampled_from(["tokens:20", "tokens:90", "samples:3"]),
    packing=st.booleans(),
)
def test_rounds_follow_one_another_and_depend_on_their_start_alone(
    token_dataset: MakeDataset, run_ranks: RunRanks, size: int, lengths: list[int],
    per_step: str, packing: bool,
) -> None:  # fmt: skip
    lengths[0] = 5
    n = len(lengths)

    def run(exchange: Exchange) -> Any:
        loader = DynamicLoader(
            token_dataset(lengths), micro_tokens=16, per_step=per_step, window=4,
            packing=packing, exchange=exchange,
        )  # fmt: skip
        maker, start = loader._maker, loader._progress
        kept: dict[int, Any] = {}
        seen: list[int] = []
        while start.place.epoch == 0:
            made = maker.make(start, kept)
            again = maker.make(start, {})
            assert summary(made) == summary(again), "what was kept is fetched again alike"
            mine = [
                sample.index
                for plan in made.plans
                for step in plan.steps
                for sample in step[exchange.rank]
            ]
            waiting = made.waiting[exchange.rank] if made.waiting else ()
            over = [i for i in made.after.pending if i in made.samples]
            assert sorted(made.samples) == sorted([*mine, *waiting, *over])
            for index, tokens in made.samples.items():
                assert len(tokens.ids) == lengths[index]
                assert tokens.ids.tolist() == token_dataset(lengths)[index]["input_ids"].tolist()
            seen += mine
            kept = made.samples
            loader._round = made
            start = loader._after_round(start.block + len(made.plans), start.counts)
        return seen

    results = run_ranks(size, run)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert sorted(index for result in results for index in result) == [
        i for i in range(n) if lengths[i]
    ]


def test_a_wish_to_stop_ends_the_round_before_anything_is_planned(
    token_dataset: MakeDataset, run_ranks: RunRanks
) -> None:
    def run(exchange: Exchange) -> Any:
        loader = DynamicLoader(
            token_dataset([5] * 30), micro_tokens=16, per_step="tokens:20", exchange=exchange
        )
        made = loader._maker.make(loader._progress, {}, "tired" if exchange.rank == 2 else "")
        return made.stop, made.plans, made.progress == loader._progress

    assert run_ranks(3, run) == [("rank 2: tired", [], True)] * 3


def test_the_first_samples_are_fetched_where_they_are_asked_for(
    token_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is forked while other threads run may find a lock taken for ever."""
    starts: list[str] = []
    start = threading.Thread.start  # torch starts one of these beside its workers

    def noting(self: threading.Thread) -> None:
        starts.append(threading.current_thread().name)
        start(self)

    loader = DynamicLoader(
        token_dataset([5] * 200), micro_tokens=16, per_step="tokens:20", window=8, num_workers=1
    )
    with loader:
        assert loader._fetcher._loader is None
        monkeypatch.setattr(threading.Thread, "start", noting)
        blocks = loader.blocks()
        next(blocks)
        monkeypatch.undo()
        first = loader._fetcher._loader
        assert first is not None
        assert set(starts) == {"MainThread"}
        for _ in range(20):
            next(blocks)
        assert loader._fetcher._loader is first, "no others were started later"


def plans_of(lengths: Sequence[int], ranks: int) -> list[BlockPlan]:
    samples = [Sample(i, n, max(0, n - 1)) for i, n in enumerate(lengths)]
    return plan_round([samples[r::ranks] for r in range(ranks)], RULES, rng_seed=1).blocks


@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=40), st.integers(1, 3), st.data()
)  # fmt: skip
def test_what_was_delivered_is_taken_off_the_front(
    lengths: list[int], ranks: int, data: st.DataObject
) -> None:
    plans = plans_of(lengths, ranks)
    queue, delivered = list(plans), []
    for _ in range(data.draw(st.integers(0, len(plans)))):
        plan = queue.pop(0)
        if len(plan.steps) > 1 and data.draw(st.booleans()):
            plan, rest = plan.first_step()
            queue.insert(0, rest)
        delivered += plan.indices()
    assert undelivered(plans, delivered) == queue
    if delivered:
        changed = data.draw(st.permutations(delivered))
        if changed != delivered:
            with pytest.raises(EkeError, match="no longer gives the samples"):
                undelivered(plans, changed)
        with pytest.raises(EkeError, match="no longer gives the samples"):
            undelivered(plans, [*(i for plan in plans for i in plan.indices()), 99])

"""Resuming: the same blocks on as many ranks, the same samples on any other number."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eke.batching import Block, CostModel, DynamicLoader, Exchange
from eke.batching.order import Place
from eke.errors import EkeError, InputError

MakeDataset = Callable[[Sequence[int]], Any]
RunRanks = Callable[[int, Callable[[Exchange], Any]], list[Any]]

LENGTHS = [(i * 29) % 31 for i in range(60)] + [50, 0, 45]
SETTINGS: dict[str, Any] = {
    "micro_tokens": 40, "per_step": "tokens:100", "window": 12, "seed": 5, "epochs": 2,
    "overlength": "truncate",
}  # fmt: skip


def content(block: Block) -> Any:
    return (
        block.epoch, block.index, block.lengths, block.label_tokens, block.position,
        [(mb.uids, mb.scale, {k: v.tolist() for k, v in mb.items()}) for mb in block],
    )  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("per_step", ["tokens:100", "samples:5"])
def test_resuming_at_any_block_equals_not_stopping(
    token_dataset: MakeDataset, workers: int, per_step: str
) -> None:
    dataset = token_dataset(LENGTHS)
    settings = {**SETTINGS, "per_step": per_step}
    with DynamicLoader(dataset, **settings) as loader:
        states = [loader.state_dict()]
        whole = []
        for block in loader.blocks():
            assert block.position == loader.state_dict()
            whole.append(content(block))
            states.append(json.loads(json.dumps(block.position)))
        end = loader.stats.counts
    assert len(whole) > 20
    with DynamicLoader(dataset, num_workers=workers, **settings) as resumed:
        for at, state in enumerate(states):
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            # A few windows on cover every way to leave the round; each tenth goes to the end.
            count = len(whole) if at % 10 == 0 else 9
            blocks = [content(b) for b in itertools.islice(resumed.blocks(), count)]
            assert blocks == whole[at : at + count]
            if at % 10 == 0:
                assert resumed.stats.counts == end


def test_a_chain_of_resumes_after_every_block(token_dataset: MakeDataset) -> None:
    dataset = token_dataset(LENGTHS)
    with DynamicLoader(dataset, **SETTINGS) as loader:
        whole = [content(block) for block in loader.blocks()]
    chain, state = [], None
    while True:
        with DynamicLoader(dataset, **SETTINGS) as loader:
            if state is not None:
                loader.load_state_dict(state)
            block = next(loader.blocks(), None)
            if block is None:
                break
            chain.append(content(block))
            state = loader.state_dict()
    assert chain == whole


def test_a_plain_iterator_resumes_inside_a_block(token_dataset: MakeDataset) -> None:
    dataset = token_dataset(LENGTHS)

    def steps(loader: DynamicLoader) -> Any:
        return ((mb.uids, mb.scale) for mb in itertools.chain(loader, loader))

    with DynamicLoader(dataset, **SETTINGS) as loader:
        states, whole = [loader.state_dict()], []
        for step in steps(loader):
            whole.append(step)
            states.append(loader.state_dict())
    for at in range(0, len(states), 3):
        with DynamicLoader(dataset, **SETTINGS) as loader:
            loader.load_state_dict(states[at])
            rest = list(steps(loader))
        n_here = sum(
            uids[0][0] == (whole[at][0][0][0] if at < len(whole) else 9) for uids, _ in whole[at:]
        )
        assert rest[:n_here] == whole[at : at + n_here]


def run_stage(
    run_ranks: RunRanks, size: int, dataset: Any, state: Any, count: int, settings: dict[str, Any]
) -> tuple[list[tuple[int, int]], list[int], Any, int]:
    """Some blocks on `size` ranks; delivered uids, samples a block, the state after, and counts."""

    def run(exchange: Exchange) -> Any:
        with DynamicLoader(dataset, exchange=exchange, **settings) as loader:
            if state is not None:
                loader.load_state_dict(state)
            blocks = list(itertools.islice(loader.blocks(), count))
            uids = [uid for block in blocks for mb in block for uid in mb.uids]
            return uids, [block.samples for block in blocks], loader.state_dict(), loader.stats

    results = run_ranks(size, run)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert all(result[1:3] == results[0][1:3] for result in results)
    uids = [uid for result in results for uid in result[0]]
    return uids, results[0][1], json.loads(json.dumps(results[0][2])), results[0][3].counts


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=60),
    stages=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), max_size=5),
    per_step=st.sampled_from(["tokens:60", "tokens:400", "samples:1", "samples:5", "samples:30"]),
    window=st.integers(1, 12),
    overlength=st.sampled_from(["truncate", "skip", "solo"]),
)
def test_samples_are_seen_once_through_any_chain_of_world_sizes(
    token_dataset: MakeDataset, run_ranks: RunRanks, lengths: list[int],
    stages: list[tuple[int, int]], per_step: str, window: int, overlength: str,
) -> None:  # fmt: skip
    usable = [i for i, n in enumerate(lengths) if n and (n <= 40 or overlength != "skip")]
    if not usable:
        return
    dataset = token_dataset(lengths)
    settings = {
        "micro_tokens": 40, "per_step": per_step, "window": window, "epochs": 2,
        "overlength": overlength,
    }  # fmt: skip
    seen, state = [], None
    for size, count in [*stages, (2, 10_000)]:
        uids, _, state, counts = run_stage(run_ranks, size, dataset, state, count, settings)
        seen += uids
    assert Counter(seen) == Counter((e, i) for e in range(2) for i in usable)
    overlong = 2 * sum(n > 40 for n in lengths)
    key = {"truncate": "truncated", "skip": "skipped", "solo": "solo"}[overlength]
    assert counts.empty == 2 * lengths.count(0)
    assert getattr(counts, key) == overlong
    assert sum(vars(counts).values()) == counts.empty + overlong


def test_worlds_2_3_1(token_dataset: MakeDataset, run_ranks: RunRanks) -> None:
    dataset = token_dataset([1 + (i * 29) % 31 for i in range(200)])
    settings = {**SETTINGS, "epochs": 1, "per_step": "samples:8", "window": 20}
    seen, sizes, state = [], [], None
    for size, count in ((2, 3), (3, 4), (1, 100)):
        uids, samples, state, _ = run_stage(run_ranks, size, dataset, state, count, settings)
        seen += uids
        sizes += samples
    assert sorted(seen) == [(0, i) for i in range(200)]
    assert sizes == [8] * 25


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 6}, {"window": 13}, {"per_step": "tokens:101"}, {"packing": True},
        {"overlength": "skip"}, {"shuffle": False}, {"move_samples": False},
    ],
)  # fmt: skip
def test_a_state_of_other_settings_is_refused(
    token_dataset: MakeDataset, change: dict[str, Any]
) -> None:
    dataset = token_dataset(LENGTHS)
    state = DynamicLoader(dataset, **SETTINGS).state_dict()
    loader = DynamicLoader(dataset, **{**SETTINGS, **change})
    with pytest.raises(InputError, match=f"other settings: {next(iter(change))}"):
        loader.load_state_dict(state)


def test_a_state_of_another_dataset_is_refused(token_dataset: MakeDataset) -> None:
    state = DynamicLoader(token_dataset(LENGTHS), **SETTINGS).state_dict()
    with pytest.raises(InputError, match="dataset_length"):
        DynamicLoader(token_dataset(LENGTHS[1:]), **SETTINGS).load_state_dict(state)
    named = token_dataset(LENGTHS)
    named.fingerprint = "abc"
    with pytest.raises(InputError, match="dataset_fingerprint"):
        DynamicLoader(named, **SETTINGS).load_state_dict(state)


@pytest.mark.parametrize("per_step", ["tokens:100", "samples:5"])
def test_a_state_that_another_eke_saved_in_mid_round_loses_nothing(
    token_dataset: MakeDataset, per_step: str
) -> None:
    """It may have planned the round otherwise: other samples were delivered first."""
    dataset, settings = token_dataset(LENGTHS), {**SETTINGS, "per_step": per_step, "epochs": 1}
    with DynamicLoader(dataset, **settings) as loader:
        first, second = itertools.islice(loader.blocks(), 2)
    seen = [uid for mb in second for uid in mb.uids]
    state = json.loads(json.dumps(first.position))
    state |= {"delivered": [index for _, index in seen], "planner": "0.0.9"}
    with DynamicLoader(dataset, **settings) as loader:
        loader.load_state_dict(state)
        seen += [uid for block in loader.blocks() for mb in block for uid in mb.uids]
    assert sorted(seen) == [(0, i) for i, n in enumerate(LENGTHS) if n]


@pytest.mark.parametrize("packing", [False, True])
def test_a_run_goes_on_with_a_cost_model_that_was_fitted_again(
    token_dataset: MakeDataset, run_ranks: RunRanks, packing: bool
) -> None:
    """Other times make other plans: what is left of the round is planned by them."""
    dataset = token_dataset(LENGTHS)
    seen, state = [], None
    for fixed, count in ((256.0, 2), (0.0, 2), (1000.0, 100)):
        settings = {**SETTINGS, "packing": packing, "cost": CostModel(1.0, 0.1, 2.0, fixed)}
        uids, _, state, _ = run_stage(run_ranks, 2, dataset, state, count, settings)
        seen += uids
    assert sorted(seen) == [(e, i) for e in range(2) for i, n in enumerate(LENGTHS) if n]
    assert state is not None
    counts = {"empty": 2 * LENGTHS.count(0), "skipped": 0, "truncated": 2 * 2, "solo": 0}
    assert state["counts"] == counts, "what the rounds that were planned again dropped counts once"


@pytest.mark.parametrize("packing", [False, True])
def test_two_ranks_that_resume_after_every_block_get_what_moved_and_what_waits(
    token_dataset: MakeDataset, run_ranks: RunRanks, packing: bool
) -> None:
    dataset = token_dataset(LENGTHS)
    settings = {**SETTINGS, "packing": packing}

    def run(exchange: Exchange) -> int:
        with DynamicLoader(dataset, exchange=exchange, **settings) as loader:
            states, whole, waits = [loader.state_dict()], [], 0
            for block in loader.blocks():
                whole.append(content(block))
                states.append(loader.state_dict())
                waits += any(states[-1]["waiting"])
            for at, state in enumerate(states[:-1]):
                loader.load_state_dict(state)
                blocks = [content(b) for b in itertools.islice(loader.blocks(), 4)]
                assert blocks == whole[at : at + 4]
            return waits

    waits = run_ranks(2, run)
    assert all(waits) == packing, "with padding, samples that move need not wait"


@pytest.mark.parametrize("per_step", ["samples:5", "samples:30"])
def test_samples_that_do_not_move_resume_on_any_number_of_ranks(
    token_dataset: MakeDataset, run_ranks: RunRanks, per_step: str
) -> None:
    dataset = token_dataset(LENGTHS)
    settings = {**SETTINGS, "per_step": per_step, "move_samples": False}
    seen, state = [], None
    for size, count in ((2, 3), (2, 2), (3, 4), (1, 100)):
        uids, _, state, _ = run_stage(run_ranks, size, dataset, state, count, settings)
        seen += uids
    usable = [i for i, n in enumerate(LENGTHS) if n]
    assert sorted(seen) == [(epoch, i) for epoch in range(2) for i in usable]


def test_a_dataset_that_changed_under_the_state_is_noticed(token_dataset: MakeDataset) -> None:
    with DynamicLoader(token_dataset(LENGTHS), **SETTINGS) as loader:
        next(loader.blocks())
        state = loader.state_dict()
    loader = DynamicLoader(token_dataset([max(1, n // 2) for n in LENGTHS]), **SETTINGS)
    loader.load_state_dict(state)
    with pytest.raises(EkeError, match="no longer gives the samples"):
        next(loader.blocks())


@pytest.mark.parametrize("packing", [False, True])
def test_a_run_of_200_steps_resumes_at_every_step(
    token_dataset: MakeDataset, packing: bool
) -> None:
    """Each step, and the state after it, follows from the state before it alone."""
    dataset = token_dataset([1 + (i * 29) % 31 for i in range(800)])
    settings = {**SETTINGS, "packing": packing, "window": 32, "per_step": "tokens:50", "epochs": 1}
    with DynamicLoader(dataset, **settings) as loader:
        states = [loader.state_dict()]
        whole = []
        for block in loader.blocks():
            whole.append(content(block))
            states.append(json.loads(json.dumps(block.position)))
    assert len(whole) >= 200
    assert sum(any(state["waiting"]) for state in states) > 50 or not packing
    with DynamicLoader(dataset, **settings) as loader:
        for at, state in enumerate(states):
            loader.load_state_dict(state)
            assert [content(b) for b in itertools.islice(loader.blocks(), 1)] == whole[at : at + 1]


@pytest.mark.parametrize("packing", [False, True])
def test_a_job_that_ends_after_every_step_on_2_3_1_and_2_ranks(
    token_dataset: MakeDataset, run_ranks: RunRanks, packing: bool
) -> None:
    """Nothing of a killed job is left but its last state; samples that wait are in it."""
    dataset = token_dataset([1 + (i * 29) % 31 for i in range(440)])
    settings = {**SETTINGS, "packing": packing, "window": 4, "per_step": "tokens:60"}
    settings["move_samples"] = packing  # samples that move wait only for a full packed row
    seen: Counter[tuple[int, int]] = Counter()
    state: Any = None
    waited = 0
    for size in itertools.cycle((2, 3, 1, 2)):
        uids, blocks, state, _ = run_stage(run_ranks, size, dataset, state, 1, settings)
        waited += any(state["waiting"])
        seen.update(uids)
        if not blocks:
            break
    assert seen == Counter((e, i) for e in range(2) for i in range(440))
    assert state["block"] >= 200
    assert waited > 20


def test_resuming_near_the_end_of_a_million_samples_reads_a_window(
    token_dataset: MakeDataset,
) -> None:
    """The epoch's order is a million whole numbers, made anew; samples are what is dear."""
    reads: list[int] = []

    class Million:
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> Any:
            reads.append(index)
            return {"input_ids": [1] * 5, "labels": [1] * 5}

    settings = {**SETTINGS, "window": 50}
    with DynamicLoader(Million(), **settings) as loader:
        order = loader._order.window(Place(1), 1_000_000)[0]
        block = next(loader.blocks())
        state = {**block.position, "epoch": 1, "cursor": 999_900}
        state |= {"taken": 0, "delivered": [], "waiting": []}
        reads.clear()
        loader.load_state_dict(state)
        uids = [uid for mb in next(loader.blocks()) for uid in mb.uids]
        assert sorted(reads) == sorted(order[999_900:999_950])
        assert {index for _, index in uids} <= set(reads)
        assert len(json.dumps(loader.state_dict())) < 2000
        rest = [uid for block in loader.blocks() for mb in block for uid in mb.uids]
    assert sorted(uids + rest) == sorted((1, i) for i in order[999_900:])


def test_resuming_reads_the_current_window_only(token_dataset: MakeDataset) -> None:
    reads = []

    class Counting(token_dataset):  # type: ignore[misc, valid-type]
        def __getitem__(self, index: int) -> Any:
            reads.append(index)
            return super().__getitem__(index)

    dataset = Counting([5] * 5000)
    settings = {**SETTINGS, "window": 50}
    with DynamicLoader(dataset, **settings) as loader:
        *_, last = itertools.islice(loader.blocks(), 200)
    assert len(reads) > 3000
    reads.clear()
    with DynamicLoader(dataset, **settings) as loader:
        loader.load_state_dict(last.position)
        next(loader.blocks())
    assert len(reads) <= 50

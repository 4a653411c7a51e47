"""Iterable datasets, of which nobody knows how long they are: each sample once, by whoever."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st

from eke.batching import Block, DynamicLoader, Exchange
from eke.errors import EkeError, InputError
from eke.testing import assert_resumable

MakeStream = Callable[..., Any]
RunRanks = Callable[[int, Callable[[Exchange], Any]], list[Any]]

LENGTHS = [1 + (i * 29) % 31 for i in range(90)]
SETTINGS: dict[str, Any] = {"micro_tokens": 40, "per_step": "tokens:120", "window": 8, "seed": 5}


def uids(blocks: Sequence[Block]) -> list[tuple[int, int]]:
    return [uid for block in blocks for mb in block for uid in mb.uids]


def content(block: Block) -> Any:
    return (
        block.epoch, block.index, block.lengths, block.label_tokens, block.position,
        [(mb.uids, mb.scale, {k: v.tolist() for k, v in mb.items()}) for mb in block],
    )  # fmt: skip


def run_all(run_ranks: RunRanks, size: int, run: Callable[[Exchange], Any]) -> list[Any]:
    results = run_ranks(size, run)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


PARTS = st.lists(st.lists(st.integers(0, 50), max_size=25), min_size=1, max_size=5)
PER_STEP = st.sampled_from(["tokens:60", "tokens:400", "samples:1", "samples:5", "samples:30"])


@settings(max_examples=80, deadline=None)
@given(
    parts=PARTS,
    seeks=st.booleans(),
    stages=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), max_size=5),
    per_step=PER_STEP,
    window=st.integers(1, 12),
    packing=st.booleans(),
    shuffle=st.booleans(),
    overlength=st.sampled_from(["truncate", "skip", "solo"]),
)
def test_samples_are_seen_once_through_any_chain_of_world_sizes(
    token_stream: MakeStream, seeking_stream: MakeStream, run_ranks: RunRanks,
    parts: list[list[int]], seeks: bool, stages: list[tuple[int, int]], per_step: str,
    window: int, packing: bool, shuffle: bool, overlength: str,
) -> None:  # fmt: skip
    dataset = (seeking_stream if seeks else token_stream)(*parts)
    named = list(itertools.chain(*dataset.numbered))
    numbers = [i for _, i in named] if seeks else range(len(named))
    usable = [
        number
        for number, (n, _) in zip(numbers, named, strict=True)
        if n and (n <= 40 or overlength != "skip")
    ]
    if not usable:
        return
    state: Any = None
    seen: Counter[tuple[int, int]] = Counter()
    for size, count in [*stages, (2, 10_000)]:

        def run(exchange: Exchange, state: Any = state, count: int = count) -> Any:
            loader = DynamicLoader(
                dataset, micro_tokens=40, per_step=per_step, window=window, packing=packing,
                shuffle=shuffle, overlength=overlength, epochs=2, exchange=exchange,
            )  # fmt: skip
            with loader:
                if state is not None:
                    loader.load_state_dict(state)
                blocks = list(itertools.islice(loader.blocks(), count))
                alike = [(len(block), block.position) for block in blocks]
                return uids(blocks), (alike, loader.state_dict(), vars(loader.stats.counts))

        results = run_all(run_ranks, size, run)
        assert all(result[1] == results[0][1] for result in results)
        seen.update(uid for result in results for uid in result[0])
        state = json.loads(json.dumps(results[0][1][1]))
        counts = results[0][1][2]
    assert seen == Counter((e, i) for e in range(2) for i in usable)
    assert state["epoch"] == 2
    assert counts["empty"] == 2 * sum(n == 0 for n, _ in named)
    assert sum(counts.values()) - counts["empty"] == 2 * sum(n > 40 for n, _ in named)


def test_a_sample_has_the_tokens_of_its_number(seeking_stream: MakeStream) -> None:
    dataset = seeking_stream(LENGTHS[:20], LENGTHS[20:29], LENGTHS[29:])
    items = {item["index"]: item for item in dataset}
    with DynamicLoader(dataset, epochs=1, **SETTINGS) as loader:
        blocks = list(loader.blocks())
    assert sorted(uids(blocks)) == sorted((0, index) for index in items)
    for mb in itertools.chain(*blocks):
        for row, (_, index) in enumerate(mb.uids):
            n, item = mb.lengths[row], items[index]
            assert mb["input_ids"][row, :n].tolist() == item["input_ids"].tolist()
            assert mb["labels"][row, :n].tolist() == item["labels"].tolist()


@pytest.mark.parametrize("seeks", [False, True])
@pytest.mark.parametrize("per_step", ["tokens:120", "samples:7"])
def test_resuming_at_any_block_equals_not_stopping(
    token_stream: MakeStream, seeking_stream: MakeStream, seeks: bool, per_step: str
) -> None:
    make = seeking_stream if seeks else token_stream
    dataset = make(LENGTHS[:50], LENGTHS[50:57], LENGTHS[57:])
    config = {**SETTINGS, "per_step": per_step, "epochs": 2}
    with DynamicLoader(dataset, **config) as loader:
        states, whole = [loader.state_dict()], []
        for block in loader.blocks():
            whole.append(content(block))
            states.append(json.loads(json.dumps(block.position)))
    assert len(whole) > 20
    with DynamicLoader(dataset, **config) as resumed:
        for at, state in enumerate(states):
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            blocks = [content(b) for b in itertools.islice(resumed.blocks(), 6)]
            assert blocks == whole[at : at + 6]
    assert_resumable(lambda: DynamicLoader(dataset, **config))


def test_worlds_2_3_1_2(seeking_stream: MakeStream, run_ranks: RunRanks) -> None:
    """A job that ends after every other step; each goes on from nothing but the last state."""
    dataset = seeking_stream(LENGTHS, LENGTHS[:31], LENGTHS[:60])
    state: Any = None
    seen: Counter[tuple[int, int]] = Counter()
    for size in itertools.cycle((2, 3, 1, 2)):

        def run(exchange: Exchange, state: Any = state) -> Any:
            loader = DynamicLoader(dataset, exchange=exchange, epochs=2, **SETTINGS)
            with loader:
                if state is not None:
                    loader.load_state_dict(state)
                blocks = list(itertools.islice(loader.blocks(), 2))
                return uids(blocks), loader.state_dict()

        results = run_all(run_ranks, size, run)
        seen.update(uid for result in results for uid in result[0])
        if state == results[0][1]:
            break
        state = json.loads(json.dumps(results[0][1]))
    assert seen == Counter((e, item["index"]) for e in range(2) for item in dataset)


# ------------------------------------------------------------------ order


def test_shuffling_is_within_a_round_and_another_in_each_epoch(token_stream: MakeStream) -> None:
    """Eight samples a round, of equal length: in turns of eight, each in an order of its own."""
    orders = {}
    for shuffle in (False, True):
        config = {**SETTINGS, "per_step": "samples:4", "shuffle": shuffle, "epochs": 2}
        with DynamicLoader(token_stream([10] * 64), **config) as loader:
            by_step = [sorted(i for mb in b for _, i in mb.uids) for b in loader.blocks()]
        orders[shuffle] = by_step
    assert orders[False] == [list(range(at, at + 4)) for at in range(0, 64, 4)] * 2
    shuffled = orders[True]
    rounds = [sorted(shuffled[at] + shuffled[at + 1]) for at in range(0, 32, 2)]
    assert rounds == [list(range(at, at + 8)) for at in range(0, 64, 8)] * 2
    first, second = shuffled[:16], shuffled[16:]
    assert first != second
    assert first != orders[False][:16] != second


def test_a_step_of_samples_has_the_same_ones_on_any_number_of_ranks(
    token_stream: MakeStream, run_ranks: RunRanks
) -> None:
    steps = []
    for size in (1, 2, 3):

        def run(exchange: Exchange) -> list[list[int]]:
            config = {**SETTINGS, "per_step": "samples:7", "shuffle": False, "epochs": 1}
            with DynamicLoader(token_stream(LENGTHS), exchange=exchange, **config) as loader:
                return [[i for mb in block for _, i in mb.uids] for block in loader.blocks()]

        ranks = run_all(run_ranks, size, run)
        steps.append([sorted(itertools.chain(*step)) for step in zip(*ranks, strict=True)])
    assert steps[0] == [list(range(at, min(at + 7, 90))) for at in range(0, 90, 7)]
    assert steps[0] == steps[1] == steps[2]


def test_an_iterable_without_an_end_is_read_no_further_than_it_is_used() -> None:
    given_out = []

    class Endless:
        def __iter__(self) -> Iterator[Any]:
            for number in itertools.count():
                given_out.append(number)
                yield {"input_ids": [1] * 10, "labels": [1] * 10}

    with DynamicLoader(Endless(), epochs=3, **SETTINGS) as loader:
        blocks = list(itertools.islice(loader.blocks(), 100))
    assert len(set(uids(blocks))) == sum(block.samples for block in blocks) > 500
    assert {block.epoch for block in blocks} == {0}
    assert len(given_out) - len(set(uids(blocks))) < 3 * 8


# ------------------------------------------------------------------ who reads what


def reads_of(run_ranks: RunRanks, size: int, make: Callable[[], Any], state: Any) -> list[Any]:
    """What each rank's dataset gave while a loader gave one block, and the state after it."""

    def run(exchange: Exchange) -> Any:
        dataset = make()
        with DynamicLoader(dataset, exchange=exchange, epochs=2, **SETTINGS) as loader:
            if state is not None:
                loader.load_state_dict(state)
            next(loader.blocks())
            return dataset.given, loader.state_dict()

    return run_all(run_ranks, size, run)


def test_ranks_read_parts_of_their_own_if_they_divide_them(
    seeking_stream: MakeStream, run_ranks: RunRanks
) -> None:
    results = reads_of(run_ranks, 2, lambda: seeking_stream(*[[5] * 40] * 4), None)
    for rank, (numbers, _) in enumerate(results):
        own = [number for number in numbers if number % 2 == rank]
        assert own == list(range(rank, 32, 2)), "of each part what is asked for, and no more"
        assert set(numbers) - set(own) <= {0}, "with what every rank begins is compared"


def test_a_resume_skips_if_the_dataset_can_and_else_reads_again(
    token_stream: MakeStream, seeking_stream: MakeStream, run_ranks: RunRanks
) -> None:
    for make, least, most in ((seeking_stream, 1, 64), (token_stream, 3000, 4000)):

        def dataset(make: MakeStream = make) -> Any:
            return make([5] * 6000)

        with DynamicLoader(dataset(), epochs=2, **SETTINGS) as loader:
            for block in loader.blocks():
                if block.position["cursor"] > 3000:
                    break
        for size in (1, 2, 3):
            for numbers, _ in reads_of(run_ranks, size, dataset, block.position):
                assert least <= len(numbers) <= most


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("move", [False, True])
def test_samples_that_open_the_next_round_are_not_read_again(
    token_stream: MakeStream, run_ranks: RunRanks, ahead: bool, move: bool
) -> None:
    """Dropped samples leave the last step of each round short. An iterable cannot go back."""
    lengths = [0 if i % 5 == 3 else 10 for i in range(300)]
    for size in (1, 2):

        def run(exchange: Exchange) -> Any:
            dataset = token_stream(lengths)
            config = {**SETTINGS, "per_step": "samples:8", "move_samples": move, "epochs": 2}
            with DynamicLoader(dataset, exchange=exchange, **config) as loader:
                loader._thread_ahead = ahead
                return uids(list(loader.blocks())), dataset.given

        results = run_all(run_ranks, size, run)
        seen = sorted(itertools.chain(*(some for some, _ in results)))
        assert seen == [(e, i) for e in range(2) for i in range(300) if i % 5 != 3]
        assert [given for _, given in results] == [list(range(300)) * 2] * size


class SharingItself(torch.utils.data.IterableDataset[Any]):
    """Gives each of torch's workers a part of its samples, as many iterables do."""

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        step, first = (1, 0) if worker is None else (worker.num_workers, worker.id)
        for number in range(first, len(LENGTHS), step):
            ids = [number % 50] * LENGTHS[number]
            yield {"input_ids": ids, "labels": ids}


class ByTheWorker(SharingItself):
    """Begins with another sample in each worker."""

    def __iter__(self) -> Iterator[Any]:
        first = torch.multiprocessing.current_process().name[-1]
        ids = [int(first)] * 3
        return itertools.chain([{"input_ids": ids, "labels": ids}], super().__iter__())


@pytest.mark.usefixtures("nothing_leaks")
def test_workers_change_nothing() -> None:
    runs = []
    for workers in (0, 1, 2):
        with DynamicLoader(SharingItself(), num_workers=workers, epochs=2, **SETTINGS) as loader:
            blocks = list(loader.blocks())
        assert sorted(uids(blocks)) == [(e, i) for e in range(2) for i in range(90)]
        runs.append([content(block) for block in blocks])
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.usefixtures("nothing_leaks")
def test_workers_that_begin_with_other_samples_are_refused() -> None:
    with (
        DynamicLoader(ByTheWorker(), num_workers=2, **SETTINGS) as loader,
        pytest.raises(InputError, match="begins with another sample in each worker"),
    ):
        next(loader.blocks())


# ------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize("size", [1, 2])
def test_blocks_that_are_taken_back_are_given_again(
    token_stream: MakeStream, run_ranks: RunRanks, size: int
) -> None:
    """After running out of memory, after a break, and beside another loader of the same data."""

    def run(exchange: Exchange) -> Any:
        dataset = token_stream(LENGTHS)
        kept: list[Block] = []
        with (
            DynamicLoader(dataset, exchange=exchange, epochs=2, **SETTINGS) as loader,
            DynamicLoader(dataset, exchange=exchange, epochs=1, **SETTINGS) as beside,
        ):
            others = beside.blocks()
            second = list(itertools.islice(others, 2))
            for number in range(12):
                block = next(loader.blocks())
                if number == 4:
                    loader.lower_cap(34)
                elif number % 3 == 1:
                    loader.take_back()
                else:
                    kept.append(block)
            kept += loader.blocks()
            second += others
            return uids(kept), uids(second), [max(mb.tokens for mb in b) for b in kept]

    results = run_all(run_ranks, size, run)
    for which, epochs in ((0, 2), (1, 1)):
        seen = sorted(itertools.chain(*(result[which] for result in results)))
        assert seen == [(e, i) for e in range(epochs) for i in range(90)]
    assert all(max(result[2][3:]) <= 34 for result in results)


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_stop_together_and_what_is_left_is_given_later(
    token_stream: MakeStream, run_ranks: RunRanks, size: int
) -> None:
    def run(exchange: Exchange) -> Any:
        blocks = []
        with DynamicLoader(token_stream(LENGTHS), exchange=exchange, epochs=1, **SETTINGS) as one:
            for block in one.blocks():
                blocks.append(block)
                if len(blocks) == 3 and exchange.rank == size - 1:
                    one.stop("enough")
            state = one.state_dict()
            with DynamicLoader(
                token_stream(LENGTHS), exchange=exchange, epochs=1, **SETTINGS
            ) as on:
                on.load_state_dict(state)
                rest = list(on.blocks())
        return one.stopped, len(blocks), uids([*blocks, *rest])

    results = run_all(run_ranks, size, run)
    assert {result[:2] for result in results} == {results[0][:2]}
    assert "enough" in results[0][0]
    assert 3 <= results[0][1] < 8
    seen = sorted(itertools.chain(*(result[2] for result in results)))
    assert seen == [(0, i) for i in range(90)]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (None, "TypeError: 'NoneType' object is not subscriptable"),
        ({"input_ids": [1, 2]}, "KeyError: 'labels'"),
        ({"input_ids": [1, 2], "labels": [1]}, r"is not a sequence of tokens with a label each"),
        ({"input_ids": [[1]], "labels": [[1]]}, r"is not a sequence of tokens with a label each"),
        ({"input_ids": [0.5], "labels": [1]}, r"is not a sequence of tokens with a label each"),
        ({"input_ids": [1] * 50, "labels": [1] * 50}, "does not fit in a micro-batch"),
    ],
)
@pytest.mark.parametrize("at", [0, 33])
def test_a_malformed_sample_is_named_on_all_ranks(
    token_stream: MakeStream, run_ranks: RunRanks, item: Any, text: str, at: int
) -> None:
    class Malformed(token_stream):  # type: ignore[misc, valid-type]
        def __iter__(self) -> Iterator[Any]:
            return (item if n == at else one for n, one in enumerate(super().__iter__()))

    kind, told = error_of(run_ranks, lambda rank: Malformed(LENGTHS))
    assert issubclass(kind, EkeError)
    assert f"sample {at}" in told
    assert re.search(text, told)


def error_of(run_ranks: RunRanks, make: Callable[[int], Any]) -> tuple[type, str]:
    def run(exchange: Exchange) -> None:
        dataset = make(exchange.rank)
        with DynamicLoader(dataset, exchange=exchange, epochs=2, **SETTINGS) as loader:
            list(loader.blocks())

    results = run_ranks(3, run)
    assert len({(type(result), str(result)) for result in results}) == 1
    return type(results[0]), str(results[0])


def test_a_fault_of_one_rank_is_named_with_the_place(
    token_stream: MakeStream, run_ranks: RunRanks
) -> None:
    class Torn(token_stream):  # type: ignore[misc, valid-type]
        def __iter__(self) -> Iterator[Any]:
            return (1 / (51 - number) and item for number, item in enumerate(super().__iter__()))

    kind, text = error_of(run_ranks, lambda rank: (Torn if rank == 2 else token_stream)(LENGTHS))
    assert kind is EkeError
    assert text == "rank 2 of 3: sample 51: ZeroDivisionError: division by zero."


def test_ranks_with_other_samples_are_refused(
    token_stream: MakeStream, run_ranks: RunRanks
) -> None:
    """A dataset that shares itself out over ranks would be shared out twice."""
    kind, text = error_of(run_ranks, lambda rank: token_stream(LENGTHS[rank::3]))
    assert kind is InputError
    assert "the datasets of rank 0 and rank 1 begin with different samples" in text


def test_ranks_whose_data_end_at_other_places_are_refused(
    token_stream: MakeStream, run_ranks: RunRanks
) -> None:
    kind, text = error_of(run_ranks, lambda rank: token_stream(LENGTHS[: 50 - 20 * (rank == 1)]))
    assert kind is EkeError
    assert "is there, sample" in text
    assert "the loader does" in text


@pytest.mark.parametrize("per_step", ["tokens:120", "samples:7"])
def test_an_iterable_that_gives_nothing_is_an_error(
    token_stream: MakeStream, run_ranks: RunRanks, per_step: str
) -> None:
    for lengths in ([], [0, 0], [50]):
        config = {**SETTINGS, "per_step": per_step, "overlength": "skip"}
        text = "no sample of the dataset is usable" if lengths else "gave no samples in epoch 0"
        with (
            DynamicLoader(token_stream(lengths), **config) as loader,
            pytest.raises(InputError, match=text),
        ):
            next(loader.blocks())


def test_an_iterable_that_does_not_begin_again_is_an_error(token_stream: MakeStream) -> None:
    class Once(token_stream):  # type: ignore[misc, valid-type]
        def __iter__(self) -> Iterator[Any]:
            self.only = getattr(self, "only", None) or super().__iter__()
            return self.only

    with DynamicLoader(Once(LENGTHS), **SETTINGS) as loader:
        assert sorted(uid for mb in loader for uid in mb.uids) == [(0, i) for i in range(90)]
        with pytest.raises(InputError, match=r"gave no samples in epoch 1.*begins again"):
            next(loader.blocks())


class Turning:
    """Begins at another sample each time that it is iterated: an order that nothing pins down."""

    def __init__(self) -> None:
        self.times = itertools.count()

    def __iter__(self) -> Iterator[Any]:
        first = next(self.times)
        order = [*range(first, 90), *range(first)]
        return ({"input_ids": [i] * LENGTHS[i], "labels": [i] * LENGTHS[i]} for i in order)


class Wrapping:
    """Iterates what can be iterated once."""

    def __init__(self) -> None:
        self.rows = iter(Turning())

    def __iter__(self) -> Iterator[Any]:
        return (row for row in self.rows)


@pytest.mark.parametrize("make", [Turning, Wrapping])
@pytest.mark.parametrize("back", ["load", "lower", "new"])
def test_an_iterable_that_gives_other_samples_when_it_is_read_again_is_refused(
    run_ranks: RunRanks, make: Callable[[], Any], back: str
) -> None:
    """Some would be trained on twice, and others never."""

    def run(exchange: Exchange) -> None:
        dataset = make()
        settings = {**SETTINGS, "exchange": exchange, "epochs": 2, "window": 16}
        with (
            DynamicLoader(dataset, **settings) as loader,
            DynamicLoader(dataset, **settings) as other,
        ):
            first, *_ = itertools.islice(loader.blocks(), 2)
            if back == "lower":
                loader.lower_cap(36)
            elif back == "load":
                loader.load_state_dict(first.position)
            else:
                loader = other
                loader.load_state_dict(first.position)
            list(loader.blocks())

    for size in (1, 2):
        for error in run_ranks(size, run):
            assert isinstance(error, InputError)
            assert "begins with another sample than it did before" in str(error)


def test_every_epoch_may_have_an_order_of_its_own() -> None:
    with DynamicLoader(Turning(), epochs=3, **SETTINGS) as loader:
        blocks = list(loader.blocks())
    assert sorted(uids(blocks)) == [(e, i) for e in range(3) for i in range(90)]
    assert len({block.position["begins"] for block in blocks} - {""}) == 3


def test_a_state_of_another_way_to_read_is_refused(
    token_dataset: MakeStream, token_stream: MakeStream, seeking_stream: MakeStream
) -> None:
    state = DynamicLoader(token_stream(LENGTHS), **SETTINGS).state_dict()
    for other, text in (
        (token_dataset(LENGTHS), "dataset_length, dataset_parts"),
        (seeking_stream(LENGTHS, LENGTHS), "dataset_parts"),
    ):
        with pytest.raises(InputError, match=f"other settings: {text}"):
            DynamicLoader(other, **SETTINGS).load_state_dict(state)

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st

from eke.batching.source import MOST_PARTS, Ended, Items, Stream, source_of
from eke.errors import EkeError, InputError

MakeStream = Callable[..., Any]
PARTS = st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=4)


def test_what_has_a_length_and_items_is_read_by_item(
    token_dataset: Callable[[list[int]], Any],
) -> None:
    for dataset in ([{"a": 1}], token_dataset([3, 4])):
        source = source_of(dataset)
        assert isinstance(source, Items)
        assert (source.samples, source.parts) == (len(dataset), 0)


def test_what_can_be_iterated_again_is_read_in_turn(
    token_stream: MakeStream, seeking_stream: MakeStream
) -> None:
    class OfTorch(torch.utils.data.IterableDataset[int]):
        """torch gives it a `__getitem__` that raises."""

        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[int]:
            return iter((5, 6, 7))

    for dataset, parts in (
        (OfTorch(), 1),
        (token_stream([1], [2]), 1),
        (seeking_stream([1], [2]), 2),
        (seeking_stream(*[[1]] * 100), MOST_PARTS),
    ):
        source = source_of(dataset)
        assert isinstance(source, Stream)
        assert (source.samples, source.parts) == (None, parts)
    assert [source_of(OfTorch()).read(0, i) for i in (2, 0, 1)] == [7, 5, 6]


def test_what_cannot_say_how_long_it_is_is_refused(
    token_dataset: Callable[[list[int]], Any],
) -> None:
    class Negative(token_dataset):  # type: ignore[misc, valid-type]
        def __len__(self) -> int:
            return -1

    for dataset, text in ((Negative([3]), "ValueError"), (Negative, "TypeError: object of type")):
        with pytest.raises(InputError, match=f"does not say how many samples it has; got .{text}"):
            source_of(dataset)


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (iter([1]), "the dataset can be read only once; got 'an iterator, list_iterator'"),
        ((i for i in range(3)), "the dataset can be read only once; got 'an iterator, generator'"),
        (7, "the dataset cannot be read; got 'int'; it has __len__ and __getitem__, or __iter__"),
        ([], "the dataset has no samples"),
    ],
)
def test_what_cannot_be_read_is_refused(dataset: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        source_of(dataset)


@given(
    PARTS,
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 30)), min_size=1, max_size=30),
)
def test_each_number_is_the_same_sample_in_any_order_of_asking(
    token_stream: MakeStream,
    seeking_stream: MakeStream,
    parts: list[list[int]],
    seeks: bool,
    asked: list[tuple[int, int]],
) -> None:
    dataset = (seeking_stream if seeks else token_stream)(*parts)
    source = source_of(dataset)
    whole = list(itertools.chain(*dataset.numbered))
    for epoch, number in asked:
        if seeks:
            place, part = divmod(number, len(parts))
            expected = parts[part][place : place + 1], number
        else:
            expected = [n for n, _ in whole[number : number + 1]], -1
        if not expected[0]:
            with pytest.raises(Ended):
                source.read(epoch, number)
            continue
        item = source.read(epoch, number)
        assert len(item["input_ids"]) == expected[0][0]
        assert not seeks or item["index"] == number


def test_numbers_that_grow_are_read_in_one_pass(token_stream: MakeStream) -> None:
    dataset = token_stream([2] * 20)
    source = source_of(dataset)
    for number in (0, 0, 3, 4, 4, 9, 19):
        assert source.read(0, number)["index"] == number
    with pytest.raises(Ended):
        source.read(0, 20)
    with pytest.raises(Ended):
        source.read(0, 99)
    assert dataset.given == list(range(20))
    assert source.read(0, 5)["index"] == 5
    assert dataset.given[20:] == list(range(6))
    source.close()
    assert source.read(0, 6)["index"] == 6
    assert dataset.given[26:] == list(range(7))


def test_what_can_skip_is_read_from_the_first_number_on(seeking_stream: MakeStream) -> None:
    dataset = seeking_stream([2] * 50, [2] * 40)
    source = source_of(dataset)
    with pytest.raises(Ended):
        source.read(3, 81)
    for number in (60, 62, 79):
        assert source.read(3, number)["index"] == number
    assert dataset.given == [60, 62, 79]
    source.read(4, 60)
    assert dataset.given == [60, 62, 79, 60]


def test_what_follows_the_first_sample_from_far_is_skipped_to(seeking_stream: MakeStream) -> None:
    dataset = seeking_stream([2] * 3000)
    source = source_of(dataset)
    for number in (0, 2000, 2002):
        assert source.read(0, number)["index"] == number
    assert dataset.given == [0, 2000, 2001, 2002]


@pytest.mark.parametrize("name", ["skip", "shard"])
@pytest.mark.parametrize("gives", ["itself", "None"])
def test_a_method_that_changes_its_dataset_is_refused(
    seeking_stream: MakeStream, name: str, gives: str
) -> None:
    """It would skip again each time that it is read."""
    dataset = seeking_stream(*[[2] * 9] * (2 if name == "shard" else 1))
    setattr(dataset, name, lambda *_, **__: dataset if gives == "itself" else None)
    with pytest.raises(InputError, match=f"the dataset's {name} gives no other dataset; got '?"):
        source_of(dataset).read(0, 7)


def test_an_epoch_is_told_before_it_is_read(seeking_stream: MakeStream) -> None:
    told: list[tuple[int, int]] = []

    class Telling(seeking_stream):  # type: ignore[misc, valid-type]
        depth = 0

        def _with(self, numbered: Any) -> Any:
            other = Telling()
            other.numbered, other.given, other.depth = numbered, self.given, self.depth + 1
            return other

        def set_epoch(self, epoch: int) -> None:
            told.append((self.depth, epoch))

    source = source_of(Telling([2] * 9, [2] * 9))
    source.read(0, 0)
    source.read(0, 1)
    assert told == [(0, 0), (1, 0)] * 2
    told.clear()
    source.read(7, 6)
    assert told == [(0, 7), (1, 7), (2, 7)]


def test_an_exception_is_named_with_the_sample_that_was_next(token_stream: MakeStream) -> None:
    class Torn(token_stream):  # type: ignore[misc, valid-type]
        def __iter__(self) -> Iterator[Any]:
            for number, item in enumerate(super().__iter__()):
                if number == 4:
                    raise OSError("torn")
                yield item

    source = source_of(Torn([2] * 9))
    for _ in range(2):  # a generator that has raised would end quietly
        with pytest.raises(EkeError, match=r"^sample 4: OSError: torn\.$"):
            source.read(0, 6)
    assert source.read(0, 3)["index"] == 3


def test_samples_of_parts_are_named_with_them(seeking_stream: MakeStream) -> None:
    assert source_of(seeking_stream([1], [1])).name(7) == "sample 3 of shard 1"
    assert source_of(seeking_stream([1])).name(7) == "sample 7"
    assert source_of([1]).name(7) == "sample 7"

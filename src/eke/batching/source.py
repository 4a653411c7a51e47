"""Where samples come from: a dataset of numbered items, or one that can only be iterated.

An iterable is read in *parts*: one, or as many as the dataset's own shards (48 at most, so that no
process reads from more files at once than it can hold). Sample p of part s of S is number
p * S + s. This number is a sample's name whatever the ranks and workers. Of W ranks with V workers
each, rank i % W takes number i, and there worker i // W % V: where S is a multiple of W * V, each
reads its own parts alone; one part is read by all of them, and each keeps its share.

Property: `read` gives the same sample for the same epoch and number, in any order of asking; it
reads forward while numbers of a part grow, and begins anew, or skips, where they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch.utils.data

from eke.batching.order import Order, StreamOrder
from eke.errors import EkeError, InputError

MOST_PARTS = 48
"""Most parts that an iterable is read in: a multiple of most numbers of ranks and workers."""

READ_OVER = 1024
"""So many samples are read, and dropped, before an iterable that has begun skips."""

_DIVIDES = (
    "ArrowExamplesIterable", "BufferShuffledExamplesIterable", "ExamplesIterable",
    "FilteredExamplesIterable", "FormattedExamplesIterable", "InterleavedShardsExamplesIterable",
    "MappedExamplesIterable", "RebatchedArrowExamplesIterable", "RepeatExamplesIterable",
    "SelectColumnsIterable", "VerticallyConcatenatedMultiSourcesExamplesIterable",
)  # fmt: skip
"""The steps of Hugging Face's pipelines whose shards together have the samples of the whole."""


class SampleDataset(Protocol):
    """A map-style dataset: item i is a mapping with `input_ids` and `labels`, integers [T].

    Item i must be the same whenever and wherever it is asked for.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Ended(Exception):
    """There is no sample of this number."""


class Items:
    """The items of a map-style dataset, the same in every epoch."""

    parts = 0

    def __init__(self, dataset: SampleDataset) -> None:
        self._dataset = dataset
        try:
            self.samples = len(dataset)
        except Exception as error:
            raise InputError(
                "the dataset does not say how many samples it has",
                value=f"{type(error).__name__}: {error}",
                rule="of a dataset with __len__ and __getitem__, len(dataset) is their number",
                fix="Mend its __len__, or give an iterable: a torch.utils.data.IterableDataset, "
                "or an object without __getitem__",
            ) from error
        if self.samples == 0:
            raise InputError("the dataset has no samples", fix="Check the data's files and filters")

    def order(self, seed: int, shuffle: bool) -> Order:
        """The order of its epochs."""
        return Order(self.samples, seed, shuffle)

    def name(self, index: int) -> str:
        """What messages call the sample."""
        return f"sample {index}"

    def read(self, epoch: int, index: int) -> Any:
        """The item.

        Raises:
            EkeError: the dataset raised an exception; it is named with the sample.
        """
        try:
            return self._dataset[index]
        except Exception as error:
            raise failure(self.name(index), error) from error

    def close(self) -> None:
        """Nothing is kept."""


class Stream:
    """The samples of an iterable by number.

    Of the dataset, these methods are used where it has them: `set_epoch(epoch)`, called before an
    epoch is read; `shard(num_shards=S, index=s)` together with the number `num_shards`, to read it
    in parts; `skip(n)`, the same without its first n samples, so as not to read them. Hugging
    Face's are read in parts only if these are known to be the whole, and do not skip.
    """

    samples = None

    def __init__(self, dataset: Iterable[Any]) -> None:
        self._dataset = dataset
        shards = getattr(dataset, "num_shards", None)
        sharded = isinstance(shards, int) and shards > 0 and _method(dataset, "shard") is not None
        self.parts = min(int(shards or 1), MOST_PARTS) if sharded and _divides(dataset) else 1
        # Hugging Face's reads what it skips, and keeps another order than it skips in.
        self._skips = _method(dataset, "skip") is not None and not _of_hugging_face(dataset)
        self._readers: dict[int, _Reader] = {}

    def order(self, seed: int, shuffle: bool) -> StreamOrder:
        """The order of its epochs."""
        return StreamOrder(self.parts, shuffle)

    def name(self, index: int) -> str:
        """What messages call the sample."""
        position, part = divmod(index, self.parts)
        return f"sample {position}" + (f" of shard {part}" if self.parts > 1 else "")

    def read(self, epoch: int, index: int) -> Any:
        """The sample.

        Raises:
            Ended: its part has fewer.
            EkeError: iterating raised an exception; it is named with the sample that was next.
        """
        position, part = divmod(index, self.parts)
        reader = self._readers.get(part)
        # Where only the first sample was read, to compare it, what follows may be far.
        far = self._skips and reader is not None and reader.at == 1 and position > READ_OVER
        if reader is None or far or not reader.can_give(epoch, position):
            reader = self._readers[part] = _Reader(epoch, position)
        try:
            return reader.give(position, lambda: self._open(epoch, part, reader))
        except Ended:
            raise
        except Exception as error:
            # A generator that has raised looks as if it had ended.
            del self._readers[part]
            raise failure(self.name(reader.at * self.parts + part), error) from error

    def close(self) -> None:
        """Let iterators go."""
        self._readers.clear()

    def _open(self, epoch: int, part: int, reader: _Reader) -> Iterator[Any]:
        """An iterator of a part; if the dataset can skip, at the reader's goal."""
        dataset: Any = self._dataset
        _set_epoch(dataset, epoch)
        if self.parts > 1:
            whole, dataset = dataset, dataset.shard(num_shards=self.parts, index=part)
            _check_new("shard", whole, dataset)
            _set_epoch(dataset, epoch)
        if reader.goal and self._skips and _method(dataset, "skip") is not None:
            whole, dataset = dataset, dataset.skip(reader.goal)
            _check_new("skip", whole, dataset)
            _set_epoch(dataset, epoch)
            reader.at = reader.goal
        return iter(dataset)


class _Reader:
    """An iterator of one part, `at` the position that it gives next; it keeps the last sample."""

    def __init__(self, epoch: int, goal: int) -> None:
        self.epoch, self.goal, self.at = epoch, goal, 0
        self._iterator: Iterator[Any] | None = None
        self._ended = False
        self._last: Any = None
        self._last_at = -1

    def can_give(self, epoch: int, position: int) -> bool:
        """Whether the sample is the last one, or one still to come."""
        return epoch == self.epoch and (position >= self.at or position == self._last_at)

    def give(self, position: int, opened: Callable[[], Iterator[Any]]) -> Any:
        if self._iterator is None and not self._ended:
            self._iterator = opened()
        while self.at <= position and not self._ended:
            assert self._iterator is not None
            try:
                self._last = next(self._iterator)
            except StopIteration:
                self._ended, self._iterator = True, None
            else:
                self._last_at, self.at = self.at, self.at + 1
        if position != self._last_at:
            raise Ended
        return self._last


Source = Items | Stream


def source_of(dataset: Any) -> Source:
    """How to read a dataset.

    Raises:
        InputError: it is neither map-style nor an iterable that can be iterated again.
    """
    iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    if not iterable and hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return Items(dataset)
    if hasattr(dataset, "__next__"):
        raise InputError(
            "the dataset can be read only once",
            value=f"an iterator, {type(dataset).__name__}",
            rule="it begins again each time that it is iterated: for every epoch, on every rank "
            "and in every worker, and after a resume",
            fix=_AGAIN,
        )
    if not hasattr(dataset, "__iter__"):
        raise InputError(
            "the dataset cannot be read",
            value=type(dataset).__name__,
            rule="it has __len__ and __getitem__, or __iter__",
            fix=_AGAIN,
        )
    return Stream(dataset)


_AGAIN = "Give a list, or an object whose __iter__ makes a new iterator each time"


def failure(name: str, error: Exception) -> EkeError:
    """What the dataset raised, with the sample that it raised it for."""
    if isinstance(error, InputError):
        return InputError(f"{name}: {error}")
    return EkeError(f"{name}: {type(error).__name__}: {error}")


def _divides(dataset: Any) -> bool:
    """Whether the shards of a dataset together have its samples, as far as is known.

    Of Hugging Face's they have others after `take` and `skip`, of which each shard does a part,
    after interleaving, and where a function is given numbers, which begin anew in each shard.
    """
    if not _of_hugging_face(dataset):
        return True
    steps: list[Any] = [getattr(dataset, "_ex_iterable", None)]
    for step in steps:
        if type(step).__name__ not in _DIVIDES or getattr(step, "with_indices", False):
            return False
        steps += getattr(step, "ex_iterables", [])
        steps += [step.ex_iterable] if hasattr(step, "ex_iterable") else []
    return True


def _of_hugging_face(dataset: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "datasets" for kind in type(dataset).__mro__)


def _check_new(name: str, dataset: Any, other: Any) -> None:
    """Refuse a method that changes its dataset instead of giving another one.

    Raises:
        InputError: it does.
    """
    if other is dataset or not hasattr(other, "__iter__"):
        raise InputError(
            f"the dataset's {name} gives no other dataset",
            value="itself" if other is dataset else type(other).__name__,
            rule=f"{name} leaves the dataset as it is, and gives another one to iterate",
            fix=f"Let it do so, or give {name} another name",
        )


def _method(dataset: Any, name: str) -> Any:
    found = getattr(dataset, name, None)
    return found if callable(found) else None


def _set_epoch(dataset: Any, epoch: int) -> None:
    set_epoch = _method(dataset, "set_epoch")
    if set_epoch is not None:
        set_epoch(epoch)

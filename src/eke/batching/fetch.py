"""Brings samples from the dataset, in this process or in worker processes.

Properties: `take` returns the samples in the order asked for, whatever the number of workers;
one that an iterable turned out not to have is `ABSENT`;
the global random state is not touched; after `close` no process and no descriptor is left, and
the next `take` starts afresh.

Samples travel in chunks, as plain bytes: one message a sample is slow, and a tensor sent from
a worker holds a file descriptor, of which a window would need thousands.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from eke.batching.batch import IGNORED, Tokens
from eke.batching.cost import CostModel
from eke.batching.extra import received, sent
from eke.batching.source import Ended, Items, Source, failure
from eke.errors import EkeError, InputError

CHUNK_SAMPLES = 32
_NOTHING = np.zeros(0, dtype=np.int64)


ABSENT = -1
"""The full length of a sample that is not there."""


class _Request(NamedTuple):
    """Samples to read in one go."""

    epoch: int
    indices: list[int]


class _Chunk(NamedTuple):
    """Samples end to end; `lengths` after truncation."""

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    lengths: list[int]
    full_lengths: list[int]
    label_tokens: list[int]
    loads: list[tuple[int, ...]]
    items: list[Any]


class _ChunkDataset:
    """What a request asks for, as a `_Chunk`."""

    def __init__(
        self, source: Source, limit: int | None, cost: CostModel, keep_items: bool
    ) -> None:
        self._source, self._limit, self._cost = source, limit, cost
        self._keep_items = keep_items

    def __getitem__(self, request: _Request) -> _Chunk:
        samples = [self._sample(request.epoch, index) for index in request.indices]
        return _Chunk(
            np.concatenate([_NOTHING, *(sample.ids for sample in samples)]),
            np.concatenate([_NOTHING, *(sample.labels for sample in samples)]),
            [len(sample.ids) for sample in samples],
            [sample.full_length for sample in samples],
            [sample.label_tokens for sample in samples],
            [sample.loads for sample in samples],
            [sent(sample.item) for sample in samples],
        )

    def _sample(self, epoch: int, index: int) -> Tokens:
        name = self._source.name(index)
        try:
            item = self._source.read(epoch, index)
        except Ended:
            return Tokens(_NOTHING, _NOTHING, ABSENT, 0, (0,) * len(self._cost.loads))
        try:
            ids, labels = np.asarray(item["input_ids"]), np.asarray(item["labels"])
            loads = self._cost.loads_of(item)
        except Exception as error:
            raise failure(name, error) from error
        integers = {ids.dtype.kind, labels.dtype.kind} <= {"i", "u"}
        if ids.ndim != 1 or ids.shape != labels.shape or (ids.size and not integers):
            raise InputError(
                f"{name} is not a sequence of tokens with a label each",
                value=f"input_ids {ids.dtype}{ids.shape}, labels {labels.dtype}{labels.shape}",
                rule="both are integers of one shape [T]",
            )
        labels = labels[: self._limit].astype(np.int64)
        return Tokens(
            ids[: self._limit].astype(np.int64),
            labels,
            full_length=len(ids),
            label_tokens=int(np.count_nonzero(labels[1:] != IGNORED)),
            loads=loads,
            item=item if self._keep_items else None,
        )


class _Requests:
    """A sampler whose requests are set before each pass."""

    def __init__(self) -> None:
        self.all: list[_Request] = []

    def __iter__(self) -> Iterator[_Request]:
        return iter(self.all)


def _same(chunk: Any) -> Any:
    return chunk


def _begin_worker(_: int) -> None:
    """Leave Ctrl-C to the trainer, and end when the trainer is gone.

    torch's own watchdog lets a worker return, but one whose last samples do not fit into their
    pipe then waits for ever for somebody to read them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    trainer = multiprocessing.parent_process()
    if trainer is not None:

        def follow() -> None:
            trainer.join()
            os._exit(1)

        threading.Thread(target=follow, name="follow-trainer", daemon=True).start()


def _begin_unseen(worker: int) -> None:
    """Begin a worker whose dataset does not know that it is one of torch's: many iterables, Hugging
    Face's among them, give a part of their samples only if they do."""
    _begin_worker(worker)
    torch.utils.data._utils.worker._worker_info = None
    if torch.utils.data.get_worker_info() is not None:
        raise RuntimeError("torch no longer lets a worker of it look like a process of its own")


class SampleFetcher:
    """Fetches samples by index.

    Args:
        ranks: how many processes share the samples of an iterable.
        keep_items: bring samples whole, besides their tokens.
        limit: longer samples are cut to this many tokens; `None` cuts nothing.
        most: the most samples in one `take`; so many can be prefetched.
        start_method: how workers start: "fork", "spawn", "forkserver"; `None` for the default.
    """

    def __init__(
        self,
        source: Source,
        *,
        limit: int | None,
        most: int,
        num_workers: int,
        start_method: str | None,
        cost: CostModel | None = None,
        ranks: int = 1,
        keep_items: bool = False,
    ) -> None:
        self._source, self._ranks = source, ranks
        self._dataset = _ChunkDataset(source, limit, cost or CostModel(), keep_items)
        self._num_workers, self._start_method = num_workers, start_method
        self._requests = _Requests()
        self._chunk_size = max(1, min(CHUNK_SAMPLES, -(-most // max(1, num_workers))))
        self._ahead = -(-most // (self._chunk_size * max(1, num_workers)))
        self._read = -1, 0  # the epoch that was read last, and from where on it was not
        self._loader: DataLoader[_Chunk] | None = None
        self._pass: Iterator[_Chunk] | None = None

    def take(self, indices: list[int], epoch: int = 0) -> list[Tokens]:
        """The samples at `indices`.

        Raises:
            InputError: a sample is malformed, or the dataset raised one.
            EkeError: the dataset raised something else, or a worker died.
        """
        requests = self._requests_for(indices, epoch)
        samples = self._take(requests)
        order = chain.from_iterable(request.indices for request in requests)
        found = dict(zip(order, samples, strict=True))
        read = self._read[1] if epoch == self._read[0] else 0
        self._read = epoch, max([read, *(index + 1 for index in indices)])
        return [found[index] for index in indices]

    def begins(self, epoch: int, indices: list[int]) -> str:
        """What all who read an iterable must agree on: the sample that the epoch begins with, as a
        digest; "" if these can be read on from where the last `take` ended.

        Raises:
            InputError: this rank's workers do not agree, or as for `take`.
            EkeError: as for `take`.
        """
        reads_on = epoch == self._read[0] and min(indices, default=self._read[1]) >= self._read[1]
        if isinstance(self._source, Items) or reads_on:
            return ""
        samples = self._take([_Request(epoch, [0])] * max(1, self._num_workers))
        digests = [
            hashlib.blake2b(s.ids.tobytes() + s.labels.tobytes(), digest_size=8).hexdigest()
            for s in samples
        ]
        if len(set(digests)) > 1:
            raise InputError(
                "the dataset begins with another sample in each worker",
                rule="in every worker it gives all its samples, in one order",
                fix="Take its order from a seed and the epoch, and leave sharing out to the loader",
            )
        self._read = epoch, 0
        return digests[0]

    def _requests_for(self, indices: list[int], epoch: int) -> list[_Request]:
        """Chunks of the indices; of an iterable, those of each worker ascending, by turns.

        torch gives the chunks of a pass to its workers in turns. If it did not, workers would read
        more than they need to.
        """
        if isinstance(self._source, Items):
            return [_Request(epoch, chunk) for chunk in self._chunks(indices)]
        workers = max(1, self._num_workers)
        shares: list[list[int]] = [[] for _ in range(workers)]
        for index in sorted(indices):
            shares[index // self._ranks % workers].append(index)
        rows = zip_longest(*map(self._chunks, shares), fillvalue=list[int]())
        return [_Request(epoch, chunk) for row in rows for chunk in row]

    def _chunks(self, indices: list[int]) -> list[list[int]]:
        size = self._chunk_size
        return [indices[at : at + size] for at in range(0, len(indices), size)]

    def _take(self, requests: list[_Request]) -> list[Tokens]:
        try:
            self._begin(requests)
            if self._pass is None:
                return []
            samples = [sample for chunk in self._pass for sample in _unpack(chunk)]
            self._pass = None
            return samples
        except Exception as error:
            self.close()
            kind = InputError if isinstance(error, InputError) else EkeError
            failure = kind(_message(error))
            if not self._num_workers:
                raise failure from error
            # The tracebacks would keep torch's iterator, and with it the workers, alive. A
            # worker's own traceback is part of the message of `error`.
            link: BaseException | None = error
            while link is not None:
                link.__traceback__ = None
                link = link.__cause__ or link.__context__
            raise failure from error
        except BaseException:
            self.close()  # an interrupt may have left half of a worker's message unread
            raise

    def close(self) -> None:
        """End the workers; harmless when there are none."""
        # torch ends them when the last reference to its iterator goes.
        self._pass = self._loader = None
        self._read = -1, 0
        self._source.close()

    def kill(self) -> None:
        """End the workers at once; a `take` in another thread then fails."""
        workers = getattr(self._pass, "_workers", [])
        for worker in workers:
            worker.kill()

    def _begin(self, requests: list[_Request]) -> None:
        self._requests.all = requests
        self._pass = None
        if not self._num_workers:
            self._pass = map(self._dataset.__getitem__, requests)
        elif self._loader is not None:
            self._pass = iter(self._loader)
        else:  # even for no samples: where the first is taken is where workers should be started
            by_item = isinstance(self._source, Items)
            self._loader = DataLoader(
                self._dataset,  # type: ignore[arg-type]
                batch_size=None,
                sampler=self._requests,
                collate_fn=_same,
                num_workers=self._num_workers,
                prefetch_factor=self._ahead,
                persistent_workers=True,
                worker_init_fn=_begin_worker if by_item else _begin_unseen,
                multiprocessing_context=self._start_method,
                # Its own generator, so that starting a pass draws nothing from the global one.
                generator=torch.Generator(),
            )
            try:
                self._pass = _first_pass(self._loader)
            except Exception as error:
                if "pickle" not in str(error):
                    raise
                raise InputError(
                    "the dataset cannot be sent to a worker",
                    value=f"{type(error).__name__}: {error}",
                    rule="a worker that is not forked gets a pickle of it",
                    fix="Open files and make iterators in __iter__ or __getitem__, with classes "
                    "and functions of a module; or start workers with start_method='fork'",
                ) from error


def _first_pass(loader: DataLoader[_Chunk]) -> Iterator[_Chunk]:
    """Start the workers without torch's SIGCHLD handler.

    The handler would raise a dead worker's error wherever the main thread is, in the middle of
    a training step of one rank alone. Without it the error shows when its samples are taken.
    """
    if threading.current_thread() is not threading.main_thread():
        return iter(loader)
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        return iter(loader)
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)


def _message(error: Exception) -> str:
    """What went wrong, without the traceback that torch adds to a worker's error."""
    return re.split(r"^eke\.errors\.\w+: ", str(error), flags=re.MULTILINE)[-1].strip(" \n.")


def _unpack(chunk: _Chunk) -> Iterator[Tokens]:
    start = 0
    each = (chunk.lengths, chunk.full_lengths, chunk.label_tokens, chunk.loads, chunk.items)
    for length, full_length, label_tokens, loads, item in zip(*each, strict=True):
        stop = start + length
        ids, labels = chunk.ids[start:stop], chunk.labels[start:stop]
        yield Tokens(ids, labels, full_length, label_tokens, loads, received(item))
        start = stop

"""Brings samples from the dataset, in this process or in worker processes.

Properties: `take` returns the samples in the order asked for, whatever the number of workers;
the global random state is not touched; after `close` no process and no descriptor is left, and
the next `take` starts afresh.

Samples travel in chunks, as plain bytes: one message a sample is slow, and a tensor sent from
a worker holds a file descriptor, of which a window would need thousands.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from eke.batching.batch import IGNORED, Tokens
from eke.batching.cost import CostModel
from eke.errors import EkeError, InputError

CHUNK_SAMPLES = 32


class SampleDataset(Protocol):
    """A map-style dataset: item i is a mapping with `input_ids` and `labels`, integers [T].

    Item i must be the same whenever and wherever it is asked for.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class _Chunk(NamedTuple):
    """Samples end to end; `lengths` after truncation."""

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    lengths: list[int]
    full_lengths: list[int]
    label_tokens: list[int]
    loads: list[tuple[int, ...]]


class _ChunkDataset:
    """Item [i, j, ...] is the `_Chunk` of the dataset's items i, j, ..."""

    def __init__(self, dataset: SampleDataset, limit: int | None, cost: CostModel) -> None:
        self._dataset, self._limit, self._cost = dataset, limit, cost

    def __getitem__(self, indices: list[int]) -> _Chunk:
        samples = [self._sample(index) for index in indices]
        return _Chunk(
            np.concatenate([sample.ids for sample in samples]),
            np.concatenate([sample.labels for sample in samples]),
            [len(sample.ids) for sample in samples],
            [sample.full_length for sample in samples],
            [sample.label_tokens for sample in samples],
            [sample.loads for sample in samples],
        )

    def _sample(self, index: int) -> Tokens:
        try:
            item = self._dataset[index]
            ids, labels = np.asarray(item["input_ids"]), np.asarray(item["labels"])
            loads = self._cost.loads_of(item)
        except InputError as error:
            raise InputError(f"sample {index}: {error}") from error
        except Exception as error:
            raise EkeError(f"sample {index}: {type(error).__name__}: {error}") from error
        integers = {ids.dtype.kind, labels.dtype.kind} <= {"i", "u"}
        if ids.ndim != 1 or ids.shape != labels.shape or (ids.size and not integers):
            raise InputError(
                f"sample {index} is not a sequence of tokens with a label each",
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
        )


class _Chunks:
    """A sampler whose chunks are set before each pass."""

    def __init__(self) -> None:
        self.indices: list[int] = []
        self.size = 1

    def __iter__(self) -> Iterator[list[int]]:
        return (self.indices[i : i + self.size] for i in range(0, len(self.indices), self.size))


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


class SampleFetcher:
    """Fetches samples by index.

    Args:
        limit: longer samples are cut to this many tokens; `None` cuts nothing.
        most: the most samples in one `take`; so many can be prefetched.
        start_method: how workers start: "fork", "spawn", "forkserver"; `None` for the default.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        limit: int | None,
        most: int,
        num_workers: int,
        start_method: str | None,
        cost: CostModel | None = None,
    ) -> None:
        self._dataset = _ChunkDataset(dataset, limit, cost or CostModel())
        self._num_workers, self._start_method = num_workers, start_method
        self._chunks = _Chunks()
        self._chunks.size = max(1, min(CHUNK_SAMPLES, -(-most // max(1, num_workers))))
        self._ahead = -(-most // (self._chunks.size * max(1, num_workers)))
        self._loader: DataLoader[_Chunk] | None = None
        self._pass: Iterator[_Chunk] | None = None

    def take(self, indices: list[int]) -> list[Tokens]:
        """The samples at `indices`.

        Raises:
            InputError: a sample is malformed, or the dataset raised one.
            EkeError: the dataset raised something else, or a worker died.
        """
        try:
            self._begin(indices)
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

    def kill(self) -> None:
        """End the workers at once; a `take` in another thread then fails."""
        workers = getattr(self._pass, "_workers", [])
        for worker in workers:
            worker.kill()

    def _begin(self, indices: list[int]) -> None:
        self._chunks.indices = list(indices)
        self._pass = None
        if not self._num_workers:
            self._pass = map(self._dataset.__getitem__, self._chunks)
        elif self._loader is not None:
            self._pass = iter(self._loader)
        else:  # even for no samples: where the first is taken is where workers should be started
            self._loader = DataLoader(
                self._dataset,  # type: ignore[arg-type]
                batch_size=None,
                sampler=self._chunks,
                collate_fn=_same,
                num_workers=self._num_workers,
                prefetch_factor=self._ahead,
                persistent_workers=True,
                worker_init_fn=_begin_worker,
                multiprocessing_context=self._start_method,
                # Its own generator, so that starting a pass draws nothing from the global one.
                generator=torch.Generator(),
            )
            self._pass = _first_pass(self._loader)


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
    for length, full_length, label_tokens, loads in zip(
        chunk.lengths, chunk.full_lengths, chunk.label_tokens, chunk.loads, strict=True
    ):
        stop = start + length
        ids, labels = chunk.ids[start:stop], chunk.labels[start:stop]
        yield Tokens(ids, labels, full_length, label_tokens, loads)
        start = stop

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from eke.batching.ahead import Ahead
from eke.batching.batch import Tokens
from eke.batching.fetch import SampleFetcher
from eke.batching.source import source_of
from eke.errors import EkeError, InputError

LENGTHS = [(i * 37) % 23 for i in range(300)]


def fetcher(dataset: Any, workers: int = 0, **more: Any) -> SampleFetcher:
    settings = {"limit": None, "most": 100, "start_method": None, **more}
    return SampleFetcher(source_of(dataset), num_workers=workers, **settings)


def plain(samples: list[Tokens]) -> list[Any]:
    return [(s.ids.tolist(), s.labels.tolist(), s.full_length, s.label_tokens) for s in samples]


@pytest.mark.usefixtures("nothing_leaks")
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_samples_come_in_the_order_asked_for(
    token_dataset: Callable[[list[int]], Any], workers: int
) -> None:
    dataset = token_dataset(LENGTHS)
    fetch = fetcher(dataset, workers)
    for indices in ([5, 3, 4], list(range(299, 200, -1)), [], list(range(100)), [7] * 3):
        samples = fetch.take(indices)
        assert len(samples) == len(indices)
        for index, sample in zip(indices, samples, strict=True):
            item = dataset[index]
            assert sample.ids.tolist() == item["input_ids"].tolist()
            assert sample.labels.tolist() == item["labels"].tolist()
            assert sample.full_length == LENGTHS[index]
            assert sample.label_tokens == int((item["labels"][1:] != -100).sum())
    fetch.close()
    fetch.close()


@pytest.mark.usefixtures("nothing_leaks")
def test_takes_of_any_samples_follow_one_another(
    token_dataset: Callable[[list[int]], Any],
) -> None:
    dataset = token_dataset(LENGTHS)
    fetch = fetcher(dataset, 2)
    alone = fetcher(dataset)
    first, second, other = list(range(100)), list(range(100, 200)), list(range(150, 250))
    assert plain(fetch.take(first)) == plain(alone.take(first))
    assert plain(fetch.take(second)) == plain(alone.take(second))
    assert fetch.take([]) == []
    assert plain(fetch.take(other)) == plain(alone.take(other))
    fetch.close()


def test_overlong_samples_are_cut_where_asked(token_dataset: Callable[[list[int]], Any]) -> None:
    dataset = token_dataset([3, 9])
    short, long = fetcher(dataset, limit=5).take([0, 1])
    assert (len(short.ids), short.full_length) == (3, 3)
    assert (len(long.ids), len(long.labels), long.full_length) == (5, 5, 9)
    assert long.label_tokens == int((dataset[1]["labels"][1:5] != -100).sum())


@pytest.mark.usefixtures("nothing_leaks")
@pytest.mark.parametrize("workers", [0, 2])
def test_the_global_random_state_is_not_touched(
    token_dataset: Callable[[list[int]], Any], workers: int
) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    fetch = fetcher(token_dataset(LENGTHS), workers)
    fetch.take([1])
    fetch.take([2])
    fetch.close()
    assert torch.equal(torch.get_rng_state(), before)


class Raising:
    """Raises at item 7; the others have one token."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 7:
            raise self._error
        return {"input_ids": np.array([1]), "labels": np.array([1])}


@pytest.mark.usefixtures("nothing_leaks")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("no such file"), EkeError, "sample 7: ValueError: no such file."),
        (InputError("no text", fix="Add it"), InputError, "sample 7: no text. Add it."),
    ],
)
def test_a_failing_sample_is_named(
    workers: int, error: Exception, kind: type[EkeError], text: str
) -> None:
    fetch = fetcher(Raising(error), workers)
    with pytest.raises(EkeError) as caught:
        fetch.take(list(range(20)))
    assert type(caught.value) is kind
    assert str(caught.value) == text
    assert len(fetch.take([1, 2, 3])) == 3, "the fetcher can be used again"
    fetch.close()


@pytest.mark.parametrize(
    "item",
    [
        {"input_ids": [1, 2], "labels": [1]},
        {"input_ids": [[1], [2]], "labels": [[1], [2]]},
        {"input_ids": [0.5], "labels": [1]},
        {"input_ids": ["a"], "labels": [1]},
    ],
)
def test_a_malformed_sample_is_refused(item: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="sample 0 is not a sequence of tokens"):
        fetcher([item]).take([0])


def test_a_sample_without_labels_is_named() -> None:
    with pytest.raises(EkeError, match=r"sample 0: KeyError: 'labels'"):
        fetcher([{"input_ids": [1]}]).take([0])


class Dying:
    """The worker that is asked for item 7 is killed, as the kernel does when memory is short."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 7:
            time.sleep(0.5)  # so that whoever fetches ahead has gone on when it happens
            os.kill(os.getpid(), signal.SIGKILL)
        return {"input_ids": np.array([1]), "labels": np.array([1])}


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_a_dataset_that_no_worker_can_be_sent_is_refused() -> None:
    rows = [{"input_ids": [1], "labels": (label for label in [1])}]
    fetch = fetcher(rows, 1, start_method="spawn")
    with pytest.raises(InputError, match=r"cannot be sent to a worker.*cannot pickle 'generator'"):
        fetch.take([0])


@pytest.mark.usefixtures("nothing_leaks")
@pytest.mark.parametrize("ahead", [False, True])
def test_a_killed_worker_is_an_error_where_its_samples_are_taken(ahead: bool) -> None:
    fetch = fetcher(Dying(), 2)
    fetch.take([1])
    indices = list(range(20))
    taking = Ahead(lambda: fetch.take(indices), "test") if ahead else None
    while taking and all(p.status() != psutil.STATUS_ZOMBIE for p in psutil.Process().children()):
        if taking.ended(0.01):  # torch's own handler would raise here, in the middle of a step
            break
    with pytest.raises(EkeError, match=r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly"):
        taking.take() if taking else fetch.take(indices)
    assert len(fetch.take([1, 2])) == 2, "new workers replace the old"
    fetch.close()


def test_thousands_of_samples_need_few_descriptors(
    token_dataset: Callable[[list[int]], Any],
) -> None:
    fetch = fetcher(token_dataset([3] * 4000), 2, most=4000)
    before = len(list(Path("/proc/self/fd").iterdir()))
    samples = fetch.take(list(range(4000)))
    assert len(list(Path("/proc/self/fd").iterdir())) - before < 50
    assert len(samples) == 4000
    fetch.close()


ORPHANS = """
import sys, time, psutil, torch
from eke.batching.fetch import SampleFetcher
from eke.batching.source import source_of

class Long:
    def __len__(self): return 4096
    def __getitem__(self, i):
        ids = torch.arange(20_000)
        return {"input_ids": ids, "labels": ids, "index": i}

if __name__ == "__main__":
    source, method = source_of(Long()), sys.argv[1]
    fetch = SampleFetcher(source, limit=None, most=2048, num_workers=2, start_method=method)
    fetch.take(list(range(2048)))
    # More than their pipes hold, and nobody reads.
    fetch._begin(fetch._requests_for(list(range(2048, 4096)), 0))
    time.sleep(2)
    print(*(p.pid for p in psutil.Process().children(recursive=True)), flush=True)
    time.sleep(600)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_workers_end_when_the_trainer_is_killed(tmp_path: Path, start_method: str) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(ORPHANS)
    trainer = subprocess.Popen(
        [sys.executable, str(script), start_method],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert trainer.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in trainer.stdout.readline().split()]
    trainer.kill()
    trainer.wait(10)
    assert len(workers) >= 2
    _, alive = psutil.wait_procs(workers, timeout=20)
    for process in alive:
        process.kill()
    assert not alive


class WhoReads:
    """Each item says whether it was read in one of torch's workers."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = [int(torch.utils.data.get_worker_info() is not None)]
        return {"input_ids": ids, "labels": ids}


class WhoIterates:
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (WhoReads()[index] for index in range(4))


@pytest.mark.parametrize(("dataset", "knows"), [(WhoReads(), 1), (WhoIterates(), 0)])
def test_only_an_iterable_does_not_know_of_workers(dataset: Any, knows: int) -> None:
    fetch = fetcher(dataset, 1)
    assert [s.ids.tolist() for s in fetch.take([0, 1, 2, 3])] == [[knows]] * 4
    fetch.close()


def test_of_a_sharded_iterable_each_worker_reads_its_own(
    seeking_stream: Callable[..., Any],
) -> None:
    """Two ranks of two workers, four parts: the requests of this rank, in torch's turns."""
    source = source_of(seeking_stream(*[[1] * 90] * 4))
    fetch = SampleFetcher(source, limit=None, most=64, num_workers=2, start_method=None, ranks=2)
    numbers = [*range(1, 300, 2)]
    requests = fetch._requests_for(numbers[::-1], 7)
    assert sorted(i for request in requests for i in request.indices) == numbers
    assert {request.epoch for request in requests} == {7}
    for worker, part in ((0, 1), (1, 3)):
        own = [i for request in requests[worker::2] for i in request.indices]
        assert own == list(range(part, 300, 4))

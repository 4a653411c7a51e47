"""One rank of a real gloo job; run by test_loader_processes.py with torchrun's environment.

Each argument is a scenario and the start method of the workers, or "none" for no workers, as in
uneven:fork. Prints one JSON line for each.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator
from typing import Any

import torch

from eke.batching import DynamicLoader
from eke.distributed import init, shutdown, world, wrap
from eke.errors import EkeError


class Dataset:
    """Item i has `lengths[i]` tokens; on a rank that is told so, one item fails."""

    def __init__(self, lengths: list[int], bad: int | None = None) -> None:
        self._lengths, self._bad = lengths, bad

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self._bad:
            raise ValueError("torn record")
        ids = torch.arange(self._lengths[index]) % 30
        return {"input_ids": ids, "labels": ids.clone(), "index": index}


class Stream:
    """The same samples one after another; under torch's loader it would share them out itself."""

    def __init__(self, lengths: list[int], bad: int | None = None) -> None:
        self._items = Dataset(lengths, bad)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = torch.utils.data.get_worker_info()
        step, first = (1, 0) if worker is None else (worker.num_workers + 1, worker.id + 1)
        return (self._items[i] for i in range(first, len(self._items), step))


def train(scenario: str, start_method: str | None) -> dict[str, Any]:
    """Train under DDP; what this rank saw, or the error that ended it."""
    lengths = {
        "uneven": [1 + (i * 29) % 31 for i in range(75)] + [0] * 4,
        "one_rank_empty": [9, 0, 8, 0, 7],
        "bad_item": [9] * 70,
    }[scenario.removeprefix("stream_")]
    bad = 33 if scenario.endswith("bad_item") and world().rank == 1 else None
    torch.manual_seed(0)
    model = wrap(
        torch.nn.Sequential(torch.nn.Embedding(30, 4), torch.nn.Linear(4, 30)), torch.device("cpu")
    )
    result: dict[str, Any] = {"uids": [], "steps": [], "dummies": 0}
    loader = DynamicLoader(
        (Stream if scenario.startswith("stream_") else Dataset)(lengths, bad),
        micro_tokens=40,
        per_step="tokens:120",
        window=8,
        shuffle=False,
        epochs=2,
        num_workers=0 if start_method is None else 1,
        start_method=start_method,
        move_samples=scenario != "one_rank_empty",
    )
    with loader:
        try:
            for block in loader.blocks():
                for micro_batch in block:
                    logits_BTV = model(micro_batch["input_ids"])[:, :-1]
                    loss_sum = torch.nn.functional.cross_entropy(
                        logits_BTV.flatten(0, 1),
                        micro_batch["labels"][:, 1:].flatten(),
                        reduction="sum",
                    )
                    (loss_sum * micro_batch.scale).backward()
                    result["uids"] += micro_batch.uids
                    result["dummies"] += micro_batch.is_dummy
                result["steps"].append(len(block))
        except EkeError as error:
            result["error"] = str(error)
    result["gradient"] = sum(float(p.grad.sum()) for p in model.parameters() if p.grad is not None)
    result["children"] = len(multiprocessing.active_children())
    return result


if __name__ == "__main__":
    init()
    for argument in sys.argv[1:]:
        scenario, _, start_method = argument.partition(":")
        print(json.dumps(train(scenario, None if start_method == "none" else start_method)))
    shutdown()

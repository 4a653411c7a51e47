"""A loader that is interrupted, or sent elsewhere, while the next round is being made."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from eke.batching import Block, DynamicLoader
from eke.batching import loader as loading
from eke.batching.batch import collate
from eke.errors import EkeError

MakeDataset = Callable[[Sequence[int]], Any]
SETTINGS: dict[str, Any] = {"micro_tokens": 16, "per_step": "tokens:32", "window": 8}


def uids(blocks: Sequence[Block]) -> list[tuple[int, int]]:
    return [uid for block in blocks for mb in block for uid in mb.uids]


class Interrupting:
    """Reading item 12 for the first time takes its time, and presses Ctrl-C meanwhile."""

    def __init__(self, pressed: Path) -> None:
        self._pressed, self._trainer = pressed, os.getpid()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 12 and not self._pressed.exists():
            self._pressed.touch()
            time.sleep(0.5)
            os.kill(self._trainer, signal.SIGINT)
            time.sleep(0.5)
        return {"input_ids": [index] * 4, "labels": [index] * 4}


@pytest.mark.usefixtures("nothing_leaks")
@pytest.mark.parametrize("workers", [0, 1])
def test_going_on_after_an_interrupt_loses_nothing(tmp_path: Path, workers: int) -> None:
    settings = {**SETTINGS, "shuffle": False, "epochs": 1, "num_workers": workers}
    dataset = Interrupting(tmp_path / "pressed")
    blocks: list[Block] = []
    with DynamicLoader(dataset, **settings) as loader:
        with pytest.raises(KeyboardInterrupt):
            blocks.extend(block for block in loader.blocks())
        assert 0 < len(blocks) < 5
        blocks += loader.blocks()
    assert sorted(uids(blocks)) == [(0, i) for i in range(40)]
    assert [block.index for block in blocks] == list(range(len(blocks)))


@pytest.mark.parametrize("lower", [False, True])
def test_a_round_ahead_that_fails_is_forgotten_by_whoever_goes_elsewhere(
    token_dataset: MakeDataset, lower: bool
) -> None:
    class Failing(token_dataset):  # type: ignore[misc, valid-type]
        def __getitem__(self, index: int) -> Any:
            if index == 12:
                raise OSError("disk gone")
            return super().__getitem__(index)

    with DynamicLoader(Failing([4] * 40), shuffle=False, **SETTINGS) as loader:
        loader._thread_ahead = True
        start = loader.state_dict()
        first = next(loader.blocks())
        assert loader._ahead is not None
        if lower:
            loader.lower_cap(8)
        else:
            loader.load_state_dict(start)
        assert loader._ahead is not None  # nobody has waited for it
        again = next(loader.blocks())
        assert set(uids([again])) <= {(0, i) for i in range(8)}
        assert again.index == first.index == 0
        with pytest.raises(EkeError, match="sample 12: OSError: disk gone"):
            list(loader.blocks())


@pytest.mark.timeout(30)
@pytest.mark.parametrize("how", ["take_back", "lower_cap", "load_state_dict"])
def test_a_block_is_taken_back_without_waiting_for_the_round_ahead(
    token_dataset: MakeDataset, how: str
) -> None:
    """A run that ends is not held up by data that it will never use."""
    go_on = threading.Event()

    class Hanging(token_dataset):  # type: ignore[misc, valid-type]
        def __getitem__(self, index: int) -> Any:
            if index == 12:
                go_on.wait()
            return super().__getitem__(index)

    settings = {**SETTINGS, "shuffle": False, "epochs": 1}
    with DynamicLoader(Hanging([4] * 40), **settings) as loader:
        loader._thread_ahead = True
        start, stats = loader.state_dict(), loader.stats
        first = next(loader.blocks())
        {
            "take_back": loader.take_back,
            "lower_cap": lambda: loader.lower_cap(8),
            "load_state_dict": lambda: loader.load_state_dict(start),
        }[how]()
        assert loader.state_dict()["delivered"] == start["delivered"] == []
        assert (loader.stats.samples, loader.stats.blocks) == (stats.samples, stats.blocks) or (
            how == "load_state_dict"
        )
        go_on.set()
        blocks = list(loader.blocks())
    assert sorted(uids(blocks)) == [(0, i) for i in range(40)]
    assert [block.index for block in blocks] == list(range(len(blocks)))
    if how == "take_back":
        assert uids(blocks[:1]) == uids([first])


@pytest.mark.parametrize("whole", [True, False])
def test_an_interrupt_while_a_block_is_made_leaves_it_to_whoever_goes_on(
    token_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    pressed = []

    def interrupted(*args: Any, **settings: Any) -> Any:
        if len(pressed) % 3 == 1:
            pressed.append(True)
            raise KeyboardInterrupt
        pressed.append(False)
        return collate(*args, **settings)

    monkeypatch.setattr(loading, "collate_tokens", interrupted)
    found: list[tuple[int, int]] = []
    with DynamicLoader(token_dataset([4] * 40), epochs=1, **SETTINGS) as loader:
        while loader.state_dict()["epoch"] == 0:
            try:
                for block in loader.blocks() if whole else loader:
                    found += uids([block]) if isinstance(block, Block) else block.uids
            except KeyboardInterrupt:
                continue
    assert sum(pressed) >= 3
    assert sorted(found) == [(0, i) for i in range(40)]

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eke.batching import Alone, Block, DynamicLoader, Exchange, MicroBatch
from eke.errors import EkeError, InputError

MakeDataset = Callable[[Sequence[int]], Any]
RunRanks = Callable[[int, Callable[[Exchange], Any]], list[Any]]

LENGTHS = [1 + (i * 29) % 31 for i in range(90)]
SETTINGS: dict[str, Any] = {"micro_tokens": 40, "per_step": "tokens:120", "window": 16, "seed": 5}


def uids(blocks: Sequence[Block]) -> list[tuple[int, int]]:
    return [uid for block in blocks for mb in block for uid in mb.uids]


def content(block: Block) -> Any:
    """Everything that a training step sees of a block, comparable."""
    return (
        block.epoch, block.index, block.lengths, block.padded_tokens, block.label_tokens,
        block.position,
        [
            (mb.uids, mb.scale, mb.label_tokens, {k: v.tolist() for k, v in mb.items()})
            for mb in block
        ],
    )  # fmt: skip


# ------------------------------------------------------------------ one rank


@pytest.mark.parametrize("per_step", ["tokens:120", "samples:7"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_delivers_every_sample_once(
    token_dataset: MakeDataset, per_step: str, shuffle: bool
) -> None:
    dataset = token_dataset(LENGTHS)
    settings = {**SETTINGS, "per_step": per_step, "shuffle": shuffle}
    with DynamicLoader(dataset, epochs=1, **settings) as loader:
        blocks = list(loader.blocks())
        stats = loader.stats
    assert sorted(uids(blocks)) == [(0, i) for i in range(90)]
    assert [block.index for block in blocks] == list(range(len(blocks)))
    for mb in itertools.chain(*blocks):
        assert mb.padded_tokens <= 40
        for row, (_, index) in enumerate(mb.uids):
            n, item = LENGTHS[index], dataset[index]
            assert mb.lengths[row] == n
            assert mb["input_ids"][row, :n].tolist() == item["input_ids"].tolist()
            assert mb["labels"][row, :n].tolist() == item["labels"].tolist()
            assert mb["attention_mask"][row].tolist() == [1] * n + [0] * (mb["labels"].shape[1] - n)
            assert mb["labels"][row, n:].eq(-100).all()
        assert mb.label_tokens == int(mb["labels"][:, 1:].ne(-100).sum())
    for block in blocks:
        assert block.tokens == sum(mb.tokens for mb in block) == sum(block.lengths)
        assert block.padded_tokens == sum(mb.padded_tokens for mb in block)
        assert block.label_tokens == sum(mb.label_tokens for mb in block)
        assert block.samples == len(block.lengths)
    if per_step == "samples:7":
        assert [block.samples for block in blocks] == [7] * 12 + [6]
    assert stats.blocks == len(blocks)
    assert stats.samples == 90
    assert stats.tokens == sum(LENGTHS)
    assert stats.padded_tokens == sum(block.padded_tokens for block in blocks)
    assert 0 < stats.efficiency == 1 - stats.padding < 1


@pytest.mark.parametrize("per_step", ["tokens:120", "samples:7"])
def test_lengths_are_in_the_order_of_the_epoch(token_dataset: MakeDataset, per_step: str) -> None:
    lengths = list(range(1, 36))
    settings = {**SETTINGS, "per_step": per_step, "shuffle": False, "wait_rounds": 0}
    with DynamicLoader(token_dataset(lengths), epochs=1, **settings) as loader:
        found = [block.lengths for block in loader.blocks()]
    assert sorted(n for block in found for n in block) == lengths
    assert all(block == sorted(block) for block in found)
    assert len(found) > 4


def test_epochs_have_their_own_order_and_blocks_run_through_all(
    token_dataset: MakeDataset,
) -> None:
    with DynamicLoader(token_dataset(LENGTHS), epochs=3, **SETTINGS) as loader:
        blocks = list(loader.blocks())
        assert list(loader.blocks()) == [], "the epochs are over"
    orders = [[i for e, i in uids(blocks) if e == epoch] for epoch in range(3)]
    assert all(sorted(order) == list(range(90)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_without_a_number_of_epochs_blocks_go_on(token_dataset: MakeDataset) -> None:
    with DynamicLoader(token_dataset([5, 6, 7]), **SETTINGS) as loader:
        blocks = list(itertools.islice(loader.blocks(), 50))
    assert Counter(e for e, _ in uids(blocks)) == dict.fromkeys(range(50), 3)


def test_lengths_do_not_order_the_blocks(token_dataset: MakeDataset) -> None:
    """Sorted batches make the loss jump; a plain shuffle has no such trend."""
    lengths = [1 + (i * 29) % 31 for i in range(2000)]
    with DynamicLoader(token_dataset(lengths), epochs=1, **{**SETTINGS, "window": 200}) as loader:
        means = torch.tensor([b.tokens / b.samples for b in loader.blocks()])
    lag_1 = torch.corrcoef(torch.stack([means[:-1], means[1:]]))[0, 1].item()
    assert abs(lag_1) < 3 / len(means) ** 0.5


def test_a_plain_iterator_gives_an_epoch_of_steps(token_dataset: MakeDataset) -> None:
    with DynamicLoader(token_dataset(LENGTHS), epochs=2, **SETTINGS) as loader:
        passes = [list(loader) for _ in range(3)]
    assert [len(one) > 0 for one in passes] == [True, True, False]
    for epoch, one in enumerate(passes[:2]):
        assert sorted(uid for mb in one for uid in mb.uids) == [(epoch, i) for i in range(90)]
        for mb in one:
            assert mb.scale == (1 / mb.label_tokens if mb.label_tokens else 0.0)


def test_a_step_of_more_than_a_window_takes_several(token_dataset: MakeDataset) -> None:
    for per_step in ("tokens:500", "samples:45"):
        settings = {**SETTINGS, "window": 3, "per_step": per_step}
        with DynamicLoader(token_dataset(LENGTHS), epochs=1, **settings) as loader:
            blocks = list(loader.blocks())
        assert sorted(uids(blocks)) == [(0, i) for i in range(90)]
        assert all(500 * 2 / 3 <= b.tokens <= 750 or b.samples == 45 for b in blocks[:-1])
        assert len(blocks) == round(sum(LENGTHS) / 500) if per_step == "tokens:500" else 2


# ------------------------------------------------------------------ what is dropped


@pytest.mark.parametrize("overlength", ["truncate", "skip", "solo"])
@pytest.mark.parametrize("per_step", ["tokens:60", "samples:4"])
def test_empty_and_overlong_samples_are_counted(
    token_dataset: MakeDataset, overlength: Any, per_step: str
) -> None:
    lengths = [0, 5, 50, 6, 0, 41, 40, 7, 8, 0, 9, 99] * 3
    settings = {**SETTINGS, "per_step": per_step, "window": 4, "overlength": overlength}
    with DynamicLoader(token_dataset(lengths), epochs=2, **settings) as loader:
        blocks = list(loader.blocks())
        counts = vars(loader.stats.counts)
    usable = [i for i, n in enumerate(lengths) if n and (n <= 40 or overlength != "skip")]
    assert sorted(uids(blocks)) == [(e, i) for e in range(2) for i in usable]
    key = {"truncate": "truncated", "skip": "skipped", "solo": "solo"}[overlength]
    assert counts == {"empty": 18, "skipped": 0, "truncated": 0, "solo": 0} | {key: 18}
    for mb in itertools.chain(*blocks):
        assert mb.padded_tokens <= 40 or (overlength == "solo" and len(mb.uids) == 1)
    if per_step == "samples:4":
        per_epoch = [[b.samples for b in blocks if b.epoch == e] for e in range(2)]
        full, rest = divmod(len(usable), 4)
        assert per_epoch == [[4] * full + [rest] * bool(rest)] * 2


def test_an_epoch_may_end_in_windows_without_a_usable_sample(token_dataset: MakeDataset) -> None:
    settings = {**SETTINGS, "window": 4, "per_step": "tokens:20", "shuffle": False, "epochs": 2}
    with DynamicLoader(token_dataset([5] * 4 + [0] * 9), **settings) as loader:
        blocks = list(loader.blocks())
        assert loader.stats.counts.empty == 18
    assert uids(blocks) == [(e, i) for e in range(2) for i in range(4)]
    with DynamicLoader(token_dataset([5] * 4 + [0] * 9), **settings) as loader:
        assert [len(mb.uids) for _ in range(3) for mb in loader] == [4, 4]
        loader.load_state_dict(blocks[0].position)
        assert [block.epoch for block in loader.blocks()] == [1]


def test_an_overlong_sample_is_an_error_by_default(token_dataset: MakeDataset) -> None:
    with (
        DynamicLoader(token_dataset([5, 41, 6]), **SETTINGS) as loader,
        pytest.raises(InputError, match=r"sample 1 .*41 tokens.*micro_tokens = 40.*at least 41"),
    ):
        next(loader.blocks())


def test_a_dataset_without_a_usable_sample_is_an_error(token_dataset: MakeDataset) -> None:
    with pytest.raises(InputError, match="the dataset has no samples"):
        DynamicLoader(token_dataset([]), **SETTINGS)
    loader = DynamicLoader(token_dataset([0, 0, 50]), overlength="skip", **SETTINGS)
    with pytest.raises(InputError, match=r"2 have no tokens, 1 are longer than micro_tokens = 40"):
        next(loader.blocks())


def test_a_block_without_labels_has_scale_0(token_dataset: MakeDataset) -> None:
    with DynamicLoader(token_dataset([1, 1, 1]), epochs=1, **SETTINGS) as loader:
        (block,) = loader.blocks()
    assert block.label_tokens == 0
    assert [mb.scale for mb in block] == [0.0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"micro_tokens": 1}, "micro_tokens is too small; got 1; it is at least 2"),
        ({"window": 0}, "window is too small"),
        ({"num_workers": -1}, "num_workers is too small"),
        ({"seed": -1}, "seed is too small"),
        ({"epochs": -1}, "epochs is too small"),
        ({"per_step": "8"}, "per_step"),
        ({"overlength": "cut"}, "error, truncate, skip, solo"),
        ({"micro_tokens": "40"}, "micro_tokens is not a whole number; got '40'"),
        ({"window": 3.5}, "window is not a whole number"),
        ({"num_workers": None}, "num_workers is not a whole number"),
        ({"seed": 1.5}, "seed is not a whole number"),
        ({"pad_token_id": None}, "pad_token_id is not a whole number"),
        ({"epochs": 1.5}, "epochs is not a whole number"),
        ({"shuffle": "no"}, "shuffle is wrong; got 'no'; it is True or False"),
        ({"packing": 1}, "packing is wrong"),
        ({"move_samples": None}, "move_samples is wrong"),
        ({"wait_rounds": 2}, "wait_rounds is too large; got 2; it is at most 1"),
        ({"wait_rounds": True}, "wait_rounds is not a whole number; got True"),
        ({"exchange": "x"}, "exchange is not an Exchange; got .str."),
        ({"exchange": 0}, "exchange is not an Exchange; got .int."),
        ({"start_method": "thread"}, "start_method .*; got 'thread'; it is one of None, .*spawn"),
        ({"cost": {}}, "cost is not a CostModel; got {}"),
        ({"patience": 0}, "patience is out of range; got 0; it is above 0"),
    ],
)
def test_bad_arguments_are_refused(
    token_dataset: MakeDataset, change: dict[str, Any], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        DynamicLoader(token_dataset(LENGTHS), **{**SETTINGS, **change})


def test_numpys_whole_numbers_are_taken(token_dataset: MakeDataset) -> None:
    settings = {**SETTINGS, "micro_tokens": np.int64(40), "window": np.int32(16)}
    with DynamicLoader(token_dataset(LENGTHS), epochs=1, **settings) as loader:
        state = json.loads(json.dumps(next(loader.blocks()).position))
    with DynamicLoader(token_dataset(LENGTHS), epochs=1, **SETTINGS) as loader:
        loader.load_state_dict(state)


def test_a_closed_loader_says_so(token_dataset: MakeDataset) -> None:
    loader = DynamicLoader(token_dataset(LENGTHS), **SETTINGS)
    state = loader.state_dict()
    loader.close()
    assert loader.state_dict() == state
    for call in (
        lambda: next(loader.blocks()),
        lambda: next(iter(loader)),
        lambda: loader.lower_cap(20),
        lambda: loader.load_state_dict(state),
    ):
        with pytest.raises(EkeError, match="the loader is closed"):
            call()


def test_a_block_that_was_taken_back_is_not_counted(token_dataset: MakeDataset) -> None:
    lengths = [min(n, 20) for n in LENGTHS]
    with DynamicLoader(token_dataset(lengths), epochs=1, **SETTINGS) as loader:
        kept: list[Block] = []
        for block in loader.blocks():
            if block.index == 4 and loader.micro_tokens == 40:
                loader.lower_cap(20)
            else:
                kept.append(block)
        stats = loader.stats
    assert sorted(uids(kept)) == [(0, i) for i in range(90)]
    assert (stats.blocks, stats.samples, stats.tokens) == (len(kept), 90, sum(lengths))
    assert stats.padded_tokens == sum(block.padded_tokens for block in kept)
    assert stats.micro_batches == sum(map(len, kept))
    assert stats.efficiency == 1 - stats.padding


@pytest.mark.parametrize("packing", [False, True])
def test_a_lowered_cap_makes_no_sample_an_error(token_dataset: MakeDataset, packing: bool) -> None:
    settings = {**SETTINGS, "packing": packing, "epochs": 1}
    with DynamicLoader(token_dataset([5] * 30 + [38] * 3), **settings) as loader:
        next(loader.blocks())
        loader.lower_cap(20)
        batches = list(itertools.chain(*loader.blocks()))
    assert sorted(uid for mb in batches for uid in mb.uids) == [(0, i) for i in range(33)]
    assert sorted(mb.padded_tokens for mb in batches if mb.padded_tokens > 20) == [38] * 3


# ------------------------------------------------------------------ several ranks


def all_blocks(run_ranks: RunRanks, size: int, dataset: Any, **settings: Any) -> list[list[Block]]:
    def run(exchange: Exchange) -> list[Block]:
        with DynamicLoader(dataset, epochs=1, exchange=exchange, **settings) as loader:
            return list(loader.blocks())

    results = run_ranks(size, run)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 4),
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=40),
    per_step=st.sampled_from(["tokens:60", "tokens:300", "samples:1", "samples:5", "samples:50"]),
    window=st.integers(1, 12),
    overlength=st.sampled_from(["truncate", "skip", "solo"]),
    seed=st.integers(0, 99),
)
def test_ranks_are_in_step_and_share_the_samples(
    token_dataset: MakeDataset, run_ranks: RunRanks, size: int, lengths: list[int],
    per_step: str, window: int, overlength: str, seed: int,
) -> None:  # fmt: skip
    usable = [i for i, n in enumerate(lengths) if n and (n <= 40 or overlength != "skip")]
    if not usable:
        return
    ranks = all_blocks(
        run_ranks, size, token_dataset(lengths), micro_tokens=40, per_step=per_step,
        window=window, overlength=overlength, seed=seed,
    )  # fmt: skip
    assert sorted(uid for blocks in ranks for uid in uids(blocks)) == [(0, i) for i in usable]
    for blocks in zip(*ranks, strict=True):
        assert len({len(block) for block in blocks}) == 1
        assert all(block.position == blocks[0].position for block in blocks)
        for name in ("tokens", "padded_tokens", "label_tokens"):
            total = sum(getattr(mb, name) for block in blocks for mb in block)
            assert {getattr(block, name) for block in blocks} == {total}
        assert {tuple(b.lengths) for b in blocks} == {tuple(blocks[0].lengths)}
        assert all(b.tallies == blocks[0].tallies for b in blocks)
        for block, of_rank in zip(blocks, blocks[0].tallies, strict=True):
            used = [mb for mb in block if not mb.is_dummy]
            assert of_rank.real == sum(mb.tokens for mb in used)
            assert of_rank.padding == sum(mb.padded_tokens - mb.tokens for mb in used)
        assert Counter(blocks[0].lengths) == Counter(
            n for b in blocks for mb in b for n in mb.lengths
        )
        for mb in itertools.chain(*blocks):
            assert mb.is_dummy == (not mb.uids)
            assert mb.padded_tokens <= 40 or len(mb.uids) == 1
    if per_step.startswith("samples"):
        n = int(per_step.split(":")[1])
        assert [b.samples for b in ranks[0][:-1]] == [n] * (len(ranks[0]) - 1)


class Still:
    """A rank's exchange that counts what is sent from rank to rank."""

    def __init__(self, exchange: Exchange) -> None:
        self.rank, self.size, self.swaps = exchange.rank, exchange.size, 0
        self.gather, self.leave, self._swap = exchange.gather, exchange.leave, exchange.swap

    def swap(self, outgoing: Sequence[bytes]) -> list[bytes]:
        self.swaps += 1
        return self._swap(outgoing)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("packing", [False, True])
def test_samples_that_do_not_move_stay_on_the_rank_that_fetched_them(
    token_dataset: MakeDataset, run_ranks: RunRanks, size: int, packing: bool
) -> None:
    settings = {**SETTINGS, "per_step": "samples:12", "epochs": 2, "packing": packing}
    swaps = {}
    for move in (True, False):

        def run(exchange: Exchange, move: bool = move) -> Any:
            still = Still(exchange)
            reads: set[int] = set()

            class Counting(token_dataset):  # type: ignore[misc, valid-type]
                def __getitem__(self, index: int) -> Any:
                    reads.add(index)
                    return super().__getitem__(index)

            dataset = Counting(LENGTHS)
            with DynamicLoader(dataset, exchange=still, move_samples=move, **settings) as loader:
                blocks = list(loader.blocks())
            return blocks, still.swaps, {i for _, i in uids(blocks)} <= reads

        ranks = run_ranks(size, run)
        assert sorted(uid for blocks, *_ in ranks for uid in uids(blocks)) == (
            [(epoch, i) for epoch in range(2) for i in range(90)]
        )
        assert [[block.samples for block in blocks] for blocks, *_ in ranks] == (
            [([12] * 7 + [6]) * 2] * size
        )
        swaps[move] = [count for _, count, _ in ranks]
        assert move or all(own for *_, own in ranks)
    assert swaps[False] == [0] * size
    assert all(swaps[True]) == (size > 1)


@pytest.mark.parametrize(
    ("lengths", "waits"),
    [
        ([16, 1] * 20 + [5], True),
        ([16, 15, 1, 2] * 9 + [16, 3, 9], False),
        ([9, 0] * 10 + [7, 7], False),
        ([1] * 10 + [16] * 3, False),
    ],
)
def test_uneven_shares_lose_nothing(
    token_dataset: MakeDataset, run_ranks: RunRanks, lengths: list[int], waits: bool
) -> None:
    """One rank's samples wait for those of another, which runs out of them first, or has none."""
    settings = {"micro_tokens": 16, "per_step": "tokens:20", "window": 2, "shuffle": False}
    settings["move_samples"] = False
    ranks = all_blocks(run_ranks, 2, token_dataset(lengths), **settings)
    usable = [i for i, n in enumerate(lengths) if n]
    assert sorted(uid for blocks in ranks for uid in uids(blocks)) == [(0, i) for i in usable]
    assert [len(block) for block in ranks[0]] == [len(block) for block in ranks[1]]
    assert waits <= any(any(block.position["waiting"]) for block in ranks[0])


def loss_sum(model: torch.nn.Module, ids_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Sum of the next-token losses; padding is on the right and the model is causal."""
    logits_BTV = model(ids_BT)[:, :-1]
    return torch.nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten(), reduction="sum"
    )


class CausalModel(torch.nn.Module):
    """Predicts from the running mean of the embeddings, so that rows mix tokens causally."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(50, 8, dtype=torch.float64)
        self.head = torch.nn.Linear(8, 50, dtype=torch.float64)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        counts_T = torch.arange(1, ids_BT.shape[1] + 1, dtype=torch.float64)
        hidden_BTD = torch.tanh(self.embed(ids_BT).cumsum(1) / counts_T[:, None])
        return self.head(hidden_BTD)


def gradients(model: torch.nn.Module, losses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("per_step", ["tokens:120", "samples:8"])
def test_gradients_equal_those_of_one_big_batch(
    token_dataset: MakeDataset, run_ranks: RunRanks, size: int, per_step: str
) -> None:
    """With unequal label counts, several micro-batches, and dummies, averaged as DDP does."""
    dataset, model = token_dataset(LENGTHS[:41]), CausalModel()
    ranks = all_blocks(run_ranks, size, dataset, **{**SETTINGS, "per_step": per_step})
    dummies = 0
    for blocks in zip(*ranks, strict=True):
        dummies += sum(mb.is_dummy for block in blocks for mb in block)
        assert len(blocks[0]) > 1 or blocks[0].index == len(ranks[0]) - 1
        by_rank = [
            gradients(
                model, [loss_sum(model, mb["input_ids"], mb["labels"]) * mb.scale for mb in block]
            )
            for block in blocks
        ]
        averaged = [sum(grads) / size for grads in zip(*by_rank, strict=True)]
        items = [dataset[i] for _, i in uids(blocks)]
        total = sum(int((item["labels"][1:] != -100).sum()) for item in items)
        sums = [loss_sum(model, x["input_ids"][None], x["labels"][None]) for x in items]
        expected = gradients(model, [sum(sums[1:], sums[0]) / max(1, total)])
        for ours, reference in zip(averaged, expected, strict=True):
            assert (ours - reference).abs().max() < 1e-10
            assert reference.abs().max() > 1e-4 or total == 0
    assert dummies > 0 or size == 1 or per_step != "samples:8"


def test_a_fault_of_one_ranks_dataset_ends_all_in_the_same_round(
    token_dataset: MakeDataset, run_ranks: RunRanks
) -> None:
    class Failing(token_dataset):  # type: ignore[misc, valid-type]
        def __getitem__(self, index: int) -> Any:
            if index == 55:
                raise OSError("disk gone")
            return super().__getitem__(index)

    delivered = []

    def run(exchange: Exchange) -> None:
        dataset = (Failing if exchange.rank == 1 else token_dataset)([5] * 60)
        with DynamicLoader(dataset, exchange=exchange, shuffle=False, **SETTINGS) as loader:
            for block in loader.blocks():
                delivered.append((block.index, exchange.rank))

    results = run_ranks(2, run)
    assert [type(result) for result in results] == [EkeError, EkeError]
    assert {str(r) for r in results} == {"rank 1 of 2: sample 55: OSError: disk gone."}
    steps = len(delivered) // 2
    assert sorted(delivered) == [(i, r) for i in range(steps) for r in range(2)]
    assert steps > 0


def test_an_overlong_sample_of_one_rank_ends_all(
    token_dataset: MakeDataset, run_ranks: RunRanks
) -> None:
    with pytest.raises(InputError, match="sample 3 "):
        all_blocks(run_ranks, 3, token_dataset([5, 5, 5, 77, 5]), **SETTINGS)


def test_ranks_with_other_settings_or_another_position_are_refused(
    token_dataset: MakeDataset, run_ranks: RunRanks
) -> None:
    dataset = token_dataset(LENGTHS)

    def other_seed(exchange: Exchange) -> None:
        next(
            DynamicLoader(
                dataset, exchange=exchange, **{**SETTINGS, "seed": exchange.rank}
            ).blocks()
        )

    for result in run_ranks(2, other_seed):
        assert isinstance(result, InputError)
        assert "{'seed': 1}" in str(result)
    with DynamicLoader(dataset, exchange=Alone(), **SETTINGS) as alone:
        next(alone.blocks())
        state = alone.state_dict()

    def resumed_on_one(exchange: Exchange) -> None:
        loader = DynamicLoader(dataset, exchange=exchange, **SETTINGS)
        if exchange.rank == 0:
            loader.load_state_dict(state)
        next(loader.blocks())

    for result in run_ranks(2, resumed_on_one):
        assert isinstance(result, InputError)
        assert "position" in str(result)


def test_ranks_at_other_samples_of_as_many_are_refused(
    token_dataset: MakeDataset, run_ranks: RunRanks
) -> None:
    """Their numbers are equal, and yet each would train on samples that the other leaves out."""
    dataset = token_dataset([5] * 90)
    settings = {**SETTINGS, "window": 32}
    with DynamicLoader(dataset, exchange=Alone(), **{**settings, "window": 64}) as alone:
        state = next(alone.blocks()).position
        state["config"]["window"] = 32
    assert len(state["delivered"]) > 10
    states = [state, {**state, "delivered": state["delivered"][::-1]}]

    def run(exchange: Exchange) -> None:
        loader = DynamicLoader(dataset, exchange=exchange, **settings)
        loader.load_state_dict({**states[exchange.rank], "world_size": 2})
        next(loader.blocks())

    for result in run_ranks(2, run):
        assert isinstance(result, InputError)
        assert "the loaders of rank 0 and rank 1 differ" in str(result)


@pytest.mark.parametrize(
    "change",
    [{"epochs": 2}, {"num_workers": 1}, {"window": 17}, {"move_samples": False}],
)
def test_ranks_that_would_not_make_the_same_calls_are_refused(
    token_dataset: MakeDataset, run_ranks: RunRanks, change: dict[str, int]
) -> None:
    def run(exchange: Exchange) -> None:
        settings = {**SETTINGS, "epochs": 1} | (change if exchange.rank == 1 else {})
        with DynamicLoader(token_dataset(LENGTHS), exchange=exchange, **settings) as loader:
            next(loader.blocks())

    for result in run_ranks(2, run):
        assert isinstance(result, InputError)
        assert next(iter(change)) in str(result)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_rank_that_closes_is_named_on_the_others(
    token_dataset: MakeDataset, run_ranks: RunRanks, ahead: bool
) -> None:
    def run(exchange: Exchange) -> None:
        loader = DynamicLoader(token_dataset(LENGTHS), exchange=exchange, **SETTINGS)
        loader._thread_ahead = ahead
        with loader:
            for block in loader.blocks():
                if exchange.rank == 1 and block.index == 3:
                    break

    results = run_ranks(3, run)
    assert results[1] is None
    text = "rank 1 of 3 has left: it closed its loader."
    assert [(type(r), str(r)) for r in (results[0], results[2])] == [(EkeError, text)] * 2
    assert not [t for t in threading.enumerate() if t.name.startswith("eke-")]


@pytest.mark.parametrize("ahead", [False, True])
def test_all_ranks_stop_at_the_same_step_for_the_same_reason(
    token_dataset: MakeDataset, run_ranks: RunRanks, ahead: bool
) -> None:
    def run(exchange: Exchange) -> Any:
        loader = DynamicLoader(token_dataset(LENGTHS), exchange=exchange, **SETTINGS)
        loader._thread_ahead = ahead
        with loader:
            steps = []
            for block in loader.blocks():
                steps.append(block.index)
                if exchange.rank == 2 and block.index == 2:
                    loader.stop("the budget is spent")
            assert next(loader.blocks(), None) is None
            loader.load_state_dict(loader.state_dict())
            again = next(loader.blocks()).index
            return steps, loader.stopped, again

    results = run_ranks(3, run)
    assert results == [results[0]] * 3
    steps, stopped, again = results[0]
    assert steps == list(range(len(steps)))
    assert (len(steps) >= 3, again, stopped) == (True, len(steps), "")


def test_a_job_that_was_not_joined_is_refused(
    token_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="has not joined"):
        DynamicLoader(token_dataset(LENGTHS), **SETTINGS)


# ------------------------------------------------------------------ workers and shutdown


@pytest.mark.parametrize("per_step", ["tokens:120", "samples:7"])
def test_workers_change_nothing(token_dataset: MakeDataset, per_step: str) -> None:
    lengths = [*LENGTHS, 0, 0, 0, 50]
    settings = {**SETTINGS, "per_step": per_step, "overlength": "skip", "epochs": 2}
    runs = []
    for workers in (0, 1, 2):
        with DynamicLoader(token_dataset(lengths), num_workers=workers, **settings) as loader:
            runs.append([content(block) for block in loader.blocks()])
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.usefixtures("nothing_leaks")
def test_nothing_is_left_behind_from_any_state(token_dataset: MakeDataset) -> None:
    def loader() -> DynamicLoader:
        return DynamicLoader(token_dataset(LENGTHS), num_workers=2, **SETTINGS)

    loader().close()
    with loader() as early:
        for block in early.blocks():
            if block.index == 2:
                break

    def fail_at_once() -> None:
        with loader() as failing:
            for block in failing.blocks():
                raise OSError(f"block {block.index}")

    with pytest.raises(OSError, match="block 0"):
        fail_at_once()
    with loader() as one, loader() as two:
        pairs = zip(one.blocks(), two.blocks(), strict=True)
        assert all(content(a) == content(b) for a, b in itertools.islice(pairs, 9))
    one.close()
    one.close()
    with pytest.raises(EkeError, match="the loader is closed"):
        next(one.blocks())


def test_no_class_of_others_is_changed(token_dataset: MakeDataset) -> None:
    """Neither torch's loader, on which ours is built, nor the dataset's."""
    dataset = token_dataset(LENGTHS)
    classes = (torch.utils.data.DataLoader, token_dataset, torch.utils.data.Dataset)
    own = {"__slotnames__"}  # kept there by Python's own pickling

    def attributes() -> list[dict[str, Any]]:
        return [{k: v for k, v in vars(one).items() if k not in own} for one in classes]

    before = attributes()
    with DynamicLoader(dataset, num_workers=1, epochs=1, **SETTINGS) as loader:
        assert sorted(uids(list(loader.blocks()))) == [(0, i) for i in range(90)]
    assert attributes() == before
    assert len(torch.utils.data.DataLoader(dataset, batch_size=9)) == 10


def test_going_on_after_a_break_loses_nothing(token_dataset: MakeDataset) -> None:
    with DynamicLoader(token_dataset(LENGTHS), epochs=1, **SETTINGS) as loader:
        first = list(itertools.islice(loader.blocks(), 3))
        steps: list[MicroBatch] = list(itertools.islice(loader, 5))
        rest = list(loader.blocks())
    seen = uids(first) + [uid for mb in steps for uid in mb.uids] + uids(rest)
    assert sorted(seen) == [(0, i) for i in range(90)]


UNCLOSED = """
import torch
from eke.batching import DynamicLoader

class Rows:
    def __len__(self): return 400
    def __getitem__(self, i): return {"input_ids": [1, 2], "labels": [1, 2]}

if __name__ == "__main__":
    loader = DynamicLoader(Rows(), micro_tokens=8, per_step="tokens:16", window=8, num_workers=1)
    print(next(loader.blocks()).index)
"""


def test_a_program_that_forgets_to_close_ends_as_it_should(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNCLOSED)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


class Killing:
    """Item 70 kills the worker that reads it."""

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 70:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"input_ids": [1, 2], "labels": [1, 2]}


@pytest.mark.usefixtures("nothing_leaks")
def test_a_killed_worker_ends_the_loader_with_an_error() -> None:
    loader = DynamicLoader(Killing(), num_workers=2, shuffle=False, **SETTINGS)
    with loader, pytest.raises(EkeError, match=r"worker \(pid\(s\) \d+\) exited unexpectedly"):
        list(loader.blocks())
    assert loader.stats.samples == 64


@pytest.mark.parametrize("there", [False, True])
def test_micro_batches_are_pinned_where_there_is_cuda(
    token_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """A stand-in for CUDA: memory is not pinned here, but it is seen which tensors would be."""
    pinned: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        pinned.append(copy.data_ptr())
        return copy

    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    runs = []
    for asked in (False, True):
        settings = {**SETTINGS, "epochs": 1, "pin_memory": asked}
        with DynamicLoader(token_dataset(LENGTHS), **settings) as loader:
            blocks = list(loader.blocks())
        tensors = [tensor for block in blocks for mb in block for tensor in mb.values()]
        assert [t.data_ptr() for t in tensors if asked and there] == pinned
        runs.append([content(block) for block in blocks])
    assert runs[0] == runs[1]

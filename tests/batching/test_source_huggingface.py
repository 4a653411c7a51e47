"""Hugging Face's iterable datasets, as people make them, through the loader."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
import pytest

from eke.batching import Block, DynamicLoader, source

SETTINGS: dict[str, Any] = {"micro_tokens": 40, "per_step": "tokens:120", "window": 16, "epochs": 2}


def rows(shards: Sequence[int]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        for i in range(20):
            ids = [shard * 20 + i] * (1 + (i * 7 + shard * 3) % 11)
            yield {"input_ids": ids, "labels": ids}


def sharded(*shards: int) -> Any:
    return datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": list(shards)})


def of(kind: str) -> Any:
    whole = sharded(*range(6))
    if kind == "shuffle":
        return whole.shuffle(seed=3, buffer_size=20)
    if kind == "take":
        return whole.take(70)
    if kind == "skip":
        return whole.skip(30)
    if kind == "mapped_skip":
        return whole.skip(30).map(lambda row: row)
    if kind == "numbered":
        return whole.filter(lambda row, i: i >= 30, with_indices=True)
    if kind == "interleaved":
        return datasets.interleave_datasets([whole, sharded(*range(6, 9))])
    if kind == "one_file":
        return datasets.Dataset.from_list(list(rows(range(6)))).to_iterable_dataset()
    assert kind == "plain"
    return whole


def content(block: Block) -> Any:
    return [(mb.uids, mb["input_ids"].tolist()) for mb in block]


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("plain", 6), ("shuffle", None), ("one_file", 1), ("take", 1), ("skip", 1),
        ("mapped_skip", 1), ("numbered", 1), ("interleaved", 1),
    ],
)  # fmt: skip
def test_its_samples_are_those_that_it_gives_itself(
    monkeypatch: pytest.MonkeyPatch, kind: str, parts: int | None
) -> None:
    """After `take` and `skip`, each of its shards takes and skips a part: training on all shards
    would be training on what was held out. And after `set_epoch`, its `skip` keeps another order.
    """
    monkeypatch.setattr(source, "READ_OVER", 4)
    assert parts in (None, source.source_of(of(kind)).parts)
    with DynamicLoader(of(kind), **SETTINGS) as loader:
        blocks = list(loader.blocks())
    for epoch in range(2):
        dataset = of(kind)
        dataset.set_epoch(epoch)
        given = [
            row[: mb.lengths[n]].tolist()
            for block in blocks
            for mb in block
            for n, row in enumerate(mb["input_ids"])
            if mb.uids and mb.uids[n][0] == epoch
        ]
        assert sorted(given) == sorted(row["input_ids"] for row in dataset)
    whole = [content(block) for block in blocks]
    for at in range(3, len(blocks), len(blocks) // 3):
        with DynamicLoader(of(kind), **SETTINGS) as loader:
            loader.load_state_dict(json.loads(json.dumps(blocks[at - 1].position)))
            rest = [content(block) for block in itertools.islice(loader.blocks(), 3)]
        assert rest == whole[at : at + 3]

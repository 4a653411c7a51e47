from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eke.batching import DynamicLoader, Exchange, Shape
from eke.batching.batch import Tokens, collate
from eke.batching.extra import received, sent, with_extra
from eke.errors import EkeError, InputError

RunRanks = Callable[[int, Callable[[Exchange], Any]], list[Any]]
LENGTHS = [2 + (i * 29) % 31 for i in range(60)]
SETTINGS: dict[str, Any] = {"micro_tokens": 40, "per_step": "tokens:120", "window": 8, "seed": 5}


def micro_of(lengths: list[int], *, packed: bool = False) -> Any:
    tokens = [Tokens(np.arange(n), np.arange(n), n, n - 1) for n in lengths]
    uids = [(3, index) for index in range(len(lengths))]
    return collate(tokens, uids, pad_token_id=0, scale=0.5, packed=packed)


@pytest.mark.parametrize(
    ("lengths", "packed", "shape"),
    [
        ([3, 2], False, Shape(2, 3, (3, 2), False)),
        ([3, 2], True, Shape(1, 5, (3, 2), True)),
        ([], False, Shape(1, 2, (), False)),
        ([], True, Shape(1, 2, (), True)),
    ],
)
def test_what_collate_gives_is_in_the_micro_batch(
    lengths: list[int], packed: bool, shape: Shape
) -> None:
    micro = micro_of(lengths, packed=packed)
    told: list[Any] = []

    def function(samples: list[Any], shape: Shape) -> Mapping[str, torch.Tensor]:
        told.append((samples, shape))
        # As a collate function written for a DataLoader does, it gives the ids too.
        return {"pixels": torch.ones(7, 4), "input_ids": micro["input_ids"].int()}

    items = [{"n": n} for n in lengths]
    more = with_extra(micro, items, function)
    assert told == [(items, shape)]
    assert set(more) == {*micro, "pixels"}
    assert more["pixels"].shape == (7, 4)
    assert all(more[name] is micro[name] for name in micro)
    names = ("uids", "lengths", "label_tokens", "scale", "is_packed", "is_dummy", "max_seqlen")
    assert all(getattr(more, name) == getattr(micro, name) for name in names)


def test_positions_of_the_users_own_do_not_make_padded_rows_packed() -> None:
    more = with_extra(micro_of([3, 2]), [1, 2], lambda *_: {"position_ids": torch.zeros(3, 2, 3)})
    assert not more.is_packed
    assert more["position_ids"].shape == (3, 2, 3)


@pytest.mark.parametrize(
    ("gives", "kind", "text"),
    [
        ([], InputError, "it gave no mapping; got 'list'"),
        ({"a": [1]}, InputError, "'a' is no tensor; got 'list'"),
        ({3: torch.ones(1)}, InputError, "3 is no tensor"),
        ({"input_ids": torch.zeros(1, 3)}, InputError, r"another input_ids; .*\[1, 3\].*\[2, 3\]"),
        ({"labels": torch.zeros(2, 4)}, InputError, r"another labels; .*\[2, 4\]"),
        ({"input_ids": torch.ones(2, 3)}, InputError, "another input_ids"),
        (KeyError("image"), EkeError, "KeyError: 'image'"),
        (InputError("no image"), InputError, "no image"),
    ],
)
def test_what_is_wrong_is_named_with_the_samples(gives: Any, kind: type, text: str) -> None:
    def function(samples: list[Any], shape: Shape) -> Any:
        if isinstance(gives, Exception):
            raise gives
        return gives

    with pytest.raises(EkeError, match=text) as caught:
        with_extra(micro_of([3, 2]), [{}, {}], function)
    assert type(caught.value) is kind
    assert str(caught.value).startswith("collate, for the samples (3, 0), (3, 1): ")
    with pytest.raises(EkeError, match=r"^collate, for a dummy without samples: ") as caught:
        with_extra(micro_of([]), [], function)


def test_a_packed_micro_batch_gets_no_mask() -> None:
    mask = torch.ones(1, 5)
    with pytest.raises(InputError, match="a packed micro-batch has none"):
        with_extra(micro_of([3, 2], packed=True), [1, 2], lambda *_: {"attention_mask": mask})


TENSORS = st.sampled_from(
    [
        torch.arange(6).reshape(2, 3),
        torch.arange(6).reshape(2, 3).T,
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
    ]
)
ITEMS = st.recursive(
    st.one_of(TENSORS, st.integers(), st.text(), st.none(), st.just(np.arange(3))),
    lambda part: st.one_of(
        st.lists(part, max_size=3),
        st.dictionaries(st.text(), part, max_size=3),
        st.tuples(part, part),
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else a == b


@given(ITEMS)
def test_what_is_sent_is_received_as_it_was(item: Any) -> None:
    assert same(received(sent(item)), item)
    assert same(received(pickle.loads(pickle.dumps(sent(item)))), item)  # noqa: S301


# ------------------------------------------------------------------ in the loader


class Pictures:
    """Item i has i % 4 pictures, each of two numbers."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = [index % 50] * LENGTHS[index]
        pixels = torch.full((index % 4, 2), float(index), dtype=torch.bfloat16)
        return {"input_ids": ids, "labels": ids, "more": {"pixels": pixels, "name": str(index)}}


def pixels_of(samples: list[Any], shape: Shape) -> dict[str, torch.Tensor]:
    nothing = torch.zeros(0, 2, dtype=torch.bfloat16)
    return {
        "pixels": torch.cat([nothing, *(sample["more"]["pixels"] for sample in samples)]),
        "names": torch.tensor([int(sample["more"]["name"]) for sample in samples]),
        "lengths": torch.tensor(shape.lengths),
    }


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("per_step", ["tokens:120", "samples:7"])
@pytest.mark.parametrize("iterable", [False, True])
def test_further_fields_come_with_their_samples(
    run_ranks: RunRanks, packing: bool, per_step: str, iterable: bool
) -> None:
    class Iterable:
        def __iter__(self) -> Any:
            return (Pictures()[i] for i in range(len(LENGTHS)))

    dataset = Iterable() if iterable else Pictures()

    def run(exchange: Exchange) -> Any:
        config = {**SETTINGS, "per_step": per_step, "packing": packing, "epochs": 1}
        config |= {"collate": pixels_of, "exchange": exchange}
        with DynamicLoader(dataset, **config) as loader:
            return list(loader.blocks())

    ranks = run_ranks(2, run)
    uids = []
    for blocks in ranks:
        assert not isinstance(blocks, BaseException), blocks
        for micro in (micro for block in blocks for micro in block):
            indices = [index for _, index in micro.uids]
            assert micro["names"].tolist() == indices
            assert micro["lengths"].tolist() == micro.lengths == [LENGTHS[i] for i in indices]
            expected = [float(i) for i in indices for _ in range(i % 4)]
            assert micro["pixels"].dtype == torch.bfloat16
            assert micro["pixels"][:, 0].float().tolist() == expected
            assert micro.is_packed == packing
            uids += indices
    assert sorted(uids) == list(range(len(LENGTHS)))
    if per_step == "samples:7":
        assert [block.samples for block in ranks[0]] == [7] * 8 + [4]


@pytest.mark.usefixtures("nothing_leaks")
def test_workers_change_nothing_and_hold_no_descriptors() -> None:
    runs = []
    for workers in (0, 2):
        config = {**SETTINGS, "epochs": 1, "num_workers": workers, "collate": pixels_of}
        with DynamicLoader(Pictures(), **config) as loader:
            runs.append(
                [
                    {name: tensor.tolist() for name, tensor in micro.items()}
                    for block in loader.blocks()
                    for micro in block
                ]
            )
    assert runs[0] == runs[1]


def test_a_state_without_collate_is_refused() -> None:
    state = DynamicLoader(Pictures(), **SETTINGS).state_dict()
    with pytest.raises(InputError, match="other settings: collate"):
        DynamicLoader(Pictures(), collate=pixels_of, **SETTINGS).load_state_dict(state)


def test_a_failing_collate_is_named_where_it_is_used() -> None:
    def failing(samples: list[Any], shape: Shape) -> Any:
        return {"pixels": samples[0]["pixels"]}

    with (
        DynamicLoader(Pictures(), collate=failing, **SETTINGS) as loader,
        pytest.raises(EkeError, match=r"collate, for the samples \(0, \d+\).*KeyError: 'pixels'"),
    ):
        next(loader.blocks())


def test_a_block_whose_collate_failed_is_still_to_be_given() -> None:
    fails = iter([False, False, True])

    def failing(samples: list[Any], shape: Shape) -> Any:
        if next(fails, False):
            raise OSError("disk gone")
        return pixels_of(samples, shape)

    with DynamicLoader(Pictures(), collate=failing, epochs=1, **SETTINGS) as loader:
        blocks = []
        with pytest.raises(EkeError, match="disk gone"):
            blocks.extend(loader.blocks())
        blocks += loader.blocks()
    seen = sorted(uid for block in blocks for mb in block for uid in mb.uids)
    assert seen == [(0, i) for i in range(len(LENGTHS))]

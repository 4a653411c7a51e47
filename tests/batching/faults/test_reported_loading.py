"""Faults of loaders that users of other projects reported, tried on ranks that are threads."""

import gc
import itertools
import json
import tracemalloc
from collections import Counter

import pytest

from eke.batching import DynamicLoader
from eke.errors import EkeError, InputError

LENGTHS = [1 + (i * 29) % 31 for i in range(75)]
SETTINGS = {"micro_tokens": 40, "per_step": "tokens:120", "window": 8, "seed": 3}


def indices(blocks):
    return [uid for block in blocks for batch in block for uid in batch.uids]


@pytest.fixture
def ranks(run_ranks):
    """Runs `work(loader)` on every rank; what each returned."""

    def run(size, dataset, work, **settings):
        def one(exchange):
            with DynamicLoader(dataset, exchange=exchange, **{**SETTINGS, **settings}) as loader:
                return work(loader)

        return run_ranks(size, one)

    return run


def no_failures(results):
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_verl_6176_without_a_group_every_rank_goes_its_own_way(token_dataset, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="has not joined the other ranks"):
        DynamicLoader(token_dataset(LENGTHS), **SETTINGS)


@pytest.mark.parametrize("per_step", ["tokens:30", "samples:3"])
def test_storage_455_a_number_of_samples_that_ranks_do_not_divide(ranks, token_dataset, per_step):
    """Sharding by the ceiling hung at an epoch's end: every remainder, and fewer than ranks."""
    for size in (2, 3, 4):
        for n in range(1, 2 * size + 2):
            settings = {"epochs": 2, "window": 2, "per_step": per_step}
            found = no_failures(
                ranks(size, token_dataset([5 + i for i in range(n)]), lambda x: list(x.blocks()),
                      **settings)
            )  # fmt: skip
            assert len({tuple(len(block) for block in blocks) for blocks in found}) == 1
            seen = Counter(uid for blocks in found for uid in indices(blocks))
            assert seen == {(epoch, i): 1 for epoch in range(2) for i in range(n)}


def test_pytorch_141069_uneven_ranks_fail_in_the_next_phase(run_ranks, token_dataset):
    """Training, evaluation and training again, each with a remainder, in step to the end."""

    def run(exchange):
        train = DynamicLoader(token_dataset(LENGTHS[:37]), exchange=exchange, epochs=2, **SETTINGS)
        counts = [len(block) for block in itertools.islice(train.blocks(), 3)]
        held_out = {**SETTINGS, "shuffle": False, "epochs": 1}
        evaluate = DynamicLoader(token_dataset(LENGTHS[:7]), exchange=exchange, **held_out)
        counts += [-len(block) for block in evaluate.blocks()]
        return counts + [len(block) for block in train.blocks()]

    found = no_failures(run_ranks(3, run))
    assert len(set(map(tuple, found))) == 1
    assert min(found[0]) < 0 < found[0][-1]


@pytest.mark.parametrize("packing", [False, True])
def test_lhotse_610_making_ranks_equal_drops_samples(ranks, token_dataset, packing):
    """A ledger of every token: what the dataset has is what the ranks were given."""
    found = no_failures(
        ranks(3, token_dataset(LENGTHS), lambda x: list(x.blocks()), epochs=1, packing=packing)
    )
    ledger = Counter()
    for blocks in found:
        for batch in itertools.chain(*blocks):
            for (_, index), n in zip(batch.uids, batch.lengths, strict=True):
                ledger[index] += n
    assert ledger == dict(enumerate(LENGTHS))


def test_icefall_910_and_fairseq_708_out_of_memory_skips_a_batch_on_one_rank(ranks, token_dataset):
    """No estimate is trusted: the block is taken back on all ranks, and comes again, smaller."""

    def work(loader):
        blocks = loader.blocks()
        kept = [next(blocks), next(blocks)]
        next(blocks)  # it did not fit
        loader.lower_cap(32)
        return kept, list(loader.blocks())

    found = no_failures(ranks(2, token_dataset(LENGTHS), work, epochs=1))
    for before, after in zip(*(kept + rest for kept, rest in found), strict=True):
        assert len(before) == len(after), "in step, before and afterwards"
    assert all(b.padded_tokens <= 32 for _, rest in found for b in itertools.chain(*rest))
    seen = Counter(uid for kept, rest in found for uid in indices(kept + rest))
    assert seen == {(0, i): 1 for i in range(len(LENGTHS))}


def test_composer_485_one_rank_alone_makes_its_batches_smaller(run_ranks, token_dataset):
    """Under different caps ranks would drift apart: all end, and hear what differs."""

    def run(exchange):
        with DynamicLoader(token_dataset([5] * 200), exchange=exchange, **SETTINGS) as loader:
            for number, _ in enumerate(loader.blocks()):
                if number == 1 and exchange.rank == 1:
                    loader.lower_cap(20)

    found = run_ranks(2, run)
    assert all(isinstance(error, EkeError) for error in found)
    assert all("micro_tokens" in str(error) for error in found)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_transformers_34373_the_loss_is_scaled_by_the_ranks_twice(ranks, token_dataset, size):
    """Averaged over ranks, every label that trains weighs the same, and all together 1."""
    found = no_failures(ranks(size, token_dataset(LENGTHS), lambda x: list(x.blocks()), epochs=1))
    for blocks in zip(*found, strict=True):
        weights = [b.scale * b.label_tokens for block in blocks for b in block]
        assert sum(weights) / size == pytest.approx(1.0)
        assert len({b.scale for block in blocks for b in block if not b.is_dummy}) == 1


def test_transformers_10909_the_first_batch_waits_until_all_lengths_are_known(token_dataset):
    class Counting(token_dataset):
        read = 0

        def __getitem__(self, index):
            Counting.read += 1
            return super().__getitem__(index)

    with DynamicLoader(Counting([5] * 100_000), **SETTINGS) as loader:
        next(loader.blocks())
    # A step of 120 tokens takes three windows of 8 samples of 5 tokens.
    assert Counting.read <= 3 * SETTINGS["window"]


def test_accelerate_961_batches_are_doubled_or_empty_at_the_end(ranks, token_dataset):
    found = no_failures(ranks(4, token_dataset(LENGTHS[:9]), lambda x: list(x.blocks()), epochs=1))
    assert sorted(uid for blocks in found for uid in indices(blocks)) == [(0, i) for i in range(9)]
    for blocks in zip(*found, strict=True):
        for step in zip(*blocks, strict=True):
            assert not all(batch.is_dummy for batch in step)


def test_accelerate_207_batches_of_different_sizes_are_not_given_out(ranks, token_dataset):
    found = no_failures(ranks(2, token_dataset(LENGTHS), lambda x: list(x), epochs=1))
    assert all(len({len(batch.uids) for batch in batches}) > 2 for batches in found)
    assert sum(len(batch.uids) for batches in found for batch in batches) == len(LENGTHS)


def test_accelerate_4233_a_resume_in_a_later_epoch_takes_the_first_ones_order(token_dataset):
    dataset = token_dataset(LENGTHS)
    with DynamicLoader(dataset, epochs=3, **SETTINGS) as loader:
        whole = list(loader.blocks())
    with DynamicLoader(dataset, epochs=3, **SETTINGS) as loader:
        for at, block in enumerate(whole):
            if block.epoch >= 1:
                loader.load_state_dict(block.position)
                assert indices(itertools.islice(loader.blocks(), 2)) == indices(whole[at + 1 :][:2])


@pytest.mark.parametrize("packing", [True, False])
def test_torchtitan_3008_and_llm_foundry_1277_samples_in_flight_are_lost_in_a_checkpoint(
    ranks, token_dataset, packing
):
    """A place counts samples, never packs; what waits and what was planned is in the state."""
    dataset, settings = token_dataset(LENGTHS), {"epochs": 1, "packing": packing, "window": 12}
    settings["move_samples"] = False  # else few samples have to wait
    whole = no_failures(ranks(2, dataset, lambda x: list(x.blocks()), **settings))
    states = [json.loads(json.dumps(block.position)) for block in whole[0]]
    assert any(any(state["waiting"]) for state in states), "some samples wait"

    def resumed(state):
        def work(loader):
            loader.load_state_dict(state)
            return list(loader.blocks())

        return work

    for at, state in enumerate(states):
        found = no_failures(ranks(2, dataset, resumed(state), **settings))
        assert [indices(b) for b in found] == [indices(blocks[at + 1 :]) for blocks in whole]


def test_streaming_617_and_litdata_213_a_loader_hangs_after_an_epoch_or_a_resume(
    ranks, token_dataset
):
    dataset = token_dataset(LENGTHS[:20])

    def work(loader):
        passes = [len(list(loader)) for _ in range(4)]
        loader.load_state_dict(loader.state_dict())
        return [*passes, len(list(loader)), len(list(loader))]

    found = no_failures(ranks(2, dataset, work, epochs=5))
    assert found[0] == found[1]
    assert all(found[0][:5])
    assert found[0][5] == 0, "the epochs are over"


def test_megatron_bridge_5637_half_the_state_on_half_the_ranks(ranks, token_dataset):
    dataset = token_dataset(LENGTHS)

    def begin(loader):
        return list(itertools.islice(loader.blocks(), 3)), loader.state_dict()

    first = no_failures(ranks(2, dataset, begin, epochs=1))
    with DynamicLoader(dataset, epochs=1, **SETTINGS) as alone:
        alone.load_state_dict(first[0][1])
        rest = indices(alone.blocks())
    done = [uid for blocks, _ in first for uid in indices(blocks)]
    assert sorted(done + rest) == [(0, i) for i in range(len(LENGTHS))]


def test_llamafactory_7318_packing_lets_a_sample_predict_the_next_one(token_dataset):
    """Positions start anew in each sample, and no sample's first token is predicted."""
    dataset = token_dataset(LENGTHS)
    with DynamicLoader(dataset, epochs=1, packing=True, **SETTINGS) as loader:
        batches = [batch for block in loader.blocks() for batch in block if not batch.is_dummy]
    for batch in batches:
        edges = batch.cu_seqlens.tolist()
        assert edges[-1] == batch.tokens
        assert batch.max_seqlen == max(batch.lengths)
        trained = 0
        for (start, stop), (_, index) in zip(itertools.pairwise(edges), batch.uids, strict=True):
            item = dataset[index]
            assert batch["position_ids"][0, start:stop].tolist() == list(range(stop - start))
            assert batch["input_ids"][0, start:stop].tolist() == item["input_ids"].tolist()
            assert batch["labels"][0, start] == -100
            trained += int((item["labels"][1:] != -100).sum())
        assert batch.label_tokens == trained == int((batch["labels"][0, 1:] != -100).sum())


def test_pytorch_62066_memory_grows_from_epoch_to_epoch(token_dataset):
    with DynamicLoader(token_dataset(LENGTHS), **SETTINGS) as loader:

        def epochs(n):
            for _ in range(n):
                assert sum(batch.tokens for batch in loader) == sum(LENGTHS)
            gc.collect()

        epochs(2)
        tracemalloc.start()
        epochs(2)
        before, _ = tracemalloc.get_traced_memory()
        epochs(10)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    # One epoch's tensors are 50 kB; ten of anything kept would be seen.
    assert after - before < 20_000

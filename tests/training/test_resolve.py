"""What `auto` becomes: complete, faithful to what was set, and the same for the same facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.budget import Budget
from eke.budget.flops import BlockShape, DecoderShape, flops_per_token, forward_flops
from eke.errors import InputError
from eke.training.config import RunConfig
from eke.training.footprint import (
    LEAST_POOL_BYTES,
    footprint,
    pool_bytes,
    state_bytes,
)
from eke.training.resolve import (
    MOST_MICRO_TOKENS,
    POLICIES,
    WANTED_EVALUATIONS,
    Facts,
    budget_of,
    expected_tokens,
    resolve,
)


def shape_of_width(hidden: int, layers: int = 5, vocab: int = 4096) -> DecoderShape:
    matmul = 12 * hidden * hidden
    groups = {"embedding": vocab * hidden, "blocks": layers * matmul, "norm": hidden, "head": 0}
    return DecoderShape(
        blocks=(BlockShape(matmul, 2 * hidden, matmul, True),) * layers,
        head_params=vocab * hidden,
        head_trains=True,
        embedding_trains=True,
        hidden=hidden,
        vocab=vocab,
        parameters=groups,
        trained_parameters=sum(groups.values()),
        bytes_per_parameter=4,
    )


FACTS = Facts(
    shape=shape_of_width(192),
    lengths=[100, 200, 300],
    n_train=1000,
    n_eval=256,
    world_size=1,
    device="cpu",
    from_scratch=True,
    free_bytes=8 * 2**30,
    flops_per_s=1e11,
)
# What depends on the data's samples is settled before: see `setup`.
SETTLED = {
    "run": {"device": "cpu"},
    "model": {"dtype": "fp32"},
    "data": {"max_length": 512, "overlength": "truncate", "workers": 1},
}


def config_with(**sections: dict[str, Any]) -> RunConfig:
    raw = {s: {**SETTLED.get(s, {}), **sections.get(s, {})} for s in {*SETTLED, *sections}}
    return RunConfig.from_mapping(raw)


facts = st.builds(
    Facts,
    shape=st.sampled_from([shape_of_width(32, 2, 300), shape_of_width(192), shape_of_width(512)]),
    lengths=st.lists(st.integers(2, 512), min_size=1, max_size=20),
    n_train=st.integers(1, 10**7),
    n_eval=st.integers(2, 10**5),
    world_size=st.integers(1, 8),
    device=st.sampled_from(["cpu", "cuda"]),
    from_scratch=st.booleans(),
    free_bytes=st.integers(4 * 2**30, 80 * 2**30),
    flops_per_s=st.none() | st.floats(1e9, 1e15),
)
chosen = st.fixed_dictionaries(
    {},
    optional={
        "budget": st.fixed_dictionaries(
            {},
            optional={
                "flops": st.floats(1e9, 1e22),
                "tokens": st.integers(100, 10**12),
                "steps": st.integers(1, 10**6),
                "epochs": st.integers(1, 50),
                "wall_time": st.floats(1, 1e6),
            },
        ),
        "batch": st.fixed_dictionaries(
            {},
            optional={
                "per_step": st.just("samples:9"),
                "micro_tokens": st.integers(2, 4096),
                "order_seed": st.integers(0, 99),
            },
        ),
        "data": st.fixed_dictionaries({}, optional={"eval_examples": st.integers(2, 999)}),
        "optimizer": st.fixed_dictionaries(
            {},
            optional={"lr": st.floats(1e-6, 1), "warmup_steps": st.integers(0, 500)},
        ),
    },
)


@given(facts, chosen)
def test_no_auto_is_left_and_what_was_set_stays(
    known: Facts, sections: dict[str, dict[str, Any]]
) -> None:
    asked = config_with(**sections)
    resolved = resolve(asked, known)
    for section, keys in resolved.model_dump().items():
        for key, value in keys.items():
            if value == "auto":
                assert (section, key) in POLICIES
            before = getattr(getattr(asked, section), key)
            if before not in ("auto", None) or section == "budget":
                assert value == before
    assert resolved.batch.order_seed is not None
    assert resolve(asked, known) == resolved
    assert resolve(resolved, known) == resolved


@given(facts, chosen)
def test_what_was_chosen_is_of_use(known: Facts, sections: dict[str, dict[str, Any]]) -> None:
    config = resolve(config_with(**sections), known)
    chosen_here = {(s, k) for s, keys in sections.items() for k in keys}
    if ("batch", "per_step") not in chosen_here:
        unit, _, number = config.batch.per_step.partition(":")
        assert unit == "tokens"
        assert 512 <= int(number) <= 65536
        assert int(number) % 256 == 0
    if ("batch", "micro_tokens") not in chosen_here:
        micro = config.batch.micro_tokens
        assert isinstance(micro, int)
        assert micro <= MOST_MICRO_TOKENS[known.device]
        pool = int(config.checkpoint.pool)
        assert footprint(known.shape, micro, pool=pool).total <= 0.6 * known.free_bytes
    if ("data", "eval_examples") not in chosen_here:
        assert 2 <= int(config.data.eval_examples) <= min(512, known.n_eval)
    if ("optimizer", "warmup_steps") not in chosen_here:
        assert 1 <= int(config.optimizer.warmup_steps) <= 100
    if ("optimizer", "lr") not in chosen_here:
        assert 0 < float(config.optimizer.lr) < 0.01


# ---------------------------------------------------------------------- memory


def test_a_model_that_is_too_large_is_refused() -> None:
    with pytest.raises(InputError, match=r"does not fit into the memory limit; got '500 MiB'"):
        resolve(
            config_with(budget={"memory": "500MiB"}), replace(FACTS, shape=shape_of_width(1024))
        )
    with pytest.raises(InputError, match=r"64 tokens at once need about .* Raise budget\.memory"):
        resolve(config_with(), replace(FACTS, free_bytes=500 * 2**20))


def test_micro_batches_shrink_to_fit() -> None:
    pool = pool_bytes(state_bytes(FACTS.shape))
    limit, known = footprint(FACTS.shape, 256, pool=pool).total, replace(FACTS, lengths=[100])
    exactly = resolve(config_with(budget={"memory": limit}), known)
    assert (exactly.batch.micro_tokens, exactly.checkpoint.pool) == (256, pool)
    assert resolve(config_with(budget={"memory": limit - 1}), known).batch.micro_tokens == 128


def test_the_pool_shrinks_before_the_longest_sample_is_refused() -> None:
    known = replace(FACTS, shape=shape_of_width(1024), lengths=[200])
    wished = pool_bytes(state_bytes(known.shape))
    for left in (wished - 1, LEAST_POOL_BYTES):
        limit = footprint(known.shape, 256).total + left
        found = resolve(config_with(budget={"memory": limit}), known)
        assert (found.batch.micro_tokens, found.checkpoint.pool) == (256, left)
    with pytest.raises(InputError, match=r"200 tokens .*data\.max_length to 128"):
        resolve(config_with(budget={"memory": limit - 1}), known)
    set_ = {"budget": {"memory": limit}, "checkpoint": {"pool": LEAST_POOL_BYTES + 1}}
    with pytest.raises(InputError, match=r"200 tokens"):
        resolve(config_with(**set_), known)


def test_what_was_asked_for_must_fit_into_the_limit_that_was_asked_for() -> None:
    memory = footprint(FACTS.shape, 300, pool=LEAST_POOL_BYTES).total
    asked = {"budget": {"memory": memory}}
    fits = config_with(**asked, batch={"micro_tokens": 300})
    assert resolve(fits, FACTS).batch.micro_tokens == 300
    with pytest.raises(InputError, match=r"301 tokens .* lower batch\.micro_tokens to 256"):
        resolve(config_with(**asked, batch={"micro_tokens": 301}), FACTS)
    # What happens to be free is a guess: it does not overrule the user.
    tight = replace(FACTS, free_bytes=2**20)
    assert resolve(config_with(batch={"micro_tokens": 300}), tight).batch.micro_tokens == 300


@pytest.mark.parametrize(("longest", "micro"), [(512, 512), (1024, 1024), (1500, 2048)])
def test_the_longest_sample_fits_into_a_micro_batch(longest: int, micro: int) -> None:
    known = replace(FACTS, lengths=[10, longest, 20])
    assert resolve(config_with(), known).batch.micro_tokens == micro


def test_a_long_context_that_no_sample_uses_asks_for_no_memory() -> None:
    config = config_with(data={"max_length": 131072, "overlength": "error"})
    assert resolve(config, FACTS).batch.micro_tokens == 512


def test_a_sample_that_does_not_fit_is_refused() -> None:
    memory = footprint(FACTS.shape, 512, pool=LEAST_POOL_BYTES).total
    config, known = config_with(budget={"memory": memory}), replace(FACTS, lengths=[600])
    with pytest.raises(InputError, match=r"600 tokens .* data\.max_length to 512"):
        resolve(config, known)


# ---------------------------------------------------------------------- how far a budget goes


def test_a_budget_without_limits_is_one_epoch() -> None:
    assert budget_of(config_with()) == Budget(epochs=1)
    assert budget_of(config_with(budget={"memory": "1GB"})) == Budget(memory_bytes=10**9, epochs=1)
    assert budget_of(config_with(budget={"steps": 5})) == Budget(steps=5)
    unlimited, one = config_with(), config_with(budget={"epochs": 1})
    assert resolve(unlimited, FACTS).batch == resolve(one, FACTS).batch


def test_expected_tokens_by_each_limit() -> None:
    per_token = flops_per_token(FACTS.shape, 200)

    def tokens(**limits: Any) -> float | None:
        return expected_tokens(Budget(**limits), FACTS)

    assert tokens(tokens=5000.0) == 5000
    assert tokens(flops=per_token * 7000) == pytest.approx(7000)
    assert tokens(epochs=3) == 3 * 1000 * 200
    assert tokens(seconds=10.0) == pytest.approx(10 * 1e11 / per_token)
    priced = tokens(money=1.0, price_per_hour=3600.0)
    assert priced == pytest.approx(1e11 / per_token)
    assert tokens(money=1.0, price_per_hour=3600.0, seconds=0.5) == pytest.approx(
        0.5 * 1e11 / per_token
    )
    assert tokens(steps=10) is None
    assert tokens(tokens=5000.0, flops=per_token * 100) == pytest.approx(100)
    assert tokens(tokens=5000.0, seconds=1e9) == 5000


def test_more_ranks_train_more_in_the_same_time() -> None:
    alone, four = (
        expected_tokens(Budget(seconds=9.0), replace(FACTS, world_size=n)) for n in (1, 4)
    )
    assert alone is not None
    assert four == pytest.approx(4 * alone)


def test_without_a_probe_time_says_nothing() -> None:
    assert expected_tokens(Budget(seconds=9.0), replace(FACTS, flops_per_s=None)) is None


def test_about_400_steps_where_the_data_allows_it() -> None:
    large = replace(FACTS, n_train=10**7)
    assert (
        resolve(config_with(budget={"tokens": 4_096_000}), large).batch.per_step == "tokens:10240"
    )
    both = {"tokens": 4_096_000, "steps": 1000}
    assert resolve(config_with(budget=both), large).batch.per_step == "tokens:4096"
    # 24,000 tokens of data: 8 steps an epoch.
    little = replace(FACTS, n_train=120)
    assert resolve(config_with(budget={"tokens": 10**9}), little).batch.per_step == "tokens:3072"


def test_evaluation_keeps_to_its_share() -> None:
    def examples(tokens: int) -> int:
        found = resolve(config_with(budget={"tokens": tokens}), replace(FACTS, n_eval=5000))
        return int(found.data.eval_examples)

    assert [examples(1000), examples(10**9)] == [32, 512]
    n = examples(4_000_000)
    assert 32 < n < 512
    one, budget = forward_flops(FACTS.shape, 1, 200), 4_000_000 * flops_per_token(FACTS.shape, 200)
    assert WANTED_EVALUATIONS * n * one <= 0.03 * budget < WANTED_EVALUATIONS * (n + 1) * one


def test_learning_rates() -> None:
    def rate(**known: Any) -> float:
        return float(resolve(config_with(), replace(FACTS, **known)).optimizer.lr)

    assert rate() == 1e-3
    assert rate(shape=shape_of_width(768, 2)) == 5e-4
    assert rate(from_scratch=False) == 2e-4


def test_warm_up_is_a_twentieth_of_the_steps() -> None:
    def warm_up(**limits: Any) -> int:
        return int(resolve(config_with(budget=limits), FACTS).optimizer.warmup_steps)

    assert warm_up(steps=200) == 10
    assert warm_up(steps=10**6) == 100
    assert warm_up(steps=5) == 1
    assert warm_up(tokens=512 * 400) == 20

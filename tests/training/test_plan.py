"""The plan is arithmetic over a prepared run: each figure against one worked out here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eke.budget import Budget
from eke.budget.flops import flops_per_token
from eke.training.config import RunConfig
from eke.training.footprint import footprint
from eke.training.plan import plan_of
from eke.training.setup import Prepared, prepare


@pytest.fixture(scope="module")
def prepared(model_dir: Path, corpus: Path) -> Prepared:
    raw = {
        "model": {"source": str(model_dir)},
        "data": {"train": str(corpus), "overlength": "truncate", "workers": 0},
        "batch": {"per_step": "tokens:256", "micro_tokens": 128},
        "run": {"device": "cpu"},
    }
    return prepare(RunConfig.from_mapping(raw))


def timed(prepared: Prepared, flops_per_s: float | None, ranks: int = 1) -> Prepared:
    facts = replace(prepared.facts, flops_per_s=flops_per_s, world_size=ranks)
    return replace(prepared, facts=facts)


def test_what_is_counted(prepared: Prepared) -> None:
    plan = plan_of(prepared, Budget(epochs=2))
    parameters = sum(p.numel() for p in prepared.model.parameters())
    assert plan["parameters"] == plan["trained_parameters"] == parameters
    assert sum(plan["parameters_by_group"].values()) == parameters
    assert plan["checkpoint_bytes"] == 12 * parameters
    pool = plan["checkpoint"]["pool_bytes"]
    assert pool == 2**20  # an eighth of this state would be less than the least
    assert plan["memory_bytes"] == footprint(prepared.shape, 128, pool=pool).terms()
    assert plan["memory_bytes"]["checkpoint pool"] == pool
    assert plan["memory_total_bytes"] == sum(plan["memory_bytes"].values())
    assert plan["corpus"] == prepared.corpus
    assert plan["limits"] == {"epochs": 2}
    assert (plan["micro_tokens"], plan["step_tokens"]) == (128, 256)
    assert json.loads(json.dumps(plan)) == plan


def test_how_far_each_limit_goes(prepared: Prepared) -> None:
    per_token = flops_per_token(prepared.shape, plan_of(prepared, Budget())["mean_length_tokens"])

    def tokens(**limits: Any) -> float:
        return float(plan_of(prepared, Budget(**limits))["tokens"])

    assert tokens(tokens=5120.0) == 5120
    assert tokens(flops=per_token * 1000) == pytest.approx(1000, rel=0.05)
    assert tokens(steps=7) == 7 * 256
    assert tokens(steps=7, tokens=1000.0) == 1000
    assert tokens(steps=2, tokens=1000.0) == 512
    plan = plan_of(prepared, Budget(epochs=3))
    assert plan["epochs"] == pytest.approx(3, rel=0.05)
    assert plan["steps"] == round(plan["tokens"] / 256)
    assert plan["flops"] == plan["tokens"] * plan["flops_per_token"]


def test_time_and_money_come_from_the_speed_of_all_ranks(prepared: Prepared) -> None:
    budget = Budget(tokens=10_000.0, price_per_hour=3600.0, currency="USD")
    one, four = (plan_of(timed(prepared, 1e9, ranks=n), budget) for n in (1, 4))
    assert one["seconds"] == one["flops"] / 1e9
    assert four["seconds"] == one["seconds"] / 4
    assert one["money"] == one["seconds"]
    assert one["currency"] == "USD"


def test_what_saves_are_expected_to_cost(prepared: Prepared) -> None:
    def saves(flops_per_s: float | None, **checkpoint: Any) -> dict[str, Any]:
        config = prepared.config.with_values({"checkpoint": checkpoint})
        known = timed(replace(prepared, config=config), flops_per_s)
        return dict(plan_of(known, Budget(steps=9))["checkpoint"])

    slow = saves(1e6, every="auto")
    assert slow["stall_s"] == pytest.approx(0.005)  # a step outlasts the copy
    assert slow["share"] == slow["stall_s"] / slow["interval_s"] <= 0.02
    fast = saves(1e15, every="auto")
    assert 0.005 < fast["stall_s"] <= fast["save_s"]
    assert saves(1e15, every="2m")["interval_s"] == 120
    plan = plan_of(timed(prepared, 1e6), Budget(steps=9))
    step_s = plan["seconds"] / plan["steps"]
    assert saves(1e6, every="50 steps")["interval_s"] == pytest.approx(50 * step_s, rel=0.01)
    unknown = saves(None, every="50 steps")
    assert (unknown["stall_s"], unknown["interval_s"], unknown["share"]) == (None, None, None)


def test_what_is_unknown_is_none(prepared: Prepared) -> None:
    plan = plan_of(timed(prepared, None), Budget(seconds=60.0))
    unknown = ("tokens", "steps", "epochs", "flops", "seconds", "money", "flops_per_s")
    assert all(plan[key] is None for key in unknown)
    assert plan_of(timed(prepared, 1e9), Budget(steps=3))["money"] is None


def test_steps_in_samples(prepared: Prepared) -> None:
    config = prepared.config.with_values({"batch": {"per_step": "samples:8"}})
    plan = plan_of(replace(prepared, config=config), Budget(steps=10))
    assert plan["step_tokens"] == 8 * plan["mean_length_tokens"]
    assert plan["steps"] == 10


def test_frozen_parameters_have_no_optimizer_state(prepared: Prepared) -> None:
    shape = replace(prepared.shape, trained_parameters=100)
    plan = plan_of(replace(prepared, shape=shape), Budget(steps=1))
    assert plan["checkpoint_bytes"] == 4 * shape.n_parameters + 800
    assert plan["memory_bytes"]["optimizer state"] == 800

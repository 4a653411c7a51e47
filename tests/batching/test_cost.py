from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.batching.cost import CostModel, Load
from eke.errors import InputError

SHAPES = [(b, n) for b in (1, 2, 4, 8, 16) for n in (32, 128, 512, 2048)]


def _seconds(model: CostModel, shapes: list[tuple[int, int]]) -> list[float]:
    a, b, s, d = (
        model.per_token,
        model.per_token_squared,
        model.per_sample,
        model.per_micro_batch,
    )
    return [d + rows * (a * n + b * n * n + s) for rows, n in shapes]


def _patches(item: Any) -> Mapping[str, int]:
    return {"patches": item["patches"]}


def _loaded(cap: int = 10, time: float = 2.0, **times: float) -> CostModel:
    return CostModel(**times, loads={"patches": Load(cap, time)}, measure=_patches)


# ---------------------------------------------------------------------- fitting

TRUTH = CostModel(2e-6, 3e-10, 4e-5, 5e-3)


def test_fitting_exact_times_finds_the_model() -> None:
    model, r_squared = CostModel.fit(SHAPES, _seconds(TRUTH, SHAPES))
    assert model.per_token == pytest.approx(TRUTH.per_token, rel=1e-6)
    assert model.per_token_squared == pytest.approx(TRUTH.per_token_squared, rel=1e-6)
    assert model.per_sample == pytest.approx(TRUTH.per_sample, rel=1e-6)
    assert model.per_micro_batch == pytest.approx(TRUTH.per_micro_batch, rel=1e-6)
    assert r_squared == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_fitting_noisy_times_comes_near(seed: int) -> None:
    order = random.Random(seed)
    shapes = SHAPES * 4
    noisy = [t * order.uniform(0.97, 1.03) for t in _seconds(TRUTH, shapes)]
    model, r_squared = CostModel.fit(shapes, noisy)
    assert model.per_token == pytest.approx(TRUTH.per_token, rel=0.1)
    assert model.per_token_squared == pytest.approx(TRUTH.per_token_squared, rel=0.1)
    assert model.per_micro_batch == pytest.approx(TRUTH.per_micro_batch, rel=0.05)
    assert 0.99 < r_squared < 1
    for found, true in zip(_seconds(model, SHAPES), _seconds(TRUTH, SHAPES), strict=True):
        assert found == pytest.approx(true, rel=0.03)


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(1, 4096), st.floats(1e-5, 10)),
        min_size=4,
        max_size=12,
    )
)
def test_whatever_is_measured_the_model_is_one(measured: list[tuple[int, int, float]]) -> None:
    model, r_squared = CostModel.fit([(b, n) for b, n, _ in measured], [t for *_, t in measured])
    assert model.per_token > 0
    assert min(model.per_token_squared, model.per_sample, model.per_micro_batch) >= 0
    assert r_squared <= 1


def test_what_the_times_do_not_show_is_left_out() -> None:
    shapes = SHAPES[:]
    model, _ = CostModel.fit(shapes, [b * n * 1e-6 - b * 1e-6 for b, n in shapes])
    assert model.per_sample == 0
    assert model.per_token == pytest.approx(1e-6, rel=0.05)


@pytest.mark.parametrize(
    ("shapes", "seconds"),
    [
        (SHAPES[:3], [1.0, 2.0, 3.0]),
        (SHAPES[:4], [1.0, 2.0, 3.0]),
        (SHAPES[:4], [1.0, 2.0, 3.0, 0.0]),
        ([], []),
    ],
)
def test_too_little_to_fit_is_refused(shapes: list[tuple[int, int]], seconds: list[float]) -> None:
    with pytest.raises(InputError, match="more measurements"):
        CostModel.fit(shapes, seconds)


# ---------------------------------------------------------------------- whole numbers


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=30),
    st.floats(1e-9, 1e3),
    st.floats(0, 1e-3),
    st.floats(0, 1e3),
)
def test_the_longer_a_sample_the_more_it_weighs(
    lengths: list[int], token: float, pairs: float, sample: float
) -> None:
    model = CostModel(token, pairs * token, sample * token)
    ordered = np.array(sorted(lengths), dtype=np.int64)
    weights = model.weights(ordered)
    assert weights.dtype == np.int64
    assert (np.diff(weights) >= 0).all()
    assert weights[0] >= 1


def test_weights_are_in_the_unit_of_a_token() -> None:
    lengths = np.array([1, 100], dtype=np.int64)
    assert CostModel().weights(lengths).tolist() == [1, 100]
    assert CostModel().fixed == 256
    model = CostModel(2.0, 0.5, 4.0, 8.0)
    assert (model.weights(lengths) / 1024).tolist() == [1 + 0.25 + 2, 100 + 2500 + 2]
    assert model.fixed == 4 * 1024
    loads = np.array([[0], [3]], dtype=np.int64)
    assert _loaded().load_weights(loads).tolist() == [0, 6]
    assert _loaded(per_sample=1.0).load_weights(loads).tolist() == [0, 6 * 1024]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [1, 3, 100_000])
def test_times_stay_whole_numbers_however_far_apart(size: int) -> None:
    model = _loaded(time=1e20, per_token=1e-9, per_token_squared=1e20, per_sample=1e20)
    lengths = np.array([1] * (size - 1) + [10**6], dtype=np.int64)
    weights = model.weights(lengths)
    times = model.load_weights(np.full((size, 1), 2**40, dtype=np.int64))
    assert weights[-1] == weights.max() > 10**12, "the longest takes longest"
    assert sum(weights.tolist()) + sum(times.tolist()) < 2**63


def test_loads_are_measured_and_capped() -> None:
    model = _loaded(7)
    assert model.loads_of({"patches": 3}) == (3,)
    assert model.caps() == [7]
    assert CostModel().loads_of({}) == ()
    assert CostModel().caps() == []


@pytest.mark.parametrize("patches", [-1, 2.5, 2**41, float("inf"), float("nan")])
def test_a_measure_that_is_no_number_of_things_is_refused(patches: float) -> None:
    with pytest.raises(InputError, match="one whole number for each of patches"):
        _loaded().loads_of({"patches": patches})


def test_a_measure_of_other_things_is_refused() -> None:
    model = CostModel(loads={"frames": Load(4)}, measure=_patches)
    with pytest.raises(InputError, match="one whole number for each of frames"):
        model.loads_of({"patches": 1})


def test_models_that_plan_differently_have_different_names() -> None:
    models = [
        CostModel(),
        CostModel(2.0),
        CostModel(1.0, 1e-4),
        CostModel(per_sample=1.0),
        CostModel(per_micro_batch=0.0),
        _loaded(),
        _loaded(11),
        _loaded(10, 3.0),
    ]
    assert len({model.name() for model in models}) == len(models)
    assert CostModel.tokens().name() == CostModel().name()


@pytest.mark.parametrize(
    "times",
    [
        {"per_token": 0.0},
        {"per_token": float("nan")},
        {"per_token_squared": -1.0},
        {"per_sample": float("inf")},
        {"per_micro_batch": -1.0},
    ],
)
def test_times_that_cannot_be_are_refused(times: dict[str, float]) -> None:
    with pytest.raises(InputError, match="times are wrong"):
        CostModel(**times)


def test_times_too_far_apart_are_refused() -> None:
    with pytest.raises(InputError, match="too far apart"):
        CostModel(1e-300, per_micro_batch=1.0)
    with pytest.raises(InputError, match="too far apart"):
        _loaded(1, 1e300, per_token=1e-300)


def test_loads_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="at least 1"):
        _loaded(0)
    with pytest.raises(InputError, match="times are wrong"):
        _loaded(1, -1.0)
    with pytest.raises(InputError, match="given together"):
        CostModel(loads={"patches": Load(1)})
    with pytest.raises(InputError, match="given together"):
        CostModel(measure=_patches)

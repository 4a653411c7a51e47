"""The learning-rate schedule: warm-up, stable, and a decay by what is spent."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from eke.training.schedule import Decay, lr_factor, phase

units = st.sampled_from(["flops", "seconds", "tokens", "steps"])


@st.composite
def decays(draw: st.DrawFn) -> Decay:
    start = draw(st.dictionaries(units, st.floats(0, 1e6), min_size=1))
    end = {unit: low + draw(st.floats(0, 1e6)) for unit, low in start.items()}
    return Decay(start, end, "enough", draw(st.none() | st.sampled_from(sorted(start))))


@given(decays(), st.dictionaries(units, st.floats(0, 1e7)))
def test_progress_is_a_share(decay: Decay, spent: dict[str, float]) -> None:
    assert 0 <= decay.progress(spent) <= 1


@given(decays(), st.floats(0, 1), st.floats(0, 1))
def test_progress_grows_with_spending(decay: Decay, a: float, b: float) -> None:
    low, high = sorted((a, b))

    def at(share: float) -> float:
        spent = {u: decay.start[u] + share * (decay.end[u] - decay.start[u]) for u in decay.start}
        return decay.progress(spent)

    assert at(low) <= at(high)


@given(decays())
def test_it_is_over_as_soon_as_one_unit_is(decay: Decay) -> None:
    for unit in decay.end:
        assert decay.progress({**decay.start, unit: decay.end[unit]}) == 1


def test_progress_is_linear_in_the_unit_that_is_furthest() -> None:
    decay = Decay({"steps": 90, "flops": 0}, {"steps": 100, "flops": 1000}, "r")
    assert decay.progress({"steps": 90}) == 0
    assert decay.progress({"steps": 93, "flops": 100}) == 0.3
    assert decay.progress({"steps": 93, "flops": 800}) == 0.8


def test_a_decay_with_nothing_to_spend_is_over() -> None:
    assert Decay({"steps": 5}, {"steps": 5}, "r").progress({"steps": 5}) == 1
    assert Decay({}, {}, "r").progress({}) == 1


@given(decays())
def test_it_survives_json(decay: Decay) -> None:
    assert Decay.from_json(json.loads(json.dumps(decay.to_json()))) == decay


@given(st.integers(0, 10**6), st.integers(0, 10**4), st.none() | st.floats(0, 1))
def test_the_factor_is_in_0_to_1(step: int, warmup: int, progress: float | None) -> None:
    assert 0 <= lr_factor(step, warmup, progress) <= 1


@given(st.integers(0, 200))
def test_warm_up_rises_to_1_and_stays(warmup: int) -> None:
    factors = [lr_factor(step, warmup, None) for step in range(warmup + 5)]
    assert factors[0] > 0
    assert factors == sorted(factors)
    assert all(f < 1 for f in factors[:warmup])
    assert all(f == 1 for f in factors[warmup:])


@given(st.integers(0, 50), st.floats(0, 1), st.floats(0, 1))
def test_a_decay_falls_to_0(warmup: int, a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert lr_factor(99, warmup, low) >= lr_factor(99, warmup, high)
    assert lr_factor(99, warmup, 1.0) == 0


def test_phases() -> None:
    decay = Decay({}, {}, "r")
    assert [phase(s, 2, None) for s in range(4)] == ["warmup", "warmup", "stable", "stable"]
    assert phase(0, 2, decay) == phase(9, 2, decay) == "decay"

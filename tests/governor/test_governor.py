"""The governor's memory: its state, its limits on actions, and what it refuses."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.errors import InputError
from eke.governor import Event, Governor, Rule, decide


def told(curve):
    return {
        "horizon": curve.horizon,
        "bigram_loss": curve.bigram_loss,
        "from_scratch": curve.from_scratch,
        "scheduled_changes": curve.scheduled_changes,
    }


def observe(governor, evaluation):
    return governor.observe(step=evaluation.step, cost=evaluation.cost, losses=evaluation.losses)


def test_it_decides_as_the_rule_does_on_the_same_history(curves):
    for curve in curves:
        governor = Governor(**told(curve))
        governor.note_event("start", 0.0)
        for end, evaluation in enumerate(curve.evaluations, start=1):
            expected = decide(curve.evaluations[:end], events=[Event(0.0, "start")], **told(curve))
            assert observe(governor, evaluation) == expected


@given(cut=st.integers(0, 40), which=st.integers(0, 8))
def test_its_state_survives_json_at_any_evaluation(curves, cut, which):
    curve = curves[which]
    whole, first = Governor(**told(curve)), Governor(**told(curve))
    for evaluation in curve.evaluations[:cut]:
        observe(whole, evaluation)
        observe(first, evaluation)
    for governor in (whole, first):
        governor.note_event("switch", curve.evaluations[cut].cost / 2)
        governor.set_horizon(curve.horizon * 1.5)
    second = Governor.from_config(json.loads(json.dumps(first.config())))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.best_step == whole.best_step
    for evaluation in curve.evaluations[cut:]:
        assert observe(second, evaluation).to_json() == observe(whole, evaluation).to_json()


def test_the_configuration_is_a_round_trip():
    governor = Governor(
        horizon=5,
        rule=Rule(epsilon=0.02, min_gain=0.3),
        actions={"decay"},
        bigram_loss=2.5,
        from_scratch=True,
        scheduled_changes=[1, 2.5],
    )
    config = json.loads(json.dumps(governor.config()))
    assert Governor.from_config(config).config() == governor.config()
    assert config["rule"]["min_gain"] == 0.3


def test_numpy_losses_are_the_same_as_floats(history_of):
    plain, array = Governor(horizon=100.0), Governor(horizon=100)
    for e in history_of([3.0] * 8):
        there = observe(plain, e)
        here = array.observe(step=e.step, cost=np.float64(e.cost), losses=np.asarray(e.losses))
        assert json.dumps(here.to_json()) == json.dumps(there.to_json())


def test_what_it_may_not_do_it_says(history_of):
    history = history_of([3.0] * 40)
    governor = Governor(horizon=100.0, actions={"rollback"})
    decisions = [observe(governor, e) for e in history]
    assert {d.action for d in decisions} == {"continue"}
    refused = next(d for d in decisions if d.evidence.get("asked_for"))
    assert refused.step == 70
    assert refused.reason.startswith("The rule asks for decay, which is not among the allowed")
    assert [a.action for a in refused.alternatives] == ["decay", "rollback"]


def test_the_best_step_is_the_lowest_finite_loss(history_of):
    governor = Governor(horizon=100.0)
    assert governor.best_step is None
    for e in history_of([3.0, 2.0, 2.5, 2.0, 4.0], noise=0.0):
        observe(governor, e)
    assert governor.best_step == 20
    governor.observe(step=60, cost=100.0, losses=[math.nan] * 64)
    assert governor.best_step == 20


def test_a_refused_observation_leaves_the_state_as_it_was(history_of):
    history = history_of([3.0] * 6)
    governor = Governor(horizon=100.0)
    for e in history[:5]:
        observe(governor, e)
    before = json.dumps(governor.state_dict())
    for step, cost, losses in (
        (60, 100.0, history[5].losses[:-1]),
        (60, 1.0, history[5].losses),
        (-1, 100.0, history[5].losses),
        (60, math.nan, history[5].losses),
        (60, 100.0, (-1.0,) * 64),
    ):
        with pytest.raises(InputError):
            governor.observe(step=step, cost=cost, losses=losses)
    with pytest.raises(InputError, match="unknown kind of event"):
        governor.note_event("lunch", 1.0)
    with pytest.raises(InputError, match="horizon"):
        governor.set_horizon(0.0)
    assert json.dumps(governor.state_dict()) == before
    assert observe(governor, history[5]) == decide(history, horizon=100.0)


def test_a_new_horizon_is_in_the_evidence(history_of):
    history = history_of([3.0] * 40)
    governor = Governor(horizon=100.0)
    first = observe(governor, history[0])
    governor.set_horizon(400.0)
    second = observe(governor, history[1])
    assert (first.evidence["horizon"], second.evidence["horizon"]) == (100.0, 400.0)
    stopped = next(e.cost for e in history[2:] if observe(governor, e).action != "continue")
    assert stopped > 40.0, "immunity is a share of the longer budget"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"horizon": 0.0}, "horizon"),
        ({"horizon": math.inf}, "horizon"),
        ({"actions": {"decay", "dance"}}, r"does not know these actions; got \['dance'\]"),
        ({"from_scratch": True}, "needs the loss of a bigram model"),
        ({"bigram_loss": -1.0}, "bigram model's loss"),
        ({"scheduled_changes": [-1.0]}, "scheduled change"),
    ],
)
def test_a_bad_argument_fails_at_once(arguments, says):
    with pytest.raises(InputError, match=says):
        Governor(**{"horizon": 1.0, **arguments})


def test_a_foreign_state_is_refused(history_of):
    governor = Governor(horizon=100.0)
    observe(governor, history_of([3.0])[0])
    state = governor.state_dict()
    with pytest.raises(InputError, match="another version"):
        Governor(horizon=1.0).load_state_dict({**state, "version": 99})
    with pytest.raises(InputError, match="cannot be read"):
        Governor(horizon=1.0).load_state_dict({"version": 1, "events": []})
    with pytest.raises(InputError, match="another version"):
        Governor.from_config({})
    with pytest.raises(InputError, match="cannot be read"):
        Governor.from_config({**governor.config(), "rule": {"patience": 3}})

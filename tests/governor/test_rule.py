"""The decision: its clauses, its guards, and the properties that its docstring states."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eke.errors import InputError
from eke.governor import Evaluation, Event, Rule, decide
from eke.governor.records import EVENT_KINDS

HORIZON = 100.0


def flat(history_of, count=40, level=3.0, **noise):
    return history_of([level] * count, **noise)


def first_stop(history, **told):
    for end in range(1, len(history) + 1):
        decision = decide(history[:end], **{"horizon": HORIZON, **told})
        if decision.action != "continue":
            return history[end - 1].cost, decision
    return None


# --- the clauses ----------------------------------------------------------------------------


def test_a_flat_loss_is_decayed_at_the_second_evaluation_that_says_so(history_of):
    history = flat(history_of)
    cost, decision = first_stop(history)
    # Immune to 10; the third evaluation from there on is the first with a regression.
    assert cost == 17.5
    assert (decision.action, decision.evidence["clause"]) == ("decay", "gain")
    assert decision.evidence["breaches"] == 2
    before = decide(history[:6], horizon=HORIZON)
    assert (before.action, before.evidence["breaches"]) == ("continue", 1)
    assert "1 of 2 running" in before.reason


def test_three_breaches_take_one_evaluation_more(history_of):
    cost, _ = first_stop(flat(history_of), rule=Rule(breaches=3))
    assert cost == 20.0


def test_a_falling_loss_goes_on_to_the_reserve(history_of):
    history = history_of([6 - math.log(i + 1) for i in range(40)], noise=0.002)
    cost, decision = first_stop(history, rule=Rule(epsilon=0.001))
    assert cost == 90.0
    assert (decision.action, decision.evidence["clause"]) == ("decay", "reserve")


def test_beyond_the_reserve_it_decays_whatever_the_guards_say(history_of):
    history = flat(history_of)
    decision = decide(
        history,
        horizon=HORIZON,
        events=[Event(99.0, "restart")],
        from_scratch=True,
        bigram_loss=1.0,
    )
    assert (decision.action, decision.evidence["clause"]) == ("decay", "reserve")
    assert decision.evidence["share"] == 1.0


def test_a_loss_that_rises_three_times_is_rolled_back(history_of):
    falling = [3 - 0.6 * math.log(i + 1) for i in range(20)]
    rising = [falling[-1] + 0.03 * (i + 1) for i in range(20)]
    cost, decision = first_stop(history_of(falling + rising, noise=0.001))
    assert (decision.action, decision.evidence["clause"]) == ("rollback", "harm")
    assert cost == 57.5  # the best is at 50, then 52.5, 55 and 57.5 are worse, each than the last
    assert decision.evidence["best_step"] == 200
    assert decision.evidence["rises"] == 3
    assert {a.action for a in decision.alternatives} == {"continue", "decay"}


def test_two_rises_and_a_fall_are_no_harm(history_of):
    falling = [3 - 0.6 * math.log(i + 1) for i in range(20)]
    bumps = [falling[-1] + up for up in (0.03, 0.06, 0.04, 0.07, 0.1, 0.02)]
    history = history_of(falling + bumps + [1.2] * 14, noise=0.001)
    assert all(decide(history[:end], horizon=HORIZON).action != "rollback" for end in range(20, 27))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e12])
def test_a_loss_that_is_not_finite_is_rolled_back_at_once_guards_or_not(history_of, bad):
    good = flat(history_of)[:2]
    dead = Evaluation(30, 7.5, (*good[0].losses[:-1], bad))
    decision = decide(
        [*good, dead], horizon=HORIZON, scheduled_changes=[50.0], from_scratch=True, bigram_loss=1.0
    )
    assert decision.action == "rollback"
    assert "The held-out loss is not finite" in decision.reason
    assert decision.evidence["not_finite_examples"] == 1
    assert decision.evidence["best_step"] in (10, 20)
    json.dumps(decision.to_json(), allow_nan=False)


def test_a_first_loss_that_is_not_finite_has_nowhere_to_go(history_of):
    decision = decide([Evaluation(0, 0.0, (math.nan, 1.0))], horizon=HORIZON)
    assert (decision.action, decision.evidence["best_step"]) == ("rollback", None)
    assert "no checkpoint with a finite loss" in decision.reason


def test_after_a_rollback_the_dead_evaluation_is_left_out(history_of):
    history = flat(history_of)
    dead = Evaluation(200, 50.0, tuple(math.nan for _ in history[0].losses))
    history = [*history[:19], dead, *history[20:]]
    told = {"events": [Event(50.0, "restart")], "horizon": HORIZON}
    assert decide(history[:24], **told).evidence["clause"] == "too_few"  # at 60
    assert decide(history[:27], **told).action == "decay"


def test_too_few_evaluations_continue_and_say_so(history_of):
    sparse = flat(history_of, count=4)
    decision = decide(sparse[:3], horizon=HORIZON)
    assert (decision.action, decision.evidence["clause"]) == ("continue", "too_few")
    assert "2 evaluations lie in the window of the regression, which needs 3" in decision.reason


def test_a_price_replaces_epsilon(history_of):
    history = history_of([4 - 0.1 * math.log(i + 1) for i in range(40)], noise=0.0005)
    by_epsilon, _ = first_stop(history)
    assert by_epsilon < 90
    # The bound per unit left is at least about the slope over T: 0.1 nats a budget.
    patient, decision = first_stop(history, rule=Rule(min_gain=0.05))
    assert (patient, decision.evidence["clause"]) == (90.0, "reserve")
    dear, decision = first_stop(history, rule=Rule(min_gain=1.0))
    assert dear < by_epsilon
    assert decision.evidence["threshold"] == pytest.approx(0.9 - dear / 100)
    unpriced, _ = first_stop(history, rule=Rule(min_gain=0.0))
    assert unpriced == 90.0


# --- the guards -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EVENT_KINDS)
def test_every_kind_of_event_makes_it_immune(history_of, kind):
    cost, decision = first_stop(flat(history_of), events=[Event(15.0, kind)])
    assert cost == 32.5  # immune to 25, three points at 30, twice running at 32.5
    assert decision.evidence["events"] == [{"kind": kind, "cost": 15.0}]


def test_it_waits_for_the_scheduled_change_and_then_through_its_immunity(history_of):
    history = flat(history_of)
    cost, _ = first_stop(history, scheduled_changes=[50.0])
    assert cost == 67.5
    waiting = decide(history[:16], horizon=HORIZON, scheduled_changes=[50.0])
    assert waiting.evidence["guards"] == ["scheduled_change"]
    assert "a change of data is scheduled at 50.0% of the budget" in waiting.reason
    assert waiting.alternatives[0].action == "decay"


def test_noting_the_scheduled_change_too_changes_nothing(history_of):
    told = first_stop(
        flat(history_of), scheduled_changes=[50.0], events=[Event(50.0, "data_change")]
    )
    assert told[0] == 67.5


def test_from_scratch_it_waits_until_a_bigram_model_is_beaten(history_of):
    history = flat(history_of, level=3.0)
    cost, decision = first_stop(history, from_scratch=True, bigram_loss=3.05)
    assert (cost, decision.evidence["clause"]) == (90.0, "reserve")
    assert (
        "bigram"
        in decide(history[:10], horizon=HORIZON, from_scratch=True, bigram_loss=3.05).reason
    )
    cost, decision = first_stop(history, from_scratch=True, bigram_loss=3.2)
    assert decision.evidence["beat_bigram_cost"] == 2.5
    assert cost == 20.0
    cost, _ = first_stop(history, from_scratch=False, bigram_loss=3.05)
    assert cost == 17.5, "only a model from scratch has to beat it"


def test_beating_the_bigram_model_begins_a_phase(history_of):
    history = history_of([3.0] * 20 + [2.8] * 20, noise=0.001)
    cost, decision = first_stop(history, from_scratch=True, bigram_loss=3.0)
    assert decision.evidence["beat_bigram_cost"] == 52.5
    assert cost == 70.0  # immune to 62.5, three points at 67.5, twice running at 70


# --- bad input ------------------------------------------------------------------------------


def test_bad_input_is_refused_in_one_sentence(history_of):
    history = flat(history_of)[:8]
    shorter = Evaluation(90, 22.5, history[0].losses[:-1])
    with pytest.raises(InputError, match="no evaluation"):
        decide([], horizon=HORIZON)
    with pytest.raises(InputError, match="another number of examples; got 63"):
        decide([*history, shorter], horizon=HORIZON)
    with pytest.raises(InputError, match="costs less than the one before"):
        decide(history[::-1], horizon=HORIZON)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InputError, match="horizon"):
            decide(history, horizon=bad)
        with pytest.raises(InputError, match="bigram model's loss"):
            decide(history, horizon=HORIZON, bigram_loss=bad)
    with pytest.raises(InputError, match="needs the loss of a bigram model"):
        decide(history, horizon=HORIZON, from_scratch=True)
    with pytest.raises(InputError, match="scheduled change"):
        decide(history, horizon=HORIZON, scheduled_changes=[math.nan])


# --- properties -----------------------------------------------------------------------------


@st.composite
def runs(draw):
    """A run as the governor may meet it, smooth or wild, with what it is told."""
    examples = draw(st.integers(2, 6))
    count = draw(st.integers(1, 24))
    start, slope = draw(st.floats(0.5, 9)), draw(st.floats(-0.5, 1.0))
    wobble = st.floats(0, 0.05)
    bad = draw(st.sampled_from([0, 0, 0, 1]))
    history, cost = [], 0.0
    for i in range(count):
        cost += draw(st.sampled_from([0.0, 1.0, 3.0, 4.0, 4.0, 4.0, 9.5]))
        level = max(0.0, start - slope * math.log1p(i))
        losses = [level + draw(wobble) for _ in range(examples)]
        if bad and draw(st.integers(0, 15)) == 0:
            losses[0] = math.nan
        history.append(Evaluation(10 * i, cost, tuple(losses)))
    # A cost that is nearly no number at all loses digits in another unit.
    costs = st.just(0.0) | st.floats(1e-6, 120)
    return history, {
        "horizon": draw(st.sampled_from([50.0, 100.0, 130.0])),
        "events": [
            Event(c, draw(st.sampled_from(EVENT_KINDS))) for c in draw(st.lists(costs, max_size=2))
        ],
        "scheduled_changes": draw(st.lists(costs, max_size=1)),
        "from_scratch": draw(st.booleans()),
        "bigram_loss": draw(st.floats(1, 9)),
        "rule": Rule(
            breaches=draw(st.integers(1, 3)),
            harm_rises=draw(st.integers(1, 3)),
            min_gain=draw(st.sampled_from([None, None, 0.0, 0.5])),
        ),
    }


def as_text(decision):
    return json.dumps(decision.to_json(), allow_nan=False)


@given(runs())
@settings(max_examples=200)
def test_it_is_deterministic_and_its_evidence_is_json(run):
    history, told = run
    copies = [Evaluation(e.step, e.cost, e.losses) for e in history]
    assert as_text(decide(history, **told)) == as_text(decide(copies, **told))


@given(runs(), st.randoms(use_true_random=False))
def test_the_order_of_examples_changes_nothing(run, random):
    history, told = run
    order = list(range(len(history[0].losses)))
    random.shuffle(order)
    shuffled = [replace(e, losses=tuple(e.losses[i] for i in order)) for e in history]
    assert as_text(decide(shuffled, **told)) == as_text(decide(history, **told))


def scaled(history, told, factor):
    return [replace(e, cost=e.cost * factor) for e in history], {
        **told,
        "horizon": told["horizon"] * factor,
        "events": [Event(e.cost * factor, e.kind) for e in told["events"]],
        "scheduled_changes": [c * factor for c in told["scheduled_changes"]],
    }


COSTS = {"cost", "horizon", "events", "scheduled_changes", "beat_bigram_cost"}


@given(runs(), st.sampled_from([2.0**-40, 0.25, 2.0, 2.0**60]))
def test_the_unit_of_cost_changes_nothing(run, factor):
    history, told = run
    there = decide(history, **told)
    history, told = scaled(history, told, factor)
    here = decide(history, **told)
    assert (here.action, here.reason) == (there.action, there.reason)
    assert {k: v for k, v in here.evidence.items() if k not in COSTS} == {
        k: v for k, v in there.evidence.items() if k not in COSTS
    }


@pytest.mark.parametrize("factor", [1e-6, 0.3, 7.1, 3.6e17])
def test_a_unit_that_is_no_power_of_two_changes_no_decision(curves, factor):
    for curve in curves:
        told = {
            "horizon": curve.horizon,
            "events": [Event(c, "restart") for c in curve.restarts],
            "scheduled_changes": curve.scheduled_changes,
            "from_scratch": curve.from_scratch,
            "bigram_loss": curve.bigram_loss,
        }
        history, other = scaled(curve.evaluations, told, factor)
        for end in range(1, len(history) + 1, 4):
            there, here = decide(curve.evaluations[:end], **told), decide(history[:end], **other)
            assert here.action == there.action
            assert here.evidence["clause"] == there.evidence["clause"]
            slopes = here.evidence["slope"], there.evidence["slope"]
            assert slopes == (None, None) or slopes[0] == pytest.approx(slopes[1], abs=1e-9)


def test_a_constant_added_to_every_cost_does_change_it(history_of):
    history = history_of([4 - 0.3 * math.log(i + 1) for i in range(40)], noise=0.001)[:20]
    offset = [replace(e, cost=e.cost + 20) for e in history]
    plain, late = decide(history, horizon=HORIZON), decide(offset, horizon=HORIZON)
    assert late.evidence["slope"] != pytest.approx(plain.evidence["slope"], rel=0.1)
    assert late.evidence["gain_bound"] != pytest.approx(plain.evidence["gain_bound"], rel=0.1)


@given(runs())
@settings(max_examples=300)
def test_no_guard_is_ever_broken(run):
    history, told = run
    decision = decide(history, **told)
    if decision.action == "continue" or decision.evidence["clause"] in ("reserve", "not_finite"):
        return
    cost, horizon = history[-1].cost, told["horizon"]
    reached = [e.cost for e in told["events"] if e.cost <= cost]
    for change in told["scheduled_changes"]:
        assert change <= cost * (1 + 1e-8), "never before a scheduled change"
        reached.append(change)
    assert cost / horizon >= max(reached, default=0.0) / horizon + 0.1 - 1e-6, "never immune"
    if told["from_scratch"]:
        best = min(e.loss for e in history if e.finite)
        assert best <= 0.97 * told["bigram_loss"], "never before a bigram model is beaten"


@given(runs())
@settings(max_examples=200)
def test_running_counts_agree_with_the_decisions_before(run):
    history, told = run
    counts = [
        decide(history[:end], **told).evidence.get("breaches", 0)
        for end in range(1, len(history) + 1)
        if history[end - 1].finite
    ]
    most = max(told["rule"].breaches, told["rule"].harm_rises)
    for before, after in pairwise(counts):
        assert after in (0, 1) if before == 0 else after in (0, min(most, before + 1))

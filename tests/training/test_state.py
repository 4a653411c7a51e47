"""What a run remembers survives JSON, whole."""

from __future__ import annotations

import json
from dataclasses import asdict, fields

from hypothesis import given
from hypothesis import strategies as st

from eke.training.schedule import Decay
from eke.training.state import RunState

amounts = st.dictionaries(st.sampled_from(["flops", "steps", "seconds"]), st.floats(0, 1e20))
counts = st.integers(0, 2**53)
states = st.builds(
    RunState,
    step=counts,
    samples=counts,
    dropped=counts,
    tokens=counts,
    longest=counts,
    flops=st.floats(0, 1e25),
    next_eval=counts,
    eval_interval=counts,
    lr_scale=st.sampled_from([1.0, 0.5]),
    bad_steps=st.integers(0, 2),
    best_step=st.none() | counts,
    best_loss=st.none() | st.floats(0, 100),
    rolled_back_to=st.none() | counts,
    decay=st.none() | st.builds(Decay, amounts, amounts, st.text(), st.none() | st.just("flops")),
    corpus=st.text(),
    governor=st.none() | st.just({"config": {"horizon": 1.5}, "state": {"history": []}}),
    eval_micro_tokens=counts,
    offsets=st.dictionaries(st.sampled_from(["ledger", "metrics", "decisions"]), counts),
)


@given(states, states)
def test_loading_gives_the_state_back_in_place(saved: RunState, live: RunState) -> None:
    live.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert asdict(live) == asdict(saved)
    assert live.decay is None or isinstance(live.decay, Decay)


def test_every_field_is_saved() -> None:
    assert RunState().state_dict().keys() == {f.name for f in fields(RunState)}


def test_a_state_of_an_older_version_keeps_the_defaults_of_what_it_lacks() -> None:
    state = RunState(step=7).state_dict()
    del state["dropped"]
    live = RunState()
    live.load_state_dict({**state, "of_a_newer_version": 1})
    assert live == RunState(step=7)

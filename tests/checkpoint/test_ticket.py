"""A save's states only move forward, and who waits is told the truth."""

from itertools import product
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eke.checkpoint.ticket import State, Ticket, reaches
from eke.errors import EkeError, InputError

STATES = get_args(State)
GOOD = ["capturing", "captured", "persisted", "committed"]


class Recorder:
    """In the engine's place: remembers who waited for what."""

    def __init__(self, error=None):
        self.heard, self.error = [], error

    def wait(self, ticket, state, timeout):
        self.heard.append((ticket, state, timeout))
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(("state", "wanted"), list(product(STATES, STATES)))
def test_what_has_been_reached(state, wanted):
    if "failed" in (state, wanted):
        assert reaches(state, wanted) == (state == wanted)
    else:
        assert reaches(state, wanted) == (wanted in GOOD[: GOOD.index(state) + 1])


@given(st.lists(st.sampled_from(STATES), max_size=12))
def test_any_sequence_of_moves_only_goes_forward(moves):
    ticket = Ticket(3, Path("step-000000003"))
    taken = ["capturing"]
    for wanted in moves:
        now = taken[-1]
        final = now in ("committed", "failed")
        forward = not final and (wanted == "failed" or GOOD.index(wanted) > GOOD.index(now))
        if forward:
            ticket.reach(wanted)
            taken.append(wanted)
        else:
            with pytest.raises(ValueError, match=f"that is {now} cannot become {wanted}"):
                ticket.reach(wanted)
        assert ticket.state == taken[-1]
        assert ticket.final == (taken[-1] in ("committed", "failed"))
    assert list(ticket.seconds) == taken[1:]
    assert list(ticket.seconds.values()) == sorted(ticket.seconds.values())


@pytest.mark.parametrize("state", ["capturing", "failed", "done", ""])
def test_some_states_cannot_be_waited_for(state):
    engine = Recorder()
    with pytest.raises(InputError, match="cannot be waited for") as caught:
        Ticket(1, Path("x"), engine).wait(state)
    assert caught.value.value == state
    assert engine.heard == []


@pytest.mark.parametrize("state", ["captured", "persisted", "committed"])
def test_waiting_is_the_engines(state):
    engine = Recorder()
    ticket = Ticket(1, Path("x"), engine)
    assert ticket.wait(state, timeout=2.5) is ticket
    assert ticket.wait() is ticket
    assert engine.heard == [(ticket, state, 2.5), (ticket, "committed", None)]


def test_what_the_engine_raises_is_raised():
    error = EkeError("the disk is full")
    with pytest.raises(EkeError) as caught:
        Ticket(1, Path("x"), Recorder(error)).wait()
    assert caught.value is error


def test_the_bill_is_what_it_has_stalled():
    ticket = Ticket(7, Path("x"))
    assert ticket.bill.seconds == 0
    ticket.stall_s += 0.25
    assert (ticket.bill.step, ticket.bill.seconds, ticket.bill.who) == (7, 0.25, "checkpoint")
    assert repr(ticket) == "Ticket(step=7, state='capturing', path='x')"

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eke.checkpoint.engine import Engine
from eke.checkpoint.errors import SaveError
from eke.checkpoint.failures import hear, unheard
from eke.checkpoint.ticket import Ticket


@pytest.fixture
def engine():
    engine = Engine(1 << 16, 10.0)
    yield engine
    engine.close()


def failed(engine: Engine, serial: int, text: str) -> Ticket:
    ticket = Ticket(serial * 10, Path("step"), engine, serial)
    ticket.error = SaveError(text)
    ticket.reach("failed")
    engine._desk.errors.append(ticket)
    return ticket


def test_without_a_failure_there_is_nothing_to_hear(engine: Engine) -> None:
    assert unheard(engine) is None
    hear(engine, [None, None])


def test_the_oldest_failure_is_heard_first_and_each_once(engine: Engine) -> None:
    failed(engine, 2, "the disk is full")
    failed(engine, 5, "the disk is gone")
    for serial, text in ((2, "full"), (5, "gone")):
        told = json.loads(json.dumps(unheard(engine)))
        assert told["serial"] == serial
        with pytest.raises(SaveError, match=text):
            hear(engine, [told, None])
    assert unheard(engine) is None


def test_another_ranks_failure_is_told_with_its_rank(engine: Engine) -> None:
    row = {"serial": 1, "step": 7, "text": "no space"}
    with pytest.raises(SaveError, match="saving step 7 failed on rank 1: no space"):
        hear(engine, [None, row])


def test_what_another_rank_told_is_not_told_again_when_it_fails_here(engine: Engine) -> None:
    failed(engine, 1, "here too")
    with pytest.raises(SaveError, match="here too"):
        hear(engine, [{"serial": 1, "step": 10, "text": "there"}, unheard(engine)])
    assert unheard(engine) is None

"""The copying half of the engine: who copies what, and what becomes of it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from eke.checkpoint.copying import Copier
from eke.checkpoint.desk import Desk
from eke.checkpoint.errors import SaveError
from eke.checkpoint.flow import Flow
from eke.checkpoint.pool import Pool
from eke.checkpoint.ticket import Ticket


def blocks_of(lanes, fill, **more):
    """A save of lanes with so many blocks; `fill` copies one."""
    return SimpleNamespace(
        ticket=Ticket(5, Path("step-000000005")),
        flow=Flow(lanes, **more),
        doing="",
        device=lambda lane: None,
        fill=fill,
        failure=lambda error: SaveError(f"saving step 5 failed: {error!r}"),
    )


@pytest.fixture
def desk():
    desk = Desk(10.0)
    desk.pool = Pool(1 << 20)
    return desk


def test_whoever_waits_copies_what_is_due_in_order(desk):
    copied = []
    task = blocks_of([2, 3], lambda spot, slot: copied.append(spot))
    desk.tasks.append(task)
    with desk.turn:
        task.flow.want(1, 1)
    Copier(desk).help(task, lambda flow: flow.all_captured)
    assert copied == [(1, 0), (0, 0), (0, 1), (1, 1), (1, 2)]
    assert task.ticket.state == "captured"
    assert sorted(spot for _, spot in desk.held) == sorted(copied)
    assert desk.pool.free == desk.pool.slots - len(copied)


def test_a_block_that_cannot_be_copied_fails_its_save_and_gives_its_slot_back(desk):
    def fill(spot, slot):
        if spot.block == 1:
            raise ValueError("odd")

    task = blocks_of([3], fill)
    desk.tasks.append(task)
    Copier(desk).help(task, lambda flow: flow.all_captured)
    assert task.ticket.state == "failed"
    assert "odd" in str(task.ticket.error)
    assert list(desk.errors) == [task.ticket]
    assert desk.pool.free == desk.pool.slots - len(desk.held)

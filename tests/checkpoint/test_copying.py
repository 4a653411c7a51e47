"""The copying half of the engine: who copies what, and what becomes of it."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eke.checkpoint import Checkpointer, Keep, copying, engine, flight, flow, pool
from eke.checkpoint import desk as desk_module
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


def test_an_interrupt_anywhere_loses_no_slot_and_holds_up_no_save(tmp_path, interrupt):
    """Struck at every few lines of a save and a step, which copies most blocks itself."""
    modules = (copying, engine, flight, flow, pool, desk_module)
    model = torch.nn.ParameterList([torch.randn(3000) for _ in range(6)])
    model[5].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model:
        parameter.grad = torch.ones(3000) if parameter.requires_grad else None
    outcomes = set()
    with Checkpointer(
        tmp_path, pool="64KiB", patience=5.0, durability="none", keep=Keep(last=1)
    ) as ck:
        ck.attach(model=model, optimizer=optimizer, extra={"notes": {"seen": 1}})

        def save(step, at):
            with interrupt(at, *modules) as struck:
                ck.save(step)
                optimizer.step()
            try:
                ck.wait()
                outcomes.add("fine")
            except SaveError as error:
                outcomes.add(str(error).split(f"step {step} ")[-1].split(";")[0])
            pool = ck._engine._desk.pool
            deadline = time.monotonic() + 20
            while pool.free < pool.slots and time.monotonic() < deadline:
                time.sleep(0.001)  # the copier may be at a block of a save that is over
            assert pool.free == pool.slots, at
            return struck.lines

        lines = max(save(step, None) for step in range(3))
        assert lines > 100
        stride = max(1, lines // 150)
        for number, at in enumerate(range(0, lines, stride), 3):
            save(number, at)
        assert outcomes == {"fine", "failed: KeyboardInterrupt: "}
        assert ck.save(10_000).wait().state == "committed"

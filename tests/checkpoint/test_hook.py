import os
import signal
import threading

import pytest
import torch
from torch import nn

import eke.checkpoint.checkpointer
from eke.checkpoint import Checkpointer, load_tensors, steps
from eke.checkpoint.engine import _finish
from eke.errors import InputError


def rig(root, **options):
    """A model, an optimizer whose kernel's changes torch does not count, and a checkpointer through
    whose pool the state does not fit."""
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(32)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    ck = Checkpointer(root, pool="64KiB", durability="none")
    ck.attach(model=model, optimizer=optimizer)
    return model, optimizer, ck


def values(model):
    return {f"model/{name}": value.clone() for name, value in model.state_dict().items()}


def test_a_step_waits_for_what_a_dropped_checkpointer_still_captures(tmp_path):
    model, optimizer, ck = rig(tmp_path)
    expected = values(model)
    ticket = ck.save(1)
    del ck
    optimizer.step()
    found = load_tensors(ticket.wait(timeout=60).path)
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


def test_a_checkpointer_dropped_at_rest_leaves_no_hook(tmp_path):
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    before = list(hooks)
    _, _, ck = rig(tmp_path)
    ck.save(1).wait(timeout=60)
    ck.wait()
    assert list(hooks) != before
    del ck
    assert list(hooks) == before


def test_a_compiled_step_waits_and_is_not_traced_through_the_engine(tmp_path, monkeypatch):
    model, optimizer, ck = rig(tmp_path)
    waits = []
    wait_for = eke.checkpoint.checkpointer.wait_for

    def watched(*args):
        waits.append(torch.compiler.is_compiling())
        wait_for(*args)

    monkeypatch.setattr(eke.checkpoint.checkpointer, "wait_for", watched)
    step = torch.compile(optimizer.step, backend="eager")
    step()
    expected = values(model)
    ticket = ck.save(1)
    step()
    found = load_tensors(ticket.wait(timeout=60).path)
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]
    assert waits == [False, False]
    ck.close()


def test_a_forked_child_is_told_and_can_train(tmp_path):
    """It has neither the engine's threads nor its pool: saving there would wait for ever."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path / "ck", pool="1MiB") as saver:
        saver.attach(model=model, optimizer=optimizer)
        saver.save(1)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                optimizer.step()
                saver.save(2)
            except InputError as error:
                code = 0 if "belongs to another process" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        saver.save(3)
    assert steps(tmp_path / "ck") == [1, 3]


def test_what_would_wait_in_a_forked_child_is_refused_whoever_holds_the_lock(tmp_path):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saver = Checkpointer(tmp_path / "ck", pool="1MiB")
    saver.attach(model=model, optimizer=optimizer)
    ticket = saver.save(1)
    held, let_go = threading.Event(), threading.Event()

    def hold():
        with saver._engine._desk.turn:
            held.set()
            let_go.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(30)
    calls = {
        "barrier": saver.barrier,
        "Ticket.wait": ticket.wait,
        "attach": lambda: saver.attach(rng=True),
        "protect": lambda: saver.protect([1]),
        "wait": saver.wait,
        "the engine's": lambda: saver._engine.barrier(lambda: None),
    }
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        code = 1
        try:
            optimizer.step()
            for name, call in calls.items():
                print(name)
                with pytest.raises(InputError, match="belongs to another process"):
                    call()
            saver.close()
            saver._finalizer()  # as if it was dropped
            _finish()
            code = 0
        finally:
            os._exit(code)
    let_go.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    holder.join()
    assert ticket.wait().state == "committed"
    saver.close()

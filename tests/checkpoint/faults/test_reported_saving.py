"""Faults of other savers that their users reported, each tried here; see docs/checkpoint-faults.md.

The names are the projects' and the numbers of their public trackers.
"""

import errno
import resource
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from eke.checkpoint import (
    Checkpointer,
    Keep,
    SaveError,
    Storage,
    latest,
    load_tensors,
    steps,
    verify,
)
from eke.checkpoint.layout import step_name, temporaries, temporary_name
from eke.checkpoint.owner import me, new_token
from eke.errors import InputError

MIB = 1 << 20
torch.set_num_threads(1)


class Slow(Storage):
    def write(self, fd, data):
        time.sleep(0.001)
        return super().write(fd, data)


def adam(rows=64):
    model = nn.Sequential(nn.Linear(64, rows), nn.Linear(rows, 64))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer):
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model, optimizer):
    """Every tensor of both under its name in a checkpoint, copied."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {f"model/{name}": p.detach().clone() for p, name in names.items()}
    for parameter, state in optimizer.state.items():
        found |= {f"optimizer/{names[parameter]}/{k}": v.clone() for k, v in state.items()}
    return found


def same(path, expected):
    there = load_tensors(path)
    assert there.keys() == expected.keys()
    return all(torch.equal(there[name], tensor) for name, tensor in expected.items())


def test_pytorch_144657_async_save_aliases_cpu_tensors(tmp_path):
    """Later values were saved, because the writer read the live tensors."""
    model, optimizer = adam()
    train(model, optimizer)
    expected = state_of(model, optimizer)
    with Checkpointer(tmp_path, pool="16KiB", storage=Slow()) as ck:
        ck.attach(model=model, optimizer=optimizer)
        ticket = ck.save(1)
        assert ticket.state == "capturing"
        ck.barrier()
        assert ticket.state != "committed"
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            for state in optimizer.state.values():
                for tensor in state.values():
                    tensor.zero_()
        assert same(ticket.wait().path, expected)


def test_nvrx_376_adam_step_is_of_another_step_than_the_weights(tmp_path):
    """`step` is a tensor of its own on the CPU, and was stored one step ahead of the weights."""
    model, optimizer = adam()
    with Checkpointer(tmp_path, pool="16KiB", keep=Keep(last=9), storage=Slow()) as ck:
        ck.attach(model=model, optimizer=optimizer)
        states = {}
        for step in range(1, 5):
            train(model, optimizer)
            states[step] = state_of(model, optimizer)
            ck.save(step)
        train(model, optimizer)
        ck.wait()
    for step, expected in states.items():
        path = tmp_path / step_name(step)
        assert load_tensors(path, "optimizer/0.weight/step")["optimizer/0.weight/step"] == step
        assert same(path, expected)


def test_lightning_20953_layers_of_different_steps_in_one_checkpoint(tmp_path):
    """Training went on while a thread was serializing: a checkpoint had layers of several steps."""
    torch.manual_seed(3)
    model, optimizer = adam()
    history = {}
    with Checkpointer(tmp_path, pool="8KiB", keep=Keep(last=99), storage=Slow()) as ck:
        ck.attach(model=model, optimizer=optimizer)
        for step in range(1, 25):
            train(model, optimizer)
            if torch.rand(()) < 0.3:
                history[step] = state_of(model, optimizer)
                ck.save(step)
    assert len(history) > 4
    assert all(same(tmp_path / step_name(step), state) for step, state in history.items())


def large():
    """64 MiB in tensors of 4 MiB."""
    return nn.ParameterList(nn.Parameter(torch.ones(MIB), requires_grad=False) for _ in range(16))


def test_megatron_pr61_and_lightning_21824_saving_takes_the_state_again_in_memory(
    tmp_path, growth_bytes
):
    """A whole shard was staged, or serialized into a buffer, beside the live one."""
    state = large()
    with Checkpointer(tmp_path, pool="4MiB") as ck:
        ck.attach(extra={"state": state})
        grown = growth_bytes(lambda: ck.save(1).wait())
    assert grown < 4 * MIB + 0.1 * 64 * MIB


def test_megatron_1707_out_of_memory_only_when_saving_in_the_background(tmp_path):
    """Saved under a limit of the kernel's that leaves a tenth of the state."""
    state = large()
    with Checkpointer(tmp_path, pool="4MiB") as ck:
        ck.attach(extra={"state": state})
        ck.save(1).wait()  # threads and pool are there
        data = next(
            int(line.split()[1]) * 1024
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmData:")
        )
        with torch.no_grad():
            for tensor in state:
                tensor.add_(1)
        old = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (data + 64 * MIB // 10, old[1]))
        try:
            with pytest.raises(RuntimeError, match="memory"):
                torch.ones(4 * MIB)  # the limit holds
            path = ck.save(2).wait().path
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, old)
    assert verify(path).ok
    assert load_tensors(path, "state/15")["state/15"][-1] == 2


def test_veomni_1162_the_last_saves_failure_is_discarded(tmp_path, faulty):
    """The program ended with exit code 0 and without its last checkpoint."""

    def program():
        with Checkpointer(tmp_path, storage=faulty) as ck:
            ck.attach(model=adam()[0])
            ck.save(1)

    faulty.fail("sync")
    with pytest.raises(SaveError, match="saving step 1 failed"):
        program()
    assert steps(tmp_path) == []


def test_pytorch_159374_a_failed_save_ends_the_saver(tmp_path, faulty):
    model, _ = adam()
    with Checkpointer(tmp_path, storage=faulty) as ck:
        ck.attach(model=model)
        ck.save(0).wait()
        threads = [thread.native_id for thread in ck._engine._threads]
        for call in ("create", "write", "sync", "rename"):
            faulty.fail(call)
            with pytest.raises(SaveError):
                ck.save(1).wait()
            faulty.heal()
        assert ck.save(1).wait().state == "committed"
        assert [t.native_id for t in ck._engine._threads if t.is_alive()] == threads
    assert verify(tmp_path).ok


def test_nemo_automodel_3261_an_interrupted_save_makes_every_resume_hang(tmp_path, new_run):
    """The same step is saved again over what an interrupted attempt left, also beside it."""
    run = new_run()
    run.step()
    ck = run.attach_to(Checkpointer(tmp_path))
    dead = me()._replace(pid=2**22 + 1, start=1)
    whole = ck.save(1).wait().path
    for number, owner in ((2, dead), (2, me())):
        debris = tmp_path / temporary_name("step", number, new_token(owner))
        debris.mkdir()
        for file in whole.iterdir():
            (debris / file.name).write_bytes(file.read_bytes()[:-9])
    (tmp_path / step_name(2)).mkdir()
    (tmp_path / step_name(2) / "rank00000.state.safetensors").write_bytes(b"half")
    assert ck.restore().step == 1
    assert ck.save(2).wait(timeout=60).state == "committed"
    assert temporaries(tmp_path) == []
    assert ck.restore().step == 2
    assert verify(tmp_path / step_name(2)).ok
    ck.close()


def test_maxtext_5260_a_failed_save_is_remembered_as_a_checkpoint(tmp_path, faulty):
    """The step stayed in a cache: later saves of it were skipped, and `latest` named it."""
    model, _ = adam()
    with Checkpointer(tmp_path, storage=faulty) as ck:
        ck.attach(model=model)
        ck.save(1).wait()
        faulty.fail("rename")
        with pytest.raises(SaveError):
            ck.save(2).wait()
        assert (ck.steps(), latest(tmp_path)) == ([1], 1)
        assert ck.restore().step == 1
        faulty.heal()
        assert ck.save(2).wait().state == "committed"
        assert (ck.steps(), latest(tmp_path)) == ([1, 2], 2)


def test_dlrover_1585_a_buffer_is_overwritten_while_it_is_written(tmp_path):
    """Saves back to back through a pool of two slots, without an optimizer's hook."""
    tensor = nn.Parameter(torch.zeros(20_000))
    with Checkpointer(tmp_path, pool="16KiB", keep=Keep(last=99), storage=Slow()) as ck:
        ck.attach(extra={"own": nn.ParameterList([tensor])})
        for step in range(8):
            ck.barrier()
            with torch.no_grad():
                tensor.fill_(step)
            ck.save(step)
    for step in range(8):
        found = load_tensors(tmp_path / step_name(step))["own/0"]
        assert (found == step).all()


def test_transformers_25136_a_limit_of_one_deletes_everything(tmp_path, faulty):
    model, _ = adam()
    with Checkpointer(tmp_path, keep=Keep(last=1), storage=faulty) as ck:
        ck.attach(model=model)
        for step in range(1, 4):
            ck.save(step)
            ck.wait()
            assert ck.steps() == [step]
            faulty.fail("rename")
            with pytest.raises(SaveError):
                ck.save(step + 100).wait()
            assert ck.steps() == [step]
            faulty.heal()
    assert verify(tmp_path).ok


def test_verl_7955_an_option_is_ignored_and_training_starts_at_step_0(saved, new_run):
    run, path = saved
    with pytest.raises(TypeError, match="unexpected keyword"):
        Checkpointer(path.parent, keep_last=3)
    with pytest.raises(InputError, match="durability"):
        Checkpointer(path.parent, durability="sync")
    ck = run.attach_to(Checkpointer(path.parent))
    with pytest.raises(InputError, match=r"no checkpoint of step 4.*it holds 3"):
        ck.restore(4)
    with pytest.raises(InputError, match="'modle' is not attached"):
        ck.restore(only=["modle"])
    with pytest.raises(TypeError, match="unexpected keyword"):
        ck.restore(resume_mode="auto")
    assert ck.restore().step == 3
    ck.close()


def test_xtuner_1859_thousands_of_tensors_take_thousands_of_descriptors(tmp_path):
    process, seen = psutil.Process(), [0]

    class Counting(Storage):
        def write(self, fd, data):
            seen.append(process.num_fds())
            return super().write(fd, data)

        def read_into(self, fd, buffer, offset):
            if len(seen) < 2000:
                seen.append(process.num_fds())
            return super().read_into(fd, buffer, offset)

    many = nn.ParameterList(nn.Parameter(torch.full((3,), float(i))) for i in range(5000))
    with Checkpointer(tmp_path, storage=Counting()) as ck:
        ck.attach(extra={"many": many})
        before = process.num_fds()
        ck.save(1).wait()
        with torch.no_grad():
            torch._foreach_zero_(list(many))
        ck.restore()
        assert all(tensor[0] == i for i, tensor in enumerate(many))
        assert max(seen) <= before + 12
        assert process.num_fds() == before


def test_veomni_102_concurrent_saves_hang(tmp_path):
    """Two checkpointers of one model save at once, while it is trained."""
    model, optimizer = adam()
    savers = [
        Checkpointer(tmp_path / name, pool="16KiB", storage=Slow(), keep=Keep(last=99))
        for name in "ab"
    ]
    states = {}
    for ck in savers:
        ck.attach(model=model, optimizer=optimizer)
    train(model, optimizer)
    for step in range(4):
        states[step] = state_of(model, optimizer)
        for ck in savers:
            ck.save(step)
        train(model, optimizer)
    for ck in savers:
        ck.close()
        assert all(same(ck.root / step_name(step), state) for step, state in states.items())


def test_orbax_605_a_failure_in_the_background_breaks_the_next_save(tmp_path, faulty):
    """It was not raised, and the next save failed for it in a strange way."""
    model, _ = adam()
    with Checkpointer(tmp_path, storage=faulty) as ck:
        ck.attach(model=model)
        faulty.fail("write", code=errno.EIO)
        ticket = ck.save(1)
        while not ticket.final:
            time.sleep(0.001)
        faulty.heal()
        with pytest.raises(SaveError, match=r"saving step 1 failed: .*Input/output error"):
            ck.save(2)
        assert ck.save(2).wait().state == "committed"

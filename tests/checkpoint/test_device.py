"""Capture from a device: against a fake one that delays and reorders, and CUDA's calls."""

import contextlib
import gc
import logging
import time
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from eke.checkpoint import Checkpointer, Keep, SaveError, load_tensors, verify
from eke.checkpoint.device import Cuda, Issued, device_of, foreign

CPU = torch.device("cpu")


class Queued(torch.optim.Optimizer):
    """Momentum whose updates happen on the device, later; its `step` is in host memory."""

    def __init__(self, parameters, device, counted=True):
        super().__init__(parameters, {})
        self.device, self.counted = device, counted
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {
                "step": torch.tensor(0.0),
                "momentum": torch.zeros_like(parameter),
            }

    def step(self):
        for parameter, state in self.state.items():
            state["step"] += 1
            both = (parameter, state["momentum"])

            def update(weight=parameter.data, momentum=state["momentum"].data):
                momentum.add_(1)
                weight.sub_(momentum)

            self.device.ask(update, *(both if self.counted else ()))


class Training:
    """A model on a fake device, and what its state will be when the device has done all."""

    def __init__(self, device, counted=True, sizes=(3000, 17, 5000)):
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Module()
        for number, size in enumerate(sizes):
            self.model.register_parameter(f"w{number}", nn.Parameter(torch.randn(size)))
        turned = nn.Parameter(torch.randn(40, 30).t())
        self.model.register_parameter("turned", turned)
        self.model.register_buffer("mean", torch.zeros(700))
        self.optimizer = Queued(self.model.parameters(), device, counted)
        self.will = self.now()

    def now(self):
        names = {p: n for n, p in self.model.named_parameters()}
        found = {f"model/{n}": t.detach().clone() for n, t in self.model.state_dict().items()}
        for parameter, state in self.optimizer.state.items():
            found |= {f"optimizer/{names[parameter]}/{k}": t.clone() for k, t in state.items()}
        return found

    def step(self):
        mean = self.model.mean  # which a forward pass changes
        if self.device.claims(mean):
            self.device.ask(lambda: mean.data.add_(1), mean)
        else:
            mean.add_(1)
        self.will["model/mean"] += 1
        self.optimizer.step()
        for name in (n for n, _ in self.model.named_parameters()):
            self.will[f"optimizer/{name}/step"] += 1
            self.will[f"optimizer/{name}/momentum"] += 1
            self.will[f"model/{name}"] -= self.will[f"optimizer/{name}/momentum"]

    def expected(self):
        return {name: tensor.clone() for name, tensor in self.will.items()}

    def attached(self, root, **more):
        ck = Checkpointer(root, keep=Keep(last=9), durability="none", **more)
        ck.attach(model=self.model, optimizer=self.optimizer)
        return ck


def same(path, expected):
    found = load_tensors(path)
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def slots_are_free(ck):
    pool, deadline = ck._engine._pool, time.monotonic() + 30
    while pool.free < pool.slots and time.monotonic() < deadline:
        time.sleep(0.001)
    return pool.free == pool.slots


@pytest.mark.parametrize("pool", ["12KiB", "64KiB", "1MiB"])
@pytest.mark.parametrize("prefer", ["compute", "copies", "either"])
def test_what_is_saved_is_the_state_at_the_save(tmp_path, new_device, pool, prefer):
    device = new_device(prefer=prefer)
    run = Training(device)
    saves = []
    with run.attached(tmp_path, pool=pool) as ck:
        run.step()
        for number in range(5):
            run.step()  # asked for, and perhaps not done when the save begins
            saves.append((ck.save(number), run.expected()))
            for _ in range(2):
                run.step()
            for _ in range(3 * number):
                device.advance()
        for ticket, expected in saves:
            path = ticket.wait().path
            assert verify(path).ok
            assert same(path, expected)
        assert device.pinned == [ck._engine._pool.slots * ck._engine._pool.slot_bytes]
        assert slots_are_free(ck)
    del ck
    gc.collect()
    assert device.pinned == []  # undone


@pytest.mark.parametrize("counted", [True, False])
def test_without_the_barrier_it_is_torn_or_found(tmp_path, new_device, counted):
    device = new_device(lambda t: t.dim() > 0 and t.numel() != 700, prefer="compute")
    run = Training(device, counted)
    ck = run.attached(tmp_path)
    ck._hook.remove()
    device.gate.clear()
    ticket, expected = ck.save(1), run.expected()
    while device.issued < 8:  # all that is on the device: four weights, four momentums
        time.sleep(0.001)
    ck._engine.barrier(set)  # of nothing
    for parameter in run.model.parameters():  # `step` alone would be found as well
        momentum = run.optimizer.state[parameter]["momentum"]
        tensors = (parameter, momentum) if counted else ()
        device.ask(lambda w=parameter.data, m=momentum.data: (w.add_(1), m.add_(1)), *tensors)
    device.gate.set()
    if counted:
        with pytest.raises(SaveError, match="was changed before it was captured"):
            ticket.wait()
    else:
        assert not same(ticket.wait().path, expected)
    ck.close()


def test_the_barrier_never_waits_for_the_device(tmp_path, new_device):
    device = new_device(lambda t: t.dim() > 0 and t.numel() != 700, prefer="compute")
    run = Training(device)
    with run.attached(tmp_path) as ck:
        run.step()
        device.gate.clear()  # whoever waits for the device now waits for long
        ticket, expected = ck.save(1), run.expected()
        run.step()
        run.step()
        ck.barrier()
        assert ticket.state == "capturing"
        here = {thread.name for thread in device.waited_in}
        assert here <= {"eke-copier"}
        device.gate.set()
        device.finish()
        assert torch.equal(run.model.w0, run.will["model/w0"])
        assert same(ticket.wait().path, expected)


def test_a_look_for_what_is_unchanged_does_not_hold_up_training(tmp_path, new_device):
    device = new_device(lambda t: t.dim() > 0 and t.numel() != 700, prefer="compute")
    run = Training(device)
    with run.attached(tmp_path) as ck:
        first = ck.save(1).wait().path
        second = ck.save(2).wait().path
        name = "rank00000.state.safetensors"
        assert (first / name).samefile(second / name)
        device.gate.clear()
        ticket, expected = ck.save(3), run.expected()
        while device.issued == 0 or not device.waited_in:
            time.sleep(0.001)
        run.step()
        assert ticket.state == "capturing"
        device.gate.set()
        path = ticket.wait().path
        assert same(path, expected)
        assert not (first / name).samefile(path / name)
        device.finish()
        run.step()
        assert same(ck.save(4).wait().path, run.expected())


def test_a_full_pool_holds_up_only_the_issuing(tmp_path, new_device):
    device = new_device(prefer="compute")
    run = Training(device)
    with run.attached(tmp_path, pool="8KiB") as ck:
        ticket, expected = ck.save(1), run.expected()
        run.step()
        assert ticket.stall_s > 0
        assert same(ticket.wait().path, expected)


@pytest.mark.parametrize("at", [1, 4])
def test_a_copy_that_fails_costs_only_its_save(tmp_path, new_device, at):
    device = new_device()
    run = Training(device)
    ck = run.attached(tmp_path)
    device.fail_at = at
    with pytest.raises(SaveError, match="an illegal memory access"):
        ck.save(1).wait()
    assert slots_are_free(ck)
    run.step()
    assert same(ck.save(2).wait().path, run.expected())
    ck.close()


def test_a_failed_saves_slots_are_taken_until_its_copies_are_over(tmp_path, new_device, faulty):
    device = new_device(lambda t: t.dim() > 0 and t.numel() != 700)
    run = Training(device)
    ck = run.attached(tmp_path, storage=faulty)
    device.gate.clear()
    write = faulty.write

    def once_all_are_issued(fd, data):
        while device.issued < 8:
            time.sleep(0.001)
        return write(fd, data)

    faulty.write = once_all_are_issued  # a save that failed sooner would issue no more
    faulty.fail("write")
    ticket = ck.save(1)
    with pytest.raises(SaveError, match="saving step 1 failed"):
        ticket.wait()
    ck._engine.drain()
    assert ck._engine._pool.free < ck._engine._pool.slots
    faulty.heal()
    run.step()
    second = ck.save(2)
    expected = run.expected()
    device.gate.set()
    assert same(second.wait().path, expected)
    assert slots_are_free(ck)
    ck.close()


def test_a_save_without_events_fails_and_frees_its_slots(tmp_path, new_device):
    device = new_device()
    run = Training(device)
    ck = run.attached(tmp_path)
    device.no_events = True
    with pytest.raises(SaveError, match="no event can be made"):
        ck.save(1).wait()
    assert slots_are_free(ck)
    assert not device._copies
    device.no_events = False
    run.step()
    assert same(ck.save(2).wait().path, run.expected())
    ck.close()


def test_memory_is_held_until_it_is_copied_and_no_longer(tmp_path, new_device):
    device = new_device()
    device.gate.clear()
    memory = np.arange(5000, dtype=np.float32)
    model = nn.Module()
    model.weight = nn.Parameter(torch.from_numpy(memory))
    alive = weakref.ref(memory)
    with Checkpointer(tmp_path) as ck:
        ck.attach(extra={"net": model})
        ticket = ck.save(1)
        while not device.issued:
            time.sleep(0.001)
        del model.weight, memory
        gc.collect()
        assert alive() is not None
        device.gate.set()
        found = load_tensors(ticket.wait().path)["net/weight"]
        assert found.tolist() == list(range(5000))
        deadline = time.monotonic() + 1
        while alive() is not None and time.monotonic() < deadline:
            gc.collect()
        assert alive() is None


def test_all_events_are_waited_for_also_when_one_fails():
    events = [mock.Mock(), mock.Mock(), mock.Mock()]
    events[0].wait.side_effect = RuntimeError("first")
    events[1].wait.side_effect = RuntimeError("second")
    issued = Issued(events, lambda: None)
    with pytest.raises(RuntimeError, match="first"):
        issued.wait()
    assert all(event.wait.called for event in events)
    events[2].done.return_value = False
    assert not issued.done()


def test_who_copies_what():
    tensor = torch.ones(3)
    assert device_of(tensor) is None
    assert [foreign(torch.device(d)) for d in ("cpu", "cuda:1", "mps", "xpu")] == [
        False,
        False,
        True,
        True,
    ]


PLACE = torch.device("cuda", 1)
STREAM = torch.cuda.Stream


class Current:
    """What torch keeps for each thread: a current device, the first one in a new thread, and for
    each device a current stream. Streams are stand-ins; they refuse what torch's own would."""

    def __init__(self):
        self.device_index, self.made = 0, []
        self.compute = mock.create_autospec(STREAM, instance=True)
        self._streams = {}

    @contextlib.contextmanager
    def device(self, place):
        before, self.device_index = self.device_index, place.index
        try:
            yield
        finally:
            self.device_index = before

    def new_stream(self, place):
        self.made.append((place, mock.create_autospec(STREAM, instance=True)))
        return self.made[-1][1]

    @contextlib.contextmanager
    def stream(self, stream):
        place = next(place for place, one in self.made if one is stream)
        before = self.current_stream(place)
        with self.device(place):
            self._streams[place] = stream
            try:
                yield
            finally:
                self._streams[place] = before

    def current_stream(self, place):
        return self._streams.get(place, self.compute)


@pytest.fixture
def current(monkeypatch):
    found = Current()
    monkeypatch.setattr(torch.cuda, "Stream", found.new_stream)
    for name in ("current_stream", "device", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    return found


def test_the_calls_to_cuda(monkeypatch, current):
    """What is asked of which stream, and where."""
    event = mock.create_autospec(torch.cuda.Event, instance=True)
    new_event = mock.Mock(return_value=event)
    monkeypatch.setattr(torch.cuda, "Event", new_event)
    called = []

    def noting(name, answer=None):
        def call(*_, **__):
            called.append((name, current.device_index, current.current_stream(PLACE)))
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    cuda, compute = Cuda(), current.compute
    cuda.begin([CPU, PLACE])
    [(made_for, side)] = current.made
    assert made_for == PLACE
    side.wait_stream.assert_called_once_with(compute)
    compute.wait_stream.assert_not_called()
    target, source = mock.Mock(), mock.Mock(device=PLACE)
    target.copy_.side_effect = noting("copy")
    with cuda.issuing(PLACE):
        cuda.copy(target, source)
    assert current.current_stream(PLACE) is compute
    target.copy_.assert_called_once_with(source, non_blocking=True)
    source.record_stream.assert_called_once_with(side)
    event.record.side_effect = noting("record")
    point = cuda.event(PLACE)
    new_event.assert_called_once_with(blocking=True)
    event.record.assert_called_once_with(side)
    assert len(current.made) == 1  # a stream for each device
    point.hold()
    compute.wait_event.assert_called_once_with(event)
    event.synchronize.side_effect = noting("synchronize")
    event.synchronize.assert_not_called()
    point.wait()
    event.synchronize.assert_called_once_with()
    side.synchronize.side_effect = noting("settle")
    cuda.settle(PLACE)
    event.query.side_effect = noting("query", False)
    assert not point.done()
    event.query.side_effect = noting("query", RuntimeError("CUDA error"))
    assert point.done()
    assert called == [
        ("copy", 1, side),
        ("record", 1, compute),
        ("synchronize", 1, compute),
        ("settle", 1, compute),
        ("query", 1, compute),
        ("query", 1, compute),
    ]
    assert current.device_index == 0


@pytest.mark.parametrize("code", [0, 2])
def test_memory_that_cannot_be_pinned_is_used_as_it_is(monkeypatch, caplog, current, code):
    """And whether it can or not, it is tried on the GPU that is saved, not on the thread's."""
    runtime, places = mock.Mock(), []

    def on(answer):
        def call(*_, **__):
            places.append(current.device_index)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    runtime.cudaHostRegister.side_effect = on(code)
    runtime.cudaHostUnregister.side_effect = on(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: on(runtime)())
    forgotten = mock.Mock(side_effect=on(RuntimeError("CUDA error: out of memory")))
    monkeypatch.setattr(torch, "zeros", forgotten)
    cuda = Cuda()
    cuda.begin([PLACE])
    with caplog.at_level(logging.WARNING, "eke.checkpoint"):
        undo = cuda.pin(4096, 8192)
    runtime.cudaHostRegister.assert_called_once_with(4096, 8192, 1)
    if code == 0:
        assert caplog.text == ""
        undo()
        runtime.cudaHostUnregister.assert_called_once_with(4096)
    else:
        assert undo is None
        assert "cannot be pinned (CUDA's error 2)" in caplog.text
        assert forgotten.called  # or the thread's next kernel would fail with it
    assert places == [1, 1, 1]
    assert current.device_index == 0


PLACES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("place", PLACES)
def test_real_training_is_saved_as_it_is(tmp_path, place):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 30)).to(place)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.randn(8, 300, device=place)).square().mean().backward()
        optimizer.step()

    with Checkpointer(tmp_path, pool="256KiB", keep=Keep(last=9)) as ck:
        ck.attach(model=model, optimizer=optimizer)
        step()
        saves = []
        for number in range(4):
            expected = {k: v.detach().cpu().clone() for k, v in model.state_dict().items()}
            saves.append((ck.save(number), expected))
            step()
        for ticket, expected in saves:
            found = load_tensors(ticket.wait().path)
            assert all(torch.equal(found[f"model/{k}"], v) for k, v in expected.items())

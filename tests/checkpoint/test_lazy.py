"""What is captured while training goes on is, byte for byte, the state at `save`.

The disk is slow and the pool small, so that most of a state is still to be captured when `save`
returns, and training would overwrite it if nothing held it back.
"""

import contextlib
import threading
import time

import pytest
import torch
from torch import nn

from eke.checkpoint import Checkpointer, Keep, SaveError, Segment, Storage, load_tensors, verify
from eke.checkpoint.tensors import as_bytes

POOL = "32KiB"


class SlowStorage(Storage):
    """A disk that takes a while for every write."""

    def write(self, fd, data):
        time.sleep(0.002)
        return super().write(fd, data)


class Odd(nn.Module):
    """Parameters and buffers of every kind that is easy to get wrong."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(64, 96)
        self.norm = nn.BatchNorm1d(96)
        self.b = nn.Linear(96, 64, bias=False)
        self.tied = nn.Linear(64, 96, bias=False)
        self.tied.weight = self.a.weight
        self.conv = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
        self.low = nn.Parameter(torch.randn(40, 33, dtype=torch.bfloat16).t())
        self.wave = nn.Parameter(torch.randn(17, 5, dtype=torch.complex64))
        self.nothing = nn.Parameter(torch.empty(0, 7))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.randn(10, 64).to(torch.float8_e4m3fn), requires_grad=False)
        self.part = nn.Parameter(torch.randn(20, 64)[3:17:2, 1:])

    def forward(self, x):
        y = self.b(self.norm(self.a(x))) + self.tied(x)[:, :64] * self.scalar
        y = y + self.conv(x.view(-1, 8, 4, 2).repeat(1, 1, 1, 2)).mean() + self.low.float().mean()
        y = y + (self.wave.abs().sum() + self.nothing.sum()) * 1e-3
        return y[:, 1:] + self.part.mean(0)


OPTIMIZERS = {
    "adamw-loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(
        [q for q in p if not q.is_complex() and q.numel()], lr=0.01, fused=True
    ),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "lbfgs": lambda p: torch.optim.LBFGS(
        [q for q in p if q.dtype == torch.float32 and q.is_contiguous() and q.numel()],
        lr=0.01,
        max_iter=2,
    ),
}


def train(model, optimizer, steps=1, accumulate=1):
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            for _ in range(accumulate):
                loss = model(torch.randn(4, 64)).square().mean()
                loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def bits(tensors):
    return {name: bytes(as_bytes(tensor)) for name, tensor in tensors.items()}


def live(model, optimizers):
    """Every tensor of a synchronous save, as bytes, by its name in a checkpoint."""
    found = {f"model/{k}": v for k, v in model.state_dict().items()}
    names = {p: name for name, p in model.named_parameters()}
    for provider, optimizer in optimizers.items():
        for parameter, state in optimizer.state.items():
            found |= {
                f"{provider}/{names[parameter]}/{k}": v
                for k, v in state.items()
                if isinstance(v, torch.Tensor)
            }
    return bits(found)


def segments_of(path):
    """The same from the disk."""
    return bits({k: v for k, v in load_tensors(path).items() if "/shared/" not in k})


def slow_checkpointer(tmp_path, **more):
    return Checkpointer(tmp_path, storage=SlowStorage(), pool=POOL, keep=Keep(last=9), **more)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_lazy_is_byte_equal_to_synchronous(tmp_path, kind, accumulate):
    model = Odd()
    optimizer = OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad])
    with slow_checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=optimizer, rng=True)
        train(model, optimizer, 2)
        late = 0
        for step in range(3):
            expected = live(model, {"optimizer": optimizer})
            ticket = ck.save(step)
            late += ticket.state == "capturing"
            train(model, optimizer, accumulate=accumulate)
            assert ticket.wait("captured").state != "capturing"
            path = ticket.wait().path
            assert verify(path).ok
            found = segments_of(path)
            assert {k: found.get(k) for k in expected} == expected
        assert late, "something was captured while training went on"


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_without_the_hook_the_state_is_torn(tmp_path, kind):
    """The test above can fail: the same without the barrier before every step."""
    model = Odd()
    optimizer = OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad])
    ck = slow_checkpointer(tmp_path)
    ck.attach(model=model, optimizer=optimizer)
    train(model, optimizer, 2)
    ck._hook.remove()
    expected = live(model, {"optimizer": optimizer})
    ticket = ck.save(1)
    train(model, optimizer)
    found = {}
    with contextlib.suppress(SaveError):
        found = segments_of(ticket.wait().path)
    assert {k: found.get(k) for k in expected} != expected
    if ticket.error is not None:  # torch counted the change, so it was even found
        assert "was changed before it was captured" in str(ticket.error)
        assert "barrier()" in str(ticket.error)
    ck.close()


def test_two_optimizers_each_wait_for_their_own(tmp_path):
    """The first one's step goes through while nothing of the second one's is captured."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    first = torch.optim.AdamW(model[0].parameters())
    second = torch.optim.AdamW(model[1].parameters())
    both = {"optimizer": first, "second": second}

    def step_both(optimizers):
        model(torch.randn(4, 64)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    step_both(both.values())
    with slow_checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=first, extra={"second": second})
        expected = live(model, both)
        ticket = ck.save(1)
        second.step()  # without gradients: a step that changes nothing, but waits
        waited = ticket.stall_s
        assert ticket.state == "capturing", "the first one's tensors may still wait"
        step_both([first, second])
        assert ticket.stall_s > waited
        path = ticket.wait().path
        assert bits(load_tensors(path)) == expected
    names = {f.name for f in path.glob("*.safetensors")}
    assert names == {"rank00000.state.safetensors", "rank00000.state-2.safetensors"}


@pytest.mark.parametrize("barrier", [True, False])
def test_an_average_of_weights_needs_the_barrier(tmp_path, barrier):
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    ema = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    ck = slow_checkpointer(tmp_path)
    ck.attach(model=model, optimizer=optimizer, extra={"ema": ema})

    def step():
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        if barrier:
            ck.barrier()
        ema.update_parameters(model)

    step()
    step()
    expected = bits({f"ema/{k}": v for k, v in ema.state_dict().items()})
    ticket = ck.save(1)
    step()
    if barrier:
        found = bits(load_tensors(ticket.wait().path, "ema/*"))
        assert found == expected
    else:
        with pytest.raises(SaveError, match=r"the tensor ema/.* was changed before"):
            ticket.wait()
    ck.close()


def test_a_barrier_for_some_tensors_waits_for_those(tmp_path):
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    with slow_checkpointer(tmp_path) as ck:
        ck.attach(model=model)
        expected = bits({f"model/{k}": v for k, v in model.state_dict().items()})
        ticket = ck.save(1)
        with torch.no_grad():
            ck.barrier([model[0].weight])
            assert ticket.state == "capturing"
            model[0].weight.zero_()
            ck.barrier()
            assert ticket.state != "capturing"
            for layer in model:
                layer.weight.zero_()
        assert bits(load_tensors(ticket.wait().path)) == expected


def test_an_optimizer_that_is_not_attached_waits_too(tmp_path):
    model = nn.Linear(64, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with slow_checkpointer(tmp_path) as ck:
        ck.attach(model=model)
        model(torch.randn(4, 64)).square().mean().backward()
        expected = bits({f"model/{k}": v for k, v in model.state_dict().items()})
        ticket = ck.save(1)
        optimizer.step()
        assert bits(load_tensors(ticket.wait().path)) == expected


def test_buffers_and_objects_are_captured_before_save_returns(tmp_path):
    model = nn.Sequential(nn.Linear(8, 4096), nn.BatchNorm1d(4096))
    notes = {"history": [1, 2], "array": torch.arange(20_000)}
    with slow_checkpointer(tmp_path) as ck:
        ck.attach(model=model, rng=True, extra={"notes": notes})
        generator, mean = torch.get_rng_state(), model[1].running_mean.clone()
        ticket = ck.save(1)
        assert ticket.state == "capturing"
        model(torch.randn(4, 8))  # changes the buffers and the generator
        notes["history"].append(3)
        notes["array"].zero_()
        tensors = load_tensors(ticket.wait().path)
        assert torch.equal(tensors["rng/rank00000/torch"], generator)
        assert torch.equal(tensors["model/1.running_mean"], mean)
        assert torch.equal(tensors["notes/array"], torch.arange(20_000))
        ck.restore(only=["notes"])
        assert notes["history"] == [1, 2]


def test_a_providers_tensors_are_eager_unless_it_says_otherwise(tmp_path):
    tensors = {"eager": torch.ones(50_000), "lazy": torch.ones(50_000)}

    class Own:
        per_rank = False

        def segments(self):
            return [
                Segment("eager", tensors["eager"]),
                Segment("lazy", tensors["lazy"], "lazy", eager=False),
            ]

        def state(self):
            return None

        def fit(self, saved):
            raise AssertionError

        def load(self, saved):
            raise AssertionError

    with slow_checkpointer(tmp_path) as ck:
        ck.attach(extra={"own": Own()})
        ticket = ck.save(1)
        assert ticket.state == "capturing"
        tensors["eager"].zero_()
        assert load_tensors(ticket.wait().path)["own/eager"].min() == 1


def test_a_state_many_times_the_pool(tmp_path):
    model = nn.Linear(512, 1024)
    with Checkpointer(tmp_path, pool="64KiB") as ck:
        ck.attach(model=model)
        path = ck.save(1).wait().path
        assert torch.equal(load_tensors(path)["model/weight"], model.weight)
        assert verify(path).ok


def test_saves_back_to_back_are_written_in_order(tmp_path):
    model = nn.Linear(64, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    expected = []
    with slow_checkpointer(tmp_path) as ck:
        ck.attach(model=model)
        for step in range(6):
            expected.append(model.weight.detach().clone())
            ck.save(step)
            model(torch.randn(2, 64)).square().mean().backward()
            optimizer.step()
        ck.wait()
        assert ck.steps() == list(range(6))
        for step, weight in enumerate(expected):
            path = tmp_path / f"step-{step:09d}"
            assert torch.equal(load_tensors(path)["model/weight"], weight)


def test_restore_sees_what_was_just_saved(tmp_path):
    model = nn.Linear(64, 512)
    with slow_checkpointer(tmp_path) as ck:
        ck.attach(model=model)
        weight = model.weight.detach().clone()
        ck.save(1)
        report = ck.restore()
        assert report.step == 1
        assert torch.equal(model.weight, weight)


def test_training_in_other_threads(tmp_path):
    """Two models stepped by two threads while a third saves: every checkpoint is one state."""
    models = [nn.Linear(64, 256) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    lock, over = threading.Lock(), threading.Event()
    with slow_checkpointer(tmp_path) as ck:
        for name, model, optimizer in zip("ab", models, optimizers, strict=True):
            ck.attach(extra={name: model, f"opt_{name}": _named(optimizer, model)})

        def loop(model, optimizer):
            while not over.is_set():
                model(torch.randn(2, 64)).square().mean().backward()
                with lock:
                    optimizer.step()
                optimizer.zero_grad()

        threads = [
            threading.Thread(target=loop, args=pair)
            for pair in zip(models, optimizers, strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            for step in range(8):
                with lock:
                    expected = [m.weight.detach().clone() for m in models]
                    ticket = ck.save(step)
                found = load_tensors(ticket.wait().path)
                assert torch.equal(found["a/weight"], expected[0])
                assert torch.equal(found["b/weight"], expected[1])
        finally:
            over.set()
            for thread in threads:
                thread.join()


def _named(optimizer, model):
    from eke.checkpoint import OptimizerProvider

    return OptimizerProvider(optimizer, model)

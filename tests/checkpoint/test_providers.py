import random

import numpy as np
import pytest
import torch
from torch import nn

from eke.checkpoint import Checkpointer, Fit, ObjectProvider, Segment, StateProvider
from eke.checkpoint.providers import ModuleProvider, Spec, compare, provider_of, unwrap
from eke.errors import InputError


def test_compare():
    saved = {"a": Spec("float32", (2,)), "b": Spec("float32", (2,)), "c": Spec("float32", (2,))}
    live = {"b": torch.zeros(2, dtype=torch.float64), "c": torch.zeros(2), "d": torch.zeros(1)}
    assert compare(saved, live) == Fit(["d"], ["a"], ["b"])


def test_wrappers_do_not_change_names():
    inner = nn.Linear(2, 2)
    compiled = torch.compile(inner, backend="eager")
    assert unwrap(compiled) is inner
    assert [s.key for s in ModuleProvider(compiled).segments()] == ["weight", "bias"]


def test_groups_of_a_module_and_what_cannot_wait():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].requires_grad_(False)
    segments = {s.key: s for s in ModuleProvider(model).segments()}
    buffers = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert {k for k, s in segments.items() if s.group == "frozen"} == {"0.weight", "0.bias"}
    assert {k for k, s in segments.items() if s.group == "state"} == {"1.weight", "1.bias"}
    assert {k for k, s in segments.items() if s.group == "buffers"} == buffers
    assert {k for k, s in segments.items() if s.eager} == buffers


def test_memory_that_comes_and_goes_cannot_wait():
    class FullyShardedDataParallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

    segments = ModuleProvider(nn.Sequential(FullyShardedDataParallel())).segments()
    assert [s.eager for s in segments] == [True, True]


def test_buffers_that_are_not_persistent_are_not_saved():
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.ones(3), persistent=False)
    assert [s.key for s in ModuleProvider(model).segments()] == ["weight", "bias"]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.calls = 0

    def get_extra_state(self):
        return {"calls": self.calls, "mask": torch.tensor([True, False])}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_extra_state_of_modules(tmp_path):
    model = nn.ModuleDict({"inner": Counting(), "plain": nn.Linear(1, 1)})
    model["inner"].calls = 7
    top = Counting()
    top.calls = 3
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, extra={"top": top})
        ck.save(0).wait()
        model["inner"].calls = top.calls = 0
        report = ck.restore()
    assert (model["inner"].calls, top.calls) == (7, 3)
    assert report.missing == report.unexpected == ()


def test_a_state_dict_that_is_not_live_is_refused():
    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(
        lambda module, state, prefix, meta: state.update(extra=torch.ones(1))
    )
    with pytest.raises(InputError, match=r"'extra', which is none of its parameters"):
        ModuleProvider(model).segments()


def test_every_generator_comes_back(tmp_path):
    def draw():
        numbers = (random.random(), random.gauss(0, 1), np.random.standard_normal())  # noqa: NPY002
        return (*numbers, torch.rand(3).tolist(), torch.randn(2).tolist())

    draw()
    with Checkpointer(tmp_path) as ck:
        ck.attach(rng=True)
        ck.save(0).wait()
        first = draw()
        assert draw() != first
        assert ck.restore().left_alone == ()
    assert draw() == first


def test_cuda_states_of_another_machine_are_left_alone(tmp_path, monkeypatch):
    assert not torch.cuda.is_available(), "this test pretends to have a GPU at save time"
    with monkeypatch.context() as patch, Checkpointer(tmp_path) as ck:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "get_rng_state_all", lambda: [torch.zeros(16, dtype=torch.uint8)])
        ck.attach(rng=True)
        ck.save(0).wait()
    with Checkpointer(tmp_path) as ck:
        ck.attach(rng=True)
        assert ck.restore().left_alone == ("rng/cuda",)


def test_dicts_and_lists_are_filled_in_place(tmp_path):
    notes, items, inner = {"a": 1, "b": [1, 2]}, [1, "x"], torch.arange(3)
    notes["tensor"] = inner
    with Checkpointer(tmp_path) as ck:
        ck.attach(extra={"notes": notes, "items": items})
        ck.save(0).wait()
        notes["a"] = 5
        notes["later"] = True
        items.clear()
        inner.zero_()
        ck.restore()
    assert list(notes) == ["a", "b", "tensor"]
    assert notes["tensor"].tolist() == [0, 1, 2]
    assert items == [1, "x"]


def test_a_dict_where_a_list_was_is_an_error(tmp_path):
    with Checkpointer(tmp_path) as ck:
        ck.attach(extra={"x": {"a": 1}})
        ck.save(0).wait()
    with Checkpointer(tmp_path) as ck:
        ck.attach(extra={"x": [1]})
        with pytest.raises(Exception, match="a dict where a list is attached"):
            ck.restore()


def test_functions_as_a_provider(tmp_path):
    box = {"value": (1, {2, 3})}
    provider = ObjectProvider(lambda: box["value"], lambda saved: box.update(value=saved))
    with Checkpointer(tmp_path) as ck:
        ck.attach(extra={"box": provider})
        ck.save(0).wait()
        box["value"] = None
        ck.restore()
    assert box["value"] == (1, {2, 3})


class Pages:
    """A user's provider: tensors that it makes up as it goes, in a group of their own."""

    per_rank = False

    def __init__(self, fill):
        self.pages = {f"page{i}": torch.full((3,), float(fill + i)) for i in range(4)}

    def segments(self):
        return [Segment(key, page, "pages") for key, page in self.pages.items()]

    def state(self):
        return {"count": len(self.pages)}

    def fit(self, saved):
        return compare(saved.tensors, self.pages)

    def load(self, saved):
        assert saved.state == {"count": 4}
        self.pages = {key: saved.read(key) for key in saved.tensors}


def test_a_users_own_provider(tmp_path):
    assert isinstance(Pages(0), StateProvider)
    with Checkpointer(tmp_path) as ck:
        ck.attach(extra={"pages": Pages(5)})
        path = ck.save(0).wait().path
    assert (path / "rank00000.pages.safetensors").exists()
    other = Pages(0)
    with Checkpointer(tmp_path) as ck:
        ck.attach(extra={"pages": other})
        ck.restore()
    assert other.pages["page3"].tolist() == [8, 8, 8]


@pytest.mark.parametrize("value", [5, "text", None, object(), {1, 2}, (1,), torch.ones(2)])
def test_what_has_no_state(value):
    with pytest.raises(InputError, match="'thing' cannot be attached"):
        provider_of(value, "thing")
    with pytest.raises(InputError, match="'thing' cannot be attached"):
        provider_of(torch.nn.Linear, "thing")


SCHEDULERS = {
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 1, 3]),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.ConstantLR(o, 0.1),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [2],
    ),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 0.9, cycle_momentum=False),
}


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_torchs_schedulers(tmp_path, name):
    def make():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return model, optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer, scheduler):
        out = []
        for n in range(6):
            optimizer.step()
            scheduler.step(*([float(n)] if name == "plateau" else []))
            out.append(optimizer.param_groups[0]["lr"])
        return out

    model, optimizer, scheduler = make()
    rates(optimizer, scheduler)
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=optimizer, scheduler=scheduler)
        ck.save(6).wait()
    expected = rates(optimizer, scheduler)
    model, optimizer, scheduler = make()
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=optimizer, scheduler=scheduler)
        ck.restore()
    assert rates(optimizer, scheduler) == expected


def test_two_saved_tensors_do_not_become_one_in_silence(tmp_path):
    def model(*, tied, alike=False):
        torch.manual_seed(3)
        made = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
        if alike:
            made["b"].load_state_dict(made["a"].state_dict())
        if tied:
            made["b"].weight = made["a"].weight
        return made

    for alike in (False, True):
        saved, live = model(tied=False, alike=alike), model(tied=True)
        with Checkpointer(tmp_path / str(alike)) as ck:
            ck.attach(model=saved)
            ck.save(1).wait()
        with Checkpointer(tmp_path / str(alike)) as ck:
            ck.attach(model=live)
            nn.init.zeros_(live["a"].weight)
            if alike:
                ck.restore()
                assert torch.equal(live["b"].weight, saved["b"].weight)
            else:
                with pytest.raises(InputError, match="are one tensor now, and were two"):
                    ck.restore()
                report = ck.restore(strict=False)
                assert report.mismatched == ("model/a.weight", "model/b.weight")
                assert not live["a"].weight.any()

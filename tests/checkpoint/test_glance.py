import torch
from torch import nn

from eke.checkpoint import Segment
from eke.checkpoint.glance import glance
from eke.checkpoint.optimizer_state import OptimizerProvider
from eke.checkpoint.providers import ModuleProvider, ObjectProvider


def test_a_module_is_not_asked_for_its_state(monkeypatch):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_module("none", None)
    monkeypatch.setattr(ModuleProvider, "segments", None)
    monkeypatch.setattr(OptimizerProvider, "segments", None)
    found = glance(ModuleProvider(model), {})
    assert {id(t) for t in found.tensors} == {
        id(t) for t in model.state_dict(keep_vars=True).values()
    }
    assert found.stateless
    assert found.segments is None
    optimizer = torch.optim.AdamW(model.parameters())
    assert glance(OptimizerProvider(optimizer, model), {}).segments is None


class Extra(nn.Linear):
    def get_extra_state(self):
        return 1

    def set_extra_state(self, state):
        raise AssertionError("not at save")


class Odd(nn.Linear):
    def state_dict(self, *args, **more):
        return super().state_dict(*args, **more)


def test_a_module_with_a_state_of_its_own_is_asked():
    for inner in (Extra(2, 2), Odd(2, 2)):
        model = nn.Sequential(inner)
        found = glance(ModuleProvider(model), {})
        assert [segment.key for segment in found.segments] == ["0.weight", "0.bias"]
        assert not found.stateless
        optimizer = torch.optim.SGD(model.parameters())
        assert glance(OptimizerProvider(optimizer, model), {}).segments == []


def test_everything_else_is_asked():
    class Mine(ObjectProvider):
        def segments(self):
            return [Segment("t", torch.ones(1))]

    found = glance(Mine(lambda: None, print), {})
    assert [segment.key for segment in found.segments] == ["t"]
    assert found.tensors == [found.segments[0].tensor]


def test_an_update_leaves_no_mark():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    providers = [ModuleProvider(model), OptimizerProvider(optimizer, model)]

    def marks():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return [glance(provider, {}).mark for provider in providers]

    assert marks() == marks()

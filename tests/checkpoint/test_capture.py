import pytest
import torch
from torch import nn

from eke.checkpoint import ObjectProvider, Segment
from eke.checkpoint.capture import capture
from eke.checkpoint.providers import ModuleProvider, RngProvider
from eke.distributed import World
from eke.errors import InputError


class Plain:
    def __init__(self, *segments, state=None, per_rank=False):
        self._segments, self._state, self.per_rank = segments, state, per_rank

    def segments(self):
        return self._segments

    def state(self):
        return self._state

    def fit(self, saved):
        raise AssertionError("not at save")

    def load(self, saved):
        raise AssertionError("not at save")


def take(**providers):
    return capture(providers, 1, World())


def test_tied_weights_are_taken_once():
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    found = take(model=ModuleProvider(model), again=ModuleProvider(model["a"]))
    assert [held.name for held in found.shared] == ["model/a.weight", "model/a.bias"]
    assert found.aliases == {
        "model/b.weight": "model/a.weight",
        "again/weight": "model/a.weight",
        "again/bias": "model/a.bias",
    }


def test_overlapping_views_and_empty_tensors_are_not_tied():
    base = torch.arange(6.0)
    views = {"half": base[:3], "all": base, "square": base.view(2, 3), "e": base[:0], "f": base[:0]}
    found = take(p=Plain(*(Segment(k, v) for k, v in views.items())))
    assert len(found.shared) == 5
    assert found.aliases == {}


def test_tensors_in_objects_stay_apart_from_segments():
    tensor = torch.ones(2)
    found = take(p=Plain(Segment("w", tensor), state={"w2": tensor, "again": [tensor]}))
    assert {(held.name, held.role) for held in found.shared} == {
        ("p/w", "segment"),
        ("p/w2", "object"),
    }
    assert found.aliases == {"p/again/0": "p/w2"}


def test_what_belongs_to_a_rank_has_it_in_its_name():
    found = take(rng=RngProvider(), mine=Plain(Segment("t", torch.ones(1)), per_rank=True))
    assert {held.name for held in found.own} == {
        "rng/rank00000/torch",
        "rng/rank00000/numpy/state/key",
        "mine/rank00000/t",
    }
    assert found.shared == []
    assert found.per_rank == {"rng": True, "mine": True}


def test_two_tensors_of_one_name_are_refused():
    twice = Plain(Segment("t", torch.ones(1)), Segment("t", torch.ones(1)))
    with pytest.raises(InputError, match="one name"):
        take(p=twice)
    clash = Plain(Segment("t", torch.ones(1)), state={"t": torch.ones(1)})
    with pytest.raises(InputError, match="would both be called p/t"):
        take(p=clash)


@pytest.mark.parametrize("group", ["", "../x", "UPPER", "a b", "-x", "a" * 65])
def test_unusable_groups(group):
    with pytest.raises(InputError, match="unusable group"):
        take(p=Plain(Segment("t", torch.ones(1), group)))


def test_unusual_tensors_are_named():
    with pytest.raises(InputError, match="the tensor p/t has the layout"):
        take(p=Plain(Segment("t", torch.eye(2).to_sparse())))


def test_an_unsaveable_object_is_named_by_provider():
    with pytest.raises(InputError, match=r"sched\['fn'\] is a builtin_function"):
        take(sched=ObjectProvider(lambda: {"fn": print}, print))

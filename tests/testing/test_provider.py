"""The conformance check passes eke's own providers, and finds what is wrong with broken ones."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import eke
from eke.checkpoint import Fit, ModuleProvider, ObjectProvider, OptimizerProvider, RngProvider
from eke.checkpoint.providers import Segment, compare
from eke.errors import InputError
from eke.testing import assert_provider


class Average:
    """A running average of activations: it changes with every forward pass, and grows."""

    per_rank = False

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.means = {name: torch.randn(3, 2) for name in ("a", "b")}
        self.seen = seed

    def segments(self):
        return [Segment(key, tensor) for key, tensor in self.means.items()]

    def state(self):
        return {"seen": self.seen}

    def fit(self, saved):
        live = {key: t for key, t in self.means.items() if key in saved.tensors}
        return Fit(mismatched=compare(saved.tensors, live).mismatched)

    def load(self, saved):
        self.means = {key: saved.read(key) for key in saved.tensors}
        self.seen = saved.state["seen"]

    def forward(self):
        for tensor in self.means.values():
            tensor.mul_(0.9).add_(1)
        self.seen += 1


def fresh():
    return Average(seed=7)


def test_a_sound_provider():
    provider = Average()
    assert_provider(provider, fresh=fresh, forward=provider.forward)
    assert_provider(provider, disturb=provider.forward)
    assert eke.testing.assert_provider is assert_provider


def test_ekes_own_providers():
    torch.manual_seed(0)

    def trained(steps):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        optimizer = torch.optim.AdamW(model.parameters())

        def forward():
            model(torch.randn(5, 4)).square().sum().backward()

        for _ in range(steps):
            forward()
            optimizer.step()
        return model, optimizer, forward

    model, optimizer, forward = trained(3)
    assert_provider(
        ModuleProvider(model), fresh=lambda: ModuleProvider(trained(0)[0]), forward=forward
    )
    for steps in (0, 1):  # into one that has no state yet, and into one that has
        assert_provider(
            OptimizerProvider(optimizer, model),
            fresh=lambda steps=steps: OptimizerProvider(*trained(steps)[1::-1]),
            forward=forward,
        )

    def draw():
        random.random()
        np.random.rand()  # noqa: NPY002
        torch.rand(1)

    assert_provider(RngProvider(), disturb=draw)
    notes = {"seen": 5, "where": [1, 2]}
    assert_provider(ObjectProvider.of_value(notes), disturb=lambda: notes.update(seen=6, more=1))


class Copies(Average):
    def segments(self):
        return [Segment(key, tensor.clone()) for key, tensor in self.means.items()]


class Twice(Average):
    def segments(self):
        return [*super().segments(), *super().segments()[:1]]


class Wanders(Average):
    calls = 0

    def segments(self):
        self.calls += 1
        return [Segment(f"{key}{self.calls}", tensor) for key, tensor in self.means.items()]


class Folder(Average):
    def segments(self):
        return [Segment(key, tensor, "../up") for key, tensor in self.means.items()]


class Nameless(Average):
    def segments(self):
        return [Segment("", tensor) for tensor in self.means.values()]


class Sparse(Average):
    def segments(self):
        return [Segment("s", self.means["a"].to_sparse())]


class Numbers(Average):
    def segments(self):
        return [Segment("seen", self.seen)]


class Tuples(Average):
    def segments(self):
        return list(self.means.items())


class Unsaveable(Average):
    def state(self):
        return {"seen": self.seen, "how": print}


class Restless(Average):
    def state(self):
        self.seen += 1
        return super().state()


class FitsByLoading(Average):
    def fit(self, saved):
        self.load(saved)
        return Fit()


class NeverFits(Average):
    def fit(self, saved):
        return Fit(missing=["a"])


class FitsWithBool(Average):
    def fit(self, saved):
        return True


class Forgets(Average):
    def load(self, saved):
        saved.copy_into("a", self.means["a"])
        self.seen = saved.state["seen"]


class Casts(Average):
    def load(self, saved):
        super().load(saved)
        self.means["b"] = self.means["b"].double()


class Leftover(Average):
    def load(self, saved):
        super().load(saved)
        self.means["old"] = torch.zeros(2)


class Loses(Average):
    def load(self, saved):
        super().load(saved)
        del self.means["a"]


class OnlyTensors(Average):
    def load(self, saved):
        self.means = {key: saved.read(key) for key in saved.tensors}


class Hoards(Average):
    def load(self, saved):
        super().load(saved)
        self.saved = saved


class Fails(Average):
    def load(self, saved):
        raise KeyError("nothing such")


class Patient(Average):
    """Says that a forward pass does not change what one does change."""

    def segments(self):
        return [Segment(key, tensor, eager=False) for key, tensor in self.means.items()]


class RankAsNumber(Average):
    per_rank = 0


class NoFit(Average):
    fit = None


BROKEN = [
    (Copies, r"segments\(\) gives other memory for 'a'.*live tensor, not a copy"),
    (Twice, r"segments\(\) has two tensors of the key 'a': name them apart"),
    (Wanders, r"segments\(\) does not have 'a\d' each time: keys must be stable"),
    (Folder, r"segments\(\) has the group '\.\./up' for 'a': use a-z"),
    (Nameless, r"segments\(\) has the key ''"),
    (Sparse, r"segments\(\) has what a checkpoint cannot hold: the tensor s has the layout"),
    (Numbers, r"segments\(\) has a int as 'seen': return it in state\(\) instead"),
    (Tuples, r"segments\(\) does not return a list of Segment"),
    (Unsaveable, r"state\(\) returns what a checkpoint cannot hold: .*\['how'\]"),
    (Restless, r"state\(\) returns something else the second time"),
    (FitsByLoading, r"fit\(\) changes the state: it only compares"),
    (NeverFits, r"fit\(\) calls provider/a missing in a state of its own making"),
    (FitsWithBool, r"fit\(\) returns a bool: return a Fit"),
    (Forgets, r"load\(\) does not bring back the bits of the segment 'b': call saved\.copy_into"),
    (Casts, r"load\(\) makes the segment 'b' .*float64.*; it was .*float32"),
    (Leftover, r"load\(\) leaves the segment 'old' behind"),
    (Loses, r"load\(\) loses the segment 'a': create it with saved\.read"),
    (OnlyTensors, r"load\(\) does not bring back what state\(\) returned"),
    (Hoards, r"load\(\) keeps what it was given alive"),
    (Fails, r"load failed: .*nothing such"),
    (Patient, r"says eager=False of 'a', but a forward pass changes it: say eager=True"),
    (RankAsNumber, r"per_rank is not True or False"),
    (NoFit, r"fit is missing"),
]


@pytest.mark.parametrize(("kind", "match"), BROKEN, ids=[kind.__name__ for kind, _ in BROKEN])
def test_what_is_broken_is_named_with_its_cure(kind, match):
    provider = kind()
    with pytest.raises(AssertionError, match=match) as caught:
        assert_provider(provider, fresh=lambda: kind(seed=7), forward=provider.forward)
    assert str(caught.value).startswith(kind.__name__)
    assert "\n" not in str(caught.value)


def test_a_check_that_would_prove_nothing_is_refused():
    with pytest.raises(InputError, match=r"give either fresh=, .* or disturb="):
        assert_provider(Average())
    with pytest.raises(InputError, match="give either"):
        assert_provider(Average(), fresh=fresh, disturb=print)
    with pytest.raises(InputError, match="restoring it would prove nothing"):
        assert_provider(Average(), fresh=Average)

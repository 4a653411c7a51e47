import pytest
import torch
from torch import nn

from eke.checkpoint.objects import encode
from eke.checkpoint.optimizer_state import OptimizerProvider
from eke.checkpoint.remembered import Remembered


def updated(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        torch.optim.SGD,
        torch.optim.Adagrad,
        torch.optim.NAdam,
        lambda parameters: torch.optim.AdamW([{"params": [p]} for p in parameters]),
    ],
    ids=["AdamW", "SGD", "Adagrad", "NAdam", "many groups"],
)
def test_the_object_is_the_providers_own(make):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = updated(make(list(model.parameters())))
    provider = OptimizerProvider(optimizer, model)
    remembered = Remembered(provider)
    for rate in (0.5, torch.tensor([0.25])):
        updated(optimizer)
        optimizer.param_groups[-1]["lr"] = rate
        tree, tensors = encode(remembered.state(), "opt")
        assert (tree, tensors.keys()) == (
            encode(provider.state(), "opt")[0],
            encode(provider.state(), "opt")[1].keys(),
        )
        optimizer.param_groups[-1]["lr"] = 0.1


@pytest.mark.parametrize("place", ["parameter", "all"])
def test_numbers_in_the_state_are_read_each_time(place):
    model = nn.Linear(2, 2)
    optimizer = updated(torch.optim.AdamW(model.parameters()))
    provider = OptimizerProvider(optimizer, model)
    key = model.weight if place == "parameter" else "all"
    optimizer.state.setdefault(key, {})["n"] = 1
    remembered = Remembered(provider)
    optimizer.state[key]["n"] = 2
    assert remembered.state() == provider.state()
    assert "2" in str(remembered.state())

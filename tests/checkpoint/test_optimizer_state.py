import pytest
import torch
from torch import nn

from eke.checkpoint import Checkpointer, CorruptCheckpoint, Keep, OptimizerProvider
from eke.errors import InputError


def train(model, optimizer, steps=3):
    torch.manual_seed(5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def state_bits(model, optimizer):
    return {
        (name, key): value.numpy().tobytes() if isinstance(value, torch.Tensor) else value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if not isinstance(value, list)
    }


OPTIMIZERS = {
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw plain": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw amsgrad, tensor lr": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(0.1), amsgrad=True, foreach=False
    ),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("fresh", [True, False])
def test_training_goes_on_bit_for_bit(tmp_path, name, fresh):
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer)
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=optimizer)
        ck.save(3).wait()
    at_save = state_bits(model, optimizer)
    train(model, optimizer)
    expected = [p.detach().clone() for p in model.parameters()]
    if fresh:
        model = net(seed=1)
        optimizer = OPTIMIZERS[name](model.parameters())
    held = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=optimizer)
        ck.restore()
    assert state_bits(model, optimizer) == at_save
    for tensor in held:
        assert any(tensor is v for s in optimizer.state.values() for v in s.values()), "in place"
    train(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(expected, model.parameters(), strict=True))


def test_lbfgs_keeps_its_lists_of_tensors(tmp_path):
    def run(model, optimizer):
        torch.manual_seed(3)
        data = torch.randn(8, 6)
        for _ in range(2):

            def closure():
                optimizer.zero_grad()
                loss = model(data).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    run(model, optimizer)
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=optimizer)
        ck.save(1).wait()
        run(model, optimizer)
        expected = [p.detach().clone() for p in model.parameters()]
    model = net(seed=1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=optimizer)
        ck.restore()
    run(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(expected, model.parameters(), strict=True))


def test_state_follows_names_whatever_the_order_and_the_groups(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    before = state_bits(model, optimizer)
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=optimizer)
        ck.save(1).wait()
    other = net(seed=2)
    parameters = list(other.parameters())[::-1]
    regrouped = torch.optim.AdamW(
        [{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:]}]
    )
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=other, optimizer=regrouped)
        with pytest.raises(InputError, match="groups are split differently"):
            ck.restore()
        assert not regrouped.state, "nothing was touched"
        report = ck.restore(strict=False)
    assert "groups" in report.mismatched[0]
    assert state_bits(other, regrouped) == before
    assert regrouped.param_groups[0]["lr"] == 0.5


def test_hyperparameters_come_back(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.3}, {"params": model[2].parameters()}], lr=0.7
    )
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=optimizer)
        ck.save(0).wait()
        for group in optimizer.param_groups:
            group.update(lr=9.0, momentum=0.1)
        ck.restore()
    assert [(g["lr"], g["momentum"]) for g in optimizer.param_groups] == [(0.3, 0), (0.7, 0)]


def test_a_tensor_rate_is_filled_in_place(tmp_path):
    model = net()
    rate = torch.tensor(0.25)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=optimizer)
        ck.save(0).wait()
        rate.fill_(1.0)
        ck.restore()
    assert rate.item() == 0.25
    assert optimizer.param_groups[0]["lr"] is rate


def test_going_back_to_before_the_first_step_forgets_the_state(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=optimizer)
        ck.save(0).wait()
        train(model, optimizer)
        assert optimizer.state
        ck.restore()
    assert not optimizer.state


def test_parameters_that_were_added_or_removed(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model[2].parameters())
    train(model, optimizer)
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=optimizer)
        ck.save(1).wait()
    wider = torch.optim.AdamW(model.parameters())
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=wider)
        with pytest.raises(InputError, match=r"missing: optimizer/0\.bias, optimizer/0\.weight"):
            ck.restore()
    narrower = torch.optim.AdamW(model[2:3].parameters())
    narrower.param_groups[0]["params"].pop()
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=narrower)
        report = ck.restore(strict=False)
    assert report.unexpected == ("optimizer/2.bias",)
    assert len(narrower.state) == 1


def test_another_kind_of_optimizer_is_left_alone(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    train(model, optimizer)
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=optimizer)
        ck.save(1).wait()
    other = torch.optim.SGD(model.parameters(), lr=0.25)
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=other)
        with pytest.raises(InputError, match="has AdamW, this is SGD"):
            ck.restore()
        ck.restore(strict=False)
    assert not other.state
    assert other.param_groups[0]["lr"] == 0.25


def test_names_without_a_model():
    model = net()
    with pytest.raises(
        InputError, match=r"parameter 0 of the optimizer's group 0, of shape \(5, 6\)"
    ):
        OptimizerProvider(torch.optim.SGD(model.parameters(), lr=1)).state()
    named = OptimizerProvider(torch.optim.SGD(model.named_parameters(), lr=1))
    assert named.state()["groups"][0]["names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert "param_names" not in named.state()["groups"][0]["options"]


def test_gradients_are_not_saved_and_do_not_matter(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, steps=1)
    assert model[0].weight.grad is not None
    with Checkpointer(tmp_path, keep=Keep()) as ck:
        ck.attach(model=model, optimizer=optimizer)
        ck.save(1).wait()
        assert len(ck.restore().missing) == 0
    assert len(OptimizerProvider(optimizer, model).segments()) == 12


def test_state_is_converted_with_its_parameters_when_asked_to(tmp_path):
    """Into live state of the other type, or, as torch does it, into the parameter's type."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=optimizer)
        ck.save(1).wait()
    saved = optimizer.state[model[0].weight]
    for stepped in (False, True):
        other = net(seed=1).bfloat16()
        halved = torch.optim.AdamW(other.parameters())
        if stepped:
            other[0].weight.grad = torch.ones_like(other[0].weight)
            halved.step()
        held = dict(halved.state.get(other[0].weight, {}))
        with Checkpointer(tmp_path) as ck:
            ck.attach(model=other, optimizer=halved)
            report = ck.restore(cast=True)
        state = halved.state[other[0].weight]
        assert state["exp_avg"].dtype == torch.bfloat16
        assert torch.equal(state["exp_avg"], saved["exp_avg"].bfloat16())
        assert state["step"].dtype == torch.float32
        assert torch.equal(state["step"], saved["step"])
        assert all(state[key] is tensor for key, tensor in held.items())
        assert "optimizer/0.weight/exp_avg" in report.cast
        assert "optimizer/0.weight/step" not in report.cast
        other(torch.ones(1, 6, dtype=torch.bfloat16)).sum().backward()
        halved.step()


def test_frozen_and_new_parameters_are_told_apart(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model[0].parameters())
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=optimizer)
        ck.save(1).wait()
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=torch.optim.AdamW(model[2].parameters()))
        with pytest.raises(InputError) as caught:
            ck.restore()
    for text in (
        "the optimizer updates 2.bias now, which was frozen or did not exist when this was saved",
        "the optimizer no longer updates 0.bias: it is frozen now, or gone",
    ):
        assert text in str(caught.value)


def test_a_restore_that_fails_lets_go_of_no_state(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    with Checkpointer(tmp_path) as ck:
        ck.attach(model=model, optimizer=optimizer)
        path = ck.save(1).wait().path
        held = {p: dict(state) for p, state in optimizer.state.items()}
        [file] = path.glob("*.state.safetensors")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(CorruptCheckpoint, match="partly restored"):
            ck.restore(only=["optimizer", "model"])
    assert {p: state.keys() for p, state in optimizer.state.items()} == {
        p: state.keys() for p, state in held.items()
    }
    assert all(optimizer.state[p][k] is v for p, state in held.items() for k, v in state.items())

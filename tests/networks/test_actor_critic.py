"""The network of actor-critics: names, initial weights, hand numbers, and which parameters a loss reaches."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.networks import assert_orthogonal, gradients, seeded

from ddrl.networks.actor_critic import ActorCritic
from ddrl.networks.custom import NetworkError
from ddrl.networks.parameters import FlatParameters

each_sharing = pytest.mark.parametrize("shared", [False, True])


def made(network: str = "mlp", shape: tuple[int, ...] = (3,), seed: int = 0, **options: Any) -> ActorCritic:
    chosen = {"num_outputs": 4, "hidden_sizes": (6, 5), "activation": "tanh", "shared": False, **options}
    return ActorCritic(network, shape, generator=seeded(seed), **chosen)


def observations(num: int = 7, shape: tuple[int, ...] = (3,)) -> torch.Tensor:
    return torch.rand(num, *shape, generator=seeded(9))


@each_sharing
def test_names_and_shapes(shared: bool) -> None:
    net = made(shared=shared, log_std_dims=4, initial_log_std=-0.5)
    layers = {"0.weight": (6, 3), "0.bias": (6,), "1.weight": (5, 6), "1.bias": (5,)}
    expected = {f"actor.layers.{name}": shape for name, shape in layers.items()}
    expected |= {"policy_head.weight": (4, 5), "policy_head.bias": (4,), "log_std": (4,)}
    assert {name: tuple(value.shape) for name, value in net.policy_state().items()} == expected
    expected |= {"value_head.weight": (1, 5), "value_head.bias": (1,)}
    expected |= {} if shared else {f"critic.layers.{name}": shape for name, shape in layers.items()}
    assert {name: tuple(value.shape) for name, value in net.named_parameters()} == expected
    assert net.log_std.tolist() == [-0.5] * 4
    assert "log_std" not in dict(made(shared=shared).named_parameters())


def test_initial_weights() -> None:
    net, shared = (made(shared=shared, hidden_sizes=(8, 8)) for shared in (False, True))
    for layer in (*net.actor.layers, *net.critic.layers):
        assert_orthogonal(layer, math.sqrt(2))
    assert_orthogonal(net.policy_head, 0.01)
    assert_orthogonal(net.value_head, 1.0)
    assert not torch.equal(net.actor.layers[0].weight, net.critic.layers[0].weight)
    state = net.state_dict()
    assert all(torch.equal(state[name], value) for name, value in shared.policy_state().items())


@pytest.mark.parametrize(("shared", "value"), [(False, [3.5, 11.0]), (True, [2.0, -1.0])])
def test_outputs_by_hand(shared: bool, value: list[float]) -> None:
    """Features of the actor, relu(x0 - x1), are 1 and 0; of the critic, relu(x0 / 2 + 2 x1 + 1), 1.5 and 4."""
    net = made("mlp", (2,), num_outputs=2, hidden_sizes=(1,), activation="relu", shared=shared)
    by_hand = {
        "actor.layers.0": ([[1.0, -1.0]], [0.0]), "critic.layers.0": ([[0.5, 2.0]], [1.0]),
        "policy_head": ([[2.0], [-1.0]], [0.25, 0.0]), "value_head": ([[3.0]], [-1.0]),
    }  # fmt: skip
    state = {f"{name}.weight": torch.tensor(weight) for name, (weight, _) in by_hand.items()}
    state |= {f"{name}.bias": torch.tensor(bias) for name, (_, bias) in by_hand.items()}
    net.load_state_dict({name: value for name, value in state.items() if name in net.state_dict()})
    parameters, found = net(torch.tensor([[1.0, 0.0], [0.0, 1.5]]))
    torch.testing.assert_close(parameters, torch.tensor([[2.25, -1.0], [0.25, 0.0]]))
    torch.testing.assert_close(found, torch.tensor(value))


def reached(net: ActorCritic, loss: torch.Tensor) -> set[str]:
    """First words of the names of parameters that a loss reaches."""
    named = dict(net.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    pairs = zip(named, found, strict=True)
    return {name.split(".")[0] for name, each in pairs if each is not None and bool(each.abs().max() > 0)}


@each_sharing
@pytest.mark.parametrize(("network", "shape"), [("mlp", (3,)), ("conv", (10, 10, 4)), ("conv", (5, 5, 3))])
def test_which_parameters_a_loss_reaches(network: str, shape: tuple[int, ...], shared: bool) -> None:
    net = made(network, shape, shared=shared)
    for num in (1, 7):
        parameters, value = net(observations(num, shape))
        assert (parameters.shape, value.shape) == ((num, 4), (num,))
    assert value.std() > 0
    assert reached(net, value.square().sum()) == {"actor" if shared else "critic", "value_head"}
    assert reached(net, net(observations(7, shape))[0].square().sum()) == {"actor", "policy_head"}


@each_sharing
def test_gradient_equals_that_of_plain_layers(shared: bool) -> None:
    net, x = made(shared=shared), observations()
    actor, critic = (
        torch.tanh(trunk.layers[1](torch.tanh(trunk.layers[0](x))))
        for trunk in (net.actor, net.actor if shared else net.critic)
    )
    plain = net.policy_head(actor).square().sum() + net.value_head(critic).square().sum()
    loss = sum(output.square().sum() for output in net(x))
    expected, found = (torch.autograd.grad(each, list(net.parameters())) for each in (plain, loss))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@each_sharing
@pytest.mark.parametrize(("network", "shape"), [("mlp", (3,)), ("conv", (10, 10, 4))])
def test_forward_follows_its_parameters(network: str, shape: tuple[int, ...], shared: bool) -> None:
    """As views of a flat vector, after `load_state_dict`, in a deep copy, as float64."""
    net, other = (made(network, shape, seed=seed, shared=shared, log_std_dims=4) for seed in (0, 1))
    x, copied = observations(3, shape), copy.deepcopy(net)
    flat = FlatParameters(net)
    with torch.no_grad():
        flat.vector.zero_()
    assert all(float(output.detach().abs().max()) == 0 for output in net(x))
    assert float(copied(x)[1].detach().abs().max()) > 0
    net.load_state_dict(other.state_dict())
    doubled = copy.deepcopy(other).double()(x.double())
    for found, expected, double in zip(net(x), other(x), doubled, strict=True):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(double.float(), expected)
    sections = gradients(flat, sum((output.sum() for output in net(x)), net.log_std.sum()))
    assert any(bool(section.any()) for section in sections)


def test_a_policy_needs_only_the_policy_state() -> None:
    learner, policy = made(log_std_dims=4), made(seed=1, log_std_dims=4)
    state = learner.policy_state()
    assert not any(value.requires_grad for value in state.values())
    missing, unexpected = policy.load_state_dict(state, strict=False)
    assert not unexpected and {name.split(".")[0] for name in missing} == {"critic", "value_head"}
    x = observations()
    assert torch.equal(policy(x)[0], learner(x)[0])
    assert not torch.equal(policy(x)[1], learner(x)[1])


OWN = """
from torch import nn

def make(observation_shape, width=5):
    module = nn.Sequential(nn.Linear(observation_shape[0], width), nn.Tanh())
    module.register_buffer("scale", module[0].weight.detach()[0].clone())
    return module

kept = make((3,))
one_for_all = lambda observation_shape: kept
"""


def test_a_custom_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_actor_critic.py").write_text(OWN)
    monkeypatch.delitem(sys.modules, "own_actor_critic", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "own_actor_critic")
    parts = {"actor.0.weight", "actor.0.bias", "actor.scale", "policy_head.weight", "policy_head.bias"}
    for shared in (False, True):
        one, two = (made("own_actor_critic:make", shared=shared, kwargs={"width": 8}) for _ in range(2))
        assert all(torch.equal(one.state_dict()[name], value) for name, value in two.state_dict().items())
        assert one.policy_head.weight.shape == (4, 8) and set(one.policy_state()) == parts
        assert [output.shape for output in one(observations())] == [(7, 4), (7,)]
    net = made("own_actor_critic:make")
    assert not torch.equal(net.critic[0].weight, net.actor[0].weight)
    made("own_actor_critic:one_for_all", shared=True)
    with pytest.raises(
        NetworkError, match="one_for_all: returned the same parameters twice; make new ones at"
    ):
        made("own_actor_critic:one_for_all")

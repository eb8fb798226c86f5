"""The network of actor-critics: names, initial weights, hand numbers, and which parameters a loss reaches."""

from __future__ import annotations

import copy

import pytest
import torch
from support.networks import actor_critic, assert_orthogonal, gradients, seeded

from ddrl.networks.custom import NetworkError
from ddrl.networks.parameters import FlatParameters

each_sharing = pytest.mark.parametrize("shared", [False, True])


def observations(num: int = 7, shape: tuple[int, ...] = (3,)) -> torch.Tensor:
    return torch.rand(num, *shape, generator=seeded(9))


@each_sharing
def test_names_and_shapes(shared: bool) -> None:
    net = actor_critic(shared=shared, log_std_dims=4, initial_log_std=-0.5)
    layers = {"0.weight": (6, 3), "0.bias": (6,), "1.weight": (5, 6), "1.bias": (5,)}
    expected = {f"actor.layers.{name}": shape for name, shape in layers.items()}
    expected |= {"policy_head.weight": (4, 5), "policy_head.bias": (4,), "log_std": (4,)}
    assert {name: tuple(value.shape) for name, value in net.policy_state().items()} == expected
    expected |= {"value_head.weight": (1, 5), "value_head.bias": (1,)}
    expected |= {} if shared else {f"critic.layers.{name}": shape for name, shape in layers.items()}
    assert {name: tuple(value.shape) for name, value in net.named_parameters()} == expected
    assert net.log_std.tolist() == [-0.5] * 4
    assert "log_std" not in dict(actor_critic(shared=shared).named_parameters())


def test_initial_weights() -> None:
    net, shared = (actor_critic(shared=shared, hidden_sizes=(8, 8)) for shared in (False, True))
    assert_orthogonal(net.policy_head, 0.01)
    assert_orthogonal(net.value_head, 1.0)
    assert not torch.equal(net.actor.layers[0].weight, net.critic.layers[0].weight)
    state = net.state_dict()
    assert all(torch.equal(state[name], value) for name, value in shared.policy_state().items())


@pytest.mark.parametrize(("shared", "value"), [(False, [3.5, 11.0]), (True, [2.0, -1.0])])
def test_outputs_by_hand(shared: bool, value: list[float]) -> None:
    """Features of the actor, relu(x0 - x1), are 1 and 0; of the critic, relu(x0 / 2 + 2 x1 + 1), 1.5 and 4."""
    net = actor_critic("mlp", (2,), num_outputs=2, hidden_sizes=(1,), activation="relu", shared=shared)
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


@each_sharing
@pytest.mark.parametrize(("network", "shape"), [("mlp", (3,)), ("conv", (10, 10, 4))])
def test_forward_follows_its_parameters(network: str, shape: tuple[int, ...], shared: bool) -> None:
    """As views of a flat vector, after `load_state_dict`, in a deep copy."""
    net, other = (actor_critic(network, shape, seed=seed, shared=shared, log_std_dims=4) for seed in (0, 1))
    x, copied = observations(3, shape), copy.deepcopy(net)
    flat = FlatParameters(net)
    with torch.no_grad():
        flat.vector.zero_()
    assert all(float(output.detach().abs().max()) == 0 for output in net(x))
    assert float(copied(x)[1].detach().abs().max()) > 0
    net.load_state_dict(other.state_dict())
    for found, expected in zip(net(x), other(x), strict=True):
        torch.testing.assert_close(found, expected)
    sections = gradients(flat, sum((output.sum() for output in net(x)), net.log_std.sum()))
    assert any(bool(section.any()) for section in sections)


def test_a_custom_network_is_made_for_actor_and_critic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "own_networks")
    parts = {"actor.0.weight", "actor.0.bias", "actor.scale", "policy_head.weight", "policy_head.bias"}
    for shared in (False, True):
        net = actor_critic("own_networks:scaled", shared=shared, network_kwargs={"width": 8})
        assert net.policy_head.weight.shape == (4, 8) and set(net.policy_state()) == parts
        assert [output.shape for output in net(observations())] == [(7, 4), (7,)]
    net = actor_critic("own_networks:scaled")
    assert not torch.equal(net.critic[0].weight, net.actor[0].weight)
    actor_critic("own_networks:one_for_all", shared=True)
    with pytest.raises(
        NetworkError, match="one_for_all: returned the same parameters twice; make new ones at"
    ):
        actor_critic("own_networks:one_for_all")

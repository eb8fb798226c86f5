"""ddrl.networks.actor_critic: names, initial weights, hand numbers, and whose gradient reaches what."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddrl.networks.actor_critic import ActorCritic
from ddrl.networks.custom import NetworkError
from ddrl.networks.parameters import FlatParameters


def made(
    network: str = "mlp", shape: tuple[int, ...] = (3,), seed: int | None = 0, **options: Any
) -> ActorCritic:
    chosen = {"num_outputs": 4, "hidden_sizes": (6, 5), "activation": "tanh", "shared": False, **options}
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return ActorCritic(network, shape, generator=generator, **chosen)


def observations(num: int = 7, shape: tuple[int, ...] = (3,)) -> torch.Tensor:
    return torch.rand(num, *shape, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("shared", [False, True])
def test_names_and_shapes(shared: bool) -> None:
    net = made(shared=shared, log_std_dims=4, initial_log_std=-0.5)
    layers = {
        "layers.0.weight": (6, 3),
        "layers.0.bias": (6,),
        "layers.1.weight": (5, 6),
        "layers.1.bias": (5,),
    }
    expected = {f"actor.{name}": shape for name, shape in layers.items()}
    expected |= {"policy_head.weight": (4, 5), "policy_head.bias": (4,), "log_std": (4,)}
    assert {name: tuple(value.shape) for name, value in net.policy_state().items()} == expected
    expected |= {"value_head.weight": (1, 5), "value_head.bias": (1,)}
    expected |= {} if shared else {f"critic.{name}": shape for name, shape in layers.items()}
    assert {name: tuple(value.shape) for name, value in net.named_parameters()} == expected
    assert net.log_std.tolist() == [-0.5] * 4
    assert "log_std" not in dict(made(shared=shared).named_parameters())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("network", "shape"), [("mlp", (3,)), ("conv", (10, 10, 4)), ("conv", (4, 84, 84)), ("conv", (5, 5, 3))]
)
def test_outputs(network: str, shape: tuple[int, ...], shared: bool) -> None:
    net = made(network, shape, shared=shared)
    for num in (1, 7):
        x = observations(num, shape)
        parameters, value = net(x)
        assert parameters.shape == (num, 4)
        assert value.shape == (num,)
        with torch.inference_mode():
            assert torch.equal(net(x)[0], parameters)
    assert value.std() > 0


@pytest.mark.parametrize("shared", [False, True])
def test_initial_weights(shared: bool) -> None:
    net = made(shared=shared, hidden_sizes=(8, 8))
    gains = {"policy_head.weight": 0.01, "value_head.weight": 1.0}
    for name, parameter in net.named_parameters():
        value = parameter.detach()
        if name.endswith("bias"):
            assert value.abs().max() == 0
        else:
            short = value.T @ value if value.shape[0] > value.shape[1] else value @ value.T
            expected = gains.get(name, math.sqrt(2)) ** 2 * torch.eye(len(short))
            torch.testing.assert_close(short, expected, rtol=1e-4, atol=1e-6 * float(expected.max()))
    if not shared:
        assert not torch.equal(net.actor.layers[0].weight, net.critic.layers[0].weight)


def test_start_is_reproducible_and_one_actor_shared_or_not() -> None:
    before = torch.get_rng_state()
    first, second, other = (made(seed=seed).state_dict() for seed in (1, 1, 2))
    shared = made(seed=1, shared=True).policy_state()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["value_head.weight"], other["value_head.weight"])
    assert all(torch.equal(first[name], value) for name, value in shared.items())
    assert not torch.equal(made(seed=None).policy_head.weight, made(seed=None).policy_head.weight)


def set_by_hand(net: ActorCritic) -> None:
    with torch.no_grad():
        for name, values in {
            "actor.layers.0": ([[1.0, -1.0]], [0.0]),
            "critic.layers.0": ([[0.5, 2.0]], [1.0]),
            "policy_head": ([[2.0], [-1.0]], [0.25, 0.0]),
            "value_head": ([[3.0]], [-1.0]),
        }.items():
            if name.startswith("critic") and net.shared:
                continue
            layer = net.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            layer.weight.copy_(torch.tensor(values[0]))
            layer.bias.copy_(torch.tensor(values[1]))


@pytest.mark.parametrize(("shared", "value"), [(False, [3.5, 11.0]), (True, [2.0, -1.0])])
def test_outputs_by_hand(shared: bool, value: list[float]) -> None:
    """Features of the actor, relu(x0 - x1), are 1 and 0; of the critic, relu(x0 / 2 + 2 x1 + 1), 1.5 and 4."""
    net = made("mlp", (2,), num_outputs=2, hidden_sizes=(1,), activation="relu", shared=shared)
    set_by_hand(net)
    x = torch.tensor([[1.0, 0.0], [0.0, 1.5]])
    parameters = torch.tensor([[2.25, -1.0], [0.25, 0.0]])
    for found, expected in zip(net(x), (parameters, torch.tensor(value)), strict=True):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(net(x)[0], parameters)
    torch.testing.assert_close(net(x)[1], torch.tensor(value))


def reached(net: ActorCritic, loss: torch.Tensor) -> set[str]:
    """First words of the names of parameters that a loss reaches."""
    named = dict(net.named_parameters())
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name.split(".")[0]
        for name, gradient in zip(named, gradients, strict=True)
        if gradient is not None and bool(gradient.abs().max() > 0)
    }


@pytest.mark.parametrize(
    ("shared", "by_value"), [(False, {"critic", "value_head"}), (True, {"actor", "value_head"})]
)
@pytest.mark.parametrize(("network", "shape"), [("mlp", (3,)), ("conv", (5, 5, 3))])
def test_which_parameters_a_loss_reaches(
    network: str, shape: tuple[int, ...], shared: bool, by_value: set[str]
) -> None:
    net = made(network, shape, shared=shared)
    x = observations(7, shape)
    parameters, value = net(x)
    assert reached(net, value.square().sum()) == by_value
    parameters, value = net(x)
    assert reached(net, parameters.square().sum()) == {"actor", "policy_head"}


@pytest.mark.parametrize("shared", [False, True])
def test_gradient_equals_that_of_plain_layers(shared: bool) -> None:
    net = made(shared=shared)
    x = observations()
    parameters, value = net(x)
    actor, critic = (
        torch.tanh(trunk.layers[1](torch.tanh(trunk.layers[0](x))))
        for trunk in (net.actor, net.actor if shared else net.critic)
    )
    plain = net.policy_head(actor).square().sum() + net.value_head(critic).square().sum()
    named = dict(net.named_parameters())
    found = torch.autograd.grad(parameters.square().sum() + value.square().sum(), list(named.values()))
    for one, other in zip(found, torch.autograd.grad(plain, list(named.values())), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("network", "shape"), [("mlp", (3,)), ("conv", (10, 10, 4))])
@pytest.mark.parametrize("shared", [False, True])
def test_forward_follows_its_parameters(network: str, shape: tuple[int, ...], shared: bool) -> None:
    """As views of a flat vector, after `load_state_dict`, in a deep copy, as float64."""
    net, other = (made(network, shape, seed=seed, shared=shared, log_std_dims=4) for seed in (0, 1))
    x = observations(3, shape)
    copied = copy.deepcopy(net)
    flat = FlatParameters(net)
    with torch.no_grad():
        flat.vector.zero_()
    assert all(float(output.detach().abs().max()) == 0 for output in net(x))
    assert float(copied(x)[1].detach().abs().max()) > 0
    net.load_state_dict(other.state_dict())
    for found, expected in zip(net(x), other(x), strict=True):
        torch.testing.assert_close(found, expected)
    for found, expected in zip(copy.deepcopy(other).double()(x.double()), other(x), strict=True):
        torch.testing.assert_close(found.float(), expected)
    flat.differentiate(sum((output.sum() for output in net(x)), net.log_std.sum()))
    assert flat.vector.grad is not None
    assert float(flat.vector.grad.abs().max()) > 0


def test_a_policy_needs_only_the_policy_state() -> None:
    learner, player = made(log_std_dims=4), made(seed=1, log_std_dims=4)
    state = learner.policy_state()
    assert not any(value.requires_grad for value in state.values())
    missing, unexpected = player.load_state_dict(state, strict=False)
    assert not unexpected
    assert {name.split(".")[0] for name in missing} == {"critic", "value_head"}
    x = observations()
    assert torch.equal(player(x)[0], learner(x)[0])
    assert not torch.equal(player(x)[1], learner(x)[1])


OWN = """
from torch import nn

def make(observation_shape, width=5):
    module = nn.Sequential(nn.Linear(observation_shape[0], width), nn.Tanh())
    module.register_buffer("scale", module[0].weight.detach()[0].clone())
    return module

kept = make((3,))
def one_for_all(observation_shape):
    return kept
"""


def test_own_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_actor_critic.py").write_text(OWN)
    monkeypatch.delitem(sys.modules, "own_actor_critic", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "own_actor_critic")
    for shared in (False, True):
        one, two = (made("own_actor_critic:make", shared=shared, kwargs={"width": 8}) for _ in range(2))
        assert all(torch.equal(one.state_dict()[name], value) for name, value in two.state_dict().items())
        assert one.policy_head.weight.shape == (4, 8)
        assert set(one.policy_state()) == {
            *("actor.0.weight", "actor.0.bias", "actor.scale", "policy_head.weight", "policy_head.bias")
        }
        parameters, value = one(observations())
        assert (parameters.shape, value.shape) == ((7, 4), (7,))
    assert not torch.equal(made("own_actor_critic:make").critic[0].weight, one.actor[0].weight)
    made("own_actor_critic:one_for_all", shared=True)
    with pytest.raises(
        NetworkError, match="one_for_all: returned the same parameters twice; make new ones at"
    ):
        made("own_actor_critic:one_for_all")

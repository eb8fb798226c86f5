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
from ddrl.networks.mlp import FlatParameters
from ddrl.networks.trunks import NetworkError


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
        assert torch.equal(net.policy(x), parameters)
        assert torch.equal(net.value(x), value)
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


@pytest.mark.parametrize(
    ("shared", "value"), [(False, [3 * 2.5 - 1, 3 * 4.0 - 1]), (True, [3 * 1.0 - 1, -1.0])]
)
def test_outputs_by_hand(shared: bool, value: list[float]) -> None:
    """Actor features relu(x0 - x1): 1 and 0; critic features relu(x0 / 2 + 2 x1 + 1): 2.5 and 4."""
    net = made("mlp", (2,), num_outputs=2, hidden_sizes=(1,), activation="relu", shared=shared)
    set_by_hand(net)
    parameters, found = net(
        torch.tensor([[3.0, 2.0 - 2.0], [2.0, 1.0]]) - torch.tensor([[0.0, 0.0], [2.0, -0.5]])
    )
    del parameters, found
    x = torch.tensor([[1.0, 0.5], [2.0, 1.0]]) * torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    x = torch.tensor([[1.0, 0.0], [0.0, 1.5]]) + 0 * x
    torch.testing.assert_close(net.value(x), torch.tensor(value))


"""
"""

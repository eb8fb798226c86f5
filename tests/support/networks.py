"""Helpers of the tests of networks: small networks of each kind, comparisons of parameters, refusals."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from ddrl.networks.actor_critic import ActorCritic
from ddrl.networks.custom import NetworkError
from ddrl.networks.parameters import FlatParameters
from ddrl.networks.q_network import QNetwork
from ddrl.networks.trunks import make_trunk

SHAPES = {
    "mlp": (4,), "conv": (10, 10, 4), "nature": (4, 40, 40), "impala": (16, 16), "data_efficient": (30, 30, 3),
}  # fmt: skip
LSTM, GRU = ({"recurrent": kind, "recurrent_size": 7} for kind in ("lstm", "gru"))


def seeded(seed: int | None = 0) -> Generator | None:
    """Return a generator; for None, which stands for torch's global one, None."""
    return None if seed is None else torch.Generator().manual_seed(seed)


def actor_critic(
    network: str = "mlp", shape: tuple[int, ...] = (3,), *, seed: int | None = 0,
    hidden_sizes: tuple[int, ...] = (6, 5), activation: str = "tanh", network_kwargs: Any = None, **options: Any,
) -> ActorCritic:  # fmt: skip
    """Return a small actor-critic network with four outputs."""
    generator, given = seeded(seed), {"num_outputs": 4, "shared": False, **options}
    trunk_options = {"hidden_sizes": hidden_sizes, "activation": activation, "kwargs": network_kwargs}
    make = functools.partial(make_trunk, network, shape, generator=generator, **trunk_options)
    return ActorCritic(network, make, generator=generator, **given)


def q_network(network: str = "mlp", *, seed: int | None = 0, **options: Any) -> QNetwork:
    """Return a small network of the values of three actions, of observations of the shape in `SHAPES`."""
    shape, generator = options.pop("input_shape", SHAPES[network]), seeded(seed)
    given = {"num_actions": 3, "hidden_sizes": (8, 6), "activation": "relu", **options}
    layers = {"activation": given["activation"], "norm": given.pop("norm", "none")}
    make = functools.partial(make_trunk, network, shape, generator=generator, **layers)
    return QNetwork(make, generator=generator, **given)


def trunk(
    network: str, shape: tuple[int, ...], hidden_sizes: tuple[int, ...] = (6, 5), activation: str = "relu",
    *, seed: int | None = 0, norm: str = "none", **kwargs: Any,
) -> Any:  # fmt: skip
    """Return a trunk, whose features `make_trunk` counted rightly."""
    options = {"norm": norm, "kwargs": kwargs, "generator": seeded(seed)}
    module, width = make_trunk(network, shape, hidden_sizes=hidden_sizes, activation=activation, **options)
    assert module(torch.rand(2, *shape, generator=seeded())).shape == (2, width)
    return module


def refusal(network: str, shape: tuple[int, ...], **options: Any) -> str:
    """Return the one line with which a trunk is refused."""
    with pytest.raises(NetworkError) as refused:
        trunk(network, shape, **options)
    message = str(refused.value)
    assert message.startswith(f"network {network}: ") and "\n" not in message
    assert refused.value.__suppress_context__ or refused.value.__context__ is None
    return message


def count(module: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def same(one: nn.Module, other: nn.Module) -> bool:
    """Return whether all parameters and buffers are equal to the last bit."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


def assert_orthogonal(layer: Any, gain: float) -> None:
    """The rows or columns of a layer's weights are orthogonal and `gain` long; its biases are zero."""
    weight = layer.weight.detach().flatten(1)
    short = weight.T @ weight if weight.shape[0] > weight.shape[1] else weight @ weight.T
    torch.testing.assert_close(short, gain**2 * torch.eye(len(short)), atol=1e-4 * gain**2, rtol=1e-4)
    assert layer.bias.abs().max() == 0


def gradients(flat: FlatParameters, loss: Tensor) -> list[Tensor]:
    """Return the gradient of each parameter, by way of the flat vector."""
    flat.differentiate(loss)
    assert flat.vector.grad is not None
    return list(flat.vector.grad.split([parameter.numel() for parameter in flat.parameters]))

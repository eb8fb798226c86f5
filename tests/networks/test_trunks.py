"""ddrl.networks.trunks: shapes, initial weights, hand numbers, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ddrl.networks.custom import NetworkError
from ddrl.networks.trunks import Trunk, make_trunk, to_input

IMAGES = [(10, 10, 4), (4, 84, 84), (84, 84, 1), (5, 5, 3), (8, 7, 8), (10, 10, 20)]  # channels last
CONVOLUTIONS = {  # shape -> (channels, kernel, stride) of each, and the inputs of the first dense layer
    (10, 10, 4): ([(16, 3, 1), (32, 3, 1)], 32 * 6 * 6),
    (5, 5, 3): ([(16, 3, 1), (32, 3, 1)], 32),
    (3, 15, 20): ([(16, 3, 1), (32, 3, 1)], 32 * 11 * 16),
    (16, 35, 3): ([(16, 3, 2), (32, 3, 2)], 32 * 4 * 8),
    (1, 36, 84): ([(32, 8, 4), (64, 4, 2), (64, 3, 1)], 64 * 1 * 7),
    (4, 84, 84): ([(32, 8, 4), (64, 4, 2), (64, 3, 1)], 64 * 7 * 7),
    (84, 84, 1): ([(32, 8, 4), (64, 4, 2), (64, 3, 1)], 64 * 7 * 7),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def trunk(
    network: str,
    shape: tuple[int, ...],
    hidden_sizes: tuple[int, ...] = (6, 5),
    activation: str = "tanh",
    seed: int | None = 0,
    **kwargs: Any,
) -> tuple[nn.Module, int]:
    return make_trunk(
        network,
        shape,
        hidden_sizes=hidden_sizes,
        activation=activation,
        kwargs=kwargs,
        generator=None if seed is None else seeded(seed),
    )


def refusal(network: str, shape: tuple[int, ...], **options: Any) -> str:
    with pytest.raises(NetworkError) as refused:
        trunk(network, shape, **options)
    message = str(refused.value)
    assert message.startswith(f"network {network}: ")
    assert "\n" not in message
    assert refused.value.__suppress_context__ or refused.value.__context__ is None
    return message


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


def test_mlp_names_shapes_and_start() -> None:
    module, num_features = trunk("mlp", (3,), (8, 5))
    assert isinstance(module, Trunk)
    assert num_features == module.num_features == 5
    assert {name: tuple(value.shape) for name, value in module.state_dict().items()} == {
        "layers.0.weight": (8, 3),
        "layers.0.bias": (8,),
        "layers.1.weight": (5, 8),
        "layers.1.bias": (5,),
    }
    for layer in module.layers:
        weight = layer.weight.detach()
        short = weight.T @ weight if weight.shape[0] > weight.shape[1] else weight @ weight.T
        torch.testing.assert_close(short, 2.0 * torch.eye(len(short)))  # gain sqrt(2)
        assert layer.bias.abs().max() == 0
        assert layer.weight.requires_grad


@pytest.mark.parametrize(("activation", "expected"), [("relu", [0.5, 0.0]), ("tanh", None)])
def test_mlp_by_hand(activation: str, expected: list[float] | None) -> None:
    module, _ = trunk("mlp", (2,), (2, 2), activation)
    state = {
        "layers.0.weight": torch.tensor([[1.0, -1.0], [2.0, 0.0]]),
        "layers.0.bias": torch.tensor([0.5, -3.0]),
        "layers.1.weight": torch.tensor([[1.0, 1.0], [-1.0, 0.0]]),
        "layers.1.bias": torch.tensor([-1.0, 0.5]),
    }
    module.load_state_dict(state)
    if expected is None:  # the first layer gives (1.5, -1) before its activation
        first = (math.tanh(1.5), math.tanh(-1.0))
        expected = [math.tanh(first[0] + first[1] - 1.0), math.tanh(-first[0] + 0.5)]
    x = torch.tensor([[1.0, 0.0]])
    torch.testing.assert_close(module(x), torch.tensor([expected]))
    assert x.tolist() == [[1.0, 0.0]]  # activations work in place, on what the trunk made


def test_no_hidden_layers_is_the_observation() -> None:
    module, num_features = trunk("mlp", (3,), ())
    x = torch.randn(2, 3, generator=seeded())
    assert num_features == 3
    assert torch.equal(module(x), x)


@pytest.mark.parametrize("shape", CONVOLUTIONS)
def test_conv_layers(shape: tuple[int, ...]) -> None:
    module, num_features = trunk("conv", shape, (7, 9), "relu")
    assert isinstance(module, Trunk)
    assert num_features == 9
    layers, num_inputs = CONVOLUTIONS[shape]
    built = [(c.out_channels, c.kernel_size[0], c.stride[0]) for c in module.convolutions]
    assert built == layers
    assert module.convolutions[0].in_channels == (shape[0] if shape[0] < min(shape[2], 5) else shape[2])
    assert [tuple(layer.weight.shape) for layer in module.layers] == [(7, num_inputs), (9, 7)]
    assert trunk("conv", shape, ())[1] == num_inputs
    assert module(torch.rand(2, *shape, generator=seeded())).shape == (2, 9)
    for layer in [*module.convolutions, *module.layers]:
        weight = layer.weight.detach().flatten(1)
        short = weight.T @ weight if weight.shape[0] > weight.shape[1] else weight @ weight.T
        torch.testing.assert_close(short, 2.0 * torch.eye(len(short)), atol=1e-4, rtol=0.0)
        assert layer.bias.abs().max() == 0
    assert set(module.state_dict()) == {
        f"{part}.{i}.{kind}"
        for part, num in (("convolutions", len(layers)), ("layers", 2))
        for i in range(num)
        for kind in ("weight", "bias")
    }


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("shape", IMAGES)
def test_conv_equals_plain_layers(shape: tuple[int, ...], activation: str) -> None:
    module, _ = trunk("conv", shape, (6,), activation)
    assert isinstance(module, Trunk)
    act = getattr(torch, activation)
    image = torch.rand(2, *shape, generator=seeded())
    first = shape[0] < min(shape[2], 5)  # channels first
    x = image if first else torch.stack([image[..., c] for c in range(shape[2])], dim=1)
    for layer in module.convolutions:
        x = act(F.conv2d(x, layer.weight, layer.bias, stride=layer.stride, padding=layer.padding))
    for layer in module.layers:
        x = act(x.reshape(2, -1) @ layer.weight.T + layer.bias)
    torch.testing.assert_close(module(image), x)


@pytest.mark.parametrize("side", [*range(5, 45), 50, 61, 64, 84, 85, 86, 87])
def test_every_pixel_is_seen(side: int) -> None:
    module, _ = trunk("conv", (side, side + 1, 1), ())
    assert isinstance(module, Trunk)
    for layer in module.convolutions:
        nn.init.ones_(layer.weight)
        layer.weight.data /= layer.weight[0].numel()
    image = torch.full((1, side, side + 1, 1), 0.1, requires_grad=True)
    module(image).sum().backward()
    assert image.grad is not None
    assert bool((image.grad > 0).all())


@pytest.mark.parametrize(
    ("side", "paddings"),
    [
        (5, (0, 0)),
        (16, (1, 1)),
        (17, (0, 1)),
        (35, (0, 0)),
        (84, (0, 0, 0)),
        (85, (2, 1, 0)),
        (87, (1, 1, 0)),
    ],
)
def test_padding_is_the_least(side: int, paddings: tuple[int, ...]) -> None:
    module, _ = trunk("conv", (side, side, 1), ())
    assert isinstance(module, Trunk)
    assert tuple(layer.padding[0] for layer in module.convolutions) == paddings


@pytest.mark.parametrize(("network", "shape"), [("mlp", (4,)), ("conv", (10, 10, 4))])
def test_start_is_reproducible_and_leaves_the_global_generator(network: str, shape: tuple[int, ...]) -> None:
    before = torch.get_rng_state()
    first, second, other = (trunk(network, shape, seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert same(first, second)
    assert not same(first, other)
    assert not same(*(trunk(network, shape, seed=None)[0] for _ in range(2)))  # the global one goes on


def test_parameters_may_be_moved_and_copied() -> None:
    """The layers that forward walks are those that optimizers, copies and `load_state_dict` work on."""
    for network, shape in (("mlp", (4,)), ("conv", (10, 10, 4))):
        module, _ = trunk(network, shape)
        other, _ = trunk(network, shape, seed=1)
        x = torch.rand(3, *shape, generator=seeded())
        other.load_state_dict(module.state_dict())
        assert torch.equal(other(x), module(x))
        doubled = trunk(network, shape)[0].double()
        torch.testing.assert_close(doubled(x.double()).float(), module(x))
        module(x).sum().backward()
        assert all(parameter.grad is not None for parameter in module.parameters())


def test_to_input() -> None:
    x = torch.rand(2, 3)
    assert to_input(x) is x
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8)
    torch.testing.assert_close(to_input(pixels), torch.tensor([0.0, 0.2, 1.0]))
    assert pixels.tolist() == [0, 51, 255]
    assert torch.equal(to_input(torch.tensor([-2, 300])), torch.tensor([-2.0, 300.0]))
    assert to_input(torch.zeros(1, dtype=torch.float64)).dtype == torch.float32


@pytest.mark.parametrize(
    ("network", "shape", "expected"),
    [
        (
            "mlp",
            (10, 10, 4),
            "needs a vector, but observations are (10, 10, 4); use conv for images, or gymn",
        ),
        (
            "mlp",
            (3, 3),
            "needs a vector, but observations are (3, 3); use gymnasium.wrappers.FlattenObservation",
        ),
        ("mlp", (), "needs a vector, but observations are (); use gymnasium.wrappers.FlattenObservation"),
        ("conv", (4,), "needs images [H, W, C] or [C, H, W], but observations are (4,); use mlp"),
        ("conv", (10, 10), "observations are (10, 10); use mlp and gymnasium.wrappers.FlattenObservation"),
        (
            "conv",
            (4, 5, 3),
            "needs images of 5x5 pixels or more, but observations are (4, 5, 3); use mlp and",
        ),
        ("conv", (1, 9, 4), "needs images of 5x5 pixels or more, but observations are (1, 9, 4)"),
        ("conv", (84, 84), "observations are (84, 84); use nature or impala"),
        ("mlp", (84, 84), "needs a vector, but observations are (84, 84)"),
        (
            "cnn",
            (4,),
            'is unknown; use mlp, conv, nature, impala, data_efficient or your own "module:callable"',
        ),
    ],
)
def test_observations_that_do_not_fit(network: str, shape: tuple[int, ...], expected: str) -> None:
    assert expected in refusal(network, shape)


def test_options_that_do_not_fit() -> None:
    assert "activation 'gelu' is unknown; use tanh or relu" in refusal("mlp", (4,), activation="gelu")
    assert "takes no keyword arguments, but got {'width': 3}" in refusal("conv", (10, 10, 4), width=3)

"""ddrl.networks.images: shapes, numbers of parameters, plain twins, norms, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddrl.networks.convolutional import Axes, BatchNorm, image_axes
from ddrl.networks.custom import NetworkError
from ddrl.networks.parameters import FlatParameters
from ddrl.networks.trunks import ResidualTrunk, Trunk, make_trunk

SCREENS = [(40, 40), (4, 40, 40), (40, 40, 3), (6, 40, 40), (1, 36, 50), (40, 40, 1)]
KINDS = [
    *(("nature", norm) for norm in ("none", "group", "batch")),
    *(("impala", norm) for norm in ("none", "group", "batch")),
    ("data_efficient", "none"),
]


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
    hidden_sizes: tuple[int, ...] = (9,),
    *,
    seed: int = 0,
    activation: str = "relu",
    **options: Any,
) -> nn.Module:
    module, num_features = make_trunk(
        network, shape, hidden_sizes=hidden_sizes, activation=activation, generator=seeded(seed), **options
    )
    assert module.num_features == num_features
    return module


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def channels_first(image: Tensor, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 2:
        return torch.stack([image], dim=1)
    if shape[0] < shape[2]:
        return image
    return torch.stack([image[..., c] for c in range(shape[2])], dim=1)


@pytest.mark.parametrize("shape", SCREENS)
@pytest.mark.parametrize(("network", "norm"), KINDS)
def test_shapes(network: str, norm: str, shape: tuple[int, ...]) -> None:
    module = trunk(network, shape, norm=norm)
    image = torch.rand(3, *shape, generator=seeded())
    kept = image.clone()
    features = module(image)
    assert features.shape == (3, 9)
    assert features.dtype == torch.float32
    assert torch.equal(image, kept)  # activations work in place, on what the trunk made
    assert module.convolutions[0].in_channels == channels_first(image, shape).shape[1]
    with torch.no_grad():
        without_gradient = module.eval()(image)
        module.requires_grad_(False)
    # Another layout of memory, and so other rounding, which norms over few pixels enlarge.
    torch.testing.assert_close(module(image), without_gradient, rtol=1e-3, atol=1e-3)


def test_numbers_of_parameters() -> None:
    """Those of DQN's network less its head, and others counted by hand."""
    assert count(trunk("nature", (4, 84, 84), (512,))) == 1_684_128
    norms = 2 * (32 + 64 + 64) - (32 + 64 + 64)  # scales and shifts for biases
    assert count(trunk("nature", (4, 84, 84), (512,), norm="group")) == 1_684_128 + norms
    assert count(trunk("nature", (4, 84, 84), (512,), norm="batch")) == 1_684_128 + norms
    convolutions = 32 * 4 * 25 + 32 + 64 * 32 * 25 + 64
    assert count(trunk("data_efficient", (4, 84, 84), (256,))) == convolutions + 576 * 256 + 256
    sections = [9 * i * o + o + 4 * (9 * o * o + o) for i, o in ((4, 16), (16, 32), (32, 32))]
    assert count(trunk("impala", (4, 84, 84), (256,))) == sum(sections) + 32 * 11 * 11 * 256 + 256


@pytest.mark.parametrize(
    ("network", "width"), [("nature", 3136), ("impala", 32 * 11 * 11), ("data_efficient", 576)]
)
def test_without_dense_layers(network: str, width: int) -> None:
    module = trunk(network, (4, 84, 84), ())
    assert module(torch.rand(2, 4, 84, 84, generator=seeded())).shape == (2, width)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("shape", SCREENS)
@pytest.mark.parametrize("network", ["nature", "data_efficient"])
def test_plain_trunk_equals_its_layers(network: str, shape: tuple[int, ...], activation: str) -> None:
    module = trunk(network, shape, (6, 5), activation=activation)
    assert isinstance(module, Trunk)
    image = torch.rand(2, *shape, generator=seeded())
    x = channels_first(image, shape)
    strides = {"nature": (4, 2, 1), "data_efficient": (5, 5)}[network]
    assert len(module.convolutions) == len(strides)
    act = getattr(torch, activation)
    for layer, stride in zip(module.convolutions, strides, strict=True):
        x = act(F.conv2d(x, layer.weight, layer.bias, stride=stride))
    x = x.reshape(2, -1)
    for layer in module.layers:
        x = act(x @ layer.weight.T + layer.bias)
    torch.testing.assert_close(module(image), x)


def plain_residual(module: ResidualTrunk, x: Tensor, act: Any, norm: Any) -> Tensor:
    """IMPALA's network as in the paper's figure."""
    stages = list(module.convolutions)

    def convolve(i: int, y: Tensor) -> Tensor:
        return norm(stages[i], F.conv2d(y, stages[i].weight, stages[i].bias, padding=1))

    for section in range(3):
        first = 5 * section
        x = F.max_pool2d(convolve(first, x), kernel_size=3, stride=2, padding=1)
        for block in (first + 1, first + 3):
            x = x + convolve(block + 1, act(convolve(block, act(x))))
    x = act(x).reshape(len(x), -1)
    for layer in module.layers:
        x = act(x @ layer.weight.T + layer.bias)
    return x


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("shape", [(20, 20), (3, 33, 30), (20, 17, 2)])
def test_residual_trunk_equals_its_layers(shape: tuple[int, ...], activation: str) -> None:
    module = trunk("impala", shape, (6, 5), activation=activation)
    assert isinstance(module, ResidualTrunk)
    assert [layer.out_channels for layer in module.convolutions] == [16] * 5 + [32] * 10
    image = torch.rand(2, *shape, generator=seeded())
    expected = plain_residual(
        module, channels_first(image, shape), getattr(torch, activation), lambda _, y: y
    )
    torch.testing.assert_close(module(image), expected)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """By the formula: mean and variance over the channels of each of 16 groups and all pixels."""
    rows, channels, height, width = x.shape
    groups = x.reshape(rows, 16, -1)
    mean = groups.mean(dim=2, keepdim=True)
    variance = (groups - mean).square().mean(dim=2, keepdim=True)
    normal = ((groups - mean) / (variance + 1e-5).sqrt()).reshape(rows, channels, height, width)
    return normal * weight[:, None, None] + bias[:, None, None]


def randomize(module: nn.Module) -> None:
    generator = seeded(5)
    for parameter in module.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def test_group_norm_by_its_formula() -> None:
    module = trunk("nature", (4, 44, 44), (6,), norm="group")
    randomize(module)
    x = image = torch.rand(2, 4, 44, 44, generator=seeded())
    for layer, stride in zip(module.convolutions, (4, 2, 1), strict=True):
        assert layer.bias is None
        x = F.conv2d(x, layer.weight, stride=stride)
        x = torch.relu(group_norm(x, layer.norm.weight, layer.norm.bias))
    x = torch.relu(F.linear(x.flatten(1), module.layers[0].weight, module.layers[0].bias))
    torch.testing.assert_close(module(image), x, rtol=1e-4, atol=1e-5)

    residual = trunk("impala", (4, 20, 20), (6,), norm="group")
    assert isinstance(residual, ResidualTrunk)
    randomize(residual)
    image = torch.rand(2, 4, 20, 20, generator=seeded())
    expected = plain_residual(
        residual, image, torch.relu, lambda layer, y: group_norm(y, layer.norm.weight, layer.norm.bias)
    )
    torch.testing.assert_close(residual(image), expected, rtol=1e-4, atol=1e-5)


def test_batch_norm_equals_torchs() -> None:
    own, theirs = BatchNorm(3), nn.BatchNorm2d(3)
    for parameters in (own, theirs):
        randomize(parameters)
    for seed in range(3):
        x = torch.randn(4, 3, 5, 6, generator=seeded(seed)) * 2 + 1
        torch.testing.assert_close(own(x), theirs(x))
    torch.testing.assert_close(own.mean, theirs.running_mean)
    torch.testing.assert_close(own.variance, theirs.running_var)
    torch.testing.assert_close(own.eval()(x), theirs.eval()(x))


@pytest.mark.parametrize("network", ["nature", "impala"])
def test_batch_norm_by_mode(network: str) -> None:
    module = trunk(network, (2, 40, 40), norm="batch")
    image = torch.rand(4, 2, 40, 40, generator=seeded())
    together = module(image)
    assert not torch.allclose(module(image[:2]), together[:2], atol=1e-3)  # rows depend on each other
    statistics = {name: value.clone() for name, value in module.named_buffers()}
    assert statistics
    assert all(name.split(".")[-1] in ("mean", "variance") for name in statistics)
    module.eval()
    together = module(image)
    for row in range(4):
        torch.testing.assert_close(module(image[row : row + 1]), together[row : row + 1])
    assert all(torch.equal(value, statistics[name]) for name, value in module.named_buffers())
    other = trunk(network, (2, 40, 40), norm="batch", seed=1).eval()
    assert not torch.allclose(other(image), together, atol=1e-3)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(image), together)
    assert all(value.dtype == torch.float32 for value in module.state_dict().values())


@pytest.mark.parametrize("network", ["nature", "impala"])
@pytest.mark.parametrize("norm", ["none", "group"])
def test_rows_are_independent_without_batch_norm(network: str, norm: str) -> None:
    module = trunk(network, (2, 40, 40), norm=norm)
    image = torch.rand(4, 2, 40, 40, generator=seeded())
    torch.testing.assert_close(module(image[1:2]), module(image)[1:2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(module.eval()(image[1:2]), module.train()(image)[1:2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("network", "norm"), KINDS)
def test_start_is_reproducible_and_leaves_the_global_generator(network: str, norm: str) -> None:
    before = torch.get_rng_state()
    first, second, other = (trunk(network, (3, 40, 40), norm=norm, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    pairs = list(zip(first.parameters(), second.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(one, two) for one, two, _ in pairs)
    assert all(not torch.equal(one, three) for one, _, three in pairs if one.ndim > 1)


@pytest.mark.parametrize(("network", "norm"), KINDS)
def test_initial_weights(network: str, norm: str) -> None:
    module = trunk(network, (3, 40, 40), norm=norm)
    gain = 1.0 if network == "impala" else math.sqrt(2)
    for layer in module.convolutions:
        weight = layer.weight.detach().flatten(1)
        if norm == "none":
            short = weight.T @ weight if weight.shape[0] > weight.shape[1] else weight @ weight.T
            torch.testing.assert_close(short, gain**2 * torch.eye(len(short)), atol=1e-4, rtol=0.0)
            assert layer.bias.abs().max() == 0
        else:
            bound = math.sqrt(6 / (9 if network == "impala" else layer.kernel_size[0] ** 2)) / math.sqrt(
                layer.in_channels + layer.out_channels
            )
            assert 0.95 * bound < weight.abs().max() <= bound * 1.0001
            assert set(layer.norm.weight.tolist()) == {1.0}
            assert set(layer.norm.bias.tolist()) == {0.0}
    (layer,) = module.layers
    assert layer.bias.abs().max() == 0


@pytest.mark.parametrize(("network", "norm"), KINDS)
def test_gradients_reach_every_parameter(network: str, norm: str) -> None:
    module = trunk(network, (2, 44, 44), (64,), norm=norm)
    image = torch.rand(3, 2, 44, 44, generator=seeded())
    flat = FlatParameters(module)
    flat.differentiate((module(image) * torch.randn(3, 64, generator=seeded())).sum())
    assert flat.vector.grad is not None
    sections = flat.vector.grad.split([p.numel() for p in flat.parameters])
    assert all(bool(section.abs().max() > 0) for section in sections)


def test_residual_sums_keep_their_size() -> None:
    module = trunk("impala", (4, 84, 84), ())
    features = module(torch.rand(2, 4, 84, 84, generator=seeded()))
    assert 0.1 < features.square().mean().sqrt() < 3.0


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((84, 84), Axes.NONE),
        ((4, 84, 84), Axes.FIRST),
        ((16, 84, 84), Axes.FIRST),
        ((84, 84, 16), Axes.LAST),
        ((10, 10, 20), Axes.LAST),  # square, and longer than its sides
        ((8, 7, 8), Axes.LAST),
        ((5, 5, 3), Axes.LAST),
        ((5, 20, 30), Axes.LAST),  # could be either
        ((4, 20, 30), Axes.FIRST),
    ],
)
def test_image_axes(shape: tuple[int, ...], expected: Axes) -> None:
    assert image_axes(shape) is expected


def test_a_stack_of_more_than_four_frames_is_one_of_channels() -> None:
    module = trunk("conv", (8, 20, 20))
    assert isinstance(module, Trunk)
    assert module.convolutions[0].in_channels == 8


@pytest.mark.parametrize(
    ("network", "shape", "expected"),
    [
        (
            "nature",
            (4,),
            "needs images [H, W], [C, H, W] or [H, W, C], but observations are (4,); use mlp",
        ),
        (
            "nature",
            (4, 84, 84, 3),
            "observations are (4, 84, 84, 3); use frames of one channel, or your own network",
        ),
        (
            "nature",
            (35, 84),
            "needs images of 36x36 pixels or more, but observations are (35, 84); use impala",
        ),
        ("nature", (4, 84, 35), "observations are (4, 84, 35); use impala or conv"),
        ("data_efficient", (24, 24, 3), "of 25x25 pixels or more, but observations are (24, 24, 3); use"),
        ("impala", (7, 7), "of 8x8 pixels or more, but observations are (7, 7); use conv, or mlp and gymn"),
    ],
)
def test_observations_that_do_not_fit(network: str, shape: tuple[int, ...], expected: str) -> None:
    with pytest.raises(NetworkError) as refused:
        trunk(network, shape)
    message = str(refused.value)
    assert message.startswith(f"network {network}: ")
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("network", "shape"),
    [("nature", (36, 36)), ("nature", (36, 40, 3)), ("data_efficient", (25, 25)), ("impala", (8, 8))],
)
def test_the_smallest_images(network: str, shape: tuple[int, ...]) -> None:
    assert trunk(network, shape)(torch.rand(1, *shape, generator=seeded())).shape == (1, 9)


@pytest.mark.parametrize(
    ("network", "shape", "norm", "expected"),
    [
        (
            "conv",
            (84, 84, 4),
            "group",
            "network conv: norm 'group' is for nature and impala only; set norm to",
        ),
        ("mlp", (4,), "batch", "network mlp: norm 'batch' is for nature and impala only"),
        ("data_efficient", (84, 84), "group", "norm 'group' is for nature and impala only"),
        ("own_networks:Good", (84, 84), "group", "norm 'group' is for nature and impala only"),
        (
            "nature",
            (84, 84),
            "layer",
            "network nature: norm 'layer' is unknown; use none, group or batch",
        ),
        ("natur", (84, 84), "group", "network natur: is unknown; use mlp, conv, nature"),
    ],
)
def test_norms_that_do_not_fit(network: str, shape: tuple[int, ...], norm: str, expected: str) -> None:
    with pytest.raises(NetworkError) as refused:
        trunk(network, shape, norm=norm)
    assert expected in str(refused.value)


def test_options_that_do_not_fit() -> None:
    with pytest.raises(NetworkError, match="takes no keyword arguments, but got {'width': 3}"):
        trunk("nature", (84, 84), kwargs={"width": 3})
    with pytest.raises(NetworkError, match="activation 'gelu' is unknown; use tanh or relu"):
        trunk("impala", (84, 84), activation="gelu")

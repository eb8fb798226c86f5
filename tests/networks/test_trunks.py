"""Trunks: shapes, initial weights, slow twins layer by layer, norms, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.networks import assert_orthogonal, count, gradients, refusal, same, seeded, trunk
from torch import Tensor, nn
from torch.nn import functional as F

from ddrl.algorithms.base import config_class
from ddrl.networks import convolutional
from ddrl.networks.convolutional import BatchNorm
from ddrl.networks.parameters import FlatParameters
from ddrl.networks.trunks import make_trunk, to_input
from ddrl.types import EnvSpec

SCREENS = [(40, 40), (4, 40, 40), (40, 40, 3), (6, 40, 40), (1, 36, 50), (40, 40, 1)]
SMALL = [(10, 10, 4), (4, 84, 84), (84, 84, 1), (5, 5, 3), (8, 7, 8), (10, 10, 20)]
NORMED = ("nature", "impala", "data_efficient")
KINDS = [(network, norm) for network in NORMED for norm in ("none", "group", "batch", "layer")]
NATURE = [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
CONVOLUTIONS = {  # shape -> (channels, kernel, stride) of each of "conv", and the inputs of the first dense layer
    (10, 10, 4): ([(16, 3, 1), (32, 3, 1)], 32 * 6 * 6),
    (5, 5, 3): ([(16, 3, 1), (32, 3, 1)], 32),
    (3, 15, 20): ([(16, 3, 1), (32, 3, 1)], 32 * 11 * 16),
    (16, 35, 3): ([(16, 3, 2), (32, 3, 2)], 32 * 4 * 8),
    (17, 17, 3): ([(16, 3, 2), (32, 3, 2)], 32 * 4 * 4),
    (1, 36, 84): (NATURE, 64 * 1 * 7),
    (4, 84, 84): (NATURE, 64 * 7 * 7),
    (84, 84, 1): (NATURE, 64 * 7 * 7),
    (85, 87, 1): (NATURE, 64 * 8 * 8),
}


def images(shape: tuple[int, ...], num: int = 2) -> Tensor:
    return torch.rand(num, *shape, generator=seeded())


def channels_first(image: Tensor) -> Tensor:
    shape = image.shape[1:]
    if len(shape) == 2:
        return torch.stack([image], dim=1)
    if shape[0] < shape[2] and (shape[0] < 5 or shape[1] == shape[2]):
        return image
    return torch.stack([image[..., c] for c in range(shape[2])], dim=1)


def randomize(module: nn.Module) -> None:
    generator = seeded(5)
    for parameter in module.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int = 16) -> Tensor:
    """By the formula: mean and variance over the channels of each group and all pixels."""
    groups = x.reshape(len(x), num_groups, -1)
    centered = groups - groups.mean(dim=2, keepdim=True)
    normal = (centered / (centered.square().mean(dim=2, keepdim=True) + 1e-5).sqrt()).reshape(x.shape)
    return normal * weight[:, None, None] + bias[:, None, None]


def slow_trunk(network: str, module: Any, image: Tensor, activation: str, norm: str) -> Tensor:
    """The layers one after another as the papers give them, with a norm where there is one."""
    act, stages = getattr(torch, activation), list(getattr(module, "convolutions", ()))
    x = channels_first(image) if stages else image

    def convolve(layer: Any, y: Tensor, **sizes: Any) -> Tensor:
        y = F.conv2d(y, layer.weight, layer.bias, **sizes)
        if layer.bias is not None:
            return y
        return group_norm(y, layer.norm.weight, layer.norm.bias, 1 if norm == "layer" else 16)

    if network == "impala":
        assert [layer.out_channels for layer in stages] == [16] * 5 + [32] * 10
        for section in range(0, 15, 5):
            x = F.max_pool2d(convolve(stages[section], x, padding=1), kernel_size=3, stride=2, padding=1)
            for block in (section + 1, section + 3):
                x = x + convolve(
                    stages[block + 1], act(convolve(stages[block], act(x), padding=1)), padding=1
                )
        x = act(x)
    else:
        strides = {"nature": (4, 2, 1), "data_efficient": (5, 5)}.get(network)
        for i, layer in enumerate(stages):
            sizes = {"stride": strides[i]} if strides else {"stride": layer.stride, "padding": layer.padding}
            x = act(convolve(layer, x, **sizes))
    x = x.reshape(len(x), -1)
    for layer in module.layers:
        x = x @ layer.weight.T + layer.bias
        if norm == "layer":
            x = x - x.mean(dim=1, keepdim=True)
            x = x / (x.square().mean(dim=1, keepdim=True) + 1e-5).sqrt()
        x = act(x)
    return x


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize(
    ("network", "norm", "shape"),
    [
        *(("conv", "none", shape) for shape in SMALL),
        *((network, "none", shape) for network in ("nature", "data_efficient") for shape in SCREENS),
        *(("impala", "none", shape) for shape in [(20, 20), (3, 33, 30), (20, 17, 2), (8, 8)]),
        ("nature", "none", (36, 36)),  # these three are the smallest images
        ("data_efficient", "none", (25, 25)),
        ("mlp", "none", (7,)),
        ("nature", "group", (4, 44, 44)),
        ("impala", "group", (4, 20, 20)),
        ("data_efficient", "group", (4, 50, 50)),
        *((network, "layer", (4, 44, 44)) for network in ("nature", "impala", "data_efficient", "conv")),
        ("mlp", "layer", (7,)),
    ],
)
def test_a_trunk_equals_its_layers(network: str, norm: str, shape: tuple[int, ...], activation: str) -> None:
    module, image = trunk(network, shape, activation=activation, norm=norm), images(shape)
    if norm != "none":
        randomize(module)
    expected = slow_trunk(network, module, image, activation, norm)
    torch.testing.assert_close(module(image), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(image, images(shape)), "activations work in place only on what the trunk made"


@pytest.mark.parametrize("num_numbers", [0, 2])
def test_images_beside_numbers_have_convolutions_of_their_own(num_numbers: int) -> None:
    shapes = [(6, 6, 2), (5, 5, 1)]
    sizes = [math.prod(shape) for shape in shapes]
    module, width = make_trunk(
        "conv", (sum(sizes) + 4 * num_numbers,), hidden_sizes=(7,), activation="relu", norm="layer",
        image_shapes=shapes, generator=seeded(),
    )  # fmt: skip
    pixels = torch.randint(0, 256, (3, sum(sizes)), generator=seeded(1), dtype=torch.uint8)
    numbers = torch.randn(3, num_numbers, generator=seeded(2)) * 1e3
    found = module(to_input(torch.cat((pixels, numbers.view(torch.uint8)), dim=1)))
    images = [
        part.reshape(3, *shape) / 255 for part, shape in zip(pixels.split(sizes, dim=1), shapes, strict=True)
    ]
    features = [
        slow_trunk("conv", one, image, "relu", "layer")
        for one, image in zip(module.images, images, strict=True)
    ]
    expected = slow_trunk("mlp", module.joined, torch.cat((*features, numbers), dim=1), "relu", "layer")
    assert width == 7
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_without_hidden_layers_an_mlp_returns_its_observation() -> None:
    x = torch.randn(2, 3, generator=seeded())
    assert torch.equal(trunk("mlp", (3,), ())(x), x)


@pytest.mark.parametrize("shape", [(40, 40), (4, 40, 40), (40, 40, 3)])
@pytest.mark.parametrize(("network", "norm"), KINDS)
def test_features_are_the_same_without_a_gradient(network: str, norm: str, shape: tuple[int, ...]) -> None:
    module, image = trunk(network, shape, (9,), norm=norm), images(shape, 3)
    module(image)
    with torch.no_grad():
        without_gradient = module.eval()(image)
    # Another layout of memory, and so other rounding, which norms over few pixels enlarge.
    torch.testing.assert_close(module(image), without_gradient, rtol=1e-3, atol=1e-3)


def test_numbers_of_parameters() -> None:
    """Those of DQN's network less its head, and others counted by hand."""
    screen, convolutions = (4, 84, 84), 32 * 4 * 25 + 32 + 64 * 32 * 25 + 64
    assert count(trunk("nature", screen, (512,))) == 1_684_128
    for norm in ("group", "batch", "layer"):  # scales and shifts for biases
        assert count(trunk("nature", screen, (512,), norm=norm)) == 1_684_128 + 32 + 64 + 64
    assert count(trunk("data_efficient", screen, (256,))) == convolutions + 576 * 256 + 256
    sections = [9 * i * o + o + 4 * (9 * o * o + o) for i, o in ((4, 16), (16, 32), (32, 32))]
    assert count(trunk("impala", screen, (256,))) == sum(sections) + 32 * 11 * 11 * 256 + 256
    features = trunk("impala", screen, ())(images(screen))
    assert 0.1 < features.square().mean().sqrt() < 3.0, "residual sums keep their size"


@pytest.mark.parametrize("shape", CONVOLUTIONS)
def test_layers_of_conv_follow_the_size_of_images(shape: tuple[int, ...]) -> None:
    module, (layers, num_inputs) = trunk("conv", shape, (7, 9)), CONVOLUTIONS[shape]
    assert [(c.out_channels, c.kernel_size[0], c.stride[0]) for c in module.convolutions] == layers
    assert module.convolutions[0].in_channels == (shape[0] if shape[0] < min(shape[2], 5) else shape[2])
    assert [tuple(layer.weight.shape) for layer in module.layers] == [(7, num_inputs), (9, 7)]
    names = [f"convolutions.{i}" for i in range(len(layers))] + ["layers.0", "layers.1"]
    assert list(module.state_dict()) == [f"{name}.{kind}" for name in names for kind in ("weight", "bias")]


@pytest.mark.parametrize(("network", "norm"), [("mlp", "none"), ("conv", "none"), *KINDS])
def test_initial_weights(network: str, norm: str) -> None:
    shape, before = (3,) if network == "mlp" else (3, 40, 40), torch.get_rng_state()
    module, again, other = (trunk(network, shape, (8, 5), norm=norm, seed=seed) for seed in (0, 0, 1))
    assert same(module, again) and not same(module, other)
    assert torch.equal(torch.get_rng_state(), before), "the global generator is left alone"
    for layer in getattr(module, "convolutions", ()):
        if norm == "none":
            assert_orthogonal(layer, 1.0 if network == "impala" else math.sqrt(2))
        else:
            area, largest = layer.kernel_size[0] ** 2, layer.weight.detach().abs().max()
            bound = math.sqrt(6 / (area * (layer.in_channels + layer.out_channels)))
            assert 0.95 * bound < largest <= bound * 1.0001
            assert set(layer.norm.weight.tolist()) == {1.0} and set(layer.norm.bias.tolist()) == {0.0}
    for layer in module.layers:
        if norm == "none":
            assert_orthogonal(layer, math.sqrt(2))
        assert layer.bias.abs().max() == 0 and layer.weight.requires_grad


@pytest.mark.parametrize("side", [*range(5, 45), 50, 61, 64, 84, 85, 86, 87])
def test_every_pixel_is_seen(side: int) -> None:
    module = trunk("conv", (side, side + 1, 1), ())
    for layer in module.convolutions:
        nn.init.ones_(layer.weight)
        layer.weight.data /= layer.weight[0].numel()
    image = torch.full((1, side, side + 1, 1), 0.1, requires_grad=True)
    module(image).sum().backward()
    assert image.grad is not None and bool((image.grad > 0).all())


def test_batch_norm_equals_torchs() -> None:
    own, theirs = BatchNorm(3), nn.BatchNorm2d(3)
    for module in (own, theirs):
        randomize(module)
    for seed in range(3):
        x = torch.randn(4, 3, 5, 6, generator=seeded(seed)) * 2 + 1
        torch.testing.assert_close(own(x), theirs(x))
    torch.testing.assert_close(own.mean, theirs.running_mean)
    torch.testing.assert_close(own.variance, theirs.running_var)
    torch.testing.assert_close(own.eval()(x), theirs.eval()(x))


@pytest.mark.parametrize(("network", "norm"), KINDS)
def test_rows_depend_on_each_other_only_with_batch_norm_in_training(network: str, norm: str) -> None:
    module, image = trunk(network, (2, 40, 40), norm=norm), images((2, 40, 40), 4)
    together = module(image)
    assert torch.allclose(module(image[:2]), together[:2], rtol=1e-4, atol=1e-5) == (norm != "batch")
    statistics = {name: value.clone() for name, value in module.named_buffers()}
    expected = {"mean", "variance"} if norm == "batch" else set()
    assert {name.split(".")[-1] for name in statistics} == expected
    together = module.eval()(image)
    for row in range(4):
        alone = module(image[row : row + 1])
        torch.testing.assert_close(alone, together[row : row + 1], rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, statistics[name]) for name, value in module.named_buffers())
    other = trunk(network, (2, 40, 40), norm=norm, seed=1).eval()
    assert not torch.allclose(other(image), together, atol=1e-3)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(image), together)


@pytest.mark.parametrize(("network", "norm"), [("mlp", "none"), ("conv", "none"), *KINDS])
def test_parameters_take_gradients_and_may_be_converted(network: str, norm: str) -> None:
    """The layers that forward walks are those that optimizers and conversions work on."""
    shape = (4,) if network == "mlp" else (2, 44, 44)
    module, doubled = (trunk(network, shape, (64,), "tanh", norm=norm) for _ in range(2))
    x, weight = images(shape, 3), torch.randn(3, 64, generator=seeded())
    torch.testing.assert_close(doubled.double()(x.double()).float(), module(x), rtol=1e-3, atol=1e-3)
    sections = gradients(FlatParameters(module), (module(x) * weight).sum())
    assert all(bool(section.abs().max() > 0) for section in sections)


def test_to_input() -> None:
    x = torch.rand(2, 3)
    assert to_input(x) is x
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8)
    torch.testing.assert_close(to_input(pixels), torch.tensor([0.0, 0.2, 1.0]))
    assert pixels.tolist() == [0, 51, 255]
    assert torch.equal(to_input(torch.tensor([-2, 300])), torch.tensor([-2.0, 300.0]))
    assert to_input(torch.zeros(1, dtype=torch.float64)).dtype == torch.float32


CHANNELS_FIRST = {
    (84, 84): (1, 84, 84), (4, 84, 84): (4, 84, 84), (16, 84, 84): (16, 84, 84), (84, 84, 16): (16, 84, 84),
    (10, 10, 20): (20, 10, 10),  # square, and longer than its sides
    (8, 7, 8): (8, 8, 7), (5, 5, 3): (3, 5, 5),
    (5, 20, 30): (30, 5, 20),  # could be either
    (4, 20, 30): (4, 20, 30),
}  # fmt: skip


def test_axes_of_images() -> None:
    for shape, expected in CHANNELS_FIRST.items():
        assert convolutional.channels_first(torch.empty(1, *shape)).shape == (1, *expected)
    assert trunk("conv", (8, 20, 20)).convolutions[0].in_channels == 8, "a stack of more than four frames"


def test_a_stack_of_frames_that_are_not_square_is_one() -> None:
    spec = EnvSpec("Toy-v0", (20, 30), "uint8", "discrete", (), (3,), frame_stack=6)
    config = config_class("dqn")(network="conv")
    module, num_features = config.make_trunk(spec)
    assert module.convolutions[0].in_channels == 6
    assert module(torch.rand(2, *spec.input_shape)).shape == (2, num_features)


FLATTEN = "gymnasium.wrappers.FlattenObservation"
REFUSED: list[tuple[str, tuple[int, ...], dict[str, Any], str]] = [
    ("mlp", (10, 10, 4), {}, "needs a vector, but observations are (10, 10, 4); use conv for images, or gymn"),
    ("mlp", (3, 3), {}, f"needs a vector, but observations are (3, 3); use {FLATTEN}"),
    ("mlp", (), {}, f"needs a vector, but observations are (); use {FLATTEN}"),
    ("conv", (4,), {}, "needs images [H, W, C] or [C, H, W], but observations are (4,); use mlp"),
    ("conv", (10, 10), {}, f"observations are (10, 10); use mlp and {FLATTEN}"),
    ("conv", (4, 5, 3), {}, "needs images of 5x5 pixels or more, but observations are (4, 5, 3); use mlp and"),
    ("conv", (84, 84), {}, "observations are (84, 84); use nature or impala"),
    ("nature", (4,), {}, "needs images [H, W], [C, H, W] or [H, W, C], but observations are (4,); use mlp"),
    ("nature", (4, 84, 84, 3), {}, "(4, 84, 84, 3); use frames of one channel, or your own network"),
    ("nature", (35, 84), {}, "needs images of 36x36 pixels or more, but observations are (35, 84); use impala"),
    ("nature", (4, 84, 35), {}, "observations are (4, 84, 35); use impala or conv"),
    ("data_efficient", (24, 24, 3), {}, "of 25x25 pixels or more, but observations are (24, 24, 3); use"),
    ("impala", (7, 7), {}, "of 8x8 pixels or more, but observations are (7, 7); use conv, or mlp and gymn"),
    ("cnn", (4,), {}, 'is unknown; use mlp, conv, nature, impala, data_efficient or your own "module:callable"'),
    ("conv", (84, 84, 4), {"norm": "group"}, "norm 'group' is for nature, impala and data_efficient only; set norm"),
    ("mlp", (4,), {"norm": "batch"}, "norm 'batch' is for nature, impala and data_efficient only"),
    ("own_networks:Good", (84, 84), {"norm": "group"}, "norm 'group' is for nature, impala and data_efficient only"),
    ("own_networks:Good", (84, 84), {"norm": "layer"}, "norm 'layer' is for built-in networks only; set norm to none"),
    ("natur", (84, 84), {"norm": "group"}, "is unknown; use mlp, conv, nature"),
]  # fmt: skip


@pytest.mark.parametrize(("network", "shape", "options", "expected"), REFUSED)
def test_what_does_not_fit_is_refused(
    network: str, shape: tuple[int, ...], options: dict[str, Any], expected: str
) -> None:
    assert expected in refusal(network, shape, **options)

"""Noisy layers: the explicit formula, their noise and its source."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from support.networks import seeded
from torch import Tensor

from ddrl.networks.heads import NoisyLinear


def noise(size: int, generator: torch.Generator) -> Tensor:
    z = torch.randn(size, generator=generator)
    return torch.tensor([math.copysign(math.sqrt(abs(value)), value) for value in z.tolist()])


def test_hand_numbers() -> None:
    layer = NoisyLinear(2, 1)
    weight, scale = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.1, 0.2]])
    biases = {"bias": torch.tensor([0.5]), "bias_scale": torch.tensor([0.3])}
    layer.load_state_dict({"weight": weight, "weight_scale": scale, **biases})
    x = torch.tensor([[3.0, 1.0]])
    assert layer(x).tolist() == [[1.5]]
    layer.draw_noise(seeded())
    layer.input_noise.copy_(torch.tensor([2.0, -1.0]))
    layer.output_noise.fill_(-3.0)
    # weights 1 + 0.1 * -6 and -2 + 0.2 * 3, bias 0.5 + 0.3 * -3
    torch.testing.assert_close(layer(x), torch.tensor([[0.4 * 3.0 - 1.4 - 0.4]]))
    layer.disable_noise()
    assert layer(x).tolist() == [[1.5]]


@pytest.mark.parametrize("num_parts", [1, 2])
def test_noise_is_factorised_gaussian_of_the_given_generator(num_parts: int) -> None:
    """Equals the explicit weights, with its gradients; the noise is copied but not part of the state."""
    layer = NoisyLinear(5, 6, generator=seeded(1), num_parts=num_parts)
    x, target = torch.randn(4, 5, generator=seeded(2)), torch.randn(4, 6, generator=seeded(3))
    before = torch.get_rng_state()
    layer.draw_noise(seeded(3))
    generator = seeded(3)
    inputs, outputs = noise(5 * num_parts, generator), noise(6, generator)
    pairs = zip(outputs.chunk(num_parts), inputs.chunk(num_parts), strict=True)
    product = torch.cat([torch.outer(*pair) for pair in pairs])
    expected = x @ (layer.weight + layer.weight_scale * product).T + layer.bias + layer.bias_scale * outputs
    first = layer(x)
    torch.testing.assert_close(first, expected)
    (first * target).sum().backward()
    gradients = (target.T @ x, target.T @ x * product, target.sum(0), target.sum(0) * outputs)
    for parameter, gradient in zip(
        (layer.weight, layer.weight_scale, layer.bias, layer.bias_scale), gradients, strict=True
    ):
        torch.testing.assert_close(parameter.grad, gradient)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), first)
    twin.draw_noise(seeded(4))
    assert not torch.allclose(twin(x), first)
    assert torch.equal(layer(x), first)
    twin.draw_noise(seeded(3))
    assert torch.equal(twin(x), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert set(layer.state_dict()) == {"weight", "bias", "weight_scale", "bias_scale"}


def test_initial_weights_and_moments_of_the_noise() -> None:
    layer = NoisyLinear(100, 30, generator=seeded())
    assert all(mean.abs().max() <= 0.1 for mean in (layer.weight, layer.bias))
    assert layer.weight.abs().max() > 0.09
    assert abs(layer.weight.std().item() - 0.1 / math.sqrt(3)) < 0.003
    for scale in (layer.weight_scale, layer.bias_scale):
        torch.testing.assert_close(scale, torch.full_like(scale, 0.05))
    scaled = NoisyLinear(100, 30, noise_scale=0.1, generator=seeded())
    assert torch.equal(scaled.weight, layer.weight)
    torch.testing.assert_close(scaled.weight_scale, layer.weight_scale / 5)
    wide = NoisyLinear(200_000, 1)
    wide.draw_noise(seeded())
    assert abs(wide.input_noise.mean().item()) < 0.01
    assert abs(wide.input_noise.square().mean().item() - math.sqrt(2 / math.pi)) < 0.01  # E|z|

"""ddrl.networks.noisy: against the explicit formula, its noise, and where it comes from."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from ddrl.networks.heads import NoisyLinear


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(size: int, generator: torch.Generator) -> Tensor:
    z = torch.randn(size, generator=generator)
    return torch.tensor([math.copysign(math.sqrt(abs(value)), value) for value in z.tolist()])


def test_the_formula_by_hand() -> None:
    layer = NoisyLinear(2, 1)
    layer.load_state_dict(
        {
            "weight": torch.tensor([[1.0, -2.0]]),
            "bias": torch.tensor([0.5]),
            "weight_scale": torch.tensor([[0.1, 0.2]]),
            "bias_scale": torch.tensor([0.3]),
        }
    )
    x = torch.tensor([[3.0, 1.0]])
    assert layer(x).tolist() == [[1.5]]
    layer.draw_noise(seeded())
    layer.input_noise.copy_(torch.tensor([2.0, -1.0]))
    layer.output_noise.fill_(-3.0)
    # weights 1 + 0.1 * -6 and -2 + 0.2 * 3, bias 0.5 + 0.3 * -3
    torch.testing.assert_close(layer(x), torch.tensor([[0.4 * 3.0 - 1.4 - 0.4]]))
    layer.mean_weights()
    assert layer(x).tolist() == [[1.5]]


def test_noise_is_factorised_gaussian_of_the_given_generator() -> None:
    layer = NoisyLinear(5, 3, generator=seeded(1))
    x = torch.randn(4, 5, generator=seeded(2))
    before = torch.get_rng_state()
    layer.draw_noise(seeded(3))
    generator = seeded(3)
    inputs, outputs = noise(5, generator), noise(3, generator)
    weight = layer.weight + layer.weight_scale * torch.outer(outputs, inputs)
    expected = x @ weight.T + layer.bias + layer.bias_scale * outputs
    torch.testing.assert_close(layer(x), expected)
    first = layer(x)
    layer.draw_noise(seeded(4))
    assert not torch.allclose(layer(x), first)
    layer.draw_noise(seeded(3))
    assert torch.equal(layer(x), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_start() -> None:
    layer = NoisyLinear(100, 30, generator=seeded())
    for mean in (layer.weight, layer.bias):
        assert mean.abs().max() <= 0.1
    assert layer.weight.abs().max() > 0.09
    assert abs(layer.weight.std().item() - 0.1 / math.sqrt(3)) < 0.003
    assert set(layer.weight_scale.flatten().tolist()) == {torch.tensor(0.05).item()}
    assert set(layer.bias_scale.tolist()) == {torch.tensor(0.05).item()}
    scaled = NoisyLinear(100, 30, noise_scale=0.1, generator=seeded())
    assert torch.equal(scaled.weight, layer.weight)
    torch.testing.assert_close(scaled.weight_scale, layer.weight_scale / 5)


def test_gradients_equal_those_of_the_explicit_weights() -> None:
    layer = NoisyLinear(4, 3, generator=seeded())
    layer.draw_noise(seeded(1))
    x = torch.randn(6, 4, generator=seeded(2))
    target = torch.randn(6, 3, generator=seeded(3))
    (layer(x) * target).sum().backward()
    gradient = target.T @ x
    product = torch.outer(layer.output_noise, layer.input_noise)
    torch.testing.assert_close(layer.weight.grad, gradient)
    torch.testing.assert_close(layer.weight_scale.grad, gradient * product)
    torch.testing.assert_close(layer.bias.grad, target.sum(0))
    torch.testing.assert_close(layer.bias_scale.grad, target.sum(0) * layer.output_noise)


def test_noise_is_no_state_but_is_copied() -> None:
    layer = NoisyLinear(2, 2, generator=seeded())
    assert set(layer.state_dict()) == {"weight", "bias", "weight_scale", "bias_scale"}
    layer.draw_noise(seeded())
    x = torch.ones(1, 2)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))
    twin.draw_noise(seeded(1))
    assert not torch.equal(twin(x), layer(x))


def test_moments_of_the_noise() -> None:
    layer = NoisyLinear(200_000, 1)
    layer.draw_noise(seeded())
    noise = layer.input_noise
    assert abs(noise.mean().item()) < 0.01
    assert abs(noise.square().mean().item() - math.sqrt(2 / math.pi)) < 0.01  # E|z|

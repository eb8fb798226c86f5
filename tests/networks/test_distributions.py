"""Distributions of actions against slow twins, torch's own, gradients by hand and numerical integration."""

from __future__ import annotations

import math

import pytest
import torch
from support.networks import seeded
from support.reference_ppo import slow_categorical, slow_gaussian
from torch import Tensor
from torch.distributions import Categorical, Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from ddrl.networks.distributions import bounded_log_std, categorical, gaussian, tanh_gaussian_sample


def random_numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def test_squashed_gaussian_hand_numbers() -> None:
    zeros, mean = torch.zeros(1, 2), torch.tensor([[0.3, -2.0]])
    action, log_prob = tanh_gaussian_sample(zeros, zeros, zeros)
    torch.testing.assert_close(action, zeros)
    torch.testing.assert_close(log_prob, torch.tensor([-math.log(2 * math.pi)]))
    assert torch.equal(tanh_gaussian_sample(mean, zeros, zeros)[0], torch.tanh(mean)), "the mode"
    far = torch.tensor([[40.0], [-40.0]], requires_grad=True)
    _, log_prob = tanh_gaussian_sample(far, torch.zeros(2, 1), torch.zeros(2, 1))
    (gradient,) = torch.autograd.grad(log_prob.sum(), far)
    expected = -0.5 * math.log(2 * math.pi) - 2 * (math.log(2) - 40.0)
    torch.testing.assert_close(log_prob, torch.full((2,), expected))
    torch.testing.assert_close(gradient, torch.tensor([[2.0], [-2.0]]))


def test_squashed_gaussian_equals_torch() -> None:
    mean, log_std, noise = (random_numbers(64, 3, seed=seed) for seed in range(3))
    action, log_prob = tanh_gaussian_sample(mean, log_std, noise)
    twin = TransformedDistribution(Normal(mean, log_std.exp()), [TanhTransform(cache_size=1)])
    value = torch.tanh(mean + log_std.exp() * noise)
    torch.testing.assert_close(action, value)
    inside = value.abs().amax(dim=1) < 0.999  # torch's inverse of tanh loses digits beyond
    assert int(inside.sum()) > 30
    torch.testing.assert_close(log_prob[inside], twin.log_prob(value).sum(dim=1)[inside])


def test_density_integrates_to_one() -> None:
    mean, log_std = torch.tensor(0.4, dtype=torch.float64), torch.tensor(-0.3, dtype=torch.float64)
    action = torch.linspace(-1 + 1e-9, 1 - 1e-9, 200_001, dtype=torch.float64)
    noise = (torch.atanh(action) - mean) / log_std.exp()
    _, log_prob = tanh_gaussian_sample(mean.expand(len(action), 1), log_std, noise[:, None])
    assert float(torch.trapezoid(log_prob.exp(), action)) == pytest.approx(1.0, abs=1e-5)


def test_log_std_stays_in_its_interval() -> None:
    log_std = bounded_log_std(torch.tensor([-1e3, 0.0, 1e3]), low=-5.0, high=2.0)
    torch.testing.assert_close(log_std, torch.tensor([-5.0, -1.5, 2.0]))
    torch.testing.assert_close(bounded_log_std(torch.tensor(0.0), low=-4.0, high=0.0), torch.tensor(-2.0))


@pytest.mark.parametrize("sizes", [(4,), (3, 2), (1, 5, 2)])
def test_categorical_equals_torch_and_the_slow_twin(sizes: tuple[int, ...]) -> None:
    logits = 3 * random_numbers(50, sum(sizes))
    action = torch.stack([torch.arange(50) % size for size in sizes], dim=1)
    log_prob, entropy = categorical(logits, action, sizes)
    parts = [Categorical(logits=part) for part in logits.split(list(sizes), dim=1)]
    expected = sum(part.log_prob(choice) for part, choice in zip(parts, action.T, strict=True))
    torch.testing.assert_close(log_prob, expected)
    torch.testing.assert_close(entropy, sum(part.entropy() for part in parts))
    if len(sizes) == 1:  # [B] will do for one dimension
        assert torch.equal(categorical(logits, action[:, 0], sizes)[0], log_prob)
    for row in range(5):
        twin = slow_categorical(list(logits[row]), action[row].tolist(), sizes)
        torch.testing.assert_close(torch.stack(twin), torch.stack((log_prob[row], entropy[row])))


def test_categorical_gradient() -> None:
    """The derivative of log p_a by logit i is [i = a] - p_i; of the entropy H, -p_i (log p_i + H). Both stay finite."""
    logits = random_numbers(1, 4).requires_grad_()
    log_prob, entropy = categorical(logits, torch.tensor([2]), (4,))
    p = torch.softmax(logits.detach()[0], dim=0)
    (gradient,) = torch.autograd.grad(log_prob.sum(), logits, retain_graph=True)
    torch.testing.assert_close(gradient[0], torch.eye(4, dtype=torch.float64)[2] - p)
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    torch.testing.assert_close(gradient[0], -p * (p.log() + entropy.detach()))
    far = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    log_prob, entropy = categorical(far, torch.tensor([2]), (3,))
    (gradient,) = torch.autograd.grad((log_prob + entropy).sum(), far)
    assert (log_prob.tolist(), entropy.tolist()) == ([-2e4], [0.0])
    assert torch.isfinite(gradient).all()


def test_gaussian_equals_torch_and_the_slow_twin() -> None:
    mean, action = (2 * random_numbers(50, 3, seed=seed) for seed in (0, 1))
    log_std = random_numbers(3, seed=2)
    log_prob, entropy = gaussian(mean, log_std, action)
    expected = Independent(Normal(mean, log_std.exp().expand(50, 3)), 1)
    torch.testing.assert_close(log_prob, expected.log_prob(action))
    torch.testing.assert_close(entropy, expected.entropy())
    for row in range(5):
        twin = slow_gaussian(list(mean[row]), list(log_std), action[row].tolist())
        torch.testing.assert_close(torch.stack(twin), torch.stack((log_prob[row], entropy[row])))


def test_gaussian_gradient() -> None:
    """With z = (a - mean) / std, of log p by the mean: z / std, by log_std: z^2 - 1; of the entropy by log_std: 1."""
    mean, log_std = random_numbers(4, 2).requires_grad_(), random_numbers(2, seed=1).requires_grad_()
    action = random_numbers(4, 2, seed=2)
    log_prob, entropy = gaussian(mean, log_std, action)
    z = ((action - mean) / log_std.exp()).detach()
    of_mean, of_log_std = torch.autograd.grad(log_prob.sum(), (mean, log_std), retain_graph=True)
    torch.testing.assert_close(of_mean, z / log_std.detach().exp())
    torch.testing.assert_close(of_log_std, (z.square() - 1).sum(dim=0))
    (gradient,) = torch.autograd.grad(entropy.mean(), log_std)
    torch.testing.assert_close(gradient, torch.ones(2, dtype=torch.float64))

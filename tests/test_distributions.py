"""ddrl.distributions against hand numbers, torch's own and numerical integration."""

from __future__ import annotations

import math

import torch
from torch.distributions import Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from ddrl.distributions import bounded_log_std, tanh_gaussian_mode, tanh_gaussian_sample


def test_hand_numbers() -> None:
    action, log_prob = tanh_gaussian_sample(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2))
    torch.testing.assert_close(action, torch.zeros(1, 2))
    torch.testing.assert_close(log_prob, torch.tensor([-math.log(2 * math.pi)]))


def test_log_prob_equals_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, log_std, noise = (torch.randn(64, 3, generator=generator, dtype=torch.float64) for _ in range(3))
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
    torch.testing.assert_close(
        torch.trapezoid(log_prob.exp(), action), torch.tensor(1.0, dtype=torch.float64), atol=1e-5, rtol=0
    )


def test_finite_far_out() -> None:
    mean = torch.tensor([[40.0], [-40.0]], requires_grad=True)
    _, log_prob = tanh_gaussian_sample(mean, torch.zeros(2, 1), torch.zeros(2, 1))
    (gradient,) = torch.autograd.grad(log_prob.sum(), mean)
    expected = -0.5 * math.log(2 * math.pi) - 2 * (math.log(2) - 40.0)
    torch.testing.assert_close(log_prob, torch.full((2,), expected))
    torch.testing.assert_close(gradient, torch.tensor([[2.0], [-2.0]]))


def test_log_std_stays_in_its_interval() -> None:
    log_std = bounded_log_std(torch.tensor([-1e3, 0.0, 1e3]), low=-5.0, high=2.0)
    torch.testing.assert_close(log_std, torch.tensor([-5.0, -1.5, 2.0]))
    torch.testing.assert_close(bounded_log_std(torch.tensor(0.0), low=-4.0, high=0.0), torch.tensor(-2.0))


def test_mode_is_the_sample_without_noise() -> None:
    mean = torch.tensor([[0.3, -2.0]])
    action, _ = tanh_gaussian_sample(mean, torch.zeros(1, 2), torch.zeros(1, 2))
    assert torch.equal(tanh_gaussian_mode(mean), action)

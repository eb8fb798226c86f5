"""Probability distributions as pure functions on tensors.

The tanh-Gaussian is the policy of SAC: a Gaussian u ~ N(mean, std) squashed to a = tanh(u) in (-1, 1).
Scaling a to the bounds of an environment happens outside and is *not* part of log_prob: it would only add
the constant -sum log(scale), which would have to be undone in the target entropy.
Source: Haarnoja et al. 2018, arXiv:1812.05905, appendix C.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F


def bounded_log_std(raw: Tensor, *, low: float, high: float) -> Tensor:
    """Map a network's output smoothly into [low, high], so that its gradient never vanishes at a bound.

    Args:
        raw: [..., A] any real number; 0 gives the middle of the interval.
        low: smallest log standard deviation, in nats.
        high: largest log standard deviation, in nats.

    Returns:
        [..., A] low + (high - low) * (tanh(raw) + 1) / 2.
    """
    return torch.tanh(raw) * (0.5 * (high - low)) + 0.5 * (high + low)


def tanh_gaussian_sample(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return a reparametrized sample of a tanh-Gaussian and its log density.

    log(1 - tanh(u)^2) is computed as 2 * (log 2 - u - softplus(-2u)), which is exact where
    1 - tanh(u)^2 rounds to 0 and needs no epsilon.
    Source: arXiv:1812.05905, equation 21; the softplus form: tensorflow_probability, bijectors.Tanh.

    Args:
        mean: [..., A] mean of the Gaussian before squashing.
        log_std: [..., A] log standard deviation before squashing, in nats.
        noise: [..., A] standard normal draws; with them the sample is a function of mean and log_std.

    Returns:
        [..., A] the action in (-1, 1), and [...] its log density in nats, summed over the A dimensions.
    """
    pre_tanh = torch.addcmul(mean, log_std.exp(), noise)  # [..., A]
    # -noise^2 / 2 - log_std - log(2 pi) / 2 - 2 (log 2 - u - softplus(-2u)), constants taken out
    density = 2.0 * (pre_tanh + F.softplus(-2.0 * pre_tanh)) - (log_std + 0.5 * noise.square())  # [..., A]
    constant = (0.5 * math.log(2.0 * math.pi) + 2.0 * math.log(2.0)) * mean.shape[-1]
    return torch.tanh(pre_tanh), density.sum(dim=-1) - constant


def categorical(logits: Tensor, action: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return log probability and entropy of independent categorical choices.

    Args:
        logits: [B, sum(sizes)] unnormalized log probabilities, one dimension after the other.
        action: [B] or [B, D] int64, the choice in each of the D dimensions.
        sizes: choices of each dimension.

    Returns:
        [B] log probability of the action and [B] entropy, both in nats and summed over the dimensions.
    """
    choices = action.reshape(len(logits), len(sizes))
    parts = logits.split_with_sizes(list(sizes), dim=1) if len(sizes) > 1 else (logits,)
    log_probs = [torch.log_softmax(part, dim=1) for part in parts]
    chosen = [each.gather(1, i.unsqueeze(1)).squeeze(1) for each, i in zip(log_probs, choices.T, strict=True)]
    entropies = [-(each.exp() * each).sum(dim=1) for each in log_probs]
    return reduce(torch.add, chosen), reduce(torch.add, entropies)


def gaussian(mean: Tensor, log_std: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Return log density and entropy of a diagonal Gaussian.

    Args:
        mean: [B, A].
        log_std: [A] log standard deviation, the same for every row, in nats.
        action: [B, A] the draw, before any clipping.

    Returns:
        [B] log density of the action and [B] entropy, both in nats and summed over the A dimensions.
    """
    half_log_tau = 0.5 * math.log(2.0 * math.pi) * mean.shape[1]
    spread = log_std.sum()
    distance = (action - mean) * torch.exp(-log_std)  # [B, A] in standard deviations
    log_prob = -0.5 * distance.square().sum(dim=1) - (spread + half_log_tau)
    return log_prob, (spread + half_log_tau + 0.5 * mean.shape[1]).expand(len(mean))

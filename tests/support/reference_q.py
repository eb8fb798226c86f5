"""Slow twins of value learning, one transition and one atom at a time, and the fixed data that its tests learn from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from support.algorithms import DISCRETE
from torch import Tensor

from ddrl.returns import n_step_return
from ddrl.types import Batch, EnvSpec

IMAGES = EnvSpec("Toy-v0", (12, 10), "uint8", "discrete", (), (3,), frame_stack=2)
PIXELS = EnvSpec("Toy-v0", (36, 40), "uint8", "discrete", (), (3,), frame_stack=4)


def softmax(logits: Sequence[Any]) -> list[Any]:
    """Probabilities of logits, numbers or tensors."""
    powers = [torch.exp(torch.as_tensor(logit)) for logit in logits]
    total = torch.stack(powers).sum()
    return [power / total for power in powers]


def slow_huber(difference: Tensor, delta: float) -> Tensor:
    """Huber 1964: quadratic up to delta, linear beyond."""
    size = difference.abs()
    return 0.5 * difference**2 if float(size.detach()) <= delta else delta * (size - 0.5 * delta)


def slow_loss(
    of_one: Callable[..., tuple[Tensor, float]], output: Tensor, next_q: Tensor, next_target: Tensor, action: Tensor,
    return_: Tensor, discount: Tensor, weight: Tensor | None, **options: Any,
) -> tuple[Tensor, list[float]]:  # fmt: skip
    """Return the mean loss and the TD errors of a batch, one transition at a time.

    The action is that of arXiv:1509.06461: the best one by `next_q`, whose output `next_target` values.

    Args:
        of_one: the loss and the TD error, given one transition's output, its target output, return and discount.
    """
    losses, errors = [], []
    for b in range(len(output)):
        values = next_q[b].tolist()
        following = next_target[b, values.index(max(values))].detach()
        loss, error = of_one(
            output[b, action[b]], following, float(return_[b]), float(discount[b]), **options
        )
        losses.append(loss if weight is None else loss * float(weight[b]))
        errors.append(error)
    return torch.stack(losses).mean(), errors


def _slow_q(
    q: Tensor, following: Tensor, return_: float, discount: float, *, loss: str, huber_delta: float
) -> tuple[Tensor, float]:
    """Mnih et al. 2015, algorithm 1."""
    difference = return_ + discount * float(following) - q
    each = slow_huber(difference, huber_delta) if loss == "huber" else 0.5 * difference**2
    return each, float(difference.detach())


def slow_projection(
    prob: Sequence[float], return_: float, discount: float, v_min: float, v_max: float
) -> list[float]:
    """arXiv:1707.06887, algorithm 1: each atom's mass to the two neighbors of where it moves."""
    num_atoms = len(prob)
    spacing = (v_max - v_min) / (num_atoms - 1)
    mass = [0.0] * num_atoms
    for j, p in enumerate(prob):
        moved = min(max(return_ + discount * (v_min + j * spacing), v_min), v_max)
        b = (moved - v_min) / spacing
        lower, upper = math.floor(b), math.ceil(b)
        if lower == upper:  # as printed, algorithm 1 loses the mass that falls onto an atom
            mass[lower] += p
        else:
            mass[lower] += p * (upper - b)
            mass[upper] += p * (b - lower)
    return mass


def _slow_categorical(
    logits: Tensor, following: Tensor, return_: float, discount: float, *, v_min: float, v_max: float
) -> tuple[Tensor, float]:
    """The divergence of arXiv:1707.06887, section 4.1."""
    next_prob = [float(p) for p in softmax(following.tolist())]
    each = torch.zeros((), dtype=logits.dtype)
    for m, p in zip(
        slow_projection(next_prob, return_, discount, v_min, v_max), softmax(list(logits)), strict=True
    ):
        if m > 0:
            each = each + m * (math.log(m) - torch.log(p))
    return each, float(each.detach())


def _slow_quantile(
    quantiles: Tensor, following: Tensor, return_: float, discount: float, *, huber_delta: float
) -> tuple[Tensor, float]:
    """arXiv:1710.10044, algorithm 1, one pair of quantiles at a time."""
    targets, num = [return_ + discount * float(value) for value in following], len(quantiles)
    each = torch.zeros((), dtype=quantiles.dtype)
    for i, theta in enumerate(quantiles):
        tau = (2 * i + 1) / (2 * num)
        for target in targets:
            u = target - theta
            each = each + abs(tau - (1.0 if u < 0 else 0.0)) * slow_huber(u, huber_delta) / num
    return each, sum(targets) / num - sum(float(theta.detach()) for theta in quantiles) / num


slow_q_loss = partial(slow_loss, _slow_q)
slow_categorical_loss = partial(slow_loss, _slow_categorical)
slow_quantile_loss = partial(slow_loss, _slow_quantile)


def slow_ladder(producer: int, num_envs: int, base: float, exponent: float) -> list[float]:
    """arXiv:1803.00933, section 5, over a ladder of 256 rungs, by writing numbers backwards."""
    epsilons = []
    for lane in range(num_envs):
        rung = int(f"{(producer * num_envs + lane) % 256:08b}"[::-1], 2)
        epsilons.append(base ** (1 + exponent * rung / 255))
    return epsilons


def make_batch(
    seed: int = 0,
    *,
    spec: EnvSpec = DISCRETE,
    rows: Any = range(6),
    gamma: float = 0.9,
    n_step: int = 1,
    weight: np.ndarray | None = None,
) -> Batch:
    """Return some rows of 64 transitions of random play on one lane, with all endings, as tensors."""
    rng, row = np.random.default_rng(seed), np.asarray(rows)
    if spec.observation_dtype == "uint8":
        observation = rng.integers(0, 256, (65, *spec.input_shape), np.uint8)
    else:
        observation = rng.standard_normal((65, *spec.input_shape)).astype(np.float32)
    ending, reward = rng.random((64, 1)), rng.standard_normal((64, 1)).astype(np.float32)
    return_, discount, k = n_step_return(reward, ending < 0.2, ending > 0.9, gamma=gamma, n=n_step)
    if spec.action_kind == "continuous":
        action = rng.uniform(spec.action_low, spec.action_high, (64, *spec.action_shape)).astype(np.float32)
    else:
        sizes = np.reshape(spec.action_sizes, spec.action_shape)
        action = rng.integers(0, sizes, (64, *spec.action_shape))
    columns = [observation[row], action[row], return_[row, 0], discount[row, 0], observation[row + k[row, 0]]]
    drawn = [] if weight is None else [row, np.asarray(weight, np.float32)]
    return Batch(*map(torch.from_numpy, columns + drawn))

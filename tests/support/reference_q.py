"""Slow twins of value learning, one transition and one atom at a time, and the fixed data that its tests learn from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from support.algorithms import DISCRETE
from torch import Tensor

from ddrl.returns import n_step_return
from ddrl.types import Batch, EnvSpec

IMAGES = EnvSpec("Toy-v0", (12, 10), "uint8", "discrete", (), (3,), frame_stack=2)
PIXELS = EnvSpec("Toy-v0", (36, 40), "uint8", "discrete", (), (3,), frame_stack=4)


def largest(values: Sequence[float]) -> int:
    """The first index of the largest value."""
    best = 0
    for index, value in enumerate(values):
        if value > values[best]:
            best = index
    return best


def softmax(logits: Sequence[Any]) -> list[Any]:
    """Probabilities of logits, numbers or tensors."""
    powers = [torch.exp(torch.as_tensor(logit)) for logit in logits]
    total = torch.stack(powers).sum()
    return [power / total for power in powers]


def slow_huber(difference: Tensor, delta: float) -> Tensor:
    """Huber 1964: quadratic up to delta, linear beyond."""
    size = difference.abs()
    return 0.5 * difference**2 if float(size.detach()) <= delta else delta * (size - 0.5 * delta)


def slow_q_loss(
    q: Tensor, next_q: Tensor, next_target_q: Tensor, action: Tensor, return_: Tensor, discount: Tensor,
    weight: Tensor | None, *, loss: str, huber_delta: float,
) -> tuple[Tensor, list[float]]:  # fmt: skip
    """Mnih et al. 2015, algorithm 1, with the action of arXiv:1509.06461, one transition at a time."""
    total, errors = torch.zeros((), dtype=q.dtype), []
    for b in range(len(q)):
        choice = largest(next_q[b].tolist())
        target = float(return_[b]) + float(discount[b]) * float(next_target_q[b, choice].detach())
        difference = target - q[b, action[b]]
        each = slow_huber(difference, huber_delta) if loss == "huber" else 0.5 * difference**2
        total = total + each * (1.0 if weight is None else float(weight[b]))
        errors.append(float(difference.detach()))
    return total / len(q), errors


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


def slow_categorical_loss(
    logits: Tensor, next_q: Tensor, next_target_logits: Tensor, action: Tensor, return_: Tensor, discount: Tensor,
    weight: Tensor | None, *, v_min: float, v_max: float,
) -> tuple[Tensor, list[float]]:  # fmt: skip
    """The divergence of arXiv:1707.06887, section 4.1, one transition at a time."""
    total, priorities = torch.zeros((), dtype=logits.dtype), []
    for b in range(len(logits)):
        next_prob = [float(p) for p in softmax(next_target_logits[b, largest(next_q[b].tolist())].tolist())]
        target = slow_projection(next_prob, float(return_[b]), float(discount[b]), v_min, v_max)
        each = torch.zeros((), dtype=logits.dtype)
        for m, p in zip(target, softmax(list(logits[b, action[b]])), strict=True):
            if m > 0:
                each = each + m * (math.log(m) - torch.log(p))
        total = total + each * (1.0 if weight is None else float(weight[b]))
        priorities.append(float(each.detach()))
    return total / len(logits), priorities


def slow_quantile_loss(
    quantiles: Tensor, next_q: Tensor, next_target: Tensor, action: Tensor, return_: Tensor, discount: Tensor,
    weight: Tensor | None, *, huber_delta: float,
) -> tuple[Tensor, list[float]]:  # fmt: skip
    """arXiv:1710.10044, algorithm 1, one pair of quantiles at a time."""
    total, errors = torch.zeros((), dtype=quantiles.dtype), []
    for b in range(len(quantiles)):
        choice = largest(next_q[b].tolist())
        targets = [float(return_[b]) + float(discount[b]) * float(v) for v in next_target[b, choice].detach()]
        predicted = list(quantiles[b, action[b]])
        each = torch.zeros((), dtype=quantiles.dtype)
        for i, theta in enumerate(predicted):
            tau = (2 * i + 1) / (2 * len(predicted))
            for target in targets:
                u = target - theta
                each = each + abs(tau - (1.0 if u < 0 else 0.0)) * slow_huber(u, huber_delta) / len(targets)
        total = total + each * (1.0 if weight is None else float(weight[b]))
        errors.append(
            sum(targets) / len(targets) - sum(float(p.detach()) for p in predicted) / len(predicted)
        )
    return total / len(quantiles), errors


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
    rows: Sequence[int] | np.ndarray = range(6),
    gamma: float = 0.9,
    n_step: int = 1,
    weight: np.ndarray | None = None,
) -> Batch:
    """Some rows of 64 transitions of random play on one lane, with all endings, as tensors."""
    rng = np.random.default_rng(seed)
    if spec.observation_dtype == "uint8":
        observation = rng.integers(0, 256, (65, *spec.input_shape), np.uint8)
    else:
        observation = rng.standard_normal((65, *spec.input_shape)).astype(np.float32)
    ending = rng.random((64, 1))
    return_, discount, k = n_step_return(
        rng.standard_normal((64, 1)).astype(np.float32), ending < 0.2, ending > 0.9, gamma=gamma, n=n_step
    )
    action = rng.integers(0, spec.action_sizes[0], 64)
    row = np.asarray(rows)
    return Batch(
        observation=torch.from_numpy(observation[row]),
        action=torch.from_numpy(action[row]),
        n_step_return=torch.from_numpy(return_[row, 0]),
        bootstrap_discount=torch.from_numpy(discount[row, 0]),
        next_observation=torch.from_numpy(observation[row + k[row, 0]]),
        number=None if weight is None else torch.from_numpy(row),
        weight=None if weight is None else torch.from_numpy(np.asarray(weight, np.float32)),
    )

"""Slow twins of returns.py, and random data for them: the papers' explicit sums over one lane, in plain float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch


def slow_return(
    reward: Any, terminated: Any, truncated: Any, *, gamma: float, n: int
) -> tuple[float, float, int]:
    """(n-step return, bootstrap discount, number of rewards) from the first step of one lane, walking forward."""
    total, used = 0.0, 0
    while True:
        total += gamma**used * float(reward[used])
        used += 1
        if terminated[used - 1]:
            return total, 0.0, used
        if truncated[used - 1] or used in (n, len(reward)):
            return total, gamma**used, used


def slow_rescale(x: float, eps: float = 1e-3) -> float:
    """Pohlen et al. 2018, section 3.2 as printed."""
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + eps * x


def slow_unrescale(x: float, eps: float = 1e-3) -> float:
    """Proposition A.2 as printed."""
    return math.copysign(((math.sqrt(1 + 4 * eps * (abs(x) + 1 + eps)) - 1) / (2 * eps)) ** 2 - 1, x)


class Steps(NamedTuple):
    """The columns of the estimators: [T, B] tensors, or the lists of one lane."""

    reward: Any
    discount: Any
    value: Any
    next_value: Any
    continues: Any
    log_rho: Any


def lanes(steps: Steps) -> Iterator[Steps]:
    """The columns of each lane as lists of numbers."""
    for lane in range(steps.reward.shape[1]):
        yield Steps(*(column[:, lane].tolist() for column in steps))


def make_steps(
    seed: int,
    *,
    num_steps: int,
    num_envs: int,
    gamma: float = 0.5,
    end_probability: float = 0.3,
    dtype: torch.dtype = torch.float32,
) -> Steps:
    """Random columns. Rewards and values are quarters, so that UPGO's comparison is exact in float32 too.

    A cut is a termination, a truncation or a border of fragments; `continues` of the last row is random.
    """
    rng = np.random.default_rng(seed)
    shape = (num_steps, num_envs)

    def quarters() -> np.ndarray:
        return rng.integers(-16, 17, shape) / 4

    cut = rng.random(shape) < end_probability
    cut[-1] = True
    terminated = cut & (rng.random(shape) < 0.4)
    value = quarters()
    next_value = np.where(cut, quarters(), np.roll(value, -1, axis=0))
    continues = ~cut
    continues[-1] = rng.random(num_envs) < 0.5
    columns = (quarters(), gamma * ~terminated, value, next_value, rng.normal(size=shape))
    reward, discount, value, next_value, log_rho = (torch.tensor(column, dtype=dtype) for column in columns)
    return Steps(reward, discount, value, next_value, torch.tensor(continues), log_rho)


def steps_to_cut(lane: Steps, start: int) -> int:
    """Return the number of steps from `start` to the next cut, the step before the cut included."""
    num = 1
    while lane.continues[start + num - 1] and start + num < len(lane.reward):
        num += 1
    return num


def slow_n_step(lane: Steps, start: int, n: int) -> float:
    """G_{t:t+n}: n discounted rewards, then the discounted value of the state after them."""
    rewards = sum(math.prod(lane.discount[start : start + i]) * lane.reward[start + i] for i in range(n))
    return rewards + math.prod(lane.discount[start : start + n]) * lane.next_value[start + n - 1]


def slow_monte_carlo(lane: Steps, start: int) -> float:
    """All rewards there are."""
    return slow_n_step(lane, start, steps_to_cut(lane, start))


def slow_td_lambda(lane: Steps, start: int, *, lambda_: float) -> float:
    """Sutton and Barto 2018, equation 12.3: the weighted mix of all n-step returns; 0^0 is 1."""
    num = steps_to_cut(lane, start)
    mix = sum(lambda_ ** (n - 1) * slow_n_step(lane, start, n) for n in range(1, num))
    return (1 - lambda_) * mix + lambda_ ** (num - 1) * slow_n_step(lane, start, num)


def _td_error(lane: Steps, step: int) -> float:
    return lane.reward[step] + lane.discount[step] * lane.next_value[step] - lane.value[step]


def slow_gae(lane: Steps, start: int, *, lambda_: float) -> float:
    """arXiv:1506.02438, equation 16: the sum of (gamma lambda)^l delta_{t+l}."""
    return sum(
        math.prod(lane.discount[start : start + i]) * lambda_**i * _td_error(lane, start + i)
        for i in range(steps_to_cut(lane, start))
    )


def slow_vtrace(
    lane: Steps, start: int, *, lambda_: float, rho_bar: float = 1.0, pg_rho_bar: float = 1.0
) -> tuple[float, float]:
    """arXiv:1802.01561, equation 1 and section 4.2: (advantage, vs) of one start."""
    rho = [math.exp(log_rho) for log_rho in lane.log_rho]

    def vs(s: int) -> float:
        return lane.value[s] + sum(
            math.prod(lane.discount[s:t])
            * math.prod(lambda_ * min(1.0, rho[i]) for i in range(s, t))
            * min(rho_bar, rho[t])
            * _td_error(lane, t)
            for t in range(s, s + steps_to_cut(lane, s))
        )

    following = vs(start + 1) if steps_to_cut(lane, start) > 1 else lane.next_value[start]
    target = lane.reward[start] + lane.discount[start] * following
    return min(pg_rho_bar, rho[start]) * (target - lane.value[start]), vs(start)


def slow_upgo(lane: Steps, start: int) -> tuple[float, float]:
    """(advantage, return): the n-step return up to the first step that does worse than its value."""
    n = 1
    while n < steps_to_cut(lane, start) and _td_error(lane, start + n) >= 0:
        n += 1
    return_ = slow_n_step(lane, start, n)
    return min(1.0, math.exp(lane.log_rho[start])) * (return_ - lane.value[start]), return_

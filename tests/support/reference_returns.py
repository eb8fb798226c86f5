"""Slow twins of returns.py, and random data for them.

n-step transitions are walked one at a time, from fragments whose frames say where they are. The estimators on
trajectories are written as the papers' explicit sums over one lane, from one start, in plain float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from support.fragments import plain_fragment

from ddrl.types import Fragment


class Transition(NamedTuple):
    """One n-step transition; next_observation is None where the episode terminated."""

    observation: np.ndarray
    action: np.ndarray
    n_step_return: float
    bootstrap_discount: float
    next_observation: np.ndarray | None
    num_steps: int


def slow_transitions(fragment: Fragment, *, gamma: float, n: int) -> list[Transition]:
    """All transitions in order of time, then lane, by walking forward from each start."""
    final = {
        (int(step), int(lane)): fragment.final_observation[i]
        for i, (step, lane) in enumerate(fragment.final_index)
    }
    end = len(fragment.reward)
    result = []
    for start in range(fragment.context, end):
        for lane in range(fragment.num_envs):
            total, used = 0.0, 0
            while True:
                step = start + used
                total += gamma**used * float(fragment.reward[step, lane])
                used += 1
                if fragment.terminated[step, lane]:
                    discount, following = 0.0, None
                    break
                if fragment.truncated[step, lane]:
                    discount, following = gamma**used, final[step, lane]
                    break
                if used == n or step + 1 == end:
                    discount, following = gamma**used, fragment.observation[step + 1, lane]
                    break
            result.append(
                Transition(
                    fragment.observation[start, lane],
                    fragment.action[start, lane],
                    total,
                    discount,
                    following,
                    used,
                )
            )
    return result


def make_fragment(
    seed: int,
    *,
    num_steps: int,
    num_envs: int,
    context: int = 0,
    serial: int = 0,
    dtype: Any = np.float32,
    end_probability: float = 0.3,
) -> Fragment:
    """A fragment with random endings. Each frame is [serial, step, lane, kind], kind 1 for a final one.

    Rewards are small integers, so that with a dyadic gamma all sums are exact in float32.
    """
    rng = np.random.default_rng(seed)
    rows = context + num_steps
    shape = (rows, num_envs)
    observation = np.empty((rows + 1, num_envs, 4), dtype)
    observation[..., 0] = serial
    observation[..., 1] = np.arange(rows + 1)[:, None]
    observation[..., 2] = np.arange(num_envs)
    observation[..., 3] = 0
    ended = rng.random(shape) < end_probability
    terminated = ended & (rng.random(shape) < 0.5)
    truncated = ended & ~terminated
    finals = {}
    for step, lane in np.argwhere(truncated):
        finals[step, lane] = observation[step, lane].copy()
        finals[step, lane][3] = 1
    return plain_fragment(
        seq=serial,
        context=context,
        observation=observation,
        action=rng.normal(size=(*shape, 2)).astype(np.float32),
        reward=rng.integers(-8, 9, shape).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        finals=finals,
    )


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
    """How many steps from `start` belong together, the one before the cut included."""
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

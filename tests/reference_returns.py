"""Slow twins of the n-step code, one transition at a time, and fragments whose frames say where they are."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

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
    final_index = np.argwhere(truncated).astype(np.int32)
    final_observation = observation[final_index[:, 0], final_index[:, 1]].copy()
    final_observation[:, 3] = 1
    return Fragment(
        run="run",
        producer=1,
        incarnation="a",
        seq=serial,
        policy_version=0,
        context=context,
        observation=observation,
        action=rng.normal(size=(*shape, 2)).astype(np.float32),
        reward=rng.integers(-8, 9, shape).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        final_index=final_index,
        final_observation=final_observation,
        episode_return=np.zeros(0, np.float32),
        episode_length=np.zeros(0, np.int32),
    )

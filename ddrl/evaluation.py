"""Play a fixed list of seeds with deterministic actions: a score that can be repeated exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ddrl import envs
from ddrl.config import EnvConfig
from ddrl.types import EnvSpec, EvaluationResult


class Policy(Protocol):
    """What an evaluation needs of a policy: a row's action must not depend on the other rows."""

    def act(self, observation: np.ndarray) -> np.ndarray:
        """The deterministic action: [B, *O] -> [B, *A]; B shrinks as episodes end."""


class _Lane:
    """One environment and the episode it is in."""

    def __init__(self, env: EnvConfig) -> None:
        self.env = envs.make_one(env)
        self.index = -1  # of the episode's seed
        self.episode_return = 0.0
        self.length = 0


def evaluate(
    policy: Policy,
    env: EnvConfig,
    spaces: EnvSpec,
    seeds: Sequence[int],
    *,
    num_envs: int,
    policy_version: int,
    on_episode: Callable[[int, float, int], None] | None = None,
) -> EvaluationResult:
    """Play one episode per seed, each from `reset(seed=seed)`, by deterministic actions.

    The result does not depend on `num_envs`: up to that many episodes go side by side, one call of the policy
    per step for all that still play.

    Args:
        policy: has its weights loaded.
        env: what is played; its `num_envs` and `reward_scale` are not used.
        spaces: of the environment, as the policy knows them.
        seeds: one per episode, at least one.
        num_envs: episodes side by side, at least 1; more amortise the policy.
        policy_version: goes into the result.
        on_episode: called after each episode, in order of ending, with (seed, return, length in agent steps).

    Raises:
        ValueError: no seeds, or `num_envs` below 1.
        EnvError: the environment cannot be made here, or its spaces are others.
    """
    if not seeds:
        raise ValueError("evaluate: no seeds; give one per episode")
    if num_envs < 1:
        raise ValueError(f"evaluate: num_envs is {num_envs}; use 1 or more")
    returns, lengths = [0.0] * len(seeds), [0] * len(seeds)
    waiting = iter(range(len(seeds)))
    lanes: list[_Lane] = []
    try:
        for _ in range(min(num_envs, len(seeds))):
            lanes.append(_Lane(env))
        envs.check_spaces(lanes[0].env, env.id, spaces)
        observation = np.empty((len(lanes), *spaces.observation_shape), spaces.observation_dtype)

        def begin(lane: _Lane, row: int) -> bool:
            index = next(waiting, None)
            if index is None:
                return False
            lane.index, lane.episode_return, lane.length = index, 0.0, 0
            observation[row] = lane.env.reset(seed=int(seeds[index]))[0]
            return True

        playing = [row for row, lane in enumerate(lanes) if begin(lane, row)]
        while playing:
            actions = policy.act(observation[playing])
            still = []
            for row, action in zip(playing, actions, strict=True):
                lane = lanes[row]
                observation[row], reward, terminated, truncated, _ = lane.env.step(action)
                lane.episode_return += float(reward)
                lane.length += 1
                if terminated or truncated:
                    returns[lane.index], lengths[lane.index] = lane.episode_return, lane.length
                    if on_episode is not None:
                        on_episode(int(seeds[lane.index]), lane.episode_return, lane.length)
                    if not begin(lane, row):
                        continue
                still.append(row)
            playing = still
    finally:
        for lane in lanes:
            lane.env.close()
    return EvaluationResult(policy_version, tuple(int(s) for s in seeds), tuple(returns), tuple(lengths))

"""A loaded policy played step by step does what it does in `evaluate`, with stacks of frames and with a memory too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from ddrl import config, envs, policy
from ddrl.algorithms.base import NO_STATE, RecurrentState, initial_state
from ddrl.runs.evaluation import evaluate


class Sensitive:
    """Its action, 0 or 1, hangs on every number it is shown and on all that it remembers."""

    evaluation_epsilon = 0.0

    def __init__(self, size: int) -> None:
        self._size = size

    def load(self, weights: Mapping[str, Any]) -> None: ...

    def initial_state(self, num_envs: int) -> RecurrentState:
        return initial_state(num_envs, self._size) if self._size else {}

    def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
        rows = observation.reshape(len(observation), -1).astype(np.float64)
        seen = (rows * np.arange(1, rows.shape[1] + 1)).sum(axis=1)
        if state:
            seen += (
                3.7 * state["hidden"][:, 0] + 1.3 * state["previous_action"] + 0.7 * state["previous_reward"]
            )
            state["hidden"][:, 0] = np.sin(1e3 * seen)
        return (np.sin(1e4 * seen) > 0).astype(np.int64)

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState = NO_STATE
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        return self.act(observation, state), {}


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("frame_stack", [1, 3])
def test_episodes_by_hand_are_those_evaluated(size: int, frame_stack: int) -> None:
    overrides = [f"env.frame_stack={frame_stack}", "env.reward_scale=0.25"]
    settings = config.load("configs/cartpole-dqn.yaml", overrides)
    spaces = envs.describe(settings.env)
    loaded = policy.LoadedPolicy(Sensitive(size), settings, spaces, "run", 1)
    seeds = range(20, 30)

    lengths = []
    env: Any = envs.make_one(settings.env)
    for seed in seeds:
        loaded.begin()
        observation, _ = env.reset(seed=seed)
        length, reward, ended = 0, 0.0, False
        while not ended:
            observation, reward, terminated, truncated, _ = env.step(loaded.action(observation, reward))
            length, ended = length + 1, terminated or truncated
        lengths.append(length)
    env.close()

    result = evaluate(Sensitive(size), settings.env, spaces, seeds, num_envs=3, policy_version=1)
    assert lengths == list(result.lengths)
    assert len(set(lengths)) > 3, "else a constant action would pass"

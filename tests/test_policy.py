"""A loaded policy that is played step by step does what `evaluate` plays, with stacked frames and recurrent state."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.algorithms import DISCRETE, make_learner

from ddrl import config, envs, policy
from ddrl.algorithms.base import NO_STATE, RecurrentState, initial_state
from ddrl.runs.evaluation import score
from ddrl.store import weights


class Sensitive:
    """A policy whose action, 0 or 1, depends on every number of its input and of its state [N, size]."""

    evaluation_epsilon = 0.0

    def __init__(self, size: int) -> None:
        self.size = size

    def initial_state(self, num_envs: int) -> RecurrentState:
        return initial_state(num_envs, self.size) if self.size else {}

    def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
        rows = observation.reshape(len(observation), -1).astype(np.float64)
        seen = (rows * np.arange(1, rows.shape[1] + 1)).sum(axis=1)
        if state:
            seen += (
                3.7 * state["hidden"][:, 0] + 1.3 * state["previous_action"] + 0.7 * state["previous_reward"]
            )
            state["hidden"][:, 0] = np.sin(1e3 * seen)
        return (np.sin(1e4 * seen) > 0).astype(np.int64)


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("frame_stack", [1, 3])
def test_episodes_by_hand_are_those_evaluated(size: int, frame_stack: int) -> None:
    overrides = [f"env.frame_stack={frame_stack}", "env.reward_scale=0.25"]
    settings = config.load("configs/cartpole-dqn.yaml", overrides)
    loaded = policy.LoadedPolicy(Sensitive(size), settings, envs.describe(settings.env), "run", 1)
    lengths = []
    env: Any = envs.make_one(settings.env)
    for seed in range(20, 30):
        loaded.begin()
        observation, _ = env.reset(seed=seed)
        length, reward, ended = 0, 0.0, False
        while not ended:
            observation, reward, terminated, truncated, _ = env.step(loaded.action(observation, reward))
            length, ended = length + 1, terminated or truncated
        lengths.append(length)
    env.close()
    assert lengths == list(score(loaded, range(20, 30), num_envs=3).lengths)
    assert len(set(lengths)) > 3, "else a constant action would pass"


def test_a_policy_file_of_another_shape_is_refused(tmp_path: Path) -> None:
    learner = make_learner("ppo", DISCRETE, hidden_sizes=(8,))
    arrays = {name: tensor.numpy() for name, tensor in learner.weights().items()}
    path = tmp_path / "a.policy"
    for size in (8, 9):
        tree = {"env": {"id": "Toy-v0"}, "algorithm": {"name": "ppo", "hidden_sizes": [size]}}
        metadata = {"format": policy.FORMAT, "run": "run", "version": "3", "config": json.dumps(tree)}
        path.write_bytes(weights.encode_weights(arrays, metadata | {"spaces": json.dumps(asdict(DISCRETE))}))
        if size == 8:
            assert policy.load(path).action(np.zeros(3, np.float32)).shape == ()
    with pytest.raises(policy.PolicyFileError, match=r"do not fit .* \(actor\.layers\.0\.bias: shape \(8,\)"):
        policy.load(path)

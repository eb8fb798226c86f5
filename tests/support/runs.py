"""Real runs of the toy `ddrl/Target-v0`, which are learned in seconds; and policies that are functions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from redis import Redis

from ddrl.algorithms import base
from ddrl.algorithms.base import NO_STATE, RecurrentState
from ddrl.config import RunConfig, validate
from ddrl.runs import submit
from ddrl.store import runs, stream, weights
from ddrl.worker.segment import Players, play


def target_tree(**sections: Any) -> dict[str, Any]:
    """Return a config as plain data; `sections` are merged into it, into a shorter one for on-policy algorithms."""
    sac = {
        "n_step": 1,
        "layer_norm": False,
        "name": "sac",
        "hidden_sizes": [32, 32],
        "learning_rate": 3e-3,
        "batch_size": 32,
        "gamma": 0.5,
    }
    tree: dict[str, Any] = {
        "name": "target",
        "env": {"id": "ddrl/Target-v0", "num_envs": 4, "reward_scale": 1.0},
        "algorithm": sac,
        "rollout": {"segment_s": 0.5, "fragment_s": 0.02, "max_fragment_steps": 20},
        "replay": {"capacity": 20_000, "warmup_steps": 200, "samples_per_insert": 16, "slack_steps": 200},
        "learner": {"publish_every_s": 0.1, "checkpoint_every_s": 1, "metrics_every_s": 0.2, "device": "cpu"},
        "evaluation": {"every_s": 1, "near_every_s": 0.2, "near": 5, "num_envs": 10, "timeout_s": 10},
        "stop": {"return": -0.5, "time": 120},
    }
    if sections.get("algorithm", {}).get("name") in ("ppo", "impala", "pqn"):
        tree |= {"algorithm": {}, "replay": {}}
        del tree["learner"]["publish_every_s"]
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section} if isinstance(section, dict) else section
    if tree["algorithm"].get("name") != "sac":
        tree["algorithm"].pop("layer_norm", None)
    return tree


def target_config(**sections: Any) -> RunConfig:
    """Return the same, validated."""
    return validate(target_tree(**sections))


def start(client: Redis, config: RunConfig, **begins: Any) -> str:
    """Submit a run."""
    return submit.create(client, config, submit.prepare(config), **begins)


def publish_initial(client: Redis, run: str, token: int, *, allowance: int = 0) -> None:
    """Publish version 0: weights that a learner starts from."""
    resolved = base.resolve(runs.config(client, run), runs.spaces(client, run))
    learner = resolved.learner(device=torch.device("cpu"), seed=1)
    blob = weights.encode_weights({name: value.numpy() for name, value in learner.weights().items()})
    weights.publish(client, run, token, version=0, blob=blob, allowance=allowance, updates=0)


def play_steps(client: Redis, run: str, token: int, steps: int, *, players: Players | None = None) -> Players:
    """Append at least `steps` more transitions by really playing, whatever the pace allows."""
    players = players or Players()
    if weights.index(client, run).latest < 0:
        publish_initial(client, run, token)
    goal = stream_steps(client, run) + steps
    deadline = time.monotonic() + 60
    while stream_steps(client, run) < goal:
        assert time.monotonic() < deadline, runs.state(client, run)
        stream.allow(client, run, token, goal, updates=0)
        stream.claim(client, run, 1)  # ends the segment at its first append, instead of waiting for its time
        play(client, client, players, run)
    return players


def stream_steps(client: Redis, run: str) -> int:
    """Return the number of transitions appended so far."""
    return runs.state(client, run).appended_steps


def toy_answers(observation: np.ndarray) -> np.ndarray:
    """Return the best actions in the toys that show their answer, by the shape of [N, *O] observations."""
    if observation.shape[1:] == (8, 8, 1):  # Spot
        observation = observation.reshape(-1, 2, 4, 2, 4).any(axis=(2, 4)).reshape(-1, 4)
    if observation.shape[1:] == (4,):  # Pick
        return np.asarray(observation.argmax(axis=1))
    return np.stack([observation[:, :3].argmax(axis=1), observation[:, 3:].argmax(axis=1)], axis=1)  # Pairs


class Acts:
    """A policy without recurrent state: a function of the observations; notes how many rows it gets."""

    evaluation_epsilon = 0.5

    def __init__(self, act: Callable[[np.ndarray], np.ndarray]) -> None:
        self.function, self.sizes = act, list[int]()

    def initial_state(self, num_envs: int) -> RecurrentState:
        return {}

    def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
        self.sizes.append(len(observation))
        return self.function(observation)

"""Small runs that tests share: the toy environment `ddrl/Target-v0`, learned in seconds by a small SAC."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from redis import Redis

from ddrl.algorithms import base
from ddrl.config import RunConfig, validate
from ddrl.runs import submit
from ddrl.store import runs, stream, tensors, weights
from ddrl.worker.segment import Players, play


def target_tree(**sections: dict[str, Any]) -> dict[str, Any]:
    """A config as plain data; `sections` are merged into it."""
    tree: dict[str, Any] = {
        "name": "target",
        "env": {"id": "ddrl/Target-v0", "num_envs": 4},
        "algorithm": {
            "name": "sac",
            "hidden_sizes": [32, 32],
            "learning_rate": 3e-3,
            "batch_size": 32,
            "gamma": 0.5,
        },
        "rollout": {"segment_s": 0.5, "fragment_s": 0.02, "max_fragment_steps": 20},
        "replay": {"capacity": 20_000, "warmup_steps": 200, "samples_per_insert": 16, "slack_steps": 200},
        "learner": {"publish_every_s": 0.1, "checkpoint_every_s": 1, "metrics_every_s": 0.2, "device": "cpu"},
        "evaluation": {"every_s": 1, "near_every_s": 0.2, "near": 5, "num_envs": 10, "timeout_s": 10},
        "stop": {"return": -0.5, "time": 120},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section} if isinstance(section, dict) else section
    return tree


def target_config(**sections: dict[str, Any]) -> RunConfig:
    """The same, validated."""
    return validate(target_tree(**sections))


def start(client: Redis, config: RunConfig) -> str:
    """Submit a run."""
    return submit.create(client, config, submit.prepare(config))


def play_steps(client: Redis, run: str, token: int, steps: int, *, players: Players | None = None) -> Players:
    """Append at least `steps` more transitions by really playing, whatever the pace allows."""
    players = players or Players()
    if weights.index(client, run).latest < 0:
        config = runs.config(client, run)
        learner = base.resolve(config, runs.spaces(client, run)).learner(device=torch.device("cpu"), seed=1)
        blob = tensors.encode_weights({name: value.numpy() for name, value in learner.weights().items()})
        weights.publish(client, run, token, version=0, blob=blob, allowance=0, updates=0)
    goal = stream_steps(client, run) + steps
    deadline = time.monotonic() + 60
    while stream_steps(client, run) < goal:
        assert time.monotonic() < deadline, runs.state(client, run)
        stream.allow(client, run, token, goal, updates=0)
        play(client, client, players, run)
    return players


def toy_answers(observation: np.ndarray) -> np.ndarray:
    """The best actions in the toys that show their answer, by the shape of [N, *O] observations."""
    if observation.shape[1:] == (8, 8, 1):  # Spot
        return observation.reshape(-1, 2, 4, 2, 4).any(axis=(2, 4)).reshape(-1, 4).argmax(axis=1)
    if observation.shape[1:] == (4,):  # Pick
        return observation.argmax(axis=1)
    return np.stack([observation[:, :3].argmax(axis=1), observation[:, 3:].argmax(axis=1)], axis=1)  # Pairs


def stream_steps(client: Redis, run: str) -> int:
    """Transitions appended so far."""
    return runs.state(client, run).appended_steps

"""Runs for tests: real ones of the toy `ddrl/Target-v0`, learned in seconds, and records like those of a lander."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import numpy as np
import torch
from redis import Redis

from ddrl.algorithms import base
from ddrl.config import RunConfig, validate
from ddrl.runs import submit
from ddrl.store import leases as lease
from ddrl.store import metrics, runs, stream, weights
from ddrl.store.evaluations import Evaluation, OpenEvaluations
from ddrl.types import EnvSpec, EvaluationResult
from ddrl.worker.segment import Players, play


def target_tree(**sections: dict[str, Any]) -> dict[str, Any]:
    """A config as plain data; `sections` are merged into it, into a shorter one for on-policy algorithms."""
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
    if sections.get("algorithm", {}).get("name") in ("ppo", "impala"):
        tree |= {"algorithm": {}, "replay": {}}
        del tree["learner"]["publish_every_s"]
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section} if isinstance(section, dict) else section
    return tree


def target_config(**sections: dict[str, Any]) -> RunConfig:
    """The same, validated."""
    return validate(target_tree(**sections))


def start(client: Redis, config: RunConfig) -> str:
    """Submit a run."""
    return submit.create(client, config, submit.prepare(config))


def initial_weights(config: RunConfig, spaces: EnvSpec) -> bytes:
    """Return the weights that a learner starts from."""
    learner = base.resolve(config, spaces).learner(device=torch.device("cpu"), seed=1)
    return weights.encode_weights({name: value.numpy() for name, value in learner.weights().items()})


def play_steps(client: Redis, run: str, token: int, steps: int, *, players: Players | None = None) -> Players:
    """Append at least `steps` more transitions by really playing, whatever the pace allows."""
    players = players or Players()
    if weights.index(client, run).latest < 0:
        blob = initial_weights(runs.config(client, run), runs.spaces(client, run))
        weights.publish(client, run, token, version=0, blob=blob, allowance=0, updates=0)
    goal = stream_steps(client, run) + steps
    deadline = time.monotonic() + 60
    while stream_steps(client, run) < goal:
        assert time.monotonic() < deadline, runs.state(client, run)
        stream.allow(client, run, token, goal, updates=0)
        stream.claim(client, run, 1)  # ends the segment at its first append, instead of waiting for its time
        play(client, client, players, run)
    return players


SPACES = EnvSpec(
    "LunarLanderContinuous-v3", (8,), "float32", "continuous", (2,), (), (-1.0, -1.0), (1.0, 1.0)
)


def make_run(client: Redis, **sections: dict[str, Any]) -> str:
    """An active run without any history."""
    tree = {
        "name": "lunar",
        "env": {"id": "LunarLanderContinuous-v3"},
        "algorithm": {"name": "sac"},
        "stop": {"return": 200, "time": 900},
        **sections,
    }
    queues = ("ddrl.rollout.box2d", "ddrl.evaluate.box2d")
    return runs.create(client, validate(tree), SPACES, queues=queues)


def add_evaluation(
    client: Redis, run: str, token: int, version: int, mean: float, *, purpose: str = "watch"
) -> None:
    """Store one evaluation: 20 episodes around `mean`."""
    evaluation = Evaluation(
        version=version, first_seed=1000, num_episodes=20, purpose=purpose, env_steps=31_024, updates=7_600
    )
    returns = tuple(mean + 10.0 * math.sin(seed) for seed in range(20))
    result = EvaluationResult(version, tuple(evaluation.seeds), returns, (200,) * 20)
    OpenEvaluations(client, run, send=lambda _: None, timeout_s=60, token=token).store(evaluation, result)


def add_history(client: Redis, run: str, *, folder: str = "") -> int:
    """Add 30 fragments with rising returns, figures, weights and evaluations; return the fencing token."""
    token = lease.acquire(client, run, host="here", folder=folder)
    assert token is not None
    weights.publish(client, run, token, version=0, blob=b"w", allowance=10**6, updates=0)
    draw = random.Random(1)
    for seq in range(30):
        returns = [-200 + 13 * seq + draw.gauss(0, 40) for _ in range(4)]
        stream.append(
            client,
            run,
            {b"h": b"{}"},
            producer=1,
            incarnation=7,
            seq=seq,
            num_transitions=1000,
            episode_returns=returns,
            played_ms=30_000 if seq == 0 else 0,
        )
    metrics.add(client, run, token, {"env_steps": 15_000, "updates": 3_000, "env_steps_per_s": 2_000.0})
    row = {"env_steps": 30_000, "updates": 7_600, "env_steps_per_s": 2_930.0, "updates_per_s": 310.0}
    row |= {"samples_per_insert": 31.9, "staleness": 0.8, "return_mean": 143.2, "replay_size": 30_000}
    metrics.add(client, run, token, row | {"learner_wait": 0.12, "critic_loss": 0.0123, "temperature": 0.05})
    blob = weights.encode_weights({"layer": np.zeros(3, np.float32)})
    weights.publish(client, run, token, version=31, blob=blob, allowance=10**6, updates=7_600)
    add_evaluation(client, run, token, 31, 201.3)
    add_evaluation(client, run, token, 31, 205.0, purpose="confirm")
    weights.mark_best(client, run, token, 31, 205.0)
    figures = {"version": 31, "return_mean": 205.0, "return_std": 7.0, "episodes": 100}
    runs.note_evaluation(client, run, token, figures)
    return token


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

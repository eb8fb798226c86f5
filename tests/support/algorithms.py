"""Learners and policies by the name of their algorithm, small options for each, and comparisons."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ddrl.algorithms.base import Resolved, config_class
from ddrl.networks.ranks import Ranks
from ddrl.types import EnvSpec

Options = dict[str, Any]  # of an algorithm, by name
CPU = torch.device("cpu")
DISCRETE = EnvSpec("Toy-v0", (3,), "float32", "discrete", (), (4,))
PAIRS = EnvSpec("Toy-v0", (3,), "float32", "multi_discrete", (2,), (3, 2))
CONTINUOUS = EnvSpec("Toy-v0", (3,), "float32", "continuous", (2,), (), (-2.0, 0.0), (2.0, 1.0))
PICTURES = replace(CONTINUOUS, observation_shape=(6, 6, 2), observation_dtype="uint8")
SMALL: dict[str, Options] = {
    "sac": {
        **{"hidden_sizes": (8, 7), "learning_rate": 1e-2, "target_rate": 0.1, "batch_size": 6},
        "layer_norm": False,
    },
    "td3": {"hidden_sizes": (8, 7), "learning_rate": 1e-2, "target_rate": 0.1, "batch_size": 6},
    "discrete_sac": {"hidden_sizes": (8, 7), "learning_rate": 1e-2, "target_rate": 0.1, "batch_size": 6},
    "bc": {"hidden_sizes": (8, 7), "learning_rate": 1e-2, "batch_size": 6},
    "iql": {"hidden_sizes": (8, 7), "learning_rate": 1e-2, "target_rate": 0.1, "batch_size": 6},
    "dqn": {"hidden_sizes": (8, 7), "learning_rate": 1e-2, "target_period": 2, "batch_size": 6},
    "r2d2": {
        "hidden_sizes": (6, 5), "recurrent_size": 7, "sequence_length": 5, "overlap": 2, "burn_in": 4, "n_step": 3,
        "gamma": 0.9, "learning_rate": 1e-2, "adam_eps": 1e-5, "loss_reduction": "mean",
    },
    "ppo": {
        **{"hidden_sizes": (6, 5), "batch_size": 60, "minibatch_size": 20, "num_epochs": 2, "learning_rate": 1e-2},
        **{"normalize_observations": False, "normalize_returns": False},
    },
    "impala": {"hidden_sizes": (6, 5), "batch_size": 60},
    "pqn": {"hidden_sizes": (6, 5), "batch_size": 60, "minibatch_size": 20, "num_epochs": 2, "learning_rate": 1e-2},
    "docs.own_algorithm": {"hidden_sizes": (8,), "learning_rate": 1e-2, "target_rate": 0.1, "batch_size": 6},
}  # fmt: skip


def make_learner(
    name: str,
    spec: EnvSpec,
    *,
    seed: int = 1,
    device: torch.device = CPU,
    ranks: Ranks | None = None,
    **options: Any,
) -> Any:
    """Return a learner with the small options and these."""
    config = config_class(name)(**SMALL[name] | options)
    return Resolved(name, config, spec).learner(device=device, seed=seed, ranks=ranks)


def make_policy(
    name: str, spec: EnvSpec, *, weights: Mapping[str, Any] | None = None, producer: int = 0, **options: Any
) -> Any:
    """Return a policy with the small options and these, and weights if given."""
    policy = Resolved(name, config_class(name)(**SMALL[name] | options), spec).policy(producer=producer)
    if weights is not None:
        policy.load(weights)
    return policy


def own_network(shape: tuple[int, ...], width: int = 5) -> nn.Module:
    """A custom network, named "support.algorithms:own_network"."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), width), nn.Tanh())


def dial() -> Any:
    """Turn to the bright column of an image: reward -(action - its position)^2, ten questions an episode.

    Observation: uint8 [8, 8, 1], black but for one column; action: its position, one number in [-1, 1].
    """
    from gymnasium.spaces import Box

    from ddrl.envs.toy import Questions

    def ask(generator: np.random.Generator) -> tuple[np.ndarray, float]:
        column = int(generator.integers(8))
        image = np.zeros((8, 8, 1), np.uint8)
        image[:, column] = 255
        return image, column / 4 - 0.875

    def grade(action: np.ndarray, answer: float) -> float:
        return -float((action[0] - answer) ** 2)

    return Questions(Box(0, 255, (8, 8, 1), np.uint8), Box(-1.0, 1.0, (1,), np.float32), ask, grade)


OWN = "support.algorithms:own_network"
ALLOWED = "support.algorithms,docs"


def digest(named: Mapping[str, Any]) -> str:
    """Return a hash of all names, types, shapes and values, of tensors or arrays."""
    sha = hashlib.sha256()
    for name, value in sorted(named.items()):
        array = np.ascontiguousarray(value)
        sha.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return sha.hexdigest()


def assert_same(left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    """Names, types, shapes and values of tensors or arrays are equal, to the last bit."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], name, strict=True)

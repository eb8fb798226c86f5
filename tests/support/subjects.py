"""Inputs for the tests of all learners: spaces, batches by number, and options of DQN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from support import reference_ppo, reference_q, reference_r2d2
from support.algorithms import CONTINUOUS, DISCRETE, OWN, PAIRS, PICTURES, Options
from support.reference_q import PIXELS

from ddrl.networks.device import to_device
from ddrl.types import EnvSpec

CATEGORICAL = {"distribution": "categorical", "num_atoms": 5, "v_min": -3.0, "v_max": 4.0}
QUANTILE = {"distribution": "quantile", "num_atoms": 5}
SOFT = {"target_period": None, "target_rate": 0.1}
NORMALIZED = {"normalize_observations": True, "normalize_returns": True}
MEMORY = {"recurrent": "lstm", "recurrent_size": 7, "shared": True}
ANNEALED = {"final_learning_rate": 0.0, "anneal_steps": 400}
NATURE = {"network": "nature", "hidden_sizes": (16,)}
CASES: dict[str, tuple[str, EnvSpec, Options]] = {
    "sac": ("sac", CONTINUOUS, {}),
    "sac fixed": ("sac", CONTINUOUS, {"temperature": 0.2}),
    "sac delayed": ("sac", CONTINUOUS, {"policy_delay": 2, "layer_norm": True}),
    "sac prioritized": ("sac", CONTINUOUS, {"prioritized": True}),
    "sac dropout": ("sac", CONTINUOUS, {"dropout": 0.3, "layer_norm": True}),
    "sac quantiles": ("sac", CONTINUOUS, {"num_quantiles": 5, "num_critics": 3}),
    "sac batch norm": ("sac", CONTINUOUS, {"batch_norm": True, "target_rate": 0.01, "policy_delay": 3}),
    "sac images": ("sac", PICTURES, {"network": "conv", "layer_norm": True}),
    "sac own network": ("sac", CONTINUOUS, {"network": OWN}),
    "td3": ("td3", CONTINUOUS, {}),
    "td3 prioritized": ("td3", CONTINUOUS, {"prioritized": True, "layer_norm": True, "num_critics": 3}),
    "discrete sac": ("discrete_sac", DISCRETE, {}),
    "discrete sac images": ("discrete_sac", PIXELS, NATURE | {"norm": "group", "temperature": 0.2, "value_clip": 0.5}),
    "sqn": ("discrete_sac", DISCRETE, {"form": "sqn", "num_critics": 3}),
    "bc": ("bc", CONTINUOUS, {}),
    "bc pairs": ("bc", PAIRS, {}),
    "bc images": ("bc", PIXELS, {"network": "nature"}),
    "iql": ("iql", CONTINUOUS, {}),
    "iql discrete": ("iql", DISCRETE, {"n_step": 3, "num_critics": 3}),
    "iql pairs": ("iql", PAIRS, {}),
    "iql images": ("iql", PICTURES, {"network": "conv"}),
    "ppo": ("ppo", DISCRETE, {}),
    "ppo normalized": ("ppo", CONTINUOUS, NORMALIZED | ANNEALED | {"estimator": "vtrace", "target_kl": 0.01}),
    "ppo recurrent": ("ppo", CONTINUOUS, NORMALIZED | MEMORY),
    "impala": ("impala", PAIRS, ANNEALED),
    "impala recurrent": ("impala", DISCRETE, MEMORY | {"recurrent": "gru"}),
    "impala normalized": ("impala", CONTINUOUS, NORMALIZED),
    "impala adam": ("impala", DISCRETE, {"optimizer": "adam", "shared": True}),
    "pqn": ("pqn", DISCRETE, {}),
    "pqn images": ("pqn", reference_ppo.IMAGES, {"network": "conv", "dueling": True, "optimizer": "rmsprop"}),
    "dqn": ("dqn", DISCRETE, {}),
    "dqn options": ("dqn", DISCRETE, {"double": True, "dueling": True, "prioritized": True, "optimizer": "rmsprop"}),
    "dqn noisy": ("dqn", DISCRETE, {"noisy": True, "double": True, "epsilon_ladder": True} | CATEGORICAL),
    "dqn soft": ("dqn", DISCRETE, QUANTILE | SOFT),
    "dqn batch norm": ("dqn", PIXELS, {"network": "nature", "norm": "batch", "double": True}),
    "r2d2": ("r2d2", DISCRETE, {"target_period": 3}),
    "r2d2 soft": ("r2d2", DISCRETE, {"target_rate": 0.1, "recurrent": "gru"}),
    "own": ("docs.own_algorithm", DISCRETE, {}),
    "r2d2 rmsprop": ("r2d2", DISCRETE, {"optimizer": "rmsprop", "adam_eps": 1e-3}),
}  # fmt: skip
SPECS = {
    "sac": CONTINUOUS,
    "td3": CONTINUOUS,
    "discrete_sac": DISCRETE,
    "bc": CONTINUOUS,
    "iql": DISCRETE,
    "dqn": DISCRETE,
    "r2d2": DISCRETE,
    "ppo": DISCRETE,
    "impala": DISCRETE,
    "pqn": DISCRETE,
    "docs.own_algorithm": DISCRETE,
}


def batch_for(name: str, learner: Any, spec: EnvSpec, seed: int) -> Any:
    """Return a batch of tensors on the CPU for a learner of `make_learner`, with weights if it prioritizes."""
    if learner.config.on_policy:
        feed = reference_ppo.make_feed(
            spec, seed=seed, num_fragments=4, state_size=learner.config.recurrent_state_size
        )
        return reference_ppo.tensors(feed)
    config = learner.config
    is_prioritized = getattr(config, "prioritized", False)
    if name != "r2d2":
        rows = np.random.default_rng(seed).choice(64, config.batch_size)
        weight = np.linspace(0.2, 1.0, len(rows)) if is_prioritized else None
        options = {"gamma": config.gamma, "n_step": getattr(config, "n_step", 1)}
        return reference_q.make_batch(seed, spec=spec, rows=rows, weight=weight, **options)
    size, shape = learner.network.state_size, config.sequences
    made = reference_r2d2.make_sequences(spec, shape, memory_size=size, seed=seed)
    return made if is_prioritized else replace(made, weight=None)


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch of tensors as a learner gets it from its replay: made of arrays, and sent to a device."""
    given = {name: value.numpy() for name, value in vars(batch).items() if value is not None}
    return to_device(type(batch)(**given), device)

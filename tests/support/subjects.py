"""Inputs for the tests of all learners: spaces, batches by number, and options of DQN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from support import reference_ppo, reference_q, reference_r2d2
from support.algorithms import CONTINUOUS, DISCRETE

from ddrl.networks.device import to_device
from ddrl.types import EnvSpec

CATEGORICAL = {"distribution": "categorical", "num_atoms": 5, "v_min": -3.0, "v_max": 4.0}
QUANTILE = {"distribution": "quantile", "num_atoms": 5}
SOFT = {"target_period": None, "target_rate": 0.1}
SPECS = {
    "sac": CONTINUOUS,
    "td3": CONTINUOUS,
    "discrete_sac": DISCRETE,
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

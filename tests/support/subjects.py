"""Batches by number for a learner of any algorithm, and learners with the draws of their replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from support import reference_ppo, reference_q, reference_r2d2
from support.algorithms import CONTINUOUS, DISCRETE, digest, make_learner

from ddrl.config import validate
from ddrl.networks.device import to_device
from ddrl.replay.experience import make_experience
from ddrl.types import EnvSpec

SPECS = {"sac": CONTINUOUS, "dqn": DISCRETE, "r2d2": DISCRETE, "ppo": DISCRETE, "impala": DISCRETE}
RUN = validate(
    {
        "env": {"id": "CartPole-v1"},
        "algorithm": {"name": "dqn"},
        "replay": {"capacity": 2000, "warmup_steps": 100},
    }
)


def batch_for(name: str, learner: Any, spec: EnvSpec, seed: int) -> Any:
    """Return a batch of tensors on the CPU for a learner of `make_learner`, with weights if it prioritizes."""
    if name in ("ppo", "impala"):
        return reference_ppo.tensors(reference_ppo.make_feed(spec, seed=seed, num_fragments=4))
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


class Subject:
    """A learner with the draws of its replay, and batches by number."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        small = {"target_period": 2, "batch_size": 6, "epsilon_ladder": False} if name == "r2d2" else {}
        self._name = name
        self.learner = make_learner(name, SPECS[name], **small | options)
        self._experience = make_experience(
            RUN,
            self.config,
            SPECS[name],
            on_policy=name in ("ppo", "impala"),
            sequences=self.config.sequences if name == "r2d2" else None,
        )
        self._priorities = getattr(self._experience, "priorities", None)
        if self._priorities is not None:
            self._priorities.append(6, np.linspace(0.1, 3.0, 6))

    @property
    def config(self) -> Any:
        """The options of the algorithm."""
        return self.learner.config

    def adopt(self, **options: Any) -> None:
        """Do what a learner does when its run's config has changed."""
        self.learner.apply_options(
            type(self.config).model_validate(self.config.model_dump(by_alias=True) | options)
        )
        self._experience.apply_options(self.config)

    def update(self, number: int) -> str:
        """Return a hash of all that an update on the batch of that number gives and leaves."""
        batch = batch_for(self._name, self.learner, SPECS[self._name], number)
        if self._priorities is not None:
            weight = self._priorities.draw(6, seed=0, draw=number)[2]
            batch = replace(batch, weight=torch.from_numpy(weight.astype(np.float32)))
        figures = self.learner.update(batch)
        return digest(figures) + digest(self.learner.state()) + digest(self.learner.weights())


def trained(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint after three updates."""
    subject = Subject(name, options)
    for number in range(3):
        subject.update(number)
    return load(save(dict(subject.learner.state())))


def continued(name: str, options: Mapping[str, Any], state: Mapping[str, Any]) -> Subject:
    """Return another learner that goes on from a checkpoint."""
    subject = Subject(name, options)
    subject.learner.load_state(state)
    return subject

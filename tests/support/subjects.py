"""One algorithm of each kind with its draws, as a learner has them, on batches by number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from support.algorithms import CONTINUOUS, CPU, DISCRETE, continuous_batch, digest
from support.algorithms import SMALL as SMALL_OPTIONS
from support.reference_ppo import make_feed
from support.reference_ppo import tensors as trajectories
from support.reference_q import make_batch
from support.reference_r2d2 import SHAPE, make_sequences
from support.replays import make_replay

from ddrl.algorithms import base
from ddrl.replay.prioritized import Priorities
from ddrl.replay.replay import Replay
from ddrl.replay.transitions import TransitionItems

SMALL = SMALL_OPTIONS | {
    "r2d2": SMALL_OPTIONS["r2d2"] | {"target_period": 2, "batch_size": 6, "epsilon_ladder": False}
}
SPECS = {"sac": CONTINUOUS, "dqn": DISCRETE, "r2d2": DISCRETE, "ppo": DISCRETE, "impala": DISCRETE}


class Subject:
    """An algorithm with its draws, as a learner has them, and batches by number."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        config: Any = base.config_class(name).model_validate(SMALL[name] | dict(options))
        self.config = config
        self.learner = base.Resolved(name, self.config, SPECS[name]).learner(device=CPU, seed=1)
        self._name = name
        self._replay: Replay | None = None
        if getattr(config, "prioritized", False):
            self._priorities = Priorities(
                exponent=config.priority_exponent,
                importance_exponent=config.importance_exponent,
                final_importance_exponent=config.final_importance_exponent,
                anneal_updates=config.importance_anneal_updates,
            )
            self._priorities.append(6, np.linspace(0.1, 3.0, 6))
            items = TransitionItems(gamma=0.9, n_step=1)
            self._replay = make_replay(
                items, capacity=10, batch_size=6, slack_steps=10, seed=1, priorities=self._priorities
            )

    def adopt(self, **options: Any) -> None:
        """What a learner does when its run's config has changed."""
        config = type(self.config).model_validate(self.config.model_dump(by_alias=True) | options)
        self.learner.apply_options(config)
        if self._replay is not None:
            self._replay.apply_options(config)
        self.config = config

    def update(self, number: int) -> str:
        """A hash of all that an update on the batch of that number gives and leaves."""
        figures = self.learner.update(self._batch(number))
        parts = {"figures": figures, "state": self.learner.state(), "weights": self.learner.weights()}
        return digest(
            {f"{part}.{name}": value for part, named in parts.items() for name, value in named.items()}
        )

    def _batch(self, number: int) -> Any:
        spec = SPECS[self._name]
        if self._name == "sac":
            return continuous_batch(number)
        if self._name in ("ppo", "impala"):
            return trajectories(make_feed(spec, seed=number))
        weight: np.ndarray | None = None
        if self._replay is not None:
            weight = self._priorities.draw(6, seed=0, draw=number)[2]
        if self._name == "dqn":
            return make_batch(number, weight=weight)
        memory_size = self.config.recurrent_state_size
        batch = make_sequences(DISCRETE, SHAPE, memory_size=memory_size, seed=number)
        if weight is None:
            return batch
        return replace(batch, weight=torch.from_numpy(weight), number=torch.arange(6))


def trained(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint after three updates."""
    subject = Subject(name, options)
    for number in range(3):
        subject.update(number)
    return load(save(dict(subject.learner.state())))


def continued(name: str, options: Mapping[str, Any], state: Mapping[str, Any]) -> Subject:
    """Another learner that goes on from a checkpoint."""
    subject = Subject(name, options)
    subject.learner.load_state(state)
    return subject

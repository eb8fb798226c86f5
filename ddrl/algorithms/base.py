"""What an algorithm's module offers, and how its name in a config finds it.

A module `ddrl.algorithms.<name>` holds `Config`, `check`, `Policy` and `ON_POLICY`, and `corrects` where that is true;
`<name>_learner` holds the class that learns, and is imported by learners only. To add one, write both and name it in
`_LEARNERS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from pydantic import BaseModel

from ddrl.config import ConfigError, RunConfig, parse
from ddrl.types import EnvSpec

if TYPE_CHECKING:
    import torch

_LEARNERS = {"impala": "IMPALA", "ppo": "PPO", "sac": "SAC"}  # algorithm -> class in its learner module


class Policy(Protocol):
    """What plays: on the CPU of a worker."""

    def load(self, weights: Mapping[str, Any]) -> None:
        """Take over published weights."""

    def act(self, observation: np.ndarray) -> np.ndarray:
        """The deterministic action: [N, *O] -> [N, *A], in the environment's unit; each row by itself."""

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
        """Exploring actions [N, *A] within the bounds, and further columns [N, ...] that the learner needs."""


class Algorithm(Protocol):
    """What learns: networks and optimizers on the learner's device."""

    num_updates: int

    def update(self, batch: Any) -> Mapping[str, torch.Tensor]:
        """Learn from tensors, a `Batch` off-policy, `Trajectories` on-policy; detached scalars by name.

        `num_updates` grows by the optimizer's steps.
        """

    def weights(self) -> Mapping[str, torch.Tensor]:
        """What a Policy needs, as CPU copies."""

    def state(self) -> Mapping[str, torch.Tensor]:
        """Everything that continuation needs, as CPU copies."""

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state` returned."""


@dataclass(frozen=True)
class Resolved:
    """An algorithm chosen and configured for one environment.

    Attributes:
        name: of the algorithm.
        config: the algorithm's own options, validated; all have gamma and batch_size, off-policy ones n_step.
        spec: spaces of the environment.
    """

    name: str
    config: Any
    spec: EnvSpec

    @property
    def on_policy(self) -> bool:
        """Each fragment is learned from once, in order, soon after it was played."""
        on_policy: bool = _module(self.name).ON_POLICY
        return on_policy

    @property
    def corrects(self) -> bool:
        """Stale fragments are corrected by importance weights; on-policy algorithms only."""
        corrects: bool = _module(self.name).corrects(self.config)
        return corrects

    def learner(self, *, device: torch.device, seed: int) -> Algorithm:
        """Fresh networks and optimizers."""
        module = importlib.import_module(f"ddrl.algorithms.{self.name}_learner")
        built: Algorithm = getattr(module, _LEARNERS[self.name])(
            self.config, self.spec, device=device, seed=seed
        )
        return built

    def policy(self) -> Policy:
        """A player without weights."""
        built: Policy = _module(self.name).Policy(self.config, self.spec)
        return built


def names() -> list[str]:
    """Algorithms that a config may name."""
    return sorted(_LEARNERS)


def config_class(name: str) -> type[BaseModel]:
    """The options of an algorithm.

    Raises:
        ConfigError: there is no such algorithm.
    """
    config: type[BaseModel] = _module(name).Config
    return config


def resolve(config: RunConfig, spec: EnvSpec) -> Resolved:
    """Validate the algorithm's part of a config against its environment.

    Raises:
        ConfigError: no such algorithm, an unknown or impossible option, or an environment it cannot serve.
    """
    options = dict(config.algorithm)
    name = options.pop("name")
    module = _module(name)
    own = parse(module.Config, options, prefix="algorithm.")
    try:
        module.check(own, spec)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Resolved(name, own, spec)


def _module(name: str) -> Any:
    if name not in _LEARNERS:
        raise ConfigError(f"algorithm.name: {name!r} is unknown; known are {', '.join(names())}")
    return importlib.import_module(f"ddrl.algorithms.{name}")

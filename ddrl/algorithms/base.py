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
from ddrl.types import EnvSpec, SequenceShape

if TYPE_CHECKING:
    import torch

RecurrentState = dict[str, np.ndarray]
"""What a recurrent policy carries from step to step, a row for each of N environments; {} for other policies.

`hidden` [N, H] float32 belongs to the policy. `previous_action` [N] int64 (-1 at an episode's start) and
`previous_reward` [N] float32, as scaled for training, are inputs of the next step.
"""

NO_STATE: RecurrentState = {}

# Algorithm -> class in its learner module.
_LEARNERS = {"dqn": "DQN", "impala": "IMPALA", "ppo": "PPO", "r2d2": "R2D2", "sac": "SAC"}


class Policy(Protocol):
    """What plays: on the CPU of a worker."""

    @property
    def evaluation_epsilon(self) -> float:
        """Share of random actions that whoever evaluates mixes in; `act` knows nothing of it."""

    def load(self, weights: Mapping[str, Any]) -> None:
        """Take over published weights."""

    def initial_state(self, num_envs: int) -> RecurrentState:
        """Return the recurrent state at the start of an episode; {} for policies without one."""

    def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
        """The deterministic action: [N, *I] -> [N, *A], in the environment's unit; each row by itself.

        A recurrent policy moves `state["hidden"]` on, in place.
        """

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState = NO_STATE
    ) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
        """Exploring actions [N, *A] within the bounds, and further columns [N, ...] that the learner needs."""


class Algorithm(Protocol):
    """What learns: networks and optimizers on the learner's device."""

    num_updates: int

    def update(self, batch: Any) -> Mapping[str, torch.Tensor]:
        """Learn from tensors, a `Batch` or `Sequences` off-policy, `Trajectories` on-policy; detached scalars by name.

        `num_updates` grows by the optimizer's steps. Where replay is prioritized, `priority` is among them: [B], how
        surprising each item was.
        """

    def weights(self) -> Mapping[str, torch.Tensor]:
        """What a Policy needs, as CPU copies."""

    def state(self) -> Mapping[str, torch.Tensor]:
        """Everything that continuation needs, as CPU copies."""

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state` returned; where options differ from those it was taken under, they count."""

    def adopt(self, options: Any) -> None:
        """Go on with other values of the live options from the next update on, as if they had been there when built.

        Raises:
            ValueError: an option differs that is not live; nothing has changed then.
        """

    def warm_start(self, weights: Mapping[str, torch.Tensor]) -> str:
        """Begin, before the first update, with the policy whose `weights` these are.

        Returns:
            What such weights do not hold and so starts fresh, as one clause for the run's journal.

        Raises:
            ValueError: they are those of another configuration; nothing has changed then.
        """


@dataclass(frozen=True)
class Resolved:
    """An algorithm chosen and configured for one environment.

    Attributes:
        name: of the algorithm.
        config: the algorithm's own options, validated; all have gamma and batch_size, off-policy ones n_step; those
            that prioritize and those that learn from sequences have what `replay.experience` names.
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

    @property
    def sequences(self) -> SequenceShape | None:
        """How a recurrent algorithm wants its sequences; None for the others."""
        shape: SequenceShape | None = getattr(self.config, "sequences", None)
        return shape

    @property
    def can_begin_at_random(self) -> bool:
        """Actions that no policy chose can be learned from."""
        return not self.on_policy and self.sequences is None

    @property
    def context(self) -> int:
        """Steps of history that a fragment brings along."""
        return self.spec.frame_stack - 1 + (self.sequences.context if self.sequences else 0)

    def policy(self, *, producer: int = 0) -> Policy:
        """A player without weights; how much it explores may go by its producer's id."""
        built: Policy = _module(self.name).Policy(self.config, self.spec, producer=producer)
        return built


def initial_state(num_envs: int, size: int) -> RecurrentState:
    """Return the recurrent state at the start of `num_envs` episodes, with H = `size`."""
    return {
        "hidden": np.zeros((num_envs, size), np.float32),
        "previous_action": np.full(num_envs, -1, np.int64),
        "previous_reward": np.zeros(num_envs, np.float32),
    }


def advance(state: RecurrentState, action: np.ndarray, reward: np.ndarray, ended: np.ndarray) -> None:
    """Update a recurrent state in place after a step; rows whose episode ended start anew. {} stays {}.

    Args:
        state: of N environments.
        action: [N] taken.
        reward: [N], as scaled for training.
        ended: [N] bool.
    """
    if state:
        state["hidden"][ended] = 0.0
        state["previous_action"][:] = np.where(ended, -1, action)
        state["previous_reward"][:] = np.where(ended, 0.0, reward)


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

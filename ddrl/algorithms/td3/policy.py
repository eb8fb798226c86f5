"""TD3's policy for rollout and evaluation, in NumPy: rollout processes need no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.algorithms.base import NO_STATE, RecurrentState
from ddrl.algorithms.sac.policy import Actor
from ddrl.algorithms.td3.config import Config
from ddrl.types import EnvSpec

if TYPE_CHECKING:
    from torch import nn


class Policy:
    """The actor; see `base.Policy`."""

    evaluation_epsilon = 0.0

    def __init__(self, config: Config, spec: EnvSpec, *, producer: int = 0) -> None:
        num_inputs = spec.input_shape[0]
        self._actor = Actor(config.hidden_sizes, spec, outputs_per_action=1, num_inputs=num_inputs)
        self._noise = np.float32(config.exploration_noise)

    def load(self, weights: Mapping[str, Any]) -> None:
        """Load published weights: CPU tensors or arrays.

        Raises:
            ValueError: they are those of another configuration or environment.
        """
        self._actor.load({name: np.asarray(value, np.float32).copy() for name, value in weights.items()})

    def initial_state(self, num_envs: int) -> RecurrentState:
        """Return {}: there is no recurrent state."""
        return {}

    def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
        """Return the actions: [N, O] -> [N, *A] float32, within the environment's bounds."""
        return self._actor.to_environment(np.tanh(self._actor.forward(observation, by_row=True)))

    def module(self) -> nn.Module:
        """Return what `act` computes; see `base.Exportable`."""
        return self._actor.module()

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState = NO_STATE
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the actions with noise: [N, O] -> [N, *A] float32, within the bounds; and no further columns."""
        action = np.tanh(self._actor.forward(observation, by_row=False))
        noise = self._noise * generator.standard_normal(action.shape, dtype=np.float32)
        return self._actor.to_environment(action + noise), {}

"""SAC's policy for rollout and evaluation, in NumPy: rollout processes need no torch."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from ddrl.algorithms.base import NO_STATE, RecurrentState, check_shapes
from ddrl.algorithms.sac.config import LOG_STD_MAX, LOG_STD_MIN, Config
from ddrl.networks.numpy_mlp import ACTIVATIONS, Layer, forward
from ddrl.types import EnvSpec


class Policy:
    """The actor; see `base.Policy`. It acts in [-1, 1]; only what it returns is in the environment's unit."""

    evaluation_epsilon = 0.0

    def __init__(self, config: Config, spec: EnvSpec, *, producer: int = 0) -> None:
        self._low, self._high = np.array([spec.action_low, spec.action_high], np.float32)
        self._scale, self._center = (self._high - self._low) / 2, (self._high + self._low) / 2
        self._action_shape = spec.action_shape
        self._num_inputs = spec.input_shape[0]
        self._shapes: dict[str, tuple[int, ...]] = {}
        sizes = (self._num_inputs, *config.hidden_sizes, 2 * len(self._low))
        for i, (inputs, outputs) in enumerate(pairwise(sizes)):
            self._shapes |= {f"weights.{i}": (inputs, outputs), f"biases.{i}": (outputs,)}
        self._layers: list[Layer] = []

    def load(self, weights: Mapping[str, Any]) -> None:
        """Load published weights: CPU tensors or arrays.

        Raises:
            ValueError: they are those of another configuration or environment.
        """
        arrays = {name: np.asarray(value, np.float32).copy() for name, value in weights.items()}
        arrays.pop("log_temperature", None)  # for learners only; not in earlier versions' weights
        check_shapes(arrays, self._shapes, source="weights")
        self._layers = [(arrays[f"weights.{i}"], arrays[f"biases.{i}"]) for i in range(len(arrays) // 2)]

    def initial_state(self, num_envs: int) -> RecurrentState:
        """Return {}: there is no recurrent state."""
        return {}

    def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
        """Return the mode: [N, O] -> [N, *A] float32, within the environment's bounds."""
        return self._to_environment(self._output(observation, by_row=True)[:, : len(self._low)])

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState = NO_STATE
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return samples of the policy: [N, O] -> [N, *A] float32, within the bounds; and no further columns."""
        output = self._output(observation, by_row=False)
        mean = output[:, : len(self._low)]
        middle, half = (LOG_STD_MAX + LOG_STD_MIN) / 2, (LOG_STD_MAX - LOG_STD_MIN) / 2
        std = np.exp(np.tanh(output[:, len(self._low) :]) * half + middle)
        noise = generator.standard_normal(std.shape, dtype=np.float32)
        return self._to_environment(mean + std * noise), {}

    def _output(self, observation: np.ndarray, *, by_row: bool) -> np.ndarray:
        """[N, O] -> [N, 2 A]: mean and raw deviation before squashing."""
        rows = np.asarray(observation, np.float32).reshape(len(observation), self._num_inputs)
        return forward(self._layers, rows, activation=ACTIVATIONS["relu"], by_row=by_row)

    def _to_environment(self, unsquashed: np.ndarray) -> np.ndarray:
        """[N, A] -> [N, *A], squashed into the bounds."""
        action = np.tanh(np.ascontiguousarray(unsquashed)) * self._scale + self._center
        # rounding may step over a bound by one unit in the last place
        action = np.clip(action, self._low, self._high)
        return np.ascontiguousarray(action.reshape(len(action), *self._action_shape), np.float32)

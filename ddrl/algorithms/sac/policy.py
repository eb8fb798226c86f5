"""SAC's policy for rollout and evaluation, in NumPy: rollout processes need no torch but for a network before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.algorithms.base import NO_STATE, RecurrentState, check_shapes
from ddrl.algorithms.sac.config import LOG_STD_MAX, LOG_STD_MIN, Config
from ddrl.networks.numpy_mlp import ACTIVATIONS, Layer, forward
from ddrl.types import EnvSpec

if TYPE_CHECKING:
    from torch import nn


class Actor:
    """An MLP in NumPy whose first outputs, squashed, are actions within the environment's bounds, or logits of choices.

    Args:
        hidden_sizes: widths of the hidden layers.
        spec: spaces of the environment.
        outputs_per_action: numbers that the network gives for each of the A dimensions of an action, or choices.
        num_inputs: F, numbers in an observation, or in its features.
    """

    def __init__(
        self, hidden_sizes: Sequence[int], spec: EnvSpec, *, outputs_per_action: int, num_inputs: int
    ) -> None:
        self._low, self._high = np.array([spec.action_low, spec.action_high], np.float32)
        self._scale, self._center = (self._high - self._low) / 2, (self._high + self._low) / 2
        self._action_shape, self._num_inputs = spec.action_shape, num_inputs
        self._shapes: dict[str, tuple[int, ...]] = {}
        num_actions = len(self._low) or sum(spec.action_sizes)
        sizes = (num_inputs, *hidden_sizes, outputs_per_action * num_actions)
        for i, (inputs, outputs) in enumerate(pairwise(sizes)):
            self._shapes |= {f"weights.{i}": (inputs, outputs), f"biases.{i}": (outputs,)}
        self._layers: list[Layer] = []

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Load published weights; ValueError if they are of another configuration or environment."""
        check_shapes(arrays, self._shapes, source="weights")
        self._layers = [(arrays[f"weights.{i}"], arrays[f"biases.{i}"]) for i in range(len(arrays) // 2)]

    def forward(self, observation: np.ndarray, *, by_row: bool) -> np.ndarray:
        """[N, F] -> [N, outputs_per_action * A]; each row by itself if `by_row`."""
        rows = np.asarray(observation, np.float32).reshape(len(observation), self._num_inputs)
        return forward(self._layers, rows, activation=ACTIVATIONS["relu"], by_row=by_row)

    def module(self) -> nn.Module:
        """Return the network of the actions without their deviations, [N, F] -> [N, *A], or of the logits."""
        from torch import nn

        from ddrl.networks.exported import Bounded, mlp

        *hidden, (weight, bias) = self._layers
        if not (num := len(self._low)):
            return mlp(self._layers, "relu")
        bounded = Bounded(self._low, self._high, self._action_shape, squash=True)
        return nn.Sequential(mlp([*hidden, (weight[:, :num], bias[:num])], "relu"), bounded)

    def to_environment(self, action: np.ndarray) -> np.ndarray:
        """[N, A] in [-1, 1] -> [N, *A] within the bounds."""
        # rounding may step over a bound by one unit in the last place
        scaled = np.clip(action * self._scale + self._center, self._low, self._high)
        return np.ascontiguousarray(scaled.reshape(len(action), *self._action_shape), np.float32)


class Policy:
    """The actor; see `base.Policy`. It acts in [-1, 1]; only what it returns is in the environment's unit."""

    evaluation_epsilon = 0.0

    def __init__(self, config: Config, spec: EnvSpec, *, producer: int = 0) -> None:
        self._trunk: Any = None
        num_inputs = spec.input_shape[0]
        if config.network != "mlp":
            self._trunk, num_inputs = config.make_trunk(spec)
            self._trunk.eval()
        outputs = 2  # mean and deviation
        self._actor = Actor(config.hidden_sizes, spec, outputs_per_action=outputs, num_inputs=num_inputs)

    def load(self, weights: Mapping[str, Any]) -> None:
        """Load published weights: CPU tensors or arrays.

        Raises:
            ValueError: they are those of another configuration or environment.
        """
        arrays = {
            name: np.asarray(value, np.float32).copy()
            for name, value in weights.items()
            if name != "log_temperature" and not name.startswith("norms.")  # those are for learners only
        }
        if self._trunk is not None:
            from ddrl.networks.parameters import load_arrays

            names = [name for name in arrays if name.startswith("trunk.")]
            load_arrays(self._trunk, {name.removeprefix("trunk."): arrays.pop(name) for name in names})
        self._actor.load(arrays)

    def initial_state(self, num_envs: int) -> RecurrentState:
        """Return {}: there is no recurrent state."""
        return {}

    def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
        """Return the mode: [N, *O] -> [N, *A] float32, within the environment's bounds."""
        mean, _ = self._parameters(observation, by_row=True)
        return self._actor.to_environment(np.tanh(np.ascontiguousarray(mean)))

    def module(self) -> nn.Module:
        """Return what `act` computes; see `base.Exportable`."""
        from torch import nn

        actor = self._actor.module()
        return actor if self._trunk is None else nn.Sequential(self._trunk, actor)

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState = NO_STATE
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return samples of the policy: [N, *O] -> [N, *A] float32, within the bounds; and no further columns."""
        mean, raw_log_std = self._parameters(observation, by_row=False)
        middle, half = (LOG_STD_MAX + LOG_STD_MIN) / 2, (LOG_STD_MAX - LOG_STD_MIN) / 2
        std = np.exp(np.tanh(raw_log_std) * half + middle)
        noise = generator.standard_normal(std.shape, dtype=np.float32)
        return self._actor.to_environment(np.tanh(np.ascontiguousarray(mean + std * noise))), {}

    def _parameters(self, observation: np.ndarray, *, by_row: bool) -> list[np.ndarray]:
        """[N, *O] -> means and raw log deviations, each [N, A]."""
        if self._trunk is not None:
            from ddrl.networks.trunks import evaluate

            observation = evaluate(self._trunk, observation, by_row=by_row)
        return np.split(self._actor.forward(observation, by_row=by_row), 2, axis=1)

"""The policy of BC and IQL, in NumPy: rollout processes need no torch but for a network before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ddrl.algorithms.base import NO_STATE, RecurrentState, best_choices, check_shapes
from ddrl.algorithms.sac.policy import Actor
from ddrl.types import EnvSpec

if TYPE_CHECKING:
    from torch import nn


class Policy:
    """A Gaussian around the tanh of an MLP, or the choices whose logits it gives; see `base.Policy`."""

    evaluation_epsilon = 0.0

    def __init__(self, config: Any, spec: EnvSpec, *, producer: int = 0) -> None:
        self._spec, self._is_continuous = spec, spec.action_kind == "continuous"
        self._sections = np.cumsum(spec.action_sizes)[:-1]  # where the logits of each dimension begin
        self._trunk: Any = None
        num_inputs = spec.input_shape[0]
        if config.network != "mlp":
            self._trunk, num_inputs = config.make_trunk(spec)
            self._trunk.eval()
        self._actor = Actor(config.hidden_sizes, spec, outputs_per_action=1, num_inputs=num_inputs)
        self._shapes = {"log_std": (len(spec.action_low),)} if self._is_continuous else {}
        self._std = np.zeros(0, np.float32)

    def load(self, weights: Mapping[str, Any]) -> None:
        """Load published weights: CPU tensors or arrays.

        Raises:
            ValueError: they are those of another configuration or environment.
        """
        arrays = {name: np.asarray(value, np.float32).copy() for name, value in weights.items()}
        own = {name: arrays.pop(name) for name in ("log_std",) if name in arrays}
        check_shapes(own, self._shapes, source="weights")
        if self._trunk is not None:
            from ddrl.networks.parameters import load_arrays

            names = [name for name in arrays if name.startswith("trunk.")]
            load_arrays(self._trunk, {name.removeprefix("trunk."): arrays.pop(name) for name in names})
        self._actor.load(arrays)
        self._std = np.exp(own.get("log_std", self._std))

    def initial_state(self, num_envs: int) -> RecurrentState:
        """Return {}: there is no recurrent state."""
        return {}

    def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
        """Return the mean or the most probable choices: [N, *I] -> [N, *A], float32 within the bounds or int64."""
        outputs = self._outputs(observation, by_row=True)
        return self._actor.to_environment(np.tanh(outputs)) if self._is_continuous else self._chosen(outputs)

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState = NO_STATE
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return samples, clipped to the bounds: [N, *I] -> [N, *A], as `act`; and no further columns."""
        outputs = self._outputs(observation, by_row=False)
        if self._is_continuous:
            noise = generator.standard_normal(outputs.shape, dtype=np.float32)
            return self._actor.to_environment(np.tanh(outputs) + self._std * noise), {}
        # The largest logit with Gumbel noise is a draw from the softmax (Gumbel 1954; Maddison et al. 2014).
        noise = -np.log(generator.standard_exponential(outputs.shape, np.float32) + np.float32(1e-38))
        return self._chosen(outputs + noise), {}

    def module(self) -> nn.Module:
        """Return what gives the means, or the logits of choices; see `base.Exportable`."""
        from torch import nn

        actor = self._actor.module()
        return actor if self._trunk is None else nn.Sequential(self._trunk, actor)

    def _outputs(self, observation: np.ndarray, *, by_row: bool) -> np.ndarray:
        """[N, *I] -> [N, P] means before tanh, or logits of the allowed choices."""
        features = observation
        if self._trunk is not None:
            from ddrl.networks.trunks import evaluate

            features = evaluate(self._trunk, observation, by_row=by_row)
        outputs = self._actor.forward(features, by_row=by_row)
        return cast(np.ndarray, self._spec.only_allowed(outputs, observation))

    def _chosen(self, scores: np.ndarray) -> np.ndarray:
        """[N, P] -> the choices of the largest scores [N, *A]."""
        return best_choices(scores, self._sections).reshape(len(scores), *self._spec.action_shape)

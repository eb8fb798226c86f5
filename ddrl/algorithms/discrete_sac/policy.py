"""The policy of discrete SAC and of soft Q-learning: draws to explore, the most probable action to act."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ddrl.algorithms.base import NO_STATE, RecurrentState
from ddrl.algorithms.discrete_sac.config import Config
from ddrl.networks.parameters import load_arrays, take_scalar
from ddrl.networks.trunks import to_input
from ddrl.types import EnvSpec


class Policy:
    """The actor, or the critics of sqn, on the CPU; see `base.Policy`."""

    evaluation_epsilon = 0.0

    def __init__(self, config: Config, spec: EnvSpec, *, producer: int = 0) -> None:
        self._spec, self._is_sqn = spec, config.form == "sqn"
        networks = [config.make_network(spec) for _ in range(config.num_critics if self._is_sqn else 1)]
        self._module = _Critics(networks, average=config.average_critics) if self._is_sqn else networks[0]
        self._module.eval().requires_grad_(False)
        self._temperature = 1.0  # of sqn's draws

    def load(self, weights: Mapping[str, Any]) -> None:
        """Load published weights: CPU tensors or arrays.

        Raises:
            ValueError: they are those of another configuration or environment.
        """
        arrays = {name: np.asarray(value).copy() for name, value in weights.items()}
        log_temperature = take_scalar(arrays, "log_temperature")
        load_arrays(self._module, arrays)
        if self._is_sqn:
            self._temperature = float(np.exp(log_temperature))

    def initial_state(self, num_envs: int) -> RecurrentState:
        """Return {}: there is no recurrent state."""
        return {}

    def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
        """Return the most probable actions: [N, *I] -> [N] int64."""
        rows = [self._logits(observation[i : i + 1]) for i in range(len(observation))]
        return cast(np.ndarray, np.concatenate(rows).argmax(axis=1))

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState = NO_STATE
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return drawn actions: [N, *I] -> [N] int64; and no further columns."""
        logits = self._logits(observation)
        # The largest logit with Gumbel noise is a draw from the softmax (Gumbel 1954; Maddison et al. 2014).
        noise = -np.log(generator.standard_exponential(logits.shape, np.float32) + np.float32(1e-38))
        return (logits + noise).argmax(axis=1), {}

    def module(self) -> nn.Module:
        """Return what gives the logits; see `base.Exportable`."""
        return self._module

    @torch.inference_mode()
    def _logits(self, observation: np.ndarray) -> np.ndarray:
        """[N, *I] -> [N, A], of allowed actions."""
        # A copy, for kernels round differently by the strides and the place of a row.
        seen = to_input(torch.from_numpy(np.array(observation, order="C")))
        logits = self._module(seen) / self._temperature
        return cast(np.ndarray, self._spec.only_allowed(logits.numpy(), observation))


class _Critics(nn.ModuleList):
    """The critics of sqn as one network of action values."""

    def __init__(self, networks: Sequence[nn.Module], *, average: bool) -> None:
        super().__init__(networks)
        self._average = average

    def forward(self, x: Tensor) -> Tensor:
        """[N, *I] -> [N, A]: their mean, or the least."""
        outputs = torch.stack([network(x) for network in self])
        return outputs.mean(dim=0) if self._average else outputs.amin(dim=0)

"""The policy of action values, feed-forward or recurrent: greedy, with random actions for exploration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ddrl.algorithms.base import NO_STATE, RecurrentState, check_state, initial_state, random_choices
from ddrl.algorithms.value_learning.options import GreedyConfig
from ddrl.networks.parameters import load_arrays, take_scalar
from ddrl.networks.q_network import QNetwork
from ddrl.networks.trunks import to_input
from ddrl.types import EnvSpec

_RUNGS = 256  # of the ladder


class Policy:
    """The network on the CPU; see `base.Policy`.

    Args:
        config: options of the algorithm.
        spec: spaces of the environment.
        producer: id of the collector, which places its environments on the ladder.
    """

    def __init__(self, config: GreedyConfig, spec: EnvSpec, *, producer: int = 0) -> None:
        self.evaluation_epsilon = config.evaluation_epsilon
        self._epsilon = config.epsilon_at(0)
        self._ladder = np.zeros(0, np.float32)
        self._config, self._producer = config, producer
        self._spec = spec
        self._network = config.make_network(spec).eval().requires_grad_(False)
        self._noise: torch.Generator | None = None

    def load(self, weights: Mapping[str, Any]) -> None:
        """Load published weights, CPU tensors or arrays, and the epsilon published with them.

        Raises:
            ValueError: they are those of another configuration or environment.
        """
        arrays = {name: np.asarray(value).copy() for name, value in weights.items()}
        epsilon = take_scalar(arrays, "epsilon")
        load_arrays(self._network, arrays)
        self._epsilon = epsilon

    def initial_state(self, num_envs: int) -> RecurrentState:
        """Return the state at the start of `num_envs` episodes; {} of a feed-forward network."""
        return initial_state(num_envs, self._network.state_size) if self._network.state_size else {}

    def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
        """Return the greedy actions; noisy layers use their means.

        Args:
            observation: [N, *I] uint8 or float32.
            state: of the N environments, from `initial_state`, kept up to date by `ddrl.algorithms.base.advance`.

        Returns:
            [N] int64.

        Raises:
            ValueError: no state for a recurrent network, or that of another number of environments.
        """
        self._network.disable_noise()
        return cast(np.ndarray, self.values(observation, state, by_row=True).argmax(axis=1))

    def module(self) -> nn.Module:
        """Return what gives the values, noisy layers by their means; see `base.Exportable`."""
        self._network.disable_noise()
        return _Values(self._network)

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState = NO_STATE
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return greedy actions, with probability epsilon random ones; noisy layers draw fresh noise.

        Args:
            observation: [N, *I] uint8 or float32.
            generator: source of the draws.
            state: as for `act`.

        Returns:
            [N] int64; and for prioritized replay the columns action_value [N], Q(s, a) of the action taken, and
            state_value [N], max_a Q(s, a), both float32 as the network gives them: with rescale_values h(Q); on-policy
            behavior_log_prob [N] float32, in nats.

        Raises:
            ValueError: as `act`.
        """
        if self._network.is_noisy:
            if self._noise is None:
                self._noise = torch.Generator().manual_seed(int(generator.integers(2**63)))
            self._network.draw_noise(self._noise)
        value, size = self.values(observation, state, by_row=False), len(observation)
        epsilon: float | np.ndarray = self._epsilon
        if self._config.epsilon_ladder:
            if len(self._ladder) != size:
                self._ladder = ladder(self._config, producer=self._producer, num_envs=size)
            epsilon = self._ladder
        is_random = generator.random(size) < epsilon
        best = value.argmax(axis=1)
        action = np.where(is_random, random_choices(self._spec, observation, generator), best)
        if self._config.on_policy:
            num_allowed = (self._spec.only_allowed(np.zeros_like(value), observation) == 0).sum(axis=1)
            probability = epsilon / num_allowed + (1.0 - epsilon) * (action == best)
            return action, {"behavior_log_prob": np.log(probability).astype(np.float32)}
        if not self._config.reports_values:
            return action, {}
        return action, {"action_value": value[np.arange(size), action], "state_value": value.max(axis=1)}

    @torch.inference_mode()
    def values(
        self, observation: np.ndarray, state: RecurrentState = NO_STATE, *, by_row: bool
    ) -> np.ndarray:
        """Return expected values [N, A] of observations [N, *I], of the allowed actions; update the state in place.

        Args:
            observation: [N, *I] uint8 or float32.
            state: as for `act`.
            by_row: each row goes through the network by itself, so that it does not depend on the others.

        Raises:
            ValueError: as `act`.
        """
        size = len(observation)
        if self._network.state_size:
            check_state(state, size, self._network.state_size)
        parts = [slice(i, i + 1) for i in range(size)] if by_row else [slice(None)]
        value = np.concatenate([self._part(observation, state, part) for part in parts])
        return cast(np.ndarray, self._spec.only_allowed(value, observation))

    def _part(self, observation: np.ndarray, state: RecurrentState, rows: slice) -> np.ndarray:
        # Copies, for kernels round differently by the strides (NumPy's [None] gives 0) and the place of a row too.
        seen = to_input(torch.from_numpy(np.array(observation[rows], order="C")))
        if not self._network.state_size:
            return self._network.expected(self._network(seen)).numpy()
        inputs = [state[name][rows].copy() for name in ("previous_action", "previous_reward", "hidden")]
        action, reward, before = map(torch.from_numpy, inputs)
        output, hidden = self._network.sequence(seen[None], action[None], reward[None], before)
        state["hidden"][rows] = hidden.numpy()
        return output[0].numpy()


class _Values(nn.Module):
    """Action values of observations, as a module; of a recurrent network with the state's arrays and the new hidden."""

    def __init__(self, network: QNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, *state: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """[N, *I] -> [N, A]; state: hidden [N, H], previous_action [N], previous_reward [N]."""
        if not state:
            return self.network.expected(self.network(x))
        hidden, action, reward = state
        output, hidden = self.network.sequence(x[None], action[None], reward[None], hidden)
        return self.network.expected(output[0]), hidden


def ladder(config: GreedyConfig, *, producer: int, num_envs: int) -> np.ndarray:
    """Return each environment's own epsilon: base^(1 + exponent * x), with x spread over [0, 1].

    A fleet that grows and shrinks has no number of environments to divide by. So they are placed on 256 rungs, in the
    order of the van der Corput sequence of base 2 (their number's eight bits backwards): any range of neighbors is
    spread evenly, and 256 of them take every rung once.
    Source: Horgan et al. 2018, arXiv:1803.00933, section 4.1, where x = i / (N - 1).

    Args:
        config: options.
        producer: id of the collector.
        num_envs: N, side by side in each collector.

    Returns:
        [N] float32 shares of random actions.
    """
    start = producer * num_envs % _RUNGS
    number = (np.arange(start, start + num_envs) % _RUNGS).astype(np.uint8)
    rung = np.packbits(np.unpackbits(number[:, None], axis=1)[:, ::-1], axis=1)[:, 0]  # [N]
    epsilon = config.ladder_base ** (1.0 + config.ladder_exponent * rung / (_RUNGS - 1))
    return np.asarray(epsilon, np.float32)

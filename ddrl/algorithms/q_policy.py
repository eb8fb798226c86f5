"""The Policy that plays for feed-forward networks of action values, and how it and R2D2's explore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.algorithms.base import NO_STATE, RecurrentState
from ddrl.algorithms.q_learning import Options, check, ladder, load_weights, make_network
from ddrl.types import EnvSpec

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from ddrl.algorithms.dqn import Config


class EpsilonGreedy:
    """The best actions, random ones with probability epsilon; of DQN and R2D2 alike.

    Args:
        config: options of the algorithm.
        spec: spaces of the environment.
        producer: id of the collector, which places its environments on the ladder.

    Attributes:
        epsilon: the schedule's, of the weights that play; a ladder goes by the environments alone.
    """

    def __init__(self, config: Options, spec: EnvSpec, *, producer: int) -> None:
        self.epsilon = config.epsilon_at(0)
        self._config, self._producer = config, producer
        self._num_actions = spec.action_sizes[0]
        self._rungs = np.zeros(0, np.float32)

    def choose(
        self, value: np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """[N, A] action values -> [N] int64 actions, and the columns that first priorities are made of.

        These are action_value [N], of the action played, and state_value [N], the largest, in units of `value`.
        """
        size = len(value)
        epsilon: float | np.ndarray = self.epsilon
        if self._config.epsilon_ladder:
            if len(self._rungs) != size:
                self._rungs = ladder(self._config, producer=self._producer, num_envs=size)
            epsilon = self._rungs
        is_random = generator.random(size) < epsilon
        action = np.where(is_random, generator.integers(self._num_actions, size=size), value.argmax(axis=1))
        return action, {"action_value": value[np.arange(size), action], "state_value": value.max(axis=1)}


class Policy:
    """The network for rollout and evaluation, on the CPU.

    A greedy action depends on its own observation only, to the last bit: each row goes through the network by itself.
    Exploration needs no such promise and takes them all at once.

    Args:
        config: options of the algorithm.
        spec: spaces of the environment.
        producer: id of the collector, which places its environments on the ladder.

    Attributes:
        evaluation_epsilon: share of random actions that whoever evaluates mixes in; `act` knows nothing of it.
    """

    def __init__(self, config: Config, spec: EnvSpec, *, producer: int = 0) -> None:
        check(config, spec, name="dqn")
        self.evaluation_epsilon = config.evaluation_epsilon
        self._config = config
        self._exploration = EpsilonGreedy(config, spec, producer=producer)
        self._network = make_network(config, spec).eval().requires_grad_(False)
        self._atoms: Tensor | None = None
        self._noise: Generator | None = None
        # In nats, and so not to be compared with errors of values: new items get the largest priority seen.
        self._tells_values = config.prioritized and config.distribution != "categorical"
        if config.distribution == "categorical":
            from ddrl.algorithms.q_losses import support

            like = next(self._network.parameters())
            self._atoms = support(config.num_atoms, v_min=config.v_min, v_max=config.v_max, like=like)

    def load(self, weights: Mapping[str, Any]) -> None:
        """Take over what `DQN.weights` returned: CPU tensors, or arrays as they come off the wire.

        Raises:
            ValueError: they are those of another configuration or environment.
        """
        self._exploration.epsilon = load_weights(self._network, weights)

    def initial_state(self, num_envs: int) -> RecurrentState:
        """Nothing is carried from step to step."""
        return {}

    def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
        """The greedy action: uint8 or float32 [N, *I] -> [N] int64; noisy layers play their means."""
        self._network.mean_weights()
        rows = [self._values(observation[i : i + 1]) for i in range(len(observation))]
        action: np.ndarray = np.concatenate(rows).argmax(axis=1)
        return action

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState = NO_STATE
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Greedy actions, random ones with probability epsilon; noisy layers draw fresh noise.

        Args:
            observation: [N, *I] uint8 or float32.
            generator: source of the draws.

        Returns:
            [N] int64; and for prioritized replay the columns action_value [N], Q(s, a) of the action played, and
            state_value [N], max_a Q(s, a), both float32 in units of the return.
        """
        if self._config.noisy:
            if self._noise is None:
                import torch

                self._noise = torch.Generator().manual_seed(int(generator.integers(2**63)))
            self._network.draw_noise(self._noise)
        action, values = self._exploration.choose(self._values(observation), generator)
        return action, values if self._tells_values else {}

    def _values(self, observation: np.ndarray) -> np.ndarray:
        """[N, *I] -> [N, A] expected values."""
        import torch

        from ddrl.algorithms.q_losses import expected_q
        from ddrl.networks.trunks import to_input

        with torch.inference_mode():
            # A copy, for kernels round differently by the strides (NumPy's [None] gives 0) and the place of a row too.
            rows = torch.from_numpy(np.array(observation, order="C"))
            return expected_q(self._network(to_input(rows)), self._atoms).numpy()

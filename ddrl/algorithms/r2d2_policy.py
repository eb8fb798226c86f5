"""The Policy that plays for R2D2: a recurrent network of action values, whose state the player keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.algorithms import recurrent_state as memories
from ddrl.algorithms.q_learning import check, load_weights, make_network
from ddrl.algorithms.q_policy import EpsilonGreedy
from ddrl.algorithms.recurrent_state import NO_MEMORY, Memory
from ddrl.types import EnvSpec

if TYPE_CHECKING:
    from ddrl.algorithms.r2d2 import Config


class Policy:
    """The network for rollout and evaluation, on the CPU.

    A greedy action depends on its own row's observation and memory only, to the last bit: each row goes through the
    network by itself. Exploration needs no such promise and takes them all at once.

    Args:
        config: options of the algorithm.
        spec: spaces of the environment.
        producer: id of the collector, which places its environments on the ladder.

    Attributes:
        evaluation_epsilon: share of random actions that whoever evaluates mixes in; `act` knows nothing of it.
    """

    def __init__(self, config: Config, spec: EnvSpec, *, producer: int = 0) -> None:
        check(config, spec, name="r2d2")
        self.evaluation_epsilon = config.evaluation_epsilon
        self._config = config
        self._exploration = EpsilonGreedy(config, spec, producer=producer)
        self._network = make_network(config, spec).eval().requires_grad_(False)

    def load(self, weights: Mapping[str, Any]) -> None:
        """Take over what `R2D2.weights` returned: CPU tensors, or arrays as they come off the wire.

        Raises:
            ValueError: they are those of another configuration or environment.
        """
        self._exploration.epsilon = load_weights(self._network, weights)

    def memory(self, num_envs: int) -> Memory:
        """That of `num_envs` episodes that have not begun."""
        return memories.fresh(num_envs, self._network.state_size)

    def act(self, observation: np.ndarray, memory: Memory = NO_MEMORY) -> np.ndarray:
        """The greedy action; moves `memory["state"]` on, in place.

        Args:
            observation: [N, *I] uint8 or float32.
            memory: of the N environments, as `memory` gave it and `ddrl.algorithms.recurrent_state.remember` keeps it.

        Returns:
            [N] int64.

        Raises:
            ValueError: no memory, or that of another number of environments.
        """
        self._check(observation, memory)
        rows = [self._values(observation, memory, slice(i, i + 1)) for i in range(len(observation))]
        action: np.ndarray = np.concatenate(rows).argmax(axis=1)
        return action

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator, memory: Memory = NO_MEMORY
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Greedy actions, random ones with probability epsilon; moves `memory["state"]` on, in place.

        Args:
            observation: [N, *I] uint8 or float32.
            generator: source of the draws.
            memory: as of `act`.

        Returns:
            [N] int64; and for prioritized replay the columns action_value [N], Q(s, a) of the action played, and
            state_value [N], max_a Q(s, a), both float32 as the network gives them: with rescale_values h(Q).

        Raises:
            ValueError: as `act`.
        """
        self._check(observation, memory)
        action, values = self._exploration.choose(self._values(observation, memory, slice(None)), generator)
        return action, values if self._config.prioritized else {}

    def _check(self, observation: np.ndarray, memory: Memory) -> None:
        if not memory:
            raise ValueError(
                "memory: none was given to a recurrent policy; pass what its memory(num_envs) returned, and keep it by "
                "ddrl.algorithms.recurrent_state.remember"
            )
        expected = (len(observation), self._network.state_size)
        if memory["state"].shape != expected:
            raise ValueError(
                f"memory: state has shape {memory['state'].shape}, but {len(observation)} observations need "
                f"{expected}; make it by memory({len(observation)})"
            )

    def _values(self, observation: np.ndarray, memory: Memory, rows: slice) -> np.ndarray:
        """[N, *I] -> [M, A] action values of `rows`, whose states move on."""
        import torch

        from ddrl.networks.trunks import to_input

        # Copies, for kernels round differently by the strides (NumPy's [None] gives 0) and the place of a row too.
        seen = torch.from_numpy(np.array(observation[rows], order="C"))
        inputs = [memory[name][rows].copy() for name in ("previous_action", "previous_reward", "state")]
        previous_action, previous_reward, before = map(torch.from_numpy, inputs)
        with torch.inference_mode():
            value, state = self._network.sequence(
                to_input(seen)[None], previous_action[None], previous_reward[None], before
            )
        memory["state"][rows] = state.numpy()
        values: np.ndarray = value[0].numpy()
        return values

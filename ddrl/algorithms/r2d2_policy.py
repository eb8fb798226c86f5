"""The Policy that plays for R2D2: a recurrent network of action values, whose state the player keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.algorithms.base import NO_STATE, RecurrentState, initial_state
from ddrl.algorithms.q_learning import check, load_weights, make_network
from ddrl.algorithms.q_policy import EpsilonGreedy
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

    def initial_state(self, num_envs: int) -> RecurrentState:
        """Return the state at the start of `num_envs` episodes."""
        return initial_state(num_envs, self._network.state_size)

    def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
        """The greedy action; moves `state["hidden"]` on, in place.

        Args:
            observation: [N, *I] uint8 or float32.
            state: of the N environments, from `initial_state`, kept up to date by `ddrl.algorithms.base.advance`.

        Returns:
            [N] int64.

        Raises:
            ValueError: no state, or that of another number of environments.
        """
        self._check(observation, state)
        rows = [self._values(observation, state, slice(i, i + 1)) for i in range(len(observation))]
        action: np.ndarray = np.concatenate(rows).argmax(axis=1)
        return action

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState = NO_STATE
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Greedy actions, random ones with probability epsilon; moves `state["hidden"]` on, in place.

        Args:
            observation: [N, *I] uint8 or float32.
            generator: source of the draws.
            state: as for `act`.

        Returns:
            [N] int64; and for prioritized replay the columns action_value [N], Q(s, a) of the action played, and
            state_value [N], max_a Q(s, a), both float32 as the network gives them: with rescale_values h(Q).

        Raises:
            ValueError: as `act`.
        """
        self._check(observation, state)
        action, values = self._exploration.choose(self._values(observation, state, slice(None)), generator)
        return action, values if self._config.prioritized else {}

    def _check(self, observation: np.ndarray, state: RecurrentState) -> None:
        if not state:
            raise ValueError(
                "state: a recurrent policy needs one; pass what initial_state(num_envs) returned, and update it after "
                "each step by ddrl.algorithms.base.advance"
            )
        expected = (len(observation), self._network.state_size)
        if state["hidden"].shape != expected:
            raise ValueError(
                f"state: hidden has shape {state['hidden'].shape}, but {len(observation)} observations need "
                f"{expected}; make it by initial_state({len(observation)})"
            )

    def _values(self, observation: np.ndarray, state: RecurrentState, rows: slice) -> np.ndarray:
        """[N, *I] -> [M, A] action values of `rows`, whose states move on."""
        import torch

        from ddrl.networks.trunks import to_input

        # Copies, for kernels round differently by the strides (NumPy's [None] gives 0) and the place of a row too.
        seen = torch.from_numpy(np.array(observation[rows], order="C"))
        inputs = [state[name][rows].copy() for name in ("previous_action", "previous_reward", "hidden")]
        previous_action, previous_reward, before = map(torch.from_numpy, inputs)
        with torch.inference_mode():
            value, hidden = self._network.sequence(
                to_input(seen)[None], previous_action[None], previous_reward[None], before
            )
        state["hidden"][rows] = hidden.numpy()
        values: np.ndarray = value[0].numpy()
        return values

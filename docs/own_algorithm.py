"""An algorithm of your own, in one module: double Q-learning on vectors, with a softmax to explore.

    DDRL_ALLOW_MODULES=docs ddrl submit docs/own_algorithm.yaml

A module has `Config`, `Policy` and `make_learner`; `ddrl/algorithms/base.py` says what each method must do. Workers
import the module too: import torch inside `make_learner`, so that their processes stay small.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from pydantic import Field, PositiveInt

from ddrl.algorithms.base import NO_STATE, check_shapes
from ddrl.algorithms.options import AlgorithmConfig, Common, changed, option
from ddrl.config import LIVE
from ddrl.types import Batch, EnvSpec


class Config(AlgorithmConfig):
    """Options, checked at submit; those that are LIVE can change while a run goes on."""

    n_step: PositiveInt = option(Common, "n_step", 1)  # off-policy algorithms have it
    target_rate: float = option(Common, "target_rate", 0.02)
    hidden_sizes: tuple[PositiveInt, ...] = option(Common, "hidden_sizes", (128,))
    temperature: float = Field(0.1, gt=0, json_schema_extra=LIVE)
    """Of the softmax over the values that workers draw actions from. More explores more."""

    def check(self, spec: EnvSpec) -> None:
        """Refuse what the algorithm cannot play."""
        if spec.action_kind != "discrete" or len(spec.input_shape) != 1:
            raise ValueError(
                f"{spec.env_id}: is not a vector with discrete actions; choose another environment"
            )


def layer_sizes(config: Config, spec: EnvSpec) -> tuple[int, ...]:
    """Return the widths of the network, of observations and actions too."""
    return spec.input_shape[0], *config.hidden_sizes, spec.action_sizes[0]


class Policy:
    """Plays with weights that the learner has published, on the CPU."""

    evaluation_epsilon = 0.0  # share of random actions in evaluations

    def __init__(self, config: Config, spec: EnvSpec, *, producer: int) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        for i, (inputs, outputs) in enumerate(pairwise(layer_sizes(config, spec))):
            self._shapes |= {f"weights.{i}": (inputs, outputs), f"biases.{i}": (outputs,)}
        self._temperature, self._last = config.temperature, len(config.hidden_sizes)

    def load(self, weights: Mapping[str, Any]) -> None:
        """Take weights as `Learner.weights` returns them; raise a ValueError if they do not fit."""
        check_shapes(weights, self._shapes, source="weights")
        self._weights = {name: np.asarray(value, np.float32).copy() for name, value in weights.items()}

    def initial_state(self, num_envs: int) -> dict[str, np.ndarray]:
        """Return {}: the policy is not recurrent."""
        return {}

    def act(self, observation: np.ndarray, state: Any = NO_STATE) -> np.ndarray:
        """Return the best actions [N] for observations [N, O]; each by itself, so that scores can be repeated."""
        return np.array([self._values(row).argmax() for row in observation], np.int64)

    def explore(self, observation: np.ndarray, generator: np.random.Generator, state: Any = NO_STATE) -> Any:
        """Return drawn actions [N], and no further columns for the learner."""
        values = np.stack([self._values(row) for row in observation])
        return (values / self._temperature + generator.gumbel(size=values.shape)).argmax(axis=1), {}

    def _values(self, row: np.ndarray) -> np.ndarray:
        """[O] -> [A]."""
        hidden = row.astype(np.float32)
        for i in range(self._last):
            hidden = np.maximum(hidden @ self._weights[f"weights.{i}"] + self._weights[f"biases.{i}"], 0)
        return np.asarray(
            hidden @ self._weights[f"weights.{self._last}"] + self._weights[f"biases.{self._last}"]
        )


def make_learner(config: Config, spec: EnvSpec, *, device: Any, seed: int) -> Any:
    """Return the learner; only learner processes call this."""
    import torch

    from ddrl.algorithms import optim
    from ddrl.networks.mlp import MLP
    from ddrl.networks.parameters import FlatParameters

    class Learner:
        """Networks and optimizer on the learner's device."""

        num_updates = 0
        from_policy = False  # True in runs that begin with a given policy

        def __init__(self) -> None:
            def network() -> MLP:
                return MLP(layer_sizes(config, spec), generator=torch.Generator().manual_seed(seed)).to(
                    device
                )

            self.config, self.online, self.target = config, network(), network().requires_grad_(False)
            self.parameters, self.followers = FlatParameters(self.online), FlatParameters(self.target)
            self.optimizer = optim.adam(self.parameters.vector, learning_rate=config.learning_rate)

        def update(self, batch: Batch) -> dict[str, Any]:
            """Learn from B transitions; the replay has summed rewards and made the discounts, 0 at terminations."""
            with torch.no_grad():
                best = self.online(batch.next_observation).argmax(dim=1, keepdim=True)
                value = self.target(batch.next_observation).gather(1, best)[:, 0]  # double Q-learning
                goal = batch.n_step_return + batch.bootstrap_discount * value
            value = self.online(batch.observation).gather(1, batch.action.reshape(-1, 1))[:, 0]
            loss = torch.nn.functional.smooth_l1_loss(value, goal)
            self.parameters.differentiate(loss)
            self.optimizer.step()
            self.followers.vector.data.lerp_(self.parameters.vector.detach(), self.config.target_rate)
            self.num_updates += 1
            return {"loss": loss.detach(), "q_mean": value.detach().mean()}

        def weights(self) -> dict[str, Any]:
            """Return what `Policy.load` takes."""
            return self.parameters.copies()

        def state(self) -> dict[str, Any]:
            """Return all that a learner elsewhere needs to go on as if nothing had happened."""
            return optim.cpu_copies(self._tensors()) | {"num_updates": torch.tensor(self.num_updates)}

        def load_state(self, state: Mapping[str, Any]) -> None:
            """Go on from `state`."""
            optim.restore(self._tensors(), state, num_updates=torch.Size(()))
            self.num_updates = int(state["num_updates"])

        def apply_options(self, options: Config) -> None:
            """Apply changed live options."""
            self.config = changed(self.config, options)
            optim.set_options(self.optimizer, lr=options.learning_rate)

        def load_initial_weights(self, weights: Mapping[str, Any]) -> str:
            """Begin with a given policy; say what is not in it."""
            optim.restore(dict(self.online.named_parameters()), weights)
            self.target.load_state_dict(self.online.state_dict())
            return "the optimizer starts fresh"

        def _tensors(self) -> dict[str, Any]:
            vectors = {"online": self.parameters.vector, "target": self.followers.vector}
            return vectors | optim.optimizer_state("adam", self.optimizer, self.parameters.vector)

    return Learner()

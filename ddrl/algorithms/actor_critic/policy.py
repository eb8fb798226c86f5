"""The policy of the on-policy actor-critics.

A feed-forward MLP runs in NumPy, so that its rollout processes need no torch; other networks run in torch.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ddrl.algorithms.actor_critic.options import OBSERVATION_CLIP, Options, num_policy_parameters
from ddrl.algorithms.base import NO_STATE, RecurrentState, best_choices, check_shapes, check_state
from ddrl.networks.numpy_mlp import ACTIVATIONS, Layer, forward
from ddrl.types import EnvSpec

if TYPE_CHECKING:
    from torch import nn

    from ddrl.networks.recurrent import RecurrentCore


class Policy:
    """The actor; see `base.Policy`."""

    evaluation_epsilon = 0.0

    def __init__(self, config: Options, spec: EnvSpec, *, producer: int = 0) -> None:
        self._spec = spec
        self._is_continuous = spec.action_kind == "continuous"
        self._low, self._high = np.array([spec.action_low, spec.action_high], np.float32)
        self._scale, self._center = (self._high - self._low) / 2, (self._high + self._low) / 2
        self._sections = np.cumsum(spec.action_sizes)[:-1]  # where the logits of each dimension begin
        self._state_size = config.recurrent_state_size
        in_numpy = config.network == "mlp" and not self._state_size
        self._network = (_NumpyActor if in_numpy else _TorchActor)(config, spec)
        self._mean = self._std = self._log_std = np.zeros(0, np.float32)
        self._shapes = {"log_std": self._low.shape} if self._is_continuous else {}
        if config.normalize_observations:
            self._shapes |= dict.fromkeys(("observation_mean", "observation_std"), spec.input_shape)

    def load(self, weights: Mapping[str, Any]) -> None:
        """Load published weights: CPU tensors or arrays.

        Raises:
            ValueError: they are those of another configuration or environment.
        """
        arrays = {name: np.asarray(value, np.float32).copy() for name, value in weights.items()}
        parts = ("core.", "actor.", "policy_head.")
        actor = {name: arrays.pop(name) for name in weights if name.startswith(parts)}
        check_shapes(arrays, self._shapes, source="weights")
        self._network.load(actor)
        self._log_std = arrays.get("log_std", self._log_std)
        self._mean = arrays.get("observation_mean", self._mean)
        self._std = arrays.get("observation_std", self._std)

    def initial_state(self, num_envs: int) -> RecurrentState:
        """Return the state at the start of `num_envs` episodes; {} of a feed-forward network."""
        return {"hidden": np.zeros((num_envs, self._state_size), np.float32)} if self._state_size else {}

    def act(self, observation: np.ndarray, state: RecurrentState = NO_STATE) -> np.ndarray:
        """Return the mode: [N, *O] -> [N, *A], float32 in the environment's unit or int64.

        Raises:
            ValueError: no state for a recurrent network, or that of another number of environments.
        """
        return self._to_environment(self._choose(self._parameters(observation, state, by_row=True)))

    def module(self) -> nn.Module:
        """Return what gives the actions, or the logits of choices; see `base.Exportable`."""
        from torch import nn

        from ddrl.networks.exported import Bounded, Normalized, Recurrent

        before, core, after = self._network.parts()
        if len(self._mean):
            before = nn.Sequential(Normalized(self._mean, self._std, OBSERVATION_CLIP), before)
        if self._is_continuous:
            bounded = Bounded(self._low, self._high, self._spec.action_shape, squash=False)
            after = nn.Sequential(after, bounded)
        return nn.Sequential(before, after) if core is None else Recurrent(before, core, after)

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator, state: RecurrentState = NO_STATE
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return drawn actions.

        Args:
            observation: [N, *O].
            generator: source of the draws.
            state: of the N environments, of a recurrent network.

        Returns:
            [N, *A] actions within the bounds, and the columns behavior_log_prob [N] (float32, nats) and, for
            continuous actions, raw_action [N, *A] (float32, the draw before scaling and clipping).

        Raises:
            ValueError: as `act`.
        """
        parameters = self._parameters(observation, state, by_row=False)
        if self._is_continuous:
            noise = generator.standard_normal(parameters.shape, np.float32)
            raw = parameters + np.exp(self._log_std) * noise
            constant = float(self._log_std.sum()) + 0.5 * math.log(2 * math.pi) * noise.shape[1]
            log_prob = -0.5 * np.einsum("nd,nd->n", noise, noise) - constant
            columns = {"behavior_log_prob": log_prob.astype(np.float32), "raw_action": self._shaped(raw)}
            return self._to_environment(raw), columns
        # The largest logit with Gumbel noise is a draw from the softmax (Gumbel 1954; Maddison et al. 2014).
        noise = -np.log(generator.standard_exponential(parameters.shape, np.float32) + np.float32(1e-38))
        drawn = self._choose(parameters + noise)
        log_prob = np.zeros(len(parameters), np.float32)
        rows = np.arange(len(parameters))
        for logits, choice in zip(np.split(parameters, self._sections, axis=1), drawn.T, strict=True):
            largest = logits.max(axis=1)
            log_prob += logits[rows, choice] - largest - np.log(np.exp(logits - largest[:, None]).sum(axis=1))
        return self._to_environment(drawn), {"behavior_log_prob": log_prob}

    def _parameters(self, observation: np.ndarray, state: RecurrentState, *, by_row: bool) -> np.ndarray:
        """[N, *O] -> [N, P], of choices the allowed ones; update the state in place."""
        if self._state_size:
            check_state(state, len(observation), self._state_size)
        seen = observation
        if len(self._mean):
            seen = (np.asarray(observation, np.float32) - self._mean) / self._std
            seen = np.clip(seen, -OBSERVATION_CLIP, OBSERVATION_CLIP)
        parameters = self._network.forward(seen, state, by_row=by_row)
        return cast(np.ndarray, self._spec.only_allowed(parameters, observation))

    def _choose(self, parameters: np.ndarray) -> np.ndarray:
        """Return the means [N, A], or the choices of largest logits [N, D] int64."""
        return parameters if self._is_continuous else best_choices(parameters, self._sections)

    def _to_environment(self, action: np.ndarray) -> np.ndarray:
        """Convert raw actions or choices, one row each, to the environment's unit and shape."""
        if not self._is_continuous:
            return self._shaped(action)
        return self._shaped(np.clip(action * self._scale + self._center, self._low, self._high))

    def _shaped(self, action: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(action).reshape(len(action), *self._spec.action_shape)


class _NumpyActor:
    """An MLP actor."""

    def __init__(self, config: Options, spec: EnvSpec) -> None:
        self._activation = config.activation
        self._names = [*(f"actor.layers.{i}" for i in range(len(config.hidden_sizes))), "policy_head"]
        sizes = (*spec.input_shape, *config.hidden_sizes, num_policy_parameters(spec))
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, (inputs, outputs) in zip(self._names, pairwise(sizes), strict=True):
            self._shapes |= {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
        self._layers: list[Layer] = []

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Load the entries of actor and policy head of published weights; ValueError if they do not fit."""
        check_shapes(arrays, self._shapes, source="weights")
        self._layers = [
            (np.ascontiguousarray(arrays[f"{name}.weight"].T), arrays[f"{name}.bias"]) for name in self._names
        ]

    def parts(self) -> tuple[nn.Module, RecurrentCore | None, nn.Module]:
        """Return the same as torch modules: what is before a recurrent core, that if there is one, and the rest."""
        from torch import nn

        from ddrl.networks.exported import mlp

        return mlp(self._layers, self._activation), None, nn.Identity()

    def forward(self, x: np.ndarray, state: RecurrentState, *, by_row: bool) -> np.ndarray:
        """[N, *O] -> [N, P] policy parameters; each row by itself if `by_row`."""
        x = x / np.float32(255.0) if x.dtype == np.uint8 else np.asarray(x, np.float32)  # as trunks.to_input
        return forward(self._layers, x, activation=ACTIVATIONS[self._activation], by_row=by_row)


class _TorchActor:
    """Any other actor, on the CPU; methods as of `_NumpyActor`. Only processes that use it import torch."""

    def __init__(self, config: Options, spec: EnvSpec) -> None:
        from torch import nn

        from ddrl.networks.layers import uniform_linear
        from ddrl.networks.recurrent import RecurrentCore

        trunk, width = config.make_trunk(spec)
        parts, self._core = {"actor": trunk}, None
        if config.recurrent != "none":
            self._core = parts["core"] = RecurrentCore(config.recurrent, width, config.recurrent_size)
            width = config.recurrent_size
        self._trunk, self._head = trunk, uniform_linear(width, num_policy_parameters(spec), None)
        self._module = nn.Sequential(OrderedDict(parts, policy_head=self._head)).eval().requires_grad_(False)

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        from ddrl.networks.parameters import load_arrays

        load_arrays(self._module, arrays)

    def parts(self) -> tuple[nn.Module, RecurrentCore | None, nn.Module]:
        return self._trunk, self._core, self._head

    def forward(self, x: np.ndarray, state: RecurrentState, *, by_row: bool) -> np.ndarray:
        from ddrl.networks.trunks import evaluate

        if self._core is None:
            return evaluate(self._module, x, by_row=by_row)
        parts = [slice(i, i + 1) for i in range(len(x))] if by_row else [slice(None)]
        return np.concatenate([self._recurrent(x[part], state["hidden"][part]) for part in parts])

    def _recurrent(self, x: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        """[N, *O] -> [N, P]; update `hidden` [N, H] in place."""
        import torch

        from ddrl.networks.trunks import to_input

        # Copies, for kernels round differently by the place of a row.
        seen, before = (torch.from_numpy(np.array(part, order="C")) for part in (x, hidden))
        assert self._core is not None, "called of a recurrent network only"
        output, after = self._core(self._trunk(to_input(seen))[None], before)
        hidden[:] = after.numpy()
        parameters: np.ndarray = self._head(output[0]).numpy()
        return parameters

"""What the on-policy actor-critics share: options, what they can serve, and the Policy that plays.

A policy over discrete choices is a categorical distribution, one for each dimension; over bounded numbers a
Gaussian with a standard deviation that does not depend on the state, on actions scaled to [-1, 1]. What is drawn
is clipped to the bounds for the environment only: densities are those of the unclipped draw.
Source: Schulman et al. 2017, arXiv:1707.06347; Huang et al. 2022, "The 37 implementation details of PPO".

An MLP plays in plain NumPy, so that its rollout processes need no torch; other networks play in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from ddrl.types import EnvSpec

OBSERVATION_CLIP = 10.0  # of normalized observations, in standard deviations
_ACTIVATIONS: Mapping[str, Callable[..., Any]] = {"tanh": np.tanh, "relu": partial(np.maximum, 0.0)}


class Options(BaseModel):
    """Options of every on-policy actor-critic; rewards are as scaled for training."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    network: str = Field(
        "mlp",
        description="Trunk from observation to features: `mlp`, `conv` (small images) or your own, "
        '"module:callable", called with the observation shape and returning a torch module.',
    )
    network_kwargs: dict[str, Any] = Field({}, description="Keyword arguments of a network of your own.")
    hidden_sizes: tuple[PositiveInt, ...] = Field(
        (64, 64),
        min_length=1,
        description="Widths of the dense layers of a trunk. Wider fits more and costs time. Usual: (64, 64) "
        "for vectors, (256,) after convolutions.",
    )
    activation: Literal["tanh", "relu"] = Field(
        "tanh", description="Of the hidden layers. tanh is steadier on small problems, relu is faster."
    )
    shared: bool = Field(
        False,
        description="Actor and critic share one trunk: cheaper, but the value loss pulls at the policy's features. "
        "Usual: no for vectors, yes for images.",
    )
    initial_log_std: float = Field(
        0.0,
        ge=-5,
        le=2,
        description="Log standard deviation that continuous actions start with, in half action ranges. More "
        "explores more. Usual: -1 to 0.",
    )
    learning_rate: float = Field(
        3e-4,
        gt=0,
        description="Step size of the optimizer. Larger is faster until the policy jumps. Usual: 1e-4 to 1e-3.",
    )
    final_learning_rate: float | None = Field(
        None,
        ge=0,
        description="Where the step size goes linearly within anneal_steps. None: stays. Usual: 0.",
    )
    entropy_coefficient: float = Field(
        0.0, ge=0, description="Weight of the entropy bonus. More explores longer. Usual: 0 to 0.02."
    )
    final_entropy_coefficient: float | None = Field(
        None, ge=0, description="Where that weight goes linearly within anneal_steps. None: stays. Usual: 0."
    )
    anneal_steps: PositiveInt | None = Field(
        None,
        description="Transitions learned from until the final_... values are reached. Usual: those of the run.",
    )
    value_coefficient: float = Field(
        0.5,
        ge=0,
        description="Weight of the value loss; matters with a shared trunk or a clipped gradient. Usual: 0.5.",
    )
    max_grad_norm: float | None = Field(
        0.5, gt=0, description="The gradient is scaled down to this norm. None: never. Usual: 0.5; IMPALA 40."
    )
    gamma: float = Field(
        0.99,
        ge=0,
        le=1,
        description="Discount per agent step; the horizon is about 1 / (1 - gamma). Usual: 0.97 to 0.999.",
    )
    lambda_: float = Field(
        0.95,
        ge=0,
        le=1,
        alias="lambda",
        description="Decay of the traces: 0 trusts the critic after one step, 1 rewards alone. Usual: 0.8 to 0.98.",
    )
    batch_size: PositiveInt = Field(
        2_048,
        description="Transitions of one iteration, after which a version of the weights is published. More is "
        "steadier and fresher per version, but versions come later. Usual: 512 to 16,384.",
    )
    normalize_observations: bool = Field(
        False,
        description="Shift and scale observations by their running mean and deviation, clipped at 10. For vectors "
        "whose entries differ in scale.",
    )
    normalize_returns: bool = Field(
        False,
        description="Let the critic predict returns in units of their own mean and deviation, so that the size of "
        "rewards does not matter to it.",
    )

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Options:
        finals = [
            name
            for name in type(self).model_fields
            if name.startswith("final_") and getattr(self, name) is not None
        ]
        if finals and self.anneal_steps is None:
            raise ValueError(
                f"{finals[0]}: needs anneal_steps, the transitions within which it is reached; set it"
            )
        if self.anneal_steps is not None and not finals:
            raise ValueError(
                f"anneal_steps={self.anneal_steps}: has no effect without a final_... value; set one"
            )
        if self.network not in ("mlp", "conv"):
            if ":" not in self.network:
                raise ValueError(
                    f'network={self.network!r}: is unknown; use mlp, conv or your own "module:callable"'
                )
            for name in ("hidden_sizes", "activation"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}: has no effect on {self.network}; pass it in network_kwargs")
        elif self.network_kwargs:
            raise ValueError(f"network_kwargs: are for a network of your own; {self.network} takes none")
        return self


def check(config: Options, spec: EnvSpec, *, name: str) -> None:
    """Refuse an environment, or a network, that cannot serve.

    Args:
        name: of the algorithm, for the message.

    Raises:
        ValueError: one line naming the thing, its value and the remedy.
    """
    is_vector = len(spec.observation_shape) == 1
    if config.network == "mlp" and not is_vector:
        others = "conv, or " if len(spec.observation_shape) == 3 else ""
        raise ValueError(
            f"algorithm.network: mlp needs a vector, but {spec.env_id} has observations {spec.observation_shape}; use "
            f"{others}gymnasium.wrappers.FlattenObservation"
        )
    if config.normalize_observations and not is_vector:
        raise ValueError(
            f"algorithm.normalize_observations: {spec.env_id} has observations {spec.observation_shape}, not a "
            "vector; set it to false"
        )
    if spec.action_kind == "continuous" and not all(
        map(math.isfinite, (*spec.action_low, *spec.action_high))
    ):
        raise ValueError(
            f"{spec.env_id}: actions have no bounds, but {name} needs finite ones; wrap the environment in "
            "gymnasium.wrappers.ClipAction"
        )
    if spec.action_kind == "continuous" and any(
        low >= high for low, high in zip(spec.action_low, spec.action_high, strict=True)
    ):
        raise ValueError(
            f"{spec.env_id}: action_low {spec.action_low} is not below action_high {spec.action_high}; remove the "
            "action dimensions that have no choice"
        )
    if spec.action_kind != "continuous" and config.initial_log_std != 0.0:
        raise ValueError(
            f"algorithm.initial_log_std: {config.initial_log_std} has no effect on {spec.env_id}, whose actions are "
            f"{spec.action_kind}; remove it"
        )
    if config.network != "mlp":
        from ddrl.networks.trunks import make_trunk

        make_trunk(
            config.network,
            spec.observation_shape,
            hidden_sizes=config.hidden_sizes,
            activation=config.activation,
            kwargs=config.network_kwargs,
        )


def num_policy_parameters(spec: EnvSpec) -> int:
    """P: outputs of the policy head: a mean a dimension, or a logit a choice."""
    return math.prod(spec.action_shape) if spec.action_kind == "continuous" else sum(spec.action_sizes)


class Policy:
    """The actor for rollout and evaluation.

    A mode depends on its own observation only, to the last bit (see sac.Policy).

    Args:
        config: options of the algorithm.
        spec: spaces of the environment.
    """

    def __init__(self, config: Options, spec: EnvSpec) -> None:
        self._spec = spec
        self._is_continuous = spec.action_kind == "continuous"
        self._low, self._high = (
            np.asarray(spec.action_low, np.float32),
            np.asarray(spec.action_high, np.float32),
        )
        self._scale, self._center = (self._high - self._low) / 2, (self._high + self._low) / 2
        self._sections = np.cumsum(spec.action_sizes)[:-1]  # where the logits of each dimension begin
        self._network = _Mlp(config, spec) if config.network == "mlp" else _module(config, spec)
        self._mean = self._std = self._log_std = np.zeros(0, np.float32)
        self._shapes = {"log_std": self._low.shape} if self._is_continuous else {}
        if config.normalize_observations:
            self._shapes |= dict.fromkeys(("observation_mean", "observation_std"), spec.observation_shape)

    def load(self, weights: Mapping[str, Any]) -> None:
        """Take over what the learner's `weights` returned: CPU tensors, or arrays as they come off the wire.

        Raises:
            ValueError: they are those of another configuration or environment.
        """
        arrays = {name: np.asarray(value, np.float32).copy() for name, value in weights.items()}
        actor = {name: arrays.pop(name) for name in weights if name.startswith(("actor.", "policy_head."))}
        _check_shapes(self._shapes, arrays)
        self._network.load(actor)
        self._log_std = arrays.get("log_std", self._log_std)
        self._mean = arrays.get("observation_mean", self._mean)
        self._std = arrays.get("observation_std", self._std)

    def act(self, observation: np.ndarray) -> np.ndarray:
        """The mode: [N, *O] -> [N, *A], float32 in the environment's unit or int64."""
        return self._to_environment(self._choose(self._parameters(observation, by_row=True)))

    def explore(
        self, observation: np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Draw actions.

        Args:
            observation: [N, *O].
            generator: source of the draws.

        Returns:
            [N, *A] actions within the bounds, and the columns behavior_log_prob [N] (float32, nats) and, for
            continuous actions, raw_action [N, *A] (float32, the draw before scaling and clipping).
        """
        parameters = self._parameters(observation, by_row=False)
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

    def _parameters(self, observation: np.ndarray, *, by_row: bool) -> np.ndarray:
        """[N, *O] -> [N, P]."""
        if len(self._mean):
            observation = np.asarray(observation, np.float32)
            observation = np.clip((observation - self._mean) / self._std, -OBSERVATION_CLIP, OBSERVATION_CLIP)
        parameters: np.ndarray = self._network.forward(observation, by_row)
        return parameters

    def _choose(self, parameters: np.ndarray) -> np.ndarray:
        """The means [N, A], or the choices of largest logits [N, D] int64."""
        if self._is_continuous:
            return parameters
        if not len(self._sections):
            return np.expand_dims(parameters.argmax(axis=1), 1)
        parts = np.split(parameters, self._sections, axis=1)
        return np.stack([part.argmax(axis=1) for part in parts], axis=1)

    def _to_environment(self, action: np.ndarray) -> np.ndarray:
        """Raw actions or choices, one row each, in the environment's unit and shape."""
        if not self._is_continuous:
            return self._shaped(action)
        return self._shaped(np.clip(action * self._scale + self._center, self._low, self._high))

    def _shaped(self, action: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(action).reshape(len(action), *self._spec.action_shape)


class _Mlp:
    """The actor as plain NumPy."""

    def __init__(self, config: Options, spec: EnvSpec) -> None:
        self._activate = _ACTIVATIONS[config.activation]
        self._names = [*(f"actor.layers.{i}" for i in range(len(config.hidden_sizes))), "policy_head"]
        sizes = (*spec.observation_shape, *config.hidden_sizes, num_policy_parameters(spec))
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, (inputs, outputs) in zip(self._names, pairwise(sizes), strict=True):
            self._shapes |= {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
        self._layers: list[tuple[np.ndarray, np.ndarray]] = []

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        _check_shapes(self._shapes, arrays)
        self._layers = [
            (np.ascontiguousarray(arrays[f"{name}.weight"].T), arrays[f"{name}.bias"]) for name in self._names
        ]

    def forward(self, x: np.ndarray, by_row: bool) -> np.ndarray:
        size = len(x)
        x = x / np.float32(255.0) if x.dtype == np.uint8 else np.asarray(x, np.float32)  # as trunks.to_input
        if by_row:
            x = x[:, None]  # [N, 1, O]: NumPy multiplies row by row
        *hidden, last = self._layers
        for weight, bias in hidden:
            x = x @ weight
            x += bias
            self._activate(x, out=x)
        output: np.ndarray = x @ last[0] + last[1]
        return output.reshape(size, -1)


def _check_shapes(expected: Mapping[str, tuple[int, ...]], arrays: Mapping[str, np.ndarray]) -> None:
    for name in sorted(expected.keys() | arrays.keys()):
        found, wanted = arrays[name].shape if name in arrays else None, expected.get(name)
        if found != wanted:
            raise ValueError(f"{name}: shape {found} in the weights, {wanted} here")


def _module(config: Options, spec: EnvSpec) -> Any:
    """The actor as a torch module; only processes that play it pay for torch."""
    from ddrl.networks.player import ModulePlayer

    return ModulePlayer(
        config.network,
        spec.observation_shape,
        num_outputs=num_policy_parameters(spec),
        hidden_sizes=config.hidden_sizes,
        activation=config.activation,
        kwargs=config.network_kwargs,
    )

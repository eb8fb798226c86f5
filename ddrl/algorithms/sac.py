"""Soft actor-critic for bounded continuous actions: its options, what it can serve, the Policy that plays.

Source: Haarnoja et al. 2018, arXiv:1812.05905 (learned temperature, two critics, no value network).
What learns is in sac_learner.py, for a rollout process and `ddrl submit` need no torch: that is seconds of
their start and most of their memory. The policy works on actions in [-1, 1]; the environment's unit appears
only where `Policy.act` goes out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from ddrl.algorithms.base import NO_STATE, RecurrentState
from ddrl.config import LIVE
from ddrl.types import EnvSpec

ON_POLICY = False
LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0  # of the Gaussian before squashing, in nats


class Config(BaseModel):
    """Options of SAC; an update is one minibatch, rewards are as scaled for training."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_sizes: tuple[PositiveInt, ...] = Field(
        (128, 128),
        min_length=1,
        description="Widths of the hidden layers of the actor and of each critic. Wider fits more and costs "
        "time per update in proportion to the square. Usual: (64, 64) to (400, 300).",
    )
    learning_rate: float = Field(
        1e-3,
        gt=0,
        description="Adam step size of actor, critics and temperature. Larger learns faster until the "
        "critics diverge. Usual: 1e-4 to 3e-3.",
        json_schema_extra=LIVE,
    )
    batch_size: PositiveInt = Field(
        256,
        description="Transitions per update. Larger gives less noisy and slower updates. Usual: 64 to 512.",
    )
    gamma: float = Field(
        0.99,
        ge=0,
        le=1,
        description="Discount per agent step; the horizon is about 1 / (1 - gamma) steps. Larger sees "
        "further and learns more slowly. Usual: 0.97 to 0.999.",
    )
    n_step: PositiveInt = Field(
        1,
        description="Rewards summed before bootstrapping. More carries rewards back faster, but is biased "
        "towards the older policies that played them. Usual: 1 to 10.",
    )
    target_rate: float = Field(
        0.005,
        gt=0,
        le=1,
        description="Share of the critics mixed into their targets at each update (tau; 1 - polyak). Larger "
        "tracks faster and is less stable. Usual: 0.002 to 0.05.",
        json_schema_extra=LIVE,
    )
    temperature: Literal["auto"] | float = Field(
        "auto",
        description="Weight of the entropy against the reward: a number >= 0, or `auto` to learn the one "
        "that keeps the entropy at target_entropy. More explores more. Usual: auto; fixed 0.01 to 0.2.",
        json_schema_extra=LIVE,
    )
    target_entropy: float | None = Field(
        None,
        description="Entropy that temperature=auto aims at, in nats, of actions in [-1, 1]. Larger is more "
        "random. None: minus the number of action dimensions. Usual: -2 to -0.5 per dimension.",
        json_schema_extra=LIVE,
    )
    initial_temperature: float = Field(
        1.0,
        gt=0,
        description="Where temperature=auto starts. Too large drowns small rewards at first. "
        "Usual: 0.1 to 1.",
    )
    policy_delay: PositiveInt = Field(
        1,
        description="Critic updates per update of actor and temperature. More is cheaper and gives the actor "
        "better critics, but fewer steps. Usual: 1 to 3.",
        json_schema_extra=LIVE,
    )
    num_critics: PositiveInt = Field(
        2,
        description="Critics whose minimum is the target. More underestimates more and costs time; 1 "
        "overestimates. Usual: 2.",
    )
    layer_norm: bool = Field(
        False,
        description="Normalize the hidden layers of the critics. Bounds their extrapolation, so larger "
        "learning_rate and n_step stay stable, at some 20 % more time per update.",
    )
    form: Literal["sac", "sac1"] = Field(
        "sac",
        description="`sac`: the policy climbs the minimum of the critics. `sac1` (Spinning Up's, as used by "
        "Distributed-DRL): it climbs the first critic at a fixed temperature, usually 0.2; cheaper, "
        "but overestimates more.",
    )

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Config:
        learned = self.temperature == "auto"
        if self.form == "sac1" and learned:
            raise ValueError("temperature='auto': form 'sac1' has a fixed temperature; set temperature=0.2")
        if not learned:
            if not 0 <= float(self.temperature) < math.inf:
                raise ValueError(f"temperature={self.temperature}: must be finite and >= 0, or 'auto'")
            for name in ("target_entropy", "initial_temperature"):
                if (
                    name in self.model_fields_set
                    and getattr(self, name) != type(self).model_fields[name].default
                ):
                    raise ValueError(
                        f"{name}={getattr(self, name)}: has no effect with temperature={self.temperature}; "
                        f"remove it or set temperature='auto'"
                    )
        return self


def check(config: Config, spec: EnvSpec) -> None:
    """Refuse an environment that SAC cannot serve.

    Raises:
        ValueError: one line naming the thing, its value and the remedy.
    """
    del config  # every configuration serves the same environments
    if spec.action_kind != "continuous":
        raise ValueError(
            f"{spec.env_id}: action_kind is {spec.action_kind!r}, but sac needs continuous actions; "
            f"choose an environment with a Box of actions"
        )
    num_dims = math.prod(spec.action_shape)
    for name, bounds in (("action_low", spec.action_low), ("action_high", spec.action_high)):
        if len(bounds) != num_dims or not all(math.isfinite(bound) for bound in bounds):
            raise ValueError(
                f"{spec.env_id}: {name} is {bounds}, but sac needs {num_dims} finite bounds; wrap the "
                f"environment in gymnasium.wrappers.RescaleAction or ClipAction"
            )
    if any(low >= high for low, high in zip(spec.action_low, spec.action_high, strict=True)):
        raise ValueError(
            f"{spec.env_id}: action_low {spec.action_low} is not below action_high {spec.action_high}; "
            f"remove the action dimensions that have no choice"
        )
    if len(spec.input_shape) != 1:
        raise ValueError(
            f"{spec.env_id}: observation_shape is {spec.input_shape}, but sac needs a vector; wrap "
            f"the environment in gymnasium.wrappers.FlattenObservation"
        )


class Policy:
    """The actor for rollout and evaluation: plain NumPy on exported weights.

    A mode depends on its own observation only, to the last bit: each row is a vector-matrix product of its
    own, because a matrix product rounds a row differently by its place and by the number of rows.
    Exploration needs no such promise and takes the faster matrix product.

    Args:
        config: options of the algorithm.
        spec: spaces of the environment.
    """

    evaluation_epsilon = 0.0

    def __init__(self, config: Config, spec: EnvSpec, *, producer: int = 0) -> None:
        check(config, spec)
        low, high = np.asarray(spec.action_low, np.float32), np.asarray(spec.action_high, np.float32)
        self._low, self._high = low, high
        self._scale = (high - low) / 2
        self._center = (high + low) / 2
        self._action_shape = spec.action_shape
        self._num_inputs = spec.input_shape[0]
        self._num_layers = len(config.hidden_sizes) + 1
        self._weights: list[np.ndarray[Any, Any]] = []
        self._biases: list[np.ndarray[Any, Any]] = []

    def load(self, weights: Mapping[str, Any]) -> None:
        """Take over what `SAC.weights` returned: CPU tensors, or arrays as they come off the wire."""
        layers = range(self._num_layers)
        self._weights = [np.asarray(weights[f"weights.{i}"], np.float32).copy() for i in layers]
        self._biases = [np.asarray(weights[f"biases.{i}"], np.float32).copy() for i in layers]

    def initial_state(self, num_envs: int) -> RecurrentState:
        """Nothing is carried from step to step."""
        return {}

    def act(
        self, observation: np.ndarray[Any, Any], state: RecurrentState = NO_STATE
    ) -> np.ndarray[Any, Any]:
        """The mode: [N, O] -> [N, *A] float32, in the environment's unit, within its bounds."""
        output = self._output(self._rows(observation)[:, None])  # [N, 1, O]: NumPy multiplies row by row
        return self._to_environment(output[:, : len(self._low)])

    def explore(
        self,
        observation: np.ndarray[Any, Any],
        generator: np.random.Generator,
        state: RecurrentState = NO_STATE,
    ) -> tuple[np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]]]:
        """Sample the policy.

        Args:
            observation: [N, O].
            generator: source of the noise.

        Returns:
            [N, *A] float32, in the environment's unit, within its bounds; and no further columns.
        """
        output = self._output(self._rows(observation))
        mean = output[:, : len(self._low)]
        middle, half = (LOG_STD_MAX + LOG_STD_MIN) / 2, (LOG_STD_MAX - LOG_STD_MIN) / 2
        std = np.exp(np.tanh(output[:, len(self._low) :]) * half + middle)
        noise = generator.standard_normal(std.shape, dtype=np.float32)
        return self._to_environment(mean + std * noise), {}

    def _rows(self, observation: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.asarray(observation, np.float32).reshape(len(observation), self._num_inputs)

    def _output(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """[N, O] or [N, 1, O] -> [N, 2 A]: mean and raw deviation before squashing."""
        size = len(x)
        *hidden, last = zip(self._weights, self._biases, strict=True)
        for weight, bias in hidden:
            x = x @ weight
            x += bias
            np.maximum(x, 0.0, out=x)
        x = x @ last[0] + last[1]
        return x.reshape(size, 2 * len(self._low))

    def _to_environment(self, unsquashed: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """[N, A] -> [N, *A], squashed into the bounds."""
        action = np.tanh(np.ascontiguousarray(unsquashed)) * self._scale + self._center
        # rounding may step over a bound by one unit in the last place
        action = np.clip(action, self._low, self._high)
        return np.ascontiguousarray(action.reshape(len(action), *self._action_shape), np.float32)

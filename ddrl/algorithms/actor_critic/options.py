"""Options of the on-policy actor-critics, PPO and IMPALA.

A policy over discrete choices is a categorical distribution for each dimension; over bounded numbers a Gaussian with a
standard deviation that does not depend on the state, on actions scaled to [-1, 1]. Draws are clipped to the bounds for
the environment only: log densities are those of the unclipped draws.
Source: Schulman et al. 2017, arXiv:1707.06347; Huang et al. 2022, "The 37 implementation details of PPO".
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from ddrl.algorithms.options import Common, NetworkConfig, check_bounds, option
from ddrl.config import LIVE
from ddrl.types import EnvSpec

if TYPE_CHECKING:
    from torch import Generator, nn

OBSERVATION_CLIP = 10.0  # of normalized observations, in standard deviations


class Options(NetworkConfig):
    """Options of every on-policy actor-critic; rewards are in training units."""

    on_policy: ClassVar[bool] = True

    hidden_sizes: tuple[PositiveInt, ...] = option(Common, "hidden_sizes", (64, 64))
    activation: Literal["tanh", "relu"] = "tanh"
    """Activation of the hidden layers. tanh is steadier; relu is faster, but its units die at large learning rates."""
    shared: bool = False
    """Actor and critic share one trunk: cheaper, but the value loss changes the policy's features. Usual: no for
    vectors, yes for images."""
    recurrent: Literal["none", "lstm", "gru"] = "none"
    """A recurrent core between trunk and heads, for tasks in which one observation does not tell all. It sees the
    features only. Gradients go back to the beginning of the episode, or at least 64 steps, as far as a batch has them.
    """
    recurrent_size: PositiveInt = 128
    """Width of the recurrent core. Wider remembers more and costs time in proportion to the square. Usual: 64 to 512.
    """
    initial_log_std: float = Field(0.0, ge=-5, le=2)
    """Log of the standard deviation that continuous actions start with; a deviation of 1 means half the action range.
    More explores more. Usual: -1 to 0."""
    learning_rate: float = option(NetworkConfig, "learning_rate", 3e-4)
    final_learning_rate: float | None = Field(None, ge=0, json_schema_extra=LIVE)
    """Final learning_rate, reached linearly within anneal_steps. null: it stays constant. Usual: 0."""
    entropy_coefficient: float = Field(0.0, ge=0, json_schema_extra=LIVE)
    """Weight of the entropy bonus. More explores longer. Usual: 0 to 0.02."""
    final_entropy_coefficient: float | None = Field(None, ge=0, json_schema_extra=LIVE)
    """Final entropy_coefficient, reached linearly within anneal_steps. null: it stays constant. Usual: 0."""
    anneal_steps: PositiveInt | None = Field(None, json_schema_extra=LIVE)
    """Number of learned transitions after which the final_... values hold. More anneals more slowly. Usual: all those
    of the run."""
    value_coefficient: float = Field(0.5, ge=0, json_schema_extra=LIVE)
    """Weight of the value loss; matters with a shared trunk or a clipped gradient. Usual: 0.5."""
    max_grad_norm: float | None = option(Common, "max_grad_norm", 0.5)
    critic_warmup_updates: int = option(Common, "critic_warmup_updates", 300)
    lambda_: float = Field(0.95, ge=0, le=1, alias="lambda", json_schema_extra=LIVE)
    """Decay of the traces; with V-trace these are lambda * min(1, rho). 0: one-step targets; 1: rewards up to the cut,
    then the critic. Usual: 0.8 to 0.98; V-trace 0.9 to 1."""
    batch_size: PositiveInt = 2_048
    """Transitions of one iteration, after which a version of the weights is published. More is steadier per version,
    but versions come later. Usual: 512 to 16,384."""
    normalize_observations: bool | None = False
    """Shift and scale observations by their running mean and deviation, clipped at 10 deviations; vectors only. null:
    yes for vectors, unless the network is your own."""
    normalize_returns: bool = False
    """The critic predicts returns in units of their own mean and deviation, and advantages have that unit too, so that
    the size of rewards does not matter (PopArt)."""

    @property
    def recurrent_state_size(self) -> int:
        """H, numbers in the recurrent state of one environment."""
        return {"none": 0, "gru": 1, "lstm": 2}[self.recurrent] * self.recurrent_size

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Options:
        finals = [name for name, value in self if name.startswith("final_") and value is not None]
        if finals and self.anneal_steps is None:
            raise ValueError(f"{finals[0]}: needs anneal_steps, the transitions until it is reached; set it")
        if not finals:
            self.refuse_changed("without a final_... value", "anneal_steps", remedy="set one")
        if self.recurrent == "none":
            self.refuse_changed("without recurrent", "recurrent_size", remedy="set recurrent to lstm or gru")
        elif not self.shared:
            raise ValueError(
                f"recurrent={self.recurrent}: the critic reads the actor's memory; set shared to true"
            )
        if ":" in self.network:
            remedy = "pass it in network_kwargs"
            self.refuse_changed(f"on {self.network}", "hidden_sizes", "activation", remedy=remedy)
        return self

    def fitted(self, spec: EnvSpec) -> Self:
        """Return the options with `normalize_observations` decided."""
        if self.normalize_observations is not None:
            return self
        return self.model_copy(update={"normalize_observations": spec.is_vector and ":" not in self.network})

    def check(self, spec: EnvSpec) -> None:
        """Refuse unbounded actions, and a network that cannot take the observations."""
        self.check_network(spec)
        if self.normalize_observations and not spec.is_vector:
            seen = spec.image_shapes or spec.input_shape
            raise ValueError(
                f"algorithm.normalize_observations: {spec.env_id} has observations {seen}, not a "
                "vector; set it to false"
            )
        if spec.action_kind == "continuous":
            check_bounds(self.name, spec)
        elif self.initial_log_std != 0.0:
            raise ValueError(
                f"algorithm.initial_log_std: {self.initial_log_std} has no effect on {spec.env_id}, whose actions are "
                f"{spec.action_kind}; remove it"
            )

    def make_trunk(
        self, spec: EnvSpec, generator: Generator | None = None, **layers: Any
    ) -> tuple[nn.Module, int]:
        """Return a new trunk with the dense layers of the options, and the number of its features."""
        dense = {"hidden_sizes": self.hidden_sizes, "activation": self.activation}
        return super().make_trunk(spec, generator, **dense | layers)


def num_policy_parameters(spec: EnvSpec) -> int:
    """Return P, the outputs of the policy head: a mean for each dimension, or a logit for each choice."""
    return math.prod(spec.action_shape) if spec.action_kind == "continuous" else sum(spec.action_sizes)

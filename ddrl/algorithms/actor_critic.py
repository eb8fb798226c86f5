"""What the on-policy actor-critics share: their options, and what they can serve.

A policy over discrete choices is a categorical distribution, one for each dimension; over bounded numbers a
Gaussian with a standard deviation that does not depend on the state, on actions scaled to [-1, 1]. What is drawn
is clipped to the bounds for the environment only: densities are those of the unclipped draw.
Source: Schulman et al. 2017, arXiv:1707.06347; Huang et al. 2022, "The 37 implementation details of PPO".
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from ddrl.config import LIVE
from ddrl.types import EnvSpec

OBSERVATION_CLIP = 10.0  # of normalized observations, in standard deviations


class Options(BaseModel):
    """Options of every on-policy actor-critic; rewards are as scaled for training."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    network: str = Field(
        "mlp",
        description="Trunk from observation to features: `mlp`; for images `conv` (small ones), `nature`, `impala` "
        'or `data_efficient`; or your own, "module:callable", called with the observation shape and returning a '
        "torch module.",
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
        json_schema_extra=LIVE,
    )
    final_learning_rate: float | None = Field(
        None,
        ge=0,
        description="Where the step size goes linearly within anneal_steps. None: stays. Usual: 0.",
        json_schema_extra=LIVE,
    )
    entropy_coefficient: float = Field(
        0.0,
        ge=0,
        description="Weight of the entropy bonus. More explores longer. Usual: 0 to 0.02.",
        json_schema_extra=LIVE,
    )
    final_entropy_coefficient: float | None = Field(
        None,
        ge=0,
        description="Where that weight goes linearly within anneal_steps. None: stays. Usual: 0.",
        json_schema_extra=LIVE,
    )
    anneal_steps: PositiveInt | None = Field(
        None,
        description="Transitions learned from until the final_... values are reached. Usual: those of the run.",
        json_schema_extra=LIVE,
    )
    value_coefficient: float = Field(
        0.5,
        ge=0,
        description="Weight of the value loss; matters with a shared trunk or a clipped gradient. Usual: 0.5.",
        json_schema_extra=LIVE,
    )
    max_grad_norm: float | None = Field(
        0.5,
        gt=0,
        description="The gradient is scaled down to this norm. None: never. Usual: 0.5; IMPALA 40.",
        json_schema_extra=LIVE,
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
        json_schema_extra=LIVE,
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
        if ":" in self.network:
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
    is_vector = len(spec.input_shape) == 1
    if config.network == "mlp" and not is_vector:
        others = "conv, or " if len(spec.input_shape) == 3 else ""
        raise ValueError(
            f"algorithm.network: mlp needs a vector, but {spec.env_id} has observations {spec.input_shape}; use "
            f"{others}gymnasium.wrappers.FlattenObservation"
        )
    if config.normalize_observations and not is_vector:
        raise ValueError(
            f"algorithm.normalize_observations: {spec.env_id} has observations {spec.input_shape}, not a "
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
            spec.input_shape,
            hidden_sizes=config.hidden_sizes,
            activation=config.activation,
            kwargs=config.network_kwargs,
        )


def num_policy_parameters(spec: EnvSpec) -> int:
    """P: outputs of the policy head: a mean a dimension, or a logit a choice."""
    return math.prod(spec.action_shape) if spec.action_kind == "continuous" else sum(spec.action_sizes)

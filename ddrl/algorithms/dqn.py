"""Deep Q-networks with orthogonal options: what they are, what they can serve, the Policy that plays.

Source: Mnih et al. 2015 (Nature 518); Double: arXiv:1509.06461; dueling: arXiv:1511.06581; prioritized:
arXiv:1511.05952; categorical: arXiv:1707.06887; quantile: arXiv:1710.10044; noisy: arXiv:1706.10295; together:
arXiv:1710.02298 (Rainbow); over a fleet: arXiv:1803.00933 (Ape-X). What learns is in dqn_learner.py.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from ddrl.algorithms import q_learning
from ddrl.algorithms.q_policy import Policy
from ddrl.config import LIVE
from ddrl.types import EnvSpec

__all__ = ["ON_POLICY", "Config", "Policy", "check"]

ON_POLICY = False


class Config(q_learning.Options):
    """Options of DQN; an update is one minibatch of n-step transitions."""

    distribution: Literal["none", "categorical", "quantile"] = Field(
        "none",
        description="Learn the distribution of returns instead of their mean: its probabilities on fixed values "
        "(`categorical`, C51; v_min and v_max must hold all returns) or its quantiles (`quantile`, QR-DQN). Often "
        "learns more per step, at more time per update.",
    )
    num_atoms: PositiveInt = Field(
        51,
        ge=2,
        description="Values or quantiles of the distribution. More is finer and slower. Usual: 51; quantile 200.",
    )
    v_min: float = Field(
        -10.0,
        description="Lowest return that `categorical` can tell, in training units. Too high cuts values off, too low "
        "wastes atoms. Usual: -10.",
    )
    v_max: float = Field(10.0, description="The highest one. Usual: 10 with reward signs.")
    noisy: bool = Field(
        False,
        description="Learned noise on the weights of the dense layers explores, consistently from step to step, "
        "instead of epsilon; it and final_epsilon are 0 unless they are set.",
    )
    noise_scale: float = Field(
        0.5,
        gt=0,
        description="Standard deviation that the noise starts with, sigma_0, shared by the inputs of a layer. More "
        "explores longer. Usual: 0.1 to 0.5.",
    )
    loss: Literal["huber", "mse"] = Field(
        "huber",
        description="huber bounds the pull of large errors; mse does not and aims at the mean. Usual: huber.",
    )
    huber_delta: float = Field(
        1.0,
        gt=0,
        description="Error beyond which huber is linear, in training units. Less is more robust and slower. Usual: 1.",
        json_schema_extra=LIVE,
    )

    @model_validator(mode="before")
    @classmethod
    def _noise_explores(cls, values: Any) -> Any:
        """Noisy layers take the place of epsilon, of whatever of it is not asked for."""
        if not isinstance(values, dict) or values.get("noisy") is not True or values.get("epsilon_ladder"):
            return values
        return {"epsilon": 0.0, "final_epsilon": 0.0, **values}

    @model_validator(mode="after")
    def _refuse_more_contradictions(self) -> Config:
        if self.distribution == "none":
            self.refuse_changed(["num_atoms"], "without a distribution")
        if self.distribution == "categorical":
            if not -math.inf < self.v_min < self.v_max < math.inf:
                raise ValueError(
                    f"v_min={self.v_min}, v_max={self.v_max}: hold no returns; v_min must be less than v_max"
                )
            self.refuse_changed(["loss", "huber_delta"], "with distribution=categorical")
        else:
            self.refuse_changed(["v_min", "v_max"], "without distribution=categorical")
        if self.distribution == "quantile":
            self.refuse_changed(["loss"], "with distribution=quantile, which is always huber")
        if self.loss == "mse":
            self.refuse_changed(["huber_delta"], "with loss=mse")
        if not self.noisy:
            self.refuse_changed(["noise_scale"], "without noisy=true")
        if self.dueling or self.noisy:
            self.refuse_layers_of_ones_own()
        elif ":" in self.network:
            own = f"on {self.network}, after which comes one linear layer"
            self.refuse_changed(["hidden_sizes", "activation"], own)
        return self

    def network_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `QNetwork` that the options decide."""
        return super().network_arguments() | {
            "distribution": self.distribution,
            "num_atoms": 1 if self.distribution == "none" else self.num_atoms,
            "noisy": self.noisy,
            "noise_scale": self.noise_scale,
        }


def check(config: Config, spec: EnvSpec) -> None:
    """Refuse an environment, or a network, that DQN cannot serve.

    Raises:
        ValueError: one line naming the thing, its value and the remedy.
    """
    q_learning.check(config, spec, name="dqn")

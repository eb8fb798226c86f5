"""Options of deep Q-networks.

Source: Mnih et al. 2015 (Nature 518); Double: arXiv:1509.06461; dueling: arXiv:1511.06581; prioritized:
arXiv:1511.05952; categorical: arXiv:1707.06887; quantile: arXiv:1710.10044; noisy: arXiv:1706.10295; together:
arXiv:1710.02298 (Rainbow); over a fleet: arXiv:1803.00933 (Ape-X).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from ddrl.algorithms.value_learning.options import Options
from ddrl.config import LIVE


class Config(Options):
    """Options of DQN; an update is one minibatch of n-step transitions."""

    name: ClassVar[str] = "dqn"
    network_options: ClassVar[tuple[str, ...]] = (
        *Options.network_options,
        *("distribution", "num_atoms", "v_min", "v_max", "noisy", "noise_scale"),
    )

    distribution: Literal["none", "categorical", "quantile"] = "none"
    """Learn the distribution of returns instead of their mean: its probabilities on fixed values (`categorical`, C51;
    v_min and v_max must hold all returns) or its quantiles (`quantile`, QR-DQN). Often learns more per step, at more
    time per update."""
    num_atoms: PositiveInt = Field(51, ge=2)
    """Values or quantiles of the distribution. More is finer and slower. Usual: 51; quantile 200."""
    v_min: float = -10.0
    """Lowest return that `categorical` can represent, in training units. Too high cuts values off, too low wastes
    atoms. Usual: -10."""
    v_max: float = 10.0
    """Highest return that `categorical` can represent. Usual: 10 with reward signs."""
    noisy: bool = False
    """Learned noise on the weights of the dense layers explores, consistently from step to step, instead of epsilon;
    epsilon and final_epsilon are 0 unless they are set."""
    noise_scale: float = Field(0.5, gt=0)
    """Standard deviation that the noise starts with, sigma_0, shared by the inputs of a layer. More explores longer.
    Usual: 0.1 to 0.5."""
    loss: Literal["huber", "mse"] = "huber"
    """huber limits the gradient of large errors; mse does not and aims at the mean. Usual: huber."""
    huber_delta: float = Field(1.0, gt=0, json_schema_extra=LIVE)
    """Error beyond which huber is linear, in training units. Less is more robust and slower. Usual: 1."""

    @model_validator(mode="before")
    @classmethod
    def _noise_replaces_epsilon(cls, values: Any) -> Any:
        """Set epsilon and final_epsilon to 0 with noisy layers, unless they are given."""
        if not isinstance(values, dict) or values.get("noisy") is not True or values.get("epsilon_ladder"):
            return values
        return {"epsilon": 0.0, "final_epsilon": 0.0, **values}

    @model_validator(mode="after")
    def _refuse_more_contradictions(self) -> Config:
        if self.distribution == "none":
            self.refuse_changed("without a distribution", "num_atoms")
        if self.distribution == "categorical":
            if self.v_min >= self.v_max:
                raise ValueError(
                    f"v_min={self.v_min}, v_max={self.v_max}: no returns between them; v_min must be less than v_max"
                )
            self.refuse_changed("with distribution=categorical", "loss", "huber_delta")
        else:
            self.refuse_changed("without distribution=categorical", "v_min", "v_max")
        if self.distribution == "quantile":
            self.refuse_changed("with distribution=quantile, which is always huber", "loss")
        if self.loss == "mse":
            self.refuse_changed("with loss=mse", "huber_delta")
        if not self.noisy:
            self.refuse_changed("without noisy=true", "noise_scale")
        self.refuse_unused_layers()
        return self

    @property
    def reports_values(self) -> bool:
        """Not of a categorical distribution: its errors are in nats, and new items get the largest priority seen."""
        return self.prioritized and self.distribution != "categorical"

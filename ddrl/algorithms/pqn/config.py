"""Options of the parallelised Q-network.

Source: Gallici et al. 2025, "Simplifying deep temporal difference learning" (ICLR), arXiv:2407.04811. Defaults lie
between those of the authors' code for CartPole and for Atari (mttga/purejaxql, config/alg/pqn_cartpole.yaml and
pqn_atari.yaml): lambda 0.95 and 0.65, 4 and 2 epochs, minibatches of 128, layer norm.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from ddrl.algorithms.options import option
from ddrl.algorithms.ppo.config import Config as PPO
from ddrl.algorithms.value_learning.options import GreedyConfig
from ddrl.config import LIVE


class Config(GreedyConfig):
    """Options of PQN; an update is one minibatch, rewards are in training units."""

    name: ClassVar[str] = "pqn"
    on_policy: ClassVar[bool] = True

    norm: Literal["none", "group", "layer"] = "layer"
    """Normalization: `layer` in every layer before the head, `group` after each convolution of nature, impala and
    data_efficient. Without target network, learning diverges more easily without it. Usual: layer."""
    batch_size: PositiveInt = option(PPO, "batch_size", 2_048)
    lambda_: float = Field(0.9, ge=0, le=1, alias="lambda", json_schema_extra=LIVE)
    """Decay of the traces. 0: one-step targets; 1: rewards up to the cut. More carries rewards back faster, but also
    what random actions cost. Usual: 0.65 for images to 0.95."""
    num_epochs: PositiveInt = option(PPO, "num_epochs", 4)
    minibatch_size: PositiveInt = option(PPO, "minibatch_size", 128)
    epsilon_anneal_updates: PositiveInt = Field(3_000, json_schema_extra=LIVE)
    """Updates until epsilon reaches its final value. S steps make S * num_epochs / minibatch_size updates. More
    explores longer. Usual: a tenth to a half of the run's updates."""

    @model_validator(mode="before")
    @classmethod
    def _own_networks_have_their_own_norm(cls, values: Any) -> Any:
        """Set norm to none for a network of the user's, unless it is given."""
        if isinstance(values, dict) and ":" in str(values.get("network", "")):
            return {"norm": "none", **values}
        return values

    @model_validator(mode="after")
    def _refuse_more_contradictions(self) -> Config:
        if self.minibatch_size > self.batch_size:
            raise ValueError(
                f"minibatch_size={self.minibatch_size}: is larger than batch_size; use at most {self.batch_size}"
            )
        self.refuse_unused_layers()
        return self

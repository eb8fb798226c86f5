"""Options of discrete soft actor-critic and of soft Q-learning.

Source: Christodoulou 2019, arXiv:1910.07207 (discrete SAC); Zhou et al. 2022, arXiv:2209.10081 (average_critics and
value_clip, against its instability); Haarnoja et al. 2017, arXiv:1702.08165 (soft Q-learning), whose form for discrete
actions Distributed-DRL calls SQN.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from ddrl.algorithms.options import Common, NetworkConfig, Prioritized, option
from ddrl.algorithms.sac.config import Config as SAC
from ddrl.algorithms.sac.config import check_temperature
from ddrl.algorithms.value_learning.options import QNetworkConfig
from ddrl.config import LIVE
from ddrl.types import EnvSpec

ENTROPY_SHARE = 0.5  # of that of uniform actions, which temperature=auto aims at by default


class Config(QNetworkConfig, Prioritized):
    """Options of discrete SAC; an update is one minibatch, rewards are in training units."""

    name: ClassVar[str] = "discrete_sac"

    form: Literal["sac", "sqn"] = "sac"
    """`sac`: a policy network beside the critics. `sqn`: none; the policy is the softmax of the least critic over a
    fixed temperature, usually 0.1: cheaper, but it follows every error of the critics."""
    norm: Literal["none", "group"] = Field("none")
    """Normalization after each convolution of nature, impala and data_efficient. `group` steadies learning and needs
    less tuning, at some time per update. Usual: none or group."""
    learning_rate: float = option(NetworkConfig, "learning_rate", 5e-4)
    batch_size: PositiveInt = option(NetworkConfig, "batch_size", 128)
    n_step: PositiveInt = option(Common, "n_step", 1)
    max_grad_norm: float | None = option(Common, "max_grad_norm", 10.0)
    target_rate: float = option(Common, "target_rate", 0.005)
    critic_warmup_updates: int = option(Common, "critic_warmup_updates", 1_000)
    temperature: Literal["auto"] | float = option(SAC, "temperature", "auto")
    target_entropy: float | None = Field(None, ge=0, json_schema_extra=LIVE)
    """Entropy that temperature=auto aims at, in nats. Larger is more random. null: half of that of uniform actions. The
    paper's 0.98 of it is unstable on many tasks. With env.action_mask it shrinks with the log of the number of allowed
    actions. Usual: 0.2 to 0.98 times the log of the number of actions."""
    initial_temperature: float = option(SAC, "initial_temperature", 1.0)
    num_critics: PositiveInt = 2
    """Critics that are learned. More underestimates more (not with average_critics) and costs time. Usual: 2."""
    average_critics: bool = False
    """Targets and policy use the mean of the critics instead of the least: less underestimation, which keeps policies
    of large entropy from settling. Usual: with value_clip."""
    value_clip: float | None = Field(None, gt=0, json_schema_extra=LIVE)
    """A critic gains nothing by moving its value further than this from its target critic's, in training units. null:
    no limit. Usual: 0.5 with clipped rewards."""

    @model_validator(mode="before")
    @classmethod
    def _sqn_has_a_fixed_temperature(cls, values: Any) -> Any:
        """Set temperature to 0.1 for sqn, unless it is given."""
        if isinstance(values, dict) and values.get("form") == "sqn":
            return {"temperature": 0.1, **values}
        return values

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Config:
        self.refuse_unused_priorities()
        if self.form == "sqn":
            self.refuse_changed("with form=sqn", "critic_warmup_updates")
            if self.temperature == "auto" or not self.temperature:
                raise ValueError(
                    f"temperature={self.temperature!r}: form 'sqn' needs a fixed one above 0; set temperature=0.1"
                )
        check_temperature(self)
        if self.network == "mlp":
            self.refuse_changed("on mlp, which has no convolutions", "norm")
        self.refuse_unused_layers()
        if self.num_critics == 1:
            self.refuse_changed("with num_critics=1", "average_critics")
        return self

    def check(self, spec: EnvSpec) -> None:
        """Refuse what `QNetworkConfig` refuses, and a target that no policy reaches."""
        super().check(spec)
        most = math.log(spec.action_sizes[0])
        if self.target_entropy is not None and self.target_entropy > most:
            raise ValueError(
                f"algorithm.target_entropy: {self.target_entropy:g} nats, but {spec.action_sizes[0]} actions have at "
                f"most {most:.3f}; lower it"
            )

    def entropy_goal(self, spec: EnvSpec) -> float:
        """Return the entropy in nats that temperature=auto aims at."""
        if self.target_entropy is not None:
            return self.target_entropy
        return ENTROPY_SHARE * math.log(spec.action_sizes[0])

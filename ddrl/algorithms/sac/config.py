"""Options of soft actor-critic for bounded continuous actions.

Source: Haarnoja et al. 2018, arXiv:1812.05905 (learned temperature, two critics, no value network); Kuznetsov et al.
2020, arXiv:2005.04269 (TQC: truncated quantile critics); Hiraoka et al. 2022, arXiv:2110.02034 (DroQ: dropout); Bhatt
et al. 2024, arXiv:1902.05605 (CrossQ: batch normalization).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from ddrl.algorithms.options import Common, NetworkConfig, Prioritized, check_continuous, option
from ddrl.config import LIVE
from ddrl.types import EnvSpec

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0  # of the Gaussian before squashing, in nats


def check_temperature(config: Any) -> None:
    """Refuse a fixed temperature that is none, and beside one the options of a learned one.

    Raises:
        ValueError: names the option and the remedy.
    """
    if config.temperature != "auto":
        if config.temperature < 0:
            raise ValueError(f"temperature={config.temperature}: must be >= 0, or 'auto'")
        fixed, remedy = f"with temperature={config.temperature}", "remove it or set temperature='auto'"
        config.refuse_changed(fixed, "target_entropy", "initial_temperature", remedy=remedy)


class Config(NetworkConfig, Prioritized):
    """Options of SAC; an update is one minibatch, rewards are in training units.

    Actor and critics are MLPs on the features of one network, of which only the critics' loss changes the weights.
    Source of that: Yarats et al. 2021, arXiv:1910.01741 (images; here without their autoencoder).
    """

    name: ClassVar[str] = "sac"
    warmup_steps: ClassVar[int] = 10_000

    hidden_sizes: tuple[PositiveInt, ...] = option(Common, "hidden_sizes", (128, 128))
    n_step: PositiveInt = option(Common, "n_step", 3)
    target_rate: float = option(Common, "target_rate", 0.01)
    critic_warmup_updates: int = option(Common, "critic_warmup_updates", 1_000)
    temperature: Literal["auto"] | float = Field("auto", json_schema_extra=LIVE)
    """Weight of the entropy against the reward: a number >= 0, or `auto` to learn the one that keeps the entropy at
    target_entropy. More explores more. Usual: auto; fixed 0.01 to 0.2."""
    target_entropy: float | None = Field(None, json_schema_extra=LIVE)
    """Entropy that temperature=auto aims at, in nats, of actions in [-1, 1]. Larger is more random. null: minus the
    number of action dimensions. Usual: -2 to -0.5 per dimension."""
    initial_temperature: float = Field(0.2, gt=0)
    """Initial value of temperature=auto. Too large drowns small rewards at first. Usual: 0.1 to 1."""
    policy_delay: PositiveInt = Field(1, json_schema_extra=LIVE)
    """Critic updates per update of actor and temperature. More is cheaper and gives the actor better critics, but fewer
    steps. Usual: 1 to 3."""
    num_critics: PositiveInt = 2
    """Critics whose minimum is the target. More underestimates more and costs time; 1 overestimates. Usual: 2."""
    num_quantiles: int | None = Field(None, ge=2)
    """Each critic predicts so many quantiles of the return in place of its mean (TQC), and the largest of all critics'
    together are left out of the target. null: the mean. Usual: 25; with num_critics 2 to 5."""
    dropped_quantiles: int = Field(2, ge=0)
    """Quantiles left out for each critic. More underestimates more. Usual: 0 to 5 of 25."""
    layer_norm: bool | None = None
    """Normalize the hidden layers of the critics. Bounds their extrapolation, so larger learning_rate and n_step stay
    stable, at some 20 % more time per update. null: yes, but with batch_norm."""
    batch_norm: bool = False
    """Batch renormalization before every layer of actor and critics, and no target critics (CrossQ): learns from fewer
    steps and takes inputs of any scale, at more time per update. Usual: no; with policy_delay 3 and wide layers."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the critics' hidden units left out by chance, also of the targets (DroQ); the policy then maximizes
    the mean of the critics. With layer_norm it keeps 20 updates a step stable (replay.samples_per_insert 20 *
    batch_size), for dear steps. Usual: 0; DroQ 0.01."""
    form: Literal["sac", "sac1"] = "sac"
    """`sac`: the policy maximizes the minimum of the critics, with num_quantiles or dropout their mean. `sac1`
    (Spinning Up's, as used by Distributed-DRL): it maximizes the first critic at a fixed temperature, usually 0.2;
    cheaper, but overestimates more."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Config:
        self.refuse_unused_priorities()
        if self.batch_norm:
            self.refuse_changed("with batch_norm=true, which needs no target critics", "target_rate")
        if self.num_quantiles is None:
            self.refuse_changed("without num_quantiles", "dropped_quantiles")
        elif self.form == "sac1":
            raise ValueError(
                f"num_quantiles={self.num_quantiles}: form 'sac1' has none; remove it or use form 'sac'"
            )
        elif self.dropped_quantiles >= self.num_quantiles:
            raise ValueError(
                f"dropped_quantiles={self.dropped_quantiles}: leaves none of {self.num_quantiles}; use fewer"
            )
        if self.temperature == "auto" and self.form == "sac1":
            raise ValueError("temperature='auto': form 'sac1' has a fixed temperature; set temperature=0.2")
        check_temperature(self)
        return self

    @property
    def learns_alone(self) -> bool:
        """Batch normalization needs the statistics of whole batches."""
        return self.batch_norm or super().learns_alone

    def check(self, spec: EnvSpec) -> None:
        """Refuse an environment without bounded continuous actions, and observations that the network cannot take."""
        check_continuous(self.name, spec)
        self.check_network(spec)

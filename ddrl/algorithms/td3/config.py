"""Options of twin delayed DDPG for bounded continuous actions.

Source: Fujimoto et al. 2018, arXiv:1802.09477.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, PositiveInt, model_validator

from ddrl.algorithms.options import Common, Prioritized, check_continuous, option
from ddrl.algorithms.sac.config import Config as SAC
from ddrl.config import LIVE
from ddrl.types import EnvSpec


class Config(Prioritized):
    """Options of TD3; an update is one minibatch, rewards are in training units, noise is of actions in [-1, 1]."""

    name: ClassVar[str] = "td3"

    hidden_sizes: tuple[PositiveInt, ...] = option(Common, "hidden_sizes", (128, 128))
    n_step: PositiveInt = option(Common, "n_step", 1)
    target_rate: float = option(Common, "target_rate", 0.005)
    critic_warmup_updates: int = option(Common, "critic_warmup_updates", 1_000)
    exploration_noise: float = Field(0.1, ge=0, le=2)
    """Standard deviation of the noise on played actions. More explores more. Usual: 0.1."""
    target_noise: float = Field(0.2, ge=0, le=2, json_schema_extra=LIVE)
    """Standard deviation of the noise on the actions of targets, which smooths the critics. More is steadier and more
    biased. Usual: 0.2."""
    target_noise_clip: float = Field(0.5, ge=0, le=2, json_schema_extra=LIVE)
    """Largest size of the noise on the actions of targets; larger draws are cut to it. More smooths further. Usual:
    0.5."""
    policy_delay: PositiveInt = Field(2, json_schema_extra=LIVE)
    """Critic updates per update of actor and targets. More is cheaper and gives the actor better critics, but fewer
    steps. Usual: 2."""
    num_critics: PositiveInt = option(SAC, "num_critics", 2)
    layer_norm: bool = False
    """Normalize the hidden layers of the critics. Bounds their extrapolation, so larger learning_rate and n_step stay
    stable, at some 20 % more time per update."""

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Config:
        self.refuse_unused_priorities()
        if not self.target_noise:
            self.refuse_changed("with target_noise=0", "target_noise_clip")
        return self

    def check(self, spec: EnvSpec) -> None:
        """Refuse an environment without a vector of observations and bounded continuous actions."""
        check_continuous(self.name, spec)
        if not spec.is_vector:
            seen = spec.image_shapes or spec.observation_shape
            raise ValueError(
                f"{spec.env_id}: observation_shape is {seen}, but {self.name} needs a vector; use algorithm.name "
                "sac, or gymnasium.wrappers.FlattenObservation"
            )

"""Proximal policy optimization: its options, what it can serve, the Policy that plays.

Source: Schulman et al. 2017, arXiv:1707.06347; Huang et al. 2022, "The 37 implementation details of PPO".
What learns is in ppo_learner.py.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from ddrl.algorithms import actor_critic
from ddrl.algorithms.actor_critic_policy import Policy
from ddrl.config import LIVE
from ddrl.types import EnvSpec

__all__ = ["ON_POLICY", "Config", "Policy", "check", "corrects"]

ON_POLICY = True


class Config(actor_critic.Options):
    """Options of PPO; an update is one minibatch."""

    estimator: Literal["gae", "td_lambda", "vtrace", "upgo", "monte_carlo"] = Field(
        "gae",
        description="Where advantages and returns come from. `gae` and `td_lambda` are the same by their definitions; "
        "`vtrace` corrects stale fragments by importance weights; `upgo` follows the best the policy did; "
        "`monte_carlo` ignores lambda and the critic up to a fragment's border.",
    )
    clip: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="The ratio of new to old probability gains nothing beyond 1 +- clip. Usual: 0.1 to 0.3.",
        json_schema_extra=LIVE,
    )
    final_clip: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Where clip goes linearly within anneal_steps. None: stays.",
        json_schema_extra=LIVE,
    )
    value_clip: float | None = Field(
        None,
        gt=0,
        description="Values gain nothing beyond +- this from where they were; in units of returns. None: free.",
        json_schema_extra=LIVE,
    )
    num_epochs: PositiveInt = Field(
        10,
        description="Passes over the transitions of one iteration. More learns more from each. Usual: 3 to 20.",
        json_schema_extra=LIVE,
    )
    minibatch_size: PositiveInt = Field(
        256,
        description="Transitions per update, about. Smaller is noisier and slower. Usual: 64 to 2,048.",
        json_schema_extra=LIVE,
    )
    target_kl: float | None = Field(
        None,
        gt=0,
        description="No further epoch of an iteration once the policy has moved this far in it, in nats. None: "
        "all. Usual: 0.01 to 0.05.",
        json_schema_extra=LIVE,
    )
    normalize_advantages: bool = Field(
        True, description="Advantages of a minibatch get mean 0 and deviation 1. Usual: yes."
    )

    @model_validator(mode="after")
    def _refuse_large_minibatches(self) -> Config:
        if self.minibatch_size > self.batch_size:
            raise ValueError(
                f"minibatch_size={self.minibatch_size}: is larger than batch_size; use at most {self.batch_size}"
            )
        return self


def corrects(config: Config) -> bool:
    """Whether stale fragments are corrected by importance weights."""
    return config.estimator in ("vtrace", "upgo")


def check(config: Config, spec: EnvSpec) -> None:
    """Refuse an environment, or a network, that PPO cannot serve.

    Raises:
        ValueError: one line naming the thing, its value and the remedy.
    """
    actor_critic.check(config, spec, name="ppo")

"""IMPALA's actor-critic: its options, what it can serve, the Policy that plays.

Source: Espeholt et al. 2018, arXiv:1802.01561. What learns is in impala_learner.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from ddrl.algorithms import actor_critic
from ddrl.algorithms.actor_critic_policy import Policy
from ddrl.config import LIVE
from ddrl.types import EnvSpec

__all__ = ["ON_POLICY", "Config", "Policy", "check", "corrects"]

ON_POLICY = True


def _fits(value: Any) -> Any:
    if value in ("gae", "td_lambda", "monte_carlo"):
        raise ValueError(
            "impala learns from corrected returns only; use vtrace or upgo, or algorithm.name ppo"
        )
    return value


class Config(actor_critic.Options):
    """Options of IMPALA; an update is one batch, used once."""

    estimator: Annotated[Literal["vtrace", "upgo"], BeforeValidator(_fits)] = Field(
        "vtrace", description="Policy gradient from V-trace, or from UPGO with V-trace's values."
    )
    learning_rate: float = Field(
        4.8e-4,
        gt=0,
        description="Step size of the optimizer. Larger is faster until the policy jumps. Usual: 1e-4 to 1e-3.",
        json_schema_extra=LIVE,
    )
    lambda_: float = Field(
        1.0,
        ge=0,
        le=1,
        alias="lambda",
        description="Decay of the traces c = lambda min(1, rho). Usual: 0.9 to 1.",
        json_schema_extra=LIVE,
    )
    entropy_coefficient: float = Field(
        0.01,
        ge=0,
        description="Weight of the entropy bonus. More explores longer. Usual: 2.5e-4 to 0.01.",
        json_schema_extra=LIVE,
    )
    max_grad_norm: float | None = Field(
        40.0,
        gt=0,
        description="The gradient, summed over the batch, is scaled down to this norm. None: never. Usual: 40.",
        json_schema_extra=LIVE,
    )
    batch_size: PositiveInt = Field(
        640,
        description="Transitions of one update, then a version is published. Usual: 20 steps of 32 environments.",
    )
    optimizer: Literal["rmsprop", "adam"] = Field(
        "rmsprop",
        description="rmsprop (decay 0.99, eps 0.1, outside the root where the paper's is inside), or adam (eps 1e-5).",
    )
    rho_bar: float = Field(
        1.0,
        gt=0,
        description="Cap of the importance weights: larger is less biased and noisier. Usual: 1.",
        json_schema_extra=LIVE,
    )
    reward_clip: float | None = Field(
        None,
        gt=0,
        description="Rewards are clipped to +- this for learning. None: not at all. Usual: 1 for Atari.",
        json_schema_extra=LIVE,
    )


def corrects(config: Config) -> bool:
    """Whether stale fragments are corrected by importance weights: always."""
    del config
    return True


def check(config: Config, spec: EnvSpec) -> None:
    """Refuse an environment, or a network, that IMPALA cannot serve.

    Raises:
        ValueError: one line naming the thing, its value and the remedy.
    """
    actor_critic.check(config, spec, name="impala")

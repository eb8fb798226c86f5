"""Options of IMPALA.

Source: Espeholt et al. 2018, arXiv:1802.01561. The defaults of learning_rate and RMSProp are those of the authors' code
(deepmind/scalable_agent); batch_size (32 unrolls of 20 steps), entropy_coefficient and max_grad_norm are those of the
paper's Atari experiments.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from ddrl.algorithms.actor_critic.options import Options
from ddrl.algorithms.options import option
from ddrl.config import LIVE


def _refuse_uncorrected(value: Any) -> Any:
    if value in ("gae", "td_lambda", "monte_carlo"):
        raise ValueError(
            "impala needs importance-corrected returns; use vtrace or upgo, or algorithm.name ppo"
        )
    return value


class Config(Options):
    """Options of IMPALA; an update is one batch, used once."""

    name: ClassVar[str] = "impala"

    estimator: Annotated[Literal["vtrace", "upgo"], BeforeValidator(_refuse_uncorrected)] = "vtrace"
    """Estimator of the advantages: V-trace, or UPGO advantages with V-trace value targets."""
    learning_rate: float = option(Options, "learning_rate", 4.8e-4)
    lambda_: float = option(Options, "lambda_", 1.0)
    entropy_coefficient: float = option(Options, "entropy_coefficient", 0.01)
    max_grad_norm: float | None = option(Options, "max_grad_norm", 40.0)
    batch_size: PositiveInt = option(Options, "batch_size", 640)
    critic_warmup_updates: int = option(Options, "critic_warmup_updates", 50)
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    """rmsprop (decay 0.99, eps 0.1 added after the square root; the paper adds it inside), or adam (eps 1e-5)."""
    rho_bar: float = Field(1.0, gt=0, json_schema_extra=LIVE)
    """Cap of V-trace's rho in targets and advantages; with upgo, in the value targets only. Larger is less biased and
    noisier. Usual: 1."""
    reward_clip: float | None = Field(None, gt=0, json_schema_extra=LIVE)
    """Rewards are clipped to +- this for learning. null: not at all. Usual: 1 for Atari."""

    @property
    def corrects_staleness(self) -> bool:
        """True: both estimators correct staleness."""
        return True

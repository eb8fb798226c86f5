"""Options of proximal policy optimization.

Source: Schulman et al. 2017, arXiv:1707.06347; Huang et al. 2022, "The 37 implementation details of PPO".
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from ddrl.algorithms.actor_critic.options import Options
from ddrl.algorithms.options import option
from ddrl.config import LIVE


class Config(Options):
    """Options of PPO; an update is one minibatch."""

    name: ClassVar[str] = "ppo"

    learning_rate: float = option(Options, "learning_rate", 1e-3)
    normalize_observations: bool | None = option(Options, "normalize_observations", None)
    normalize_returns: bool = option(Options, "normalize_returns", True)
    estimator: Literal["gae", "td_lambda", "vtrace", "upgo", "monte_carlo"] = "gae"
    """Estimator of advantages and returns. `td_lambda` is another form of `gae` with equal results; `vtrace` corrects
    stale fragments by importance weights; `upgo` follows trajectories that did better than expected; `monte_carlo`,
    without lambda, sums rewards to the episode's end or the batch's last step, then bootstraps unless it terminated."""
    clip: float = Field(0.2, gt=0, lt=1, json_schema_extra=LIVE)
    """The objective gains nothing by moving the ratio of new to old probability further than 1 +- clip. More lets the
    policy move further per iteration. Usual: 0.1 to 0.3."""
    final_clip: float | None = Field(None, gt=0, lt=1, json_schema_extra=LIVE)
    """Final clip, reached linearly within anneal_steps. null: clip stays constant."""
    value_clip: float | None = Field(None, gt=0, json_schema_extra=LIVE)
    """The value loss gains nothing by moving a value further than this from its old one, in units of returns. Less is
    steadier and slower. null: unlimited."""
    num_epochs: PositiveInt = Field(10, json_schema_extra=LIVE)
    """Passes over the transitions of one iteration. More learns more from each. Usual: 3 to 20."""
    minibatch_size: PositiveInt = Field(256, json_schema_extra=LIVE)
    """Approximate transitions per update. Smaller is noisier and slower. Usual: 64 to 2,048."""
    target_kl: float | None = Field(None, gt=0, json_schema_extra=LIVE)
    """An iteration ends after the epoch in which the policy has moved this far, in nats. Less is steadier and learns
    less per iteration. null: never early. Usual: 0.01 to 0.05."""
    normalize_advantages: bool = True
    """Advantages of a minibatch get mean 0 and deviation 1. Usual: yes."""

    @model_validator(mode="after")
    def _refuse_large_minibatches(self) -> Config:
        if self.minibatch_size > self.batch_size:
            raise ValueError(
                f"minibatch_size={self.minibatch_size}: is larger than batch_size; use at most {self.batch_size}"
            )
        return self

    @property
    def corrects_staleness(self) -> bool:
        """Only some estimators have importance weights."""
        return self.estimator in ("vtrace", "upgo")

"""Options of implicit Q-learning for continuous and discrete actions.

Source: Kostrikov, Nair, Levine 2021, arXiv:2110.06169.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, PositiveInt

from ddrl.algorithms.options import Common, NetworkConfig, check_bounds, option
from ddrl.algorithms.sac.config import Config as SAC
from ddrl.config import LIVE
from ddrl.types import EnvSpec


class Config(NetworkConfig):
    """Options of IQL; an update is one minibatch, rewards are in training units."""

    name: ClassVar[str] = "iql"

    hidden_sizes: tuple[PositiveInt, ...] = option(Common, "hidden_sizes", (256, 256))
    learning_rate: float = option(NetworkConfig, "learning_rate", 3e-4)
    n_step: PositiveInt = option(Common, "n_step", 1)
    target_rate: float = option(Common, "target_rate", 0.005)
    critic_warmup_updates: int = option(Common, "critic_warmup_updates", 1_000)
    num_critics: PositiveInt = option(SAC, "num_critics", 2)
    expectile: float = Field(0.7, ge=0.5, lt=1, json_schema_extra=LIVE)
    """Expectile of the action values in the data that is the value of a state. 0.5: that of the policy that played;
    near 1: that of the best action played, but with few data rather that of the luckiest. Usual: 0.7 to 0.9."""
    inverse_temperature: float = Field(3.0, ge=0, json_schema_extra=LIVE)
    """An action of advantage A, in training units, has the weight exp(inverse_temperature * A) in the policy's loss. 0
    imitates all actions alike; more follows the values and trusts fewer data. Usual: 0.5 to 10."""

    def check(self, spec: EnvSpec) -> None:
        """Refuse continuous actions without bounds, and observations that the network cannot take."""
        self.check_network(spec)
        if spec.action_kind == "continuous":
            check_bounds(self.name, spec)

"""Options of behaviour cloning for continuous and discrete actions.

Source: Pomerleau 1991, "Efficient training of artificial neural networks for autonomous navigation".
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from ddrl.algorithms.options import Common, NetworkConfig, check_bounds, option
from ddrl.types import EnvSpec


class Config(NetworkConfig):
    """Options of BC; an update is one minibatch. Rewards are not used."""

    name: ClassVar[str] = "bc"
    gamma: ClassVar[float] = 0.0  # type: ignore[misc]  # no option: there are no returns
    n_step: ClassVar[int] = 1

    hidden_sizes: tuple[PositiveInt, ...] = option(Common, "hidden_sizes", (256, 256))
    learning_rate: float = option(NetworkConfig, "learning_rate", 3e-4)

    def check(self, spec: EnvSpec) -> None:
        """Refuse continuous actions without bounds, and observations that the network cannot take."""
        self.check_network(spec)
        if spec.action_kind == "continuous":
            check_bounds(self.name, spec)

"""The networks of BC and IQL, and the loss of their policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor, nn

from ddrl.algorithms.actor_critic.options import num_policy_parameters
from ddrl.algorithms.sac.learner import to_unit
from ddrl.networks.distributions import categorical, gaussian
from ddrl.networks.mlp import MLP
from ddrl.types import EnvSpec

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0  # of actions in [-1, 1]; arXiv:2110.06169, appendix B

T = TypeVar("T")


def regression_loss(log_prob: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the weighted negative log-likelihood of the actions of the data: -E[w log pi(a | s)].

    Source: arXiv:2110.06169, equation 7; without weights it is behaviour cloning.

    Args:
        log_prob: [B] log pi(a | s), in nats; the only argument with a gradient.
        weight: [B] of each transition; None: 1.
    """
    return -(log_prob if weight is None else weight.detach() * log_prob).mean()


class ObservationMLP(nn.Module):
    """An MLP on the features of a trunk of its own, and on further inputs.

    Args:
        config: the options `hidden_sizes` and those of the trunk.
        spec: spaces of the environment.
        num_outputs: of the MLP.
        num_more: further inputs of the MLP.
        num_members: E, of an ensemble on the same features; None for a single MLP.
        generator: CPU generator of the initial weights.
    """

    def __init__(
        self,
        config: Any,
        spec: EnvSpec,
        num_outputs: int,
        *,
        num_more: int = 0,
        num_members: int | None = None,
        generator: Generator,
    ) -> None:
        super().__init__()
        self.trunk, num_features = config.make_trunk(spec, generator)
        sizes = (num_features + num_more, *config.hidden_sizes, num_outputs)
        self.mlp = MLP(sizes, num_members=num_members, generator=generator)

    def forward(self, observation: Tensor, *more: Tensor) -> Tensor:
        """Evaluate: [B, *I], and [B, M] further inputs -> [B, num_outputs], or [E, B, num_outputs]."""
        outputs: Tensor = self.mlp(torch.cat((self.trunk(observation), *more), dim=1))
        return outputs


class Actor(nn.Module):
    """The policy: a Gaussian over actions in [-1, 1], or a categorical distribution over the choices of each dimension.

    The Gaussian's mean is the tanh of the network, its standard deviation is learned and the same in all states.
    Source: arXiv:2110.06169, appendix B.

    Args:
        config, spec, generator: as of `ObservationMLP`.
        device: where it is.
    """

    def __init__(self, config: Any, spec: EnvSpec, *, generator: Generator, device: torch.device) -> None:
        super().__init__()
        num_outputs = num_policy_parameters(spec)
        self.network = ObservationMLP(config, spec, num_outputs, generator=generator)
        self._spec, self._to_unit = spec, None
        if spec.action_kind == "continuous":
            self.log_std = nn.Parameter(torch.zeros(num_outputs))
            self._to_unit = to_unit(spec, device)
        self.to(device)

    def forward(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return log pi(a | s) [B] and the entropies [B], in nats, of actions in [-1, 1].

        Args:
            observation: [B, *I], as `trunks.to_input` gives them.
            action: [B, *A] in the environment's unit.
        """
        outputs = self.network(observation)
        if self._to_unit is None:
            logits = self._spec.only_allowed(outputs, observation)
            return categorical(logits, action, self._spec.action_sizes)
        return gaussian(outputs.tanh(), self.log_std, self._to_unit(action))

    @torch.no_grad()
    def clamp(self) -> None:
        """Clamp the log standard deviation after a step; within `forward`, its gradient would vanish at a bound."""
        if self._to_unit is not None:
            self.log_std.clamp_(LOG_STD_MIN, LOG_STD_MAX)


def published(named: Mapping[str, T]) -> dict[str, T]:
    """Return parameters or buffers of an `Actor` by the names that a `Policy` takes."""
    return {name.removeprefix("network.").removeprefix("mlp."): value for name, value in named.items()}

"""The losses of implicit Q-learning, and its learner.

Source: Kostrikov, Nair, Levine 2021, arXiv:2110.06169, algorithm 1. No action is valued that is not in the data. All
losses of an update are of the networks before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn

from ddrl.algorithms.bc.actor import Actor, ObservationMLP, published, regression_loss
from ddrl.algorithms.iql.config import Config
from ddrl.algorithms.optim import adams, cpu_copies, restore, set_options, with_optimizers
from ddrl.algorithms.options import changed
from ddrl.algorithms.sac.learner import critic_loss, to_unit
from ddrl.networks.captured import Captured
from ddrl.networks.parameters import FlatParameters, saved_buffers
from ddrl.networks.ranks import ALONE, Ranks
from ddrl.networks.trunks import to_input
from ddrl.types import Batch, EnvSpec

MOST_WEIGHT = 100.0  # of an action in the policy's loss; arXiv:2110.06169, appendix B


def expectile_loss(value: Tensor, q: Tensor, *, expectile: float) -> Tensor:
    """Return E[|expectile - 1(Q < V)| (Q - V)^2], which is least where V is that expectile of Q.

    Source: arXiv:2110.06169, equation 5.

    Args:
        value: [B] V(s), the only argument with a gradient.
        q: [B] Q(s, a) of actions of the data.
        expectile: in (0, 1); 0.5: half of the squared error.
    """
    error = q.detach() - value
    return (torch.where(error < 0.0, 1.0 - expectile, expectile) * error.square()).mean()


def advantage_weight(advantage: Tensor, *, inverse_temperature: float) -> Tensor:
    """Return exp(inverse_temperature * A), at most MOST_WEIGHT: [B].

    Source: arXiv:2110.06169, equation 7 and appendix B.

    Args:
        advantage: [B] Q(s, a) - V(s), in training units.
        inverse_temperature: beta.
    """
    return (inverse_temperature * advantage).exp().clamp(max=MOST_WEIGHT)


def action_inputs(spec: EnvSpec, device: torch.device) -> tuple[Callable[[Tensor], Tensor], int]:
    """Return the map of actions [B, *A] to inputs [B, M] of a critic, and M.

    They are continuous actions in [-1, 1], or of each dimension's choices 1 for the one taken and 0 for the others.
    """
    if spec.action_kind == "continuous":
        return to_unit(spec, device), math.prod(spec.action_shape)
    sizes = torch.tensor(spec.action_sizes)
    first, num_choices = (sizes.cumsum(0) - sizes).to(device), sum(spec.action_sizes)

    def one_hot(action: Tensor) -> Tensor:
        index = action.reshape(len(action), -1) + first
        return torch.zeros(len(action), num_choices, device=device).scatter_(1, index, 1.0)

    return one_hot, num_choices


class IQL:
    """Networks and optimizers; see `base.Learner`.

    Args:
        config: options of the algorithm.
        spec: spaces of the environment.
        device: where networks and batches are.
        seed: of the initial weights, which are the same on every device.
        ranks: that learn together.
    """

    def __init__(
        self, config: Config, spec: EnvSpec, *, device: torch.device, seed: int, ranks: Ranks = ALONE
    ) -> None:
        self.num_updates = 0
        self.from_policy = False
        self.config = config
        generator = torch.Generator().manual_seed(seed)
        network = partial(ObservationMLP, config, spec, 1, generator=generator)
        self._inputs, num_more = action_inputs(spec, device)
        self.actor = Actor(config, spec, generator=generator, device=device)
        self.critics = network(num_more=num_more, num_members=config.num_critics).to(device)
        self.target_critics = deepcopy(self.critics).requires_grad_(False)
        self.value = network().to(device)
        networks: dict[str, nn.Module] = {"actor": self.actor, "critics": self.critics, "value": self.value}
        self._networks = networks | {"target_critics": self.target_critics}
        self._parameters = {name: FlatParameters(module, ranks) for name, module in networks.items()}
        self._target = FlatParameters(self.target_critics).vector.requires_grad_(False)
        self._learned = {name: parameters.vector for name, parameters in self._parameters.items()}
        self._optimizers = adams(self._learned, learning_rate=config.learning_rate)
        self._captured = Captured(self._learn, device, ranks=ranks)

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """One update of value, critics and targets, and of the policy.

        Args:
            batch: tensors on the learner's device; actions in the environment's unit.

        Returns:
            Detached scalars by name; those of the policy only where it was updated.
        """
        is_warm = not self.from_policy or self.num_updates >= self.config.critic_warmup_updates
        metrics = self._captured(batch, improves=is_warm)
        self.num_updates += 1
        return metrics

    def _learn(self, batch: Batch, *, improves: bool) -> dict[str, Tensor]:
        """Update value, critics and targets and, where it `improves`, the policy."""
        config = self.config
        observation, next_observation = to_input(batch.observation), to_input(batch.next_observation)
        action = self._inputs(batch.action)  # [B, M]
        with torch.no_grad():
            target_q = self.target_critics(observation, action)[..., 0].amin(dim=0)  # [B]
            next_value = self.value(next_observation)[:, 0]  # [B]
        value = self.value(observation)[:, 0]  # [B]
        value_loss = expectile_loss(value, target_q, expectile=config.expectile)
        self._step("value", value_loss)
        q = self.critics(observation, action)[..., 0]  # [E, B]
        none = next_value.new_zeros(())  # of entropy
        others = batch.n_step_return, batch.bootstrap_discount, none
        loss, _ = critic_loss(q, next_value[None], none, *others)
        self._step("critics", loss)
        metrics = {"critic_loss": loss, "q_mean": q.mean(), "value_loss": value_loss}
        if improves:
            beta = config.inverse_temperature
            weight = advantage_weight(target_q - value.detach(), inverse_temperature=beta)
            log_prob, entropy = self.actor(observation, batch.action)
            policy_loss = regression_loss(log_prob, weight)
            self._step("actor", policy_loss)
            self.actor.clamp()
            metrics |= {"policy_loss": policy_loss, "entropy": entropy.mean()}
        self._target.lerp_(self._learned["critics"].detach(), config.target_rate)
        return {name: metric.detach() for name, metric in metrics.items()}

    def _step(self, name: str, loss: Tensor) -> None:
        """Take an optimizer step of one network on its loss."""
        self._parameters[name].differentiate(loss)
        self._optimizers[name].step()

    def weights(self) -> dict[str, Tensor]:
        """Return the policy's parameters and buffers by name, as CPU copies."""
        return published(self._parameters["actor"].copies() | cpu_copies(saved_buffers(self.actor)))

    def state(self) -> dict[str, Tensor]:
        """Return everything needed to continue, as CPU copies."""
        return cpu_copies(self._tensors()) | {"num_updates": torch.tensor(self.num_updates)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned."""
        restore(self._tensors(), state, num_updates=torch.Size(()))
        self.num_updates = int(state["num_updates"])

    def apply_options(self, options: Config) -> None:
        """Apply changed live options from the next update on."""
        self.config = changed(self.config, options)
        set_options(*self._optimizers.values(), lr=options.learning_rate)
        self._captured.forget()

    def load_initial_weights(self, weights: Mapping[str, Tensor]) -> str:
        """Start from a published policy; return what starts fresh."""
        restore(published(dict(self.actor.named_parameters()) | saved_buffers(self.actor)), weights)
        return "values, critics and optimizers start fresh"

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors that updates change, by name; not copied."""
        named = with_optimizers(self._learned, self._optimizers) | {"target_critics.value": self._target}
        for part, network in self._networks.items():
            named |= {f"{part}.{name}": buffer for name, buffer in saved_buffers(network).items()}
        return named


make_learner = IQL

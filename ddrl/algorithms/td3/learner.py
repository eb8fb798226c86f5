"""TD3's targets, and its learner.

Source: Fujimoto et al. 2018, arXiv:1802.09477, algorithm 1. Actor and critics work on actions in [-1, 1]; the loss of
the critics is SAC's without entropy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ddrl.algorithms.optim import adams, cpu_copies, restore, set_options, with_optimizers
from ddrl.algorithms.options import changed
from ddrl.algorithms.sac.learner import critic_loss, to_unit
from ddrl.algorithms.td3.config import Config
from ddrl.networks.captured import Captured
from ddrl.networks.mlp import MLP
from ddrl.networks.parameters import FlatParameters
from ddrl.networks.ranks import ALONE, Ranks
from ddrl.types import Batch, EnvSpec


def smoothed(action: Tensor, noise: Tensor, *, scale: float, clip: float) -> Tensor:
    """Return the action of a target, with clipped noise, in [-1, 1].

    Source: arXiv:1802.09477, equation 14.

    Args:
        action: [B, A] in [-1, 1], of the target actor.
        noise: [B, A] standard normal.
        scale: standard deviation of the noise.
        clip: the scaled noise is clipped to +- this.
    """
    return (action + (scale * noise).clamp(-clip, clip)).clamp(-1.0, 1.0)


class TD3:
    """Networks, optimizers and random state; see `base.Learner`.

    Args:
        config: options of the algorithm.
        spec: spaces of the environment.
        device: where networks and batches are.
        seed: of the initial weights, which are the same on every device, and of the noise of targets.
        ranks: that learn together.
    """

    def __init__(
        self, config: Config, spec: EnvSpec, *, device: torch.device, seed: int, ranks: Ranks = ALONE
    ) -> None:
        self.num_updates = 0
        self.from_policy = False
        self.config = config
        num_inputs, num_dims = spec.input_shape[0], math.prod(spec.action_shape)
        self._to_unit = to_unit(spec, device)
        generator = torch.Generator().manual_seed(seed)

        def network(num_inputs: int, num_outputs: int, **options: Any) -> MLP:
            sizes = (num_inputs, *config.hidden_sizes, num_outputs)
            return MLP(sizes, generator=generator, **options).to(device)

        ensemble = {"num_members": config.num_critics, "layer_norm": config.layer_norm}
        self.actor, self.target_actor = (network(num_inputs, num_dims) for _ in range(2))
        self.critics, self.target_critics = (network(num_inputs + num_dims, 1, **ensemble) for _ in range(2))
        self._ranks = ranks
        learned = (FlatParameters(network, ranks) for network in (self.actor, self.critics))
        self.actor_parameters, self.critic_parameters = learned
        self._learned = {"actor": self.actor_parameters.vector, "critics": self.critic_parameters.vector}
        targets = {"actor": self.target_actor, "critics": self.target_critics}
        self._targets = {
            name: FlatParameters(target.requires_grad_(False)).vector.requires_grad_(False)
            for name, target in targets.items()
        }
        self._optimizers = adams(self._learned, learning_rate=config.learning_rate)
        self._noise = torch.Generator(device).manual_seed(seed)
        self._captured = Captured(self._learn, device, self._noise, ranks=ranks)
        self._move_targets(1.0)

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """One update of the critics and, every `policy_delay`-th time, of actor and targets.

        Args:
            batch: tensors on the learner's device, float32; actions in the environment's unit.

        Returns:
            Detached scalars by name; those of the actor only where it was updated.
        """
        is_due = self.num_updates % self.config.policy_delay == 0
        is_warm = not self.from_policy or self.num_updates >= self.config.critic_warmup_updates
        metrics = self._captured(batch, improves=is_due and is_warm, moves_targets=is_due)
        self.num_updates += 1
        return metrics

    def _learn(self, batch: Batch, *, improves: bool, moves_targets: bool) -> dict[str, Tensor]:
        """Update the critics and, where it says so, the actor and the targets."""
        config = self.config
        observation, next_observation = batch.observation, batch.next_observation  # [B, O]
        with torch.no_grad():
            next_action = self.target_actor(next_observation).tanh()
            noise = self._ranks.randn(next_action.shape, self._noise)
            next_action = smoothed(
                next_action, noise, scale=config.target_noise, clip=config.target_noise_clip
            )
            next_q = self.target_critics(torch.cat((next_observation, next_action), dim=1))[..., 0]
        q = self.critics(torch.cat((observation, self._to_unit(batch.action)), dim=1))[..., 0]  # [E, B]
        none = next_q.new_zeros(())  # of entropy
        loss, error = critic_loss(
            q, next_q, none, batch.n_step_return, batch.bootstrap_discount, none, batch.weight
        )
        self.critic_parameters.differentiate(loss)
        self._optimizers["critics"].step()
        metrics = {"critic_loss": loss.detach(), "q_mean": q.detach().mean()}
        if config.prioritized:
            metrics["priority"] = error
        if improves:
            metrics["policy_loss"] = self._improve_policy(observation)
        if moves_targets:
            self._move_targets(config.target_rate)
        return metrics

    def _improve_policy(self, observation: Tensor) -> Tensor:
        """Climb the first critic on [B, O] observations; return the loss."""
        pairs = torch.cat((observation, self.actor(observation).tanh()), dim=1)
        loss: Tensor = -self.critics(pairs, num_members=1).mean()
        self.actor_parameters.differentiate(loss)
        self._optimizers["actor"].step()
        return loss.detach()

    @torch.no_grad()
    def _move_targets(self, share: float) -> None:
        """Move the targets by a share of their way to actor and critics."""
        for name, target in self._targets.items():
            target.lerp_(self._learned[name], share)

    def weights(self) -> dict[str, Tensor]:
        """Return the actor's parameters by name, as CPU copies."""
        return self.actor_parameters.copies()

    def state(self) -> dict[str, Tensor]:
        """Return everything needed to continue, as CPU copies."""
        others = {"noise": self._noise.get_state(), "num_updates": torch.tensor(self.num_updates)}
        return cpu_copies(self._tensors()) | others

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned."""
        restore(self._tensors(), state, {"noise": self._noise}, num_updates=torch.Size(()))
        self.num_updates = int(state["num_updates"])

    def apply_options(self, options: Config) -> None:
        """Apply changed live options from the next update on."""
        self.config = changed(self.config, options)
        set_options(*self._optimizers.values(), lr=options.learning_rate)
        self._captured.forget()

    def load_initial_weights(self, weights: Mapping[str, Tensor]) -> str:
        """Start from a published actor, in the target too; return what starts fresh."""
        restore(dict(self.actor.named_parameters()), weights)
        self._move_targets(1.0)
        return "critics and optimizers start fresh"

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors that updates change, by name; not copied."""
        named = {f"target_{name}.value": target for name, target in self._targets.items()}
        return with_optimizers(self._learned, self._optimizers) | named


make_learner = TD3

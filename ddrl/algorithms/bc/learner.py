"""The learner of behaviour cloning: it maximizes the log-likelihood of the actions of the data."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ddrl.algorithms.bc.actor import Actor, published, regression_loss
from ddrl.algorithms.bc.config import Config
from ddrl.algorithms.optim import adams, cpu_copies, restore, set_options, with_optimizers
from ddrl.algorithms.options import changed
from ddrl.networks.captured import Captured
from ddrl.networks.parameters import FlatParameters, saved_buffers
from ddrl.networks.ranks import ALONE, Ranks
from ddrl.networks.trunks import to_input
from ddrl.types import Batch, EnvSpec


class BC:
    """The policy's network and optimizer; see `base.Learner`.

    Args:
        config: options of the algorithm.
        spec: spaces of the environment.
        device: where the network and batches are.
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
        self.actor = Actor(config, spec, generator=generator, device=device)
        self.parameters = FlatParameters(self.actor, ranks)
        self._learned = {"actor": self.parameters.vector}
        self._optimizers = adams(self._learned, learning_rate=config.learning_rate)
        self._captured = Captured(self._learn, device, ranks=ranks)

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """Take one step towards the actions of a batch.

        Args:
            batch: tensors on the learner's device; actions in the environment's unit.

        Returns:
            Detached scalars by name.
        """
        metrics = self._captured(batch)
        self.num_updates += 1
        return metrics

    def _learn(self, batch: Batch) -> dict[str, Tensor]:
        """Update the policy."""
        log_prob, entropy = self.actor(to_input(batch.observation), batch.action)
        loss = regression_loss(log_prob)
        self.parameters.differentiate(loss)
        self._optimizers["actor"].step()
        self.actor.clamp()
        return {"policy_loss": loss.detach(), "entropy": entropy.detach().mean()}

    def weights(self) -> dict[str, Tensor]:
        """Return the policy's parameters and buffers by name, as CPU copies."""
        return published(self.parameters.copies() | cpu_copies(saved_buffers(self.actor)))

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
        return "the optimizer starts fresh"

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors that updates change, by name; not copied."""
        buffers = {f"actor.{name}": buffer for name, buffer in saved_buffers(self.actor).items()}
        return with_optimizers(self._learned, self._optimizers) | buffers


make_learner = BC

"""What learns in IMPALA: the pure policy-gradient loss, and one small class.

Source: Espeholt et al. 2018, arXiv:1802.01561. Options and the policy that plays are in impala.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ddrl.algorithms.actor_critic_learner import Trainee
from ddrl.algorithms.continuation import adam, rmsprop
from ddrl.algorithms.impala import Config, check
from ddrl.types import EnvSpec, Trajectories


def policy_gradient_loss(log_prob: Tensor, advantage: Tensor) -> Tensor:
    """E[-A log pi(a | s)]: its gradient is minus the policy gradient.

    Source: arXiv:1802.01561, section 4.2; the clipped importance weight is already in the advantage.

    Args:
        log_prob: [B] log pi(a | s), the only argument through which a gradient is taken, in nats.
        advantage: [B] min(rho_bar, rho) (r + discount vs' - V), in reward units.
    """
    return -(advantage * log_prob).mean()


class IMPALA:
    """One learner: a network, its optimizer, one step a batch.

    Args: as of `actor_critic_learner.Trainee`.
    """

    def __init__(self, config: Config, spec: EnvSpec, *, device: torch.device, seed: int) -> None:
        check(config, spec)
        self._config = config
        self._trainee = trainee = Trainee(config, spec, device=device, seed=seed)
        vector, rate = trainee.flat.vector, config.learning_rate
        if config.optimizer == "adam":
            trainee.optimizer = adam(vector, learning_rate=rate, eps=1e-5)
        else:
            trainee.optimizer = rmsprop(vector, learning_rate=rate, eps=0.1, decay=0.99)

    @property
    def num_updates(self) -> int:
        """Batches learned from."""
        return self._trainee.num_updates

    def update(self, batch: Trajectories) -> dict[str, Tensor]:
        """One step on a batch.

        Args:
            batch: tensors on the learner's device.

        Returns:
            Detached scalars by name.
        """
        config, trainee = self._config, self._trainee
        prepared = trainee.prepare(
            batch, estimator=config.estimator, rho_bar=config.rho_bar, reward_clip=config.reward_clip
        )
        learning_rate = trainee.scheduled("learning_rate")
        log_prob, entropy, value = trainee.evaluate(prepared)
        policy_loss = policy_gradient_loss(log_prob, prepared.advantage)
        value_loss = 0.5 * (value - prepared.return_).square().mean()
        bonus = trainee.scheduled("entropy_coefficient") * entropy.mean()
        loss = policy_loss + config.value_coefficient * value_loss - bonus
        # The paper's loss is a sum over the batch, and its epsilon and gradient norm are of that size.
        trainee.step(len(prepared) * loss, learning_rate=learning_rate)
        trainee.finish(batch, len(prepared))
        rho = (prepared.log_prob - prepared.behavior_log_prob).exp()
        return {
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach().mean(),
            "rho": rho.mean(),
            "learning_rate": torch.tensor(learning_rate),
        }

    def weights(self) -> dict[str, Tensor]:
        """What a `Policy` needs, as CPU copies."""
        return self._trainee.weights()

    def state(self) -> dict[str, Tensor]:
        """Everything that continuation needs, as CPU copies."""
        return self._trainee.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned.

        Raises:
            ValueError: it is that of another configuration.
        """
        self._trainee.load_state(state)

    def adopt(self, options: Config) -> None:
        """Go on with other live options from the next update on.

        Raises:
            ValueError: an option differs that is not live.
        """
        self._trainee.adopt(options)
        self._config = options

    def warm_start(self, weights: Mapping[str, Tensor]) -> str:
        """Begin with a published actor; what starts fresh.

        Raises:
            ValueError: they are those of another configuration.
        """
        return self._trainee.warm_start(weights)

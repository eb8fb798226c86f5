"""IMPALA's loss, and its iteration: one step on each batch.

Source: Espeholt et al. 2018, arXiv:1802.01561.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddrl.algorithms.actor_critic.learner import ActorCriticLearner
from ddrl.algorithms.impala.config import Config
from ddrl.algorithms.optim import adam, rmsprop
from ddrl.types import EnvSpec, Trajectories

Learner = ActorCriticLearner[Config]


def policy_gradient_loss(log_prob: Tensor, advantage: Tensor) -> Tensor:
    """Return E[-A log pi(a | s)], whose gradient is minus the policy gradient.

    Source: arXiv:1802.01561, section 4.2; the clipped importance weight is already in the advantage.

    Args:
        log_prob: [B] log pi(a | s), in nats; the only argument with a gradient.
        advantage: [B] min(rho_bar, rho) (r + discount vs' - V), in units of the critic.
    """
    return -(advantage * log_prob).mean()


def make_learner(config: Config, spec: EnvSpec, **place: Any) -> Learner:
    """Return a learner with a fresh network; `place`: device, seed and ranks of `ActorCriticLearner`."""

    def make_optimizer(parameter: Tensor) -> torch.optim.Optimizer:
        if config.optimizer == "adam":
            return adam(parameter, learning_rate=config.learning_rate, eps=1e-5)
        return rmsprop(parameter, learning_rate=config.learning_rate, eps=0.1, decay=0.99)

    return Learner(config, spec, make_optimizer=make_optimizer, update=update, **place)


def update(learner: Learner, batch: Trajectories) -> dict[str, Tensor]:
    """Take one step on a batch; return its metrics."""
    config = learner.config
    prepared = learner.prepare(
        batch, estimator=config.estimator, rho_bar=config.rho_bar, reward_clip=config.reward_clip
    )
    learning_rate = learner.scheduled("learning_rate")
    log_prob, entropy, value = learner.evaluate(prepared)
    policy_loss = policy_gradient_loss(log_prob, prepared.advantage)
    value_loss = 0.5 * (value - prepared.return_).square().mean()
    bonus = learner.scheduled("entropy_coefficient") * entropy.mean()
    loss = policy_loss + config.value_coefficient * value_loss - bonus
    # The paper's loss is a sum over the batch; its epsilon and gradient norm are chosen for that size.
    learner.step(learner.ranks.count(len(prepared)) * loss, learning_rate=learning_rate)
    learner.finish(batch, len(prepared))
    rho = (prepared.log_prob - prepared.behavior_log_prob).exp()
    return {
        "policy_loss": policy_loss.detach(),
        "value_loss": value_loss.detach(),
        "entropy": entropy.detach().mean(),
        "rho": rho.mean(),
        "learning_rate": torch.tensor(learning_rate),
    }

"""PPO's losses, and its iteration.

Source: Schulman et al. 2017, arXiv:1707.06347.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddrl.algorithms.actor_critic.learner import ActorCriticLearner, Prepared
from ddrl.algorithms.optim import adam
from ddrl.algorithms.ppo.config import Config
from ddrl.types import EnvSpec, Trajectories

Learner = ActorCriticLearner[Config]
MAX_LOG_RATIO = 20.0  # in nats; above it the ratio is constant, and has no gradient


def policy_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Return pi / pi_old: [B], of log probabilities [B]; finite also where pi_old is nearly 0."""
    return (log_prob - old_log_prob).clamp(max=MAX_LOG_RATIO).exp()


def clipped_surrogate(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, *, clip: float) -> Tensor:
    """Return minus the clipped surrogate objective: E[-min(r A, clip(r, 1 - clip, 1 + clip) A)], r = pi / pi_old.

    The minimum is that of r A and A + clip |A|, which takes fewer operations.

    Source: arXiv:1707.06347, equation 7.

    Args:
        log_prob: [B] log pi(a | s), in nats; the only argument with a gradient.
        old_log_prob: [B] of the policy in the ratio's denominator.
        advantage: [B] in any unit.
        clip: distance of the ratio from 1 beyond which it gains nothing.
    """
    ratio = policy_ratio(log_prob, old_log_prob)
    return -torch.minimum(ratio * advantage, advantage + clip * advantage.abs()).mean()


def value_loss(value: Tensor, old_value: Tensor, return_: Tensor, *, clip: float | None) -> Tensor:
    """Return half the mean squared error of the critic; moving a prediction more than `clip` brings no gain.

    Source: "The 37 implementation details of PPO", detail 9.

    Args:
        value: [B] predictions; the only argument with a gradient.
        old_value: [B] predictions before the iteration.
        return_: [B] targets, in the same unit.
        clip: distance from `old_value` beyond which a prediction gains nothing; None: no limit.
    """
    error = (value - return_).square()
    if clip is not None:
        near = old_value + (value - old_value).clamp(-clip, clip)
        error = torch.maximum(error, (near - return_).square())
    return 0.5 * error.mean()


def make_learner(config: Config, spec: EnvSpec, **place: Any) -> Learner:
    """Return a learner with a fresh network; `place`: device, seed and ranks of `ActorCriticLearner`."""
    make_optimizer = partial(adam, learning_rate=config.learning_rate, eps=1e-5)
    return Learner(config, spec, make_optimizer=make_optimizer, update=update, loss=minibatch_loss, **place)


def update(learner: Learner, batch: Trajectories) -> dict[str, Tensor]:
    """Do one iteration: several epochs over the batch in shuffled minibatches.

    The ratio's denominator is the policy that acted. With V-trace and UPGO, whose advantages already have the factor
    min(1, pi / mu) (learning policy over acting policy), it is the policy before the iteration.
    Source of that split: Hilton et al. 2021, arXiv:2110.00641, section 3 (the decoupled objective).

    Returns:
        Metrics of the whole batch after the last epoch; explained_variance is the critic's before the iteration.
    """
    config = learner.config
    prepared = learner.prepare(batch, estimator=config.estimator)
    numbers = {name: learner.scheduled(name) for name in ("clip", "learning_rate", "entropy_coefficient")}
    clip, has_bonus = numbers["clip"], numbers["entropy_coefficient"] != 0
    if config.value_clip is not None:  # in reward units; where returns are normalized, the critic's differ
        scale = learner.return_scale[1] if config.normalize_returns else 1.0
        numbers["value_clip"] = config.value_clip / scale
    num_minibatches = max(1, round(learner.ranks.count(len(prepared)) / config.minibatch_size))
    epochs_done, metrics = 0, {}
    while epochs_done < config.num_epochs:
        for part in learner.minibatches(prepared, num_minibatches):
            learner.learn(part, has_bonus=has_bonus, **numbers)
        epochs_done += 1
        if config.target_kl is not None:
            metrics = _metrics(learner, prepared, clip=clip)
            if metrics["kl"] > config.target_kl:
                break
    metrics = metrics or _metrics(learner, prepared, clip=clip)
    learner.finish(batch, len(prepared))
    settings = {"learning_rate": numbers["learning_rate"], "epochs": float(epochs_done)}
    return metrics | {name: torch.tensor(value) for name, value in settings.items()}


def _old_log_prob(config: Config, prepared: Prepared) -> Tensor:
    """Return the denominator of the ratio; see `update`."""
    return prepared.log_prob if config.corrects_staleness else prepared.behavior_log_prob


def minibatch_loss(
    learner: Learner,
    part: Prepared,
    *,
    clip: float,
    entropy_coefficient: float,
    has_bonus: bool,
    value_clip: float | None = None,
) -> Tensor:
    """Return the loss of one minibatch; without `has_bonus` the entropy does not count.

    `value_clip` is in units of the critic.
    """
    config = learner.config
    log_prob, entropy, value = learner.evaluate(part)
    advantage = learner.standardized(part.advantage) if config.normalize_advantages else part.advantage
    loss = clipped_surrogate(log_prob, _old_log_prob(config, part), advantage, clip=clip)
    loss = loss + config.value_coefficient * value_loss(value, part.value, part.return_, clip=value_clip)
    if has_bonus:
        loss = loss - entropy_coefficient * entropy.mean()
    return loss


@torch.no_grad()
def _metrics(learner: Learner, prepared: Prepared, *, clip: float) -> dict[str, Tensor]:
    """Return how far the policy has moved, and how well the critic predicted, over the whole batch."""
    log_prob, entropy, value = learner.evaluate(prepared)
    moved = log_prob - prepared.log_prob  # within this iteration
    ratio = policy_ratio(log_prob, _old_log_prob(learner.config, prepared))
    unexplained = (prepared.return_ - prepared.value).var(correction=0)
    means = {
        "kl": (moved.exp() - 1 - moved).mean(),  # Schulman 2020, "Approximating KL divergence"
        "clip_fraction": ((ratio - 1).abs() > clip).float().mean(),
        "entropy": entropy.mean(),
        "value_loss": value_loss(value, prepared.value, prepared.return_, clip=None),
    }
    # The ranks end an iteration together: these are means over all of them.
    means = dict(zip(means, learner.ranks.mean(torch.stack([*means.values()])), strict=True))
    learner.ranks.settle()
    explained = 1 - unexplained / prepared.return_.var(correction=0).clamp(min=1e-8)
    return {**means, "explained_variance": explained}

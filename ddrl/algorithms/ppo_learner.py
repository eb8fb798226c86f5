"""What learns in proximal policy optimization: pure losses, and one small class.

Source: Schulman et al. 2017, arXiv:1707.06347. Options and the policy that plays are in ppo.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ddrl.algorithms.actor_critic_learner import Prepared, Trainee
from ddrl.algorithms.continuation import adam
from ddrl.algorithms.ppo import Config, check, corrects
from ddrl.types import EnvSpec, Trajectories


def clipped_surrogate(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, *, clip: float) -> Tensor:
    """Minus the clipped surrogate objective: E[-min(r A, clip(r, 1 - clip, 1 + clip) A)], r = pi / pi_old.

    Source: arXiv:1707.06347, equation 7.

    Args:
        log_prob: [B] log pi(a | s), the only argument through which a gradient is taken, in nats.
        old_log_prob: [B] of the policy that the ratio is measured from.
        advantage: [B] in any unit.
        clip: how far from 1 the ratio still gains.
    """
    ratio = torch.exp(log_prob - old_log_prob)
    return -torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage).mean()


def value_loss(value: Tensor, old_value: Tensor, return_: Tensor, *, clip: float | None) -> Tensor:
    """Half the mean squared error of the critic, which gains nothing by moving further than `clip`.

    Source: "The 37 implementation details of PPO", detail 9.

    Args:
        value: [B] predictions, the only argument through which a gradient is taken.
        old_value: [B] predictions before the iteration.
        return_: [B] targets, in the same unit.
        clip: how far from `old_value` a prediction still gains; None: however far.
    """
    error = (value - return_).square()
    if clip is not None:
        near = old_value + (value - old_value).clamp(-clip, clip)
        error = torch.maximum(error, (near - return_).square())
    return 0.5 * error.mean()


class PPO:
    """One learner: a network, its optimizer, and the iterations.

    The ratio starts from the policy that played. Estimators that correct by importance weights (V-trace, UPGO)
    have min(1, pi / mu) in their advantages instead, and start it from the policy that begins the iteration.
    Source of that split: Hilton et al. 2021, arXiv:2110.00641, section 3 (the decoupled objective).

    Args: as of `actor_critic_learner.Trainee`.
    """

    def __init__(self, config: Config, spec: EnvSpec, *, device: torch.device, seed: int) -> None:
        check(config, spec)
        self._config = config
        self._trainee = Trainee(config, spec, device=device, seed=seed)
        self._trainee.optimizer = adam(
            self._trainee.flat.vector, learning_rate=config.learning_rate, eps=1e-5
        )

    @property
    def num_updates(self) -> int:
        """Minibatches learned from."""
        return self._trainee.num_updates

    def update(self, batch: Trajectories) -> dict[str, Tensor]:
        """One iteration: several epochs over the batch in shuffled minibatches.

        Args:
            batch: tensors on the learner's device.

        Returns:
            Detached scalars by name, of the whole batch after the last epoch.
        """
        config, trainee = self._config, self._trainee
        prepared = trainee.prepare(batch, estimator=config.estimator)
        old_log_prob = prepared.log_prob if corrects(config) else prepared.behavior_log_prob
        clip, learning_rate = trainee.scheduled("clip"), trainee.scheduled("learning_rate")
        entropy_coefficient = trainee.scheduled("entropy_coefficient")
        num_minibatches = max(1, round(len(prepared) / config.minibatch_size))
        num_epochs, figures = 0, {}
        while num_epochs < config.num_epochs:
            order = torch.randperm(len(prepared), generator=trainee.generator).to(trainee.device)
            shuffled, old = prepared.select(order), old_log_prob[order].tensor_split(num_minibatches)
            for part, part_old in zip(shuffled.split(num_minibatches), old, strict=True):
                loss = self._loss(part, part_old, clip, entropy_coefficient)
                trainee.step(loss, learning_rate=learning_rate)
            num_epochs += 1
            if config.target_kl is not None:
                figures = self._figures(prepared, old_log_prob, clip)
                if figures["kl"] > config.target_kl:
                    break
        figures = figures or self._figures(prepared, old_log_prob, clip)
        trainee.finish(batch, len(prepared))
        settings = {"learning_rate": learning_rate, "epochs": float(num_epochs)}
        return figures | {name: torch.tensor(value) for name, value in settings.items()}

    def _loss(self, part: Prepared, old_log_prob: Tensor, clip: float, entropy_coefficient: float) -> Tensor:
        """The loss of a minibatch."""
        config = self._config
        log_prob, entropy, value = self._trainee.evaluate(part)
        advantage = part.advantage
        if config.normalize_advantages and len(advantage) > 1:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        loss = clipped_surrogate(log_prob, old_log_prob, advantage, clip=clip)
        value_clip = config.value_clip
        if value_clip is not None and config.normalize_returns:
            value_clip /= self._trainee.return_scale[1]
        loss = loss + config.value_coefficient * value_loss(value, part.value, part.return_, clip=value_clip)
        if entropy_coefficient:
            loss = loss - entropy_coefficient * entropy.mean()
        return loss

    @torch.no_grad()
    def _figures(self, prepared: Prepared, old_log_prob: Tensor, clip: float) -> dict[str, Tensor]:
        """How far the policy has moved, and how good the critic was, over the whole batch."""
        log_prob, entropy, value = self._trainee.evaluate(prepared)
        moved = log_prob - prepared.log_prob  # within this iteration
        ratio = (log_prob - old_log_prob).exp()
        unexplained = (prepared.return_ - prepared.value).var(correction=0)
        return {
            "kl": (moved.exp() - 1 - moved).mean(),  # Schulman 2020, "Approximating KL divergence"
            "clip_fraction": ((ratio - 1).abs() > clip).float().mean(),
            "entropy": entropy.mean(),
            "value_loss": value_loss(value, prepared.value, prepared.return_, clip=None),
            "explained_variance": 1 - unexplained / prepared.return_.var(correction=0).clamp(min=1e-8),
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

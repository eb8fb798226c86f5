"""The losses of discrete soft actor-critic and of soft Q-learning, and their learner.

Source: Christodoulou 2019, arXiv:1910.07207; Zhou et al. 2022, arXiv:2209.10081. Expectations over actions are sums, so
no action is drawn in an update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ddrl.algorithms.discrete_sac.config import Config
from ddrl.algorithms.optim import adams, cpu_copies, restore, set_options, with_optimizers
from ddrl.algorithms.options import changed
from ddrl.algorithms.sac.learner import adapt_temperature, initial_log_temperature, set_temperature
from ddrl.networks.captured import Captured
from ddrl.networks.parameters import FlatParameters, saved_buffers
from ddrl.networks.ranks import ALONE, Ranks
from ddrl.networks.trunks import to_input
from ddrl.types import Batch, EnvSpec


def soft_value(q: Tensor, log_policy: Tensor, temperature: Tensor) -> Tensor:
    """Return V = sum_a pi(a) (Q(a) - alpha log pi(a)): [B] in reward units.

    Source: arXiv:1910.07207, equation 10.

    Args:
        q: [B, A] values.
        log_policy: [B, A] log pi, in nats.
        temperature: [] alpha, reward units per nat.
    """
    return (log_policy.exp() * (q - temperature * log_policy)).sum(dim=1)


def soft_maximum(q: Tensor, temperature: Tensor) -> Tensor:
    """Return V = alpha log sum_a exp(Q(a) / alpha): [B], which `soft_value` is for pi = softmax(Q / alpha).

    Source: Haarnoja et al. 2017, arXiv:1702.08165, equation 4.

    Args:
        q: [B, A] values.
        temperature: [] alpha, above 0.
    """
    return temperature * torch.logsumexp(q / temperature, dim=1)


def critic_loss(
    q: Tensor, target: Tensor, target_q: Tensor, weight: Tensor | None = None, *, clip: float | None
) -> Tensor:
    """Return the sum over the critics of their mean squared errors; moving further than `clip` gains nothing.

    Source: arXiv:1910.07207, equation 4; the clip: arXiv:2209.10081, equation 14.

    Args:
        q: [E, B] Q_i(s_t, a_t), the only argument with a gradient.
        target: [B] n-step return plus discounted soft value.
        target_q: [E, B] the target critics at (s_t, a_t).
        weight: [B] importance weight in (0, 1] of prioritized replay; None: 1.
        clip: distance from `target_q`, in reward units; None: no limit.
    """
    error = (q - target).square()
    if clip is not None:
        near = target_q + (q - target_q).clamp(-clip, clip)
        error = torch.maximum(error, (near - target).square())
    return (error if weight is None else weight * error).sum() / len(target)


def policy_loss(q: Tensor, log_policy: Tensor, temperature: Tensor) -> Tensor:
    """Return E[sum_a pi(a) (alpha log pi(a) - Q(a))].

    Source: arXiv:1910.07207, equation 12.

    Args:
        q: [B, A] values, without gradient.
        log_policy: [B, A] log pi, in nats; the only argument with a gradient.
        temperature: [] alpha; no gradient is taken through it.
    """
    return -soft_value(q, log_policy, temperature.detach()).mean()


class DiscreteSAC:
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
        self._spec, self._ranks = spec, ranks
        generator = torch.Generator().manual_seed(seed)

        def networks(num: int) -> nn.ModuleList:
            made = (config.make_network(spec, generator=generator) for _ in range(num))
            return nn.ModuleList(made).to(device)

        self.critics, self.target_critics = networks(config.num_critics), networks(config.num_critics)
        self.target_critics.requires_grad_(False)
        self.target_critics.load_state_dict(self.critics.state_dict())
        self.actor = networks(1)[0] if config.form == "sac" else None
        self.critic_parameters = FlatParameters(self.critics, ranks)
        self._target = FlatParameters(self.target_critics).vector.requires_grad_(False)
        self._log_temperature = initial_log_temperature(config, device)
        self._learned = {"critics": self.critic_parameters.vector, "temperature": self._log_temperature}
        self._published: tuple[nn.Module, FlatParameters] = self.critics, self.critic_parameters
        if self.actor is not None:
            self.actor_parameters = FlatParameters(self.actor, ranks)
            self._published = self.actor, self.actor_parameters
            self._learned["actor"] = self.actor_parameters.vector
        self._optimizers = adams(self._learned, learning_rate=config.learning_rate)
        self._captured = Captured(self._learn, device, ranks=ranks)
        self._use_options()

    def _use_options(self) -> None:
        """Apply the live options."""
        config = self.config
        self._target_entropy = config.entropy_goal(self._spec)
        set_options(*self._optimizers.values(), lr=config.learning_rate)
        set_temperature(self._log_temperature, config)
        self._captured.forget()

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """One update of critics and targets, and of actor and temperature.

        Args:
            batch: tensors on the learner's device; observations uint8 or float32.

        Returns:
            Detached scalars by name.
        """
        is_warm = not self.from_policy or self.num_updates >= self.config.critic_warmup_updates
        metrics = self._captured(batch, improves=self.actor is not None and is_warm)
        self.num_updates += 1
        return metrics

    def _learn(self, batch: Batch, *, improves: bool) -> dict[str, Tensor]:
        """Update critics and targets and, where it `improves`, actor and temperature."""
        config = self.config
        observation, next_observation = to_input(batch.observation), to_input(batch.next_observation)
        index = batch.action.reshape(-1, 1)
        with torch.no_grad():
            temperature = self._log_temperature.exp()
            next_value = self._next_value(next_observation, temperature)
            target = torch.addcmul(batch.n_step_return, batch.bootstrap_discount, next_value)  # [B]
        every_q = torch.stack([critic(observation) for critic in self.critics])  # [E, B, A]
        q = self._taken(every_q, index)  # [E, B]
        target_q = q
        if config.value_clip is not None:
            every_target = torch.stack([critic(observation) for critic in self.target_critics])
            target_q = self._taken(every_target, index)
        loss = critic_loss(q, target, target_q.detach(), batch.weight, clip=config.value_clip)
        self.critic_parameters.differentiate(loss)
        if config.max_grad_norm is not None:
            self.critic_parameters.clip_gradient(config.max_grad_norm)
        self._optimizers["critics"].step()
        metrics = {"critic_loss": loss.detach(), "q_mean": q.detach().mean(), "temperature": temperature}
        if config.prioritized:
            metrics["priority"] = (q.detach() - target).abs().mean(dim=0)
        every_q = self._combined(every_q.detach(), observation)
        if self.actor is None:
            log_policy = (every_q / temperature).log_softmax(dim=1)
            metrics["entropy"] = -(log_policy.exp() * log_policy).sum(dim=1).mean()
        elif improves:
            metrics |= self._improve_policy(observation, every_q, temperature)
        self._target.lerp_(self.critic_parameters.vector.detach(), config.target_rate)
        return metrics

    def _next_value(self, next_observation: Tensor, temperature: Tensor) -> Tensor:
        """Return the soft values [B] of the next observations."""
        every_q = torch.stack([critic(next_observation) for critic in self.target_critics])
        q = self._combined(every_q, next_observation)
        if self.actor is None:
            return soft_maximum(q, temperature)
        return soft_value(q, self._log_policy(next_observation), temperature)

    def _log_policy(self, observation: Tensor) -> Tensor:
        """Return log pi [B, A] of the actor, in nats."""
        assert self.actor is not None
        logits: Tensor = self._spec.only_allowed(self.actor(observation), observation)
        return logits.log_softmax(dim=1)

    def _improve_policy(self, observation: Tensor, q: Tensor, temperature: Tensor) -> dict[str, Tensor]:
        """Update actor and temperature; q [B, A] is that of the critics before their step."""
        log_policy = self._log_policy(observation)
        loss = policy_loss(q, log_policy, temperature)
        self.actor_parameters.differentiate(loss)
        if self.config.max_grad_norm is not None:
            self.actor_parameters.clip_gradient(self.config.max_grad_norm)
        self._optimizers["actor"].step()
        log_policy = log_policy.detach()
        negative_entropy = (log_policy.exp() * log_policy).sum(dim=1)  # [B]
        if self.config.temperature == "auto":
            learned, optimizer = self._log_temperature, self._optimizers["temperature"]
            goal = self._entropy_goal(observation)
            adapt_temperature(learned, optimizer, negative_entropy, target_entropy=goal, ranks=self._ranks)
        return {"policy_loss": loss.detach(), "entropy": -negative_entropy.mean()}

    def _entropy_goal(self, observation: Tensor) -> float | Tensor:
        """Return the entropy that the policy should have on average; of few allowed actions, as large a share."""
        if not (num := self._spec.num_masked):
            return self._target_entropy
        allowed = observation[:, -num:].sum(dim=1)  # [B]
        return self._target_entropy / math.log(max(num, 2)) * allowed.log().mean()

    def _combined(self, q: Tensor, observation: Tensor) -> Tensor:
        """[E, B, A] -> [B, A]: the least critic, or their mean, of the allowed actions."""
        combined = q.mean(dim=0) if self.config.average_critics else q.amin(dim=0)
        allowed: Tensor = self._spec.only_allowed(combined, observation)
        return allowed

    def _taken(self, q: Tensor, index: Tensor) -> Tensor:
        """Return the values [E, B] of the actions taken, of values [E, B, A] and actions [B, 1]."""
        return q.gather(2, index.expand(len(q), -1, 1)).squeeze(2)

    def weights(self) -> dict[str, Tensor]:
        """Return what a policy needs, the actor or the critics of sqn, and the log temperature, as CPU copies."""
        module, parameters = self._published
        others = {**saved_buffers(module), "log_temperature": self._log_temperature}
        return parameters.copies() | cpu_copies(others)

    def state(self) -> dict[str, Tensor]:
        """Return everything needed to continue, as CPU copies."""
        return cpu_copies(self._tensors()) | {"num_updates": torch.tensor(self.num_updates)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned."""
        restore(self._tensors(), state, num_updates=torch.Size(()))
        self.num_updates = int(state["num_updates"])
        self._use_options()

    def apply_options(self, options: Config) -> None:
        """Apply changed live options from the next update on."""
        self.config = changed(self.config, options)
        self._use_options()

    @torch.no_grad()
    def load_initial_weights(self, weights: Mapping[str, Tensor]) -> str:
        """Start from a published policy and its temperature; return what starts fresh."""
        module, _ = self._published
        given = dict(module.named_parameters()) | saved_buffers(module)
        restore(given | {"log_temperature": self._log_temperature}, weights)
        self._use_options()
        if self.actor is None:
            self.target_critics.load_state_dict(self.critics.state_dict())
            return "the optimizer starts fresh"
        return f"critics and optimizers start fresh, the temperature at {self._log_temperature.exp():.3g}"

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors that updates change, by name; not copied."""
        named = with_optimizers(self._learned, self._optimizers) | {"target_critics.value": self._target}
        for part in ("actor", "critics", "target_critics"):
            if (module := getattr(self, part)) is not None:
                named |= {f"{part}.{name}": buffer for name, buffer in saved_buffers(module).items()}
        return named


make_learner = DiscreteSAC

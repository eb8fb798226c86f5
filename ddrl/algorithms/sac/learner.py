"""SAC's losses, and its learner.

Source: Haarnoja et al. 2018, arXiv:1812.05905; Kuznetsov et al. 2020, arXiv:2005.04269 (quantiles). Actor and critics
work on actions in [-1, 1]; the environment's unit appears only where a batch comes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ddrl.algorithms.optim import adams, begin_anew, cpu_copies, restore, set_options, with_optimizers
from ddrl.algorithms.options import changed
from ddrl.algorithms.quantiles import quantile_huber
from ddrl.algorithms.sac.config import LOG_STD_MAX, LOG_STD_MIN, Config
from ddrl.networks.captured import Captured
from ddrl.networks.distributions import bounded_log_std, tanh_gaussian_sample
from ddrl.networks.mlp import MLP
from ddrl.networks.parameters import FlatParameters, saved_buffers
from ddrl.networks.ranks import ALONE, Ranks
from ddrl.networks.trunks import to_input
from ddrl.types import Batch, EnvSpec

LOG_ZERO = -1_000.0  # whose exponential is 0; what is saved and published is finite


def critic_loss(
    q: Tensor, next_target_q: Tensor, next_log_prob: Tensor, n_step_return: Tensor,
    bootstrap_discount: Tensor, temperature: Tensor, weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Soft Bellman error: the sum over the critics of their mean squared errors.

    Source: arXiv:1812.05905, equations 5 and 6, with the minimum of two target critics (section 6) and
    n-step returns. The entropy bonus enters at the bootstrap only, not within the n steps.

    Args:
        q: [E, B] Q_i(s_t, a_t), the only argument through which a gradient is taken.
        next_target_q: [E, B] target critics at (s_{t+k}, a'), a' drawn from the *current* policy.
        next_log_prob: [B] log pi(a' | s_{t+k}), in nats.
        n_step_return: [B] sum of gamma^i * r_{t+i} for i < k, in reward units.
        bootstrap_discount: [B] gamma^k, or 0 where the episode *terminated* within the k steps.
        temperature: [] alpha, reward units per nat.
        weight: [B] importance weight in (0, 1] of prioritized replay; None: 1.

    Returns:
        The scalar loss, and [B] the critics' mean absolute error (detached), which is the new priority.
    """
    next_value = next_target_q.amin(dim=0) - temperature * next_log_prob  # [B]
    target = torch.addcmul(n_step_return, bootstrap_discount, next_value).detach()  # [B]
    error = q - target  # [E, B]
    each = error.square() if weight is None else weight * error.square()
    return each.sum() / target.shape[0], error.detach().abs().mean(dim=0)


def quantile_critic_loss(
    quantiles: Tensor, next_target: Tensor, next_log_prob: Tensor, n_step_return: Tensor, bootstrap_discount: Tensor,
    temperature: Tensor, weight: Tensor | None = None, *, dropped: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Loss of truncated quantile critics: the sum over the critics of their mean quantile regression losses.

    The targets are the smallest E * (Z - dropped) of all target critics' quantiles together.
    Source: arXiv:2005.04269, equations 10 to 14.

    Args:
        quantiles: [E, B, Z] of the critics at (s_t, a_t), the only argument through which a gradient is taken.
        next_target: [E, B, Z] of the target critics at (s_{t+k}, a').
        next_log_prob, n_step_return, bootstrap_discount, temperature, weight: as for `critic_loss`.
        dropped: quantiles left out for each critic.

    Returns:
        The scalar loss, and [B] the absolute error of the mean (detached), which is the new priority.
    """
    num_critics, batch_size, num = next_target.shape
    pooled = next_target.transpose(0, 1).reshape(batch_size, -1).sort(dim=1).values  # [B, E * Z]
    kept = pooled[:, : num_critics * (num - dropped)] - (temperature * next_log_prob)[:, None]
    target = torch.addcmul(n_step_return[:, None], bootstrap_discount[:, None], kept).detach()
    each = quantile_huber(quantiles, target)  # [E, B]
    error = target.mean(dim=1) - quantiles.detach().mean(dim=(0, 2))  # [B]
    return (each if weight is None else weight * each).sum() / (batch_size * num), error.abs()


def policy_loss(q: Tensor, log_prob: Tensor, temperature: Tensor) -> Tensor:
    """Policy improvement: E[alpha * log pi - min_i Q_i], for reparametrized actions.

    Source: arXiv:1812.05905, equation 7.

    Args:
        q: [E, B] critics at (s, a~), a~ from the policy, which maximizes their minimum (E = 1: form sac1, or the mean
            of all quantiles).
        log_prob: [B] log pi(a~ | s), in nats.
        temperature: [] alpha, reward units per nat; no gradient is taken through it.

    Returns:
        The scalar loss.
    """
    return (temperature.detach() * log_prob - q.amin(dim=0)).mean()


def temperature_loss(log_temperature: Tensor, log_prob: Tensor, *, target_entropy: float | Tensor) -> Tensor:
    """Dual of the entropy constraint: E[-alpha * (log pi + H)], as a function of log alpha.

    Source: arXiv:1812.05905, equation 18.

    Args:
        log_temperature: [] log alpha, which keeps alpha positive.
        log_prob: [B] log pi(a~ | s), in nats; no gradient is taken through it.
        target_entropy: H, in nats: above it alpha falls, below it alpha rises.

    Returns:
        The scalar loss. As a function of log alpha it is its own gradient.
    """
    return -log_temperature.exp() * (log_prob.detach().mean() + target_entropy)


def initial_log_temperature(config: Any, device: torch.device) -> Tensor:
    """Return the log of `initial_temperature` as a parameter."""
    return torch.tensor(math.log(config.initial_temperature), device=device).requires_grad_()


@torch.no_grad()
def adapt_temperature(
    log_temperature: Tensor,
    optimizer: torch.optim.Optimizer,
    log_prob: Tensor,
    *,
    target_entropy: float | Tensor,
    ranks: Ranks,
) -> None:
    """Take one optimizer step on `temperature_loss` over all ranks' rows, which is its own gradient."""
    gradient = temperature_loss(log_temperature, log_prob, target_entropy=target_entropy)
    log_temperature.grad = ranks.mean(gradient)
    optimizer.step()


@torch.no_grad()
def set_temperature(log_temperature: Tensor, config: Any) -> None:
    """Apply the option `temperature`; a learned one continues from its value."""
    if config.temperature != "auto":
        log_temperature.fill_(math.log(config.temperature) if config.temperature > 0 else LOG_ZERO)
    elif log_temperature <= LOG_ZERO:  # it was fixed at 0, where its gradient vanishes
        log_temperature.fill_(math.log(config.initial_temperature))


def to_unit(spec: EnvSpec, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the map of actions [B, *A] in the environment's unit to [B, A] in [-1, 1]."""
    low, high = (torch.tensor(bound, device=device) for bound in (spec.action_low, spec.action_high))
    scale, offset = 2.0 / (high - low), -(high + low) / (high - low)
    return lambda action: torch.addcmul(offset, action.reshape(len(action), -1), scale)


class SAC:
    """Networks, optimizers and random state; see `base.Learner`.

    Args:
        config: options of the algorithm.
        spec: spaces of the environment.
        device: where networks and batches are.
        seed: of the initial weights, which are the same on every device, and of the policy's noise.
        ranks: that learn together.
    """

    def __init__(
        self, config: Config, spec: EnvSpec, *, device: torch.device, seed: int, ranks: Ranks = ALONE
    ) -> None:
        self.num_updates = 0
        self.from_policy = False
        self.config = config
        self._ranks = ranks
        num_dims = math.prod(spec.action_shape)
        self._num_dims, self._to_unit = num_dims, to_unit(spec, device)

        generator = torch.Generator().manual_seed(seed)
        trunk, num_inputs = config.make_trunk(spec, generator)
        self.trunk, self.target_trunk = trunk.to(device), deepcopy(trunk).to(device)

        def network(num_inputs: int, num_outputs: int, **options: Any) -> MLP:
            sizes = (num_inputs, *config.hidden_sizes, num_outputs)
            return MLP(sizes, generator=generator, **options).to(device)

        ensemble = {name: getattr(config, name) for name in ("dropout", "batch_norm")}
        ensemble["layer_norm"] = not config.batch_norm if config.layer_norm is None else config.layer_norm
        ensemble["num_members"] = config.num_critics
        self.actor = network(num_inputs, 2 * num_dims, batch_norm=config.batch_norm)
        num_outputs = config.num_quantiles or 1
        self.critics = network(num_inputs + num_dims, num_outputs, **ensemble)
        self.target_critics = network(num_inputs + num_dims, num_outputs, **ensemble)
        self.actor_parameters = FlatParameters(self.actor, ranks)
        self._has_trunk = any(True for _ in trunk.parameters())
        self.critic_parameters = FlatParameters(nn.ModuleList((self.trunk, self.critics)), ranks)
        targets = nn.ModuleList((self.target_trunk, self.target_critics)).requires_grad_(False)
        self._target = FlatParameters(targets).vector.requires_grad_(False)
        self._target.copy_(self.critic_parameters.vector.detach())

        self._log_temperature = initial_log_temperature(config, device)
        self._learned = {
            "actor": self.actor_parameters.vector,
            "critics": self.critic_parameters.vector,
            "temperature": self._log_temperature,
        }
        self._optimizers = adams(self._learned, learning_rate=config.learning_rate)
        self._noise = torch.Generator(device).manual_seed(seed)
        self._captured = Captured(self._learn, device, self._noise, ranks=ranks)
        self._use_options()

    def _use_options(self) -> None:
        """Apply the live options."""
        config, entropy = self.config, self.config.target_entropy
        self._target_entropy = -float(self._num_dims) if entropy is None else entropy
        set_options(*self._optimizers.values(), lr=config.learning_rate)
        set_temperature(self._log_temperature, config)
        self._captured.forget()

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """One update of critics and targets and, every `policy_delay`-th time, of actor and temperature.

        Args:
            batch: tensors on the learner's device, float32, observations also uint8; actions in the environment's unit.

        Returns:
            Detached scalars by name; those of the actor only where it was updated.
        """
        warmup = self.config.critic_warmup_updates if self.from_policy else 0
        is_warm = self.num_updates >= warmup
        # At 0, too: a branch brings the optimizer of its checkpoint.
        if self._has_trunk and warmup and self.num_updates in (0, warmup):
            begin_anew(self._optimizers["critics"], self.critic_parameters.vector)
        improves = is_warm and self.num_updates % self.config.policy_delay == 0
        metrics = self._captured(batch, improves=improves, is_warm=is_warm)
        self.num_updates += 1
        return metrics

    def _learn(self, batch: Batch, *, improves: bool, is_warm: bool) -> dict[str, Tensor]:
        """Update critics and targets and, where it `improves`, actor and temperature; the trunk once it `is_warm`."""
        config = self.config
        observation = to_input(batch.observation)  # [B, *O]
        next_observation = to_input(batch.next_observation)
        action = self._to_unit(batch.action)  # [B, A], in [-1, 1]
        with torch.no_grad():
            temperature = self._log_temperature.exp()
            next_features = self.trunk(next_observation)  # [B, F]
            next_action, next_log_prob = self._sample(next_features)
            if not config.batch_norm:
                next_pairs = torch.cat((self.target_trunk(next_observation), next_action), dim=1)
                next_target_q = self.target_critics(next_pairs, generator=self._noise)

        features = self.trunk(observation)
        pairs = torch.cat((features, action), dim=1)
        if config.batch_norm:  # one batch: the next actions are others than those of the replay
            both = torch.cat((pairs, torch.cat((next_features, next_action), dim=1)))
            q, next_target_q = self.critics(both, generator=self._noise, train=True).chunk(2, dim=1)
            next_target_q = next_target_q.detach()
        else:
            q = self.critics(pairs, generator=self._noise)  # [E, B, 1 or Z]
        others = next_log_prob, batch.n_step_return, batch.bootstrap_discount, temperature, batch.weight
        if config.num_quantiles is None:
            loss, error = critic_loss(q[..., 0], next_target_q[..., 0], *others)
        else:
            loss, error = quantile_critic_loss(q, next_target_q, *others, dropped=config.dropped_quantiles)
        self.critic_parameters.differentiate(loss)
        if not is_warm:
            self.critic_parameters.keep_gradient("1.")  # the critics': the given policy sees by the trunk
        self._optimizers["critics"].step()
        metrics = {"critic_loss": loss.detach(), "q_mean": q.detach().mean(), "temperature": temperature}
        if config.prioritized:
            metrics["priority"] = error
        if improves:
            metrics |= self._improve_policy(features.detach(), temperature)
        if not config.batch_norm:
            self._target.lerp_(self.critic_parameters.vector.detach(), config.target_rate)
        return metrics

    def _improve_policy(self, features: Tensor, temperature: Tensor) -> dict[str, Tensor]:
        """Update actor and temperature on [B, F] features."""
        action, log_prob = self._sample(features, train=True)
        num_members = 1 if self.config.form == "sac1" else self.config.num_critics
        pairs = torch.cat((features, action), dim=1)
        q = self.critics(pairs, num_members=num_members, generator=self._noise)  # [E, B, 1 or Z]
        is_mean = self.config.num_quantiles is not None or self.config.dropout > 0
        loss = policy_loss(q.mean(dim=(0, 2))[None] if is_mean else q[..., 0], log_prob, temperature)
        self.actor_parameters.differentiate(loss)
        self._optimizers["actor"].step()
        log_prob = log_prob.detach()
        if self.config.temperature == "auto":
            learned, optimizer = self._log_temperature, self._optimizers["temperature"]
            goal = self._target_entropy
            adapt_temperature(learned, optimizer, log_prob, target_entropy=goal, ranks=self._ranks)
        return {"policy_loss": loss.detach(), "entropy": -log_prob.mean()}

    def _sample(self, features: Tensor, *, train: bool = False) -> tuple[Tensor, Tensor]:
        """Return actions [B, A] of the current policy at [B, F] features, and their log densities [B]."""
        mean, raw_log_std = self.actor(features, train=train).chunk(2, dim=1)
        noise = self._ranks.randn(mean.shape, self._noise)
        log_std = bounded_log_std(raw_log_std, low=LOG_STD_MIN, high=LOG_STD_MAX)
        return tanh_gaussian_sample(mean, log_std, noise)

    def weights(self) -> dict[str, Tensor]:
        """Return what a policy needs, and the log of a learned temperature, by name, as CPU copies.

        Of an actor with batch_norm they are those of an equal one without, and its statistics, for later learners.
        """
        others = self._trunk_weights() | saved_buffers(self.actor) | self.actor.folded()
        if self.config.temperature == "auto":
            others["log_temperature"] = self._log_temperature
        return self.actor_parameters.copies() | cpu_copies(others)

    def state(self) -> dict[str, Tensor]:
        """Return everything needed to continue, as CPU copies."""
        others = {"noise": self._noise.get_state(), "num_updates": torch.tensor(self.num_updates)}
        return cpu_copies(self._tensors()) | others

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned."""
        restore(self._tensors(), state, {"noise": self._noise}, num_updates=torch.Size(()))
        self.num_updates = int(state["num_updates"])
        self._use_options()

    def apply_options(self, options: Config) -> None:
        """Apply changed live options from the next update on."""
        self.config = changed(self.config, options)
        self._use_options()

    @torch.no_grad()
    def load_initial_weights(self, weights: Mapping[str, Tensor]) -> str:
        """Start from a published actor and its temperature, which earlier versions lack; return what starts fresh."""
        given = dict(weights)
        log_temperature = given.pop("log_temperature", self._log_temperature)
        restore(
            dict(self.actor.named_parameters()) | self._trunk_weights() | saved_buffers(self.actor), given
        )
        self.actor.unfold()
        self.target_trunk.load_state_dict(self.trunk.state_dict())
        self._log_temperature.copy_(log_temperature)
        self._use_options()
        return f"critics and optimizers start fresh, the temperature at {self._log_temperature.exp():.3g}"

    def _trunk_weights(self) -> dict[str, Tensor]:
        """Return the trunk's parameters and saved buffers, by name; not copied."""
        return {f"trunk.{name}": tensor for name, tensor in self.trunk.state_dict().items()}

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors that updates change, by name; not copied."""
        named = with_optimizers(self._learned, self._optimizers) | {"target_critics.value": self._target}
        for part in ("trunk", "target_trunk", "actor", "critics"):
            named |= {f"{part}.{name}": buffer for name, buffer in saved_buffers(getattr(self, part)).items()}
        return named


make_learner = SAC

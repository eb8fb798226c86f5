"""Soft actor-critic for bounded continuous actions: options, losses, the learner's SAC, the player's Policy.

Source: Haarnoja et al. 2018, arXiv:1812.05905 (learned temperature, two critics, no value network).
The policy and the critics work on actions in [-1, 1]; the environment's unit appears only where a batch
comes in and where `Policy.act` goes out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator
from torch import Tensor

from ddrl.distributions import LOG_STD_MAX, LOG_STD_MIN, bounded_log_std, tanh_gaussian_sample
from ddrl.networks.mlp import MLP, EnsembleMLP, FlatParameters
from ddrl.types import Batch, EnvSpec


class Config(BaseModel):
    """Options of SAC; an update is one minibatch, rewards are as scaled for training."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_sizes: tuple[PositiveInt, ...] = Field(
        (128, 128),
        min_length=1,
        description="Widths of the hidden layers of the actor and of each critic. Wider fits more and costs "
        "time per update in proportion to the square. Usual: (64, 64) to (400, 300).",
    )
    learning_rate: float = Field(
        1e-3,
        gt=0,
        description="Adam step size of actor, critics and temperature. Larger learns faster until the "
        "critics diverge. Usual: 1e-4 to 3e-3.",
    )
    batch_size: PositiveInt = Field(
        256,
        description="Transitions per update. Larger gives less noisy and slower updates. Usual: 64 to 512.",
    )
    gamma: float = Field(
        0.99,
        ge=0,
        le=1,
        description="Discount per agent step; the horizon is about 1 / (1 - gamma) steps. Larger sees "
        "further and learns more slowly. Usual: 0.97 to 0.999.",
    )
    n_step: PositiveInt = Field(
        1,
        description="Rewards summed before bootstrapping. More carries rewards back faster, but is biased "
        "towards the older policies that played them. Usual: 1 to 10.",
    )
    target_rate: float = Field(
        0.005,
        gt=0,
        le=1,
        description="Share of the critics mixed into their targets at each update (tau; 1 - polyak). Larger "
        "tracks faster and is less stable. Usual: 0.002 to 0.05.",
    )
    temperature: Literal["auto"] | float = Field(
        "auto",
        description="Weight of the entropy against the reward: a number >= 0, or `auto` to learn the one "
        "that keeps the entropy at target_entropy. More explores more. Usual: auto; fixed 0.01 to 0.2.",
    )
    target_entropy: float | None = Field(
        None,
        description="Entropy that temperature=auto aims at, in nats, of actions in [-1, 1]. Larger is more "
        "random. None: minus the number of action dimensions. Usual: -2 to -0.5 per dimension.",
    )
    initial_temperature: float = Field(
        1.0,
        gt=0,
        description="Where temperature=auto starts. Too large drowns small rewards at first. "
        "Usual: 0.1 to 1.",
    )
    policy_delay: PositiveInt = Field(
        1,
        description="Critic updates per update of actor and temperature. More is cheaper and gives the actor "
        "better critics, but fewer steps. Usual: 1 to 3.",
    )
    num_critics: PositiveInt = Field(
        2,
        description="Critics whose minimum is the target. More underestimates more and costs time; 1 "
        "overestimates. Usual: 2.",
    )
    layer_norm: bool = Field(
        False,
        description="Normalize the hidden layers of the critics. Bounds their extrapolation, so larger "
        "learning_rate and n_step stay stable, at some 20 % more time per update.",
    )
    form: Literal["sac", "sac1"] = Field(
        "sac",
        description="`sac`: the policy climbs the minimum of the critics. `sac1` (Spinning Up's, as used by "
        "Distributed-DRL): it climbs the first critic at a fixed temperature, usually 0.2; cheaper, "
        "but overestimates more.",
    )

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Config:
        learned = self.temperature == "auto"
        if self.form == "sac1" and learned:
            raise ValueError("temperature='auto': form 'sac1' has a fixed temperature; set temperature=0.2")
        if not learned:
            if not 0 <= float(self.temperature) < math.inf:
                raise ValueError(f"temperature={self.temperature}: must be finite and >= 0, or 'auto'")
            for name in ("target_entropy", "initial_temperature"):
                if (
                    name in self.model_fields_set
                    and getattr(self, name) != type(self).model_fields[name].default
                ):
                    raise ValueError(
                        f"{name}={getattr(self, name)}: has no effect with temperature={self.temperature}; "
                        f"remove it or set temperature='auto'"
                    )
        return self


def check(config: Config, spec: EnvSpec) -> None:
    """Refuse an environment that SAC cannot serve.

    Raises:
        ValueError: one line naming the thing, its value and the remedy.
    """
    del config  # every configuration serves the same environments
    if spec.action_kind != "continuous":
        raise ValueError(
            f"{spec.env_id}: action_kind is {spec.action_kind!r}, but sac needs continuous actions; "
            f"use algorithm dqn or ppo"
        )
    num_dims = math.prod(spec.action_shape)
    for name, bounds in (("action_low", spec.action_low), ("action_high", spec.action_high)):
        if len(bounds) != num_dims or not all(math.isfinite(bound) for bound in bounds):
            raise ValueError(
                f"{spec.env_id}: {name} is {bounds}, but sac needs {num_dims} finite bounds; wrap the "
                f"environment in gymnasium.wrappers.RescaleAction or ClipAction, or use algorithm ppo"
            )
    if any(low >= high for low, high in zip(spec.action_low, spec.action_high, strict=True)):
        raise ValueError(
            f"{spec.env_id}: action_low {spec.action_low} is not below action_high {spec.action_high}; "
            f"remove the action dimensions that have no choice"
        )
    if len(spec.observation_shape) != 1:
        raise ValueError(
            f"{spec.env_id}: observation_shape is {spec.observation_shape}, but sac needs a vector; wrap "
            f"the environment in gymnasium.wrappers.FlattenObservation"
        )


def critic_loss(
    q: Tensor, next_target_q: Tensor, next_log_prob: Tensor, n_step_return: Tensor,
    bootstrap_discount: Tensor, temperature: Tensor,
) -> Tensor:  # fmt: skip
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

    Returns:
        The scalar loss.
    """
    next_value = next_target_q.amin(dim=0) - temperature * next_log_prob  # [B]
    target = torch.addcmul(n_step_return, bootstrap_discount, next_value).detach()  # [B]
    return (q - target).square().sum() / target.shape[0]


def policy_loss(q: Tensor, log_prob: Tensor, temperature: Tensor) -> Tensor:
    """Policy improvement: E[alpha * log pi - min_i Q_i], for reparametrized actions.

    Source: arXiv:1812.05905, equation 7.

    Args:
        q: [E, B] critics at (s, a~), a~ from the policy; the minimum over E is climbed (E = 1: form sac1).
        log_prob: [B] log pi(a~ | s), in nats.
        temperature: [] alpha, reward units per nat; no gradient is taken through it.

    Returns:
        The scalar loss.
    """
    return (temperature.detach() * log_prob - q.amin(dim=0)).mean()


def temperature_loss(log_temperature: Tensor, log_prob: Tensor, *, target_entropy: float) -> Tensor:
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


class SAC:
    """Networks, optimizers and random state of one learner.

    Args:
        config: options of the algorithm.
        spec: spaces of the environment.
        device: where networks and batches live.
        seed: of the initial weights, which are the same on every device, and of the policy's noise.
    """

    def __init__(self, config: Config, spec: EnvSpec, *, device: torch.device, seed: int) -> None:
        check(config, spec)
        self.num_updates = 0
        self._config = config
        num_inputs, num_dims = spec.observation_shape[0], math.prod(spec.action_shape)
        low, high = (torch.tensor(bound, device=device) for bound in (spec.action_low, spec.action_high))
        self._action_scale = 2.0 / (high - low)  # to [-1, 1]
        self._action_offset = -(high + low) / (high - low)
        self._num_dims = num_dims
        self._target_entropy = -float(num_dims) if config.target_entropy is None else config.target_entropy

        weights = torch.Generator().manual_seed(seed)
        hidden = config.hidden_sizes
        critic_sizes = (num_inputs + num_dims, *hidden, 1)

        def critics() -> EnsembleMLP:
            return EnsembleMLP(
                config.num_critics, critic_sizes, layer_norm=config.layer_norm, generator=weights
            ).to(device)

        self.actor = MLP((num_inputs, *hidden, 2 * num_dims), generator=weights).to(device)
        self.critics = critics()
        self.target_critics = critics().requires_grad_(False)
        self._actor = FlatParameters(self.actor)
        self._critics = FlatParameters(self.critics)
        self._target = FlatParameters(self.target_critics).vector.requires_grad_(False)
        self._target.copy_(self._critics.vector.detach())

        learned = config.temperature == "auto"
        start = config.initial_temperature if config.temperature == "auto" else config.temperature
        self._log_temperature = torch.tensor(math.log(start) if start > 0 else -math.inf, device=device)
        self._optimizers = {
            "critics": _adam(self._critics.vector, config),
            "actor": _adam(self._actor.vector, config),
        }
        if learned:
            self._log_temperature.requires_grad_()
            self._log_temperature.grad = torch.zeros_like(self._log_temperature)
            self._optimizers["temperature"] = _adam(self._log_temperature, config)
        self._noise = torch.Generator(device).manual_seed(seed)

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """One update of critics and targets and, every `policy_delay`-th time, of actor and temperature.

        Args:
            batch: tensors on the learner's device, float32; actions in the environment's unit.

        Returns:
            Detached scalars by name; reading one waits for the device. Those of the actor are absent
            from updates that leave it alone.
        """
        config = self._config
        observation, next_observation = batch.observation, batch.next_observation  # [B, O]
        size = len(observation)
        action = torch.addcmul(
            self._action_offset, batch.action.reshape(size, self._num_dims), self._action_scale
        )  # [B, A], in [-1, 1]
        with torch.no_grad():
            temperature = self._log_temperature.exp()
            next_action, next_log_prob = self._sample(next_observation)
            next_target_q = self.target_critics(torch.cat((next_observation, next_action), dim=1))[..., 0]

        q = self.critics(torch.cat((observation, action), dim=1))[..., 0]  # [E, B]
        loss = critic_loss(
            q, next_target_q, next_log_prob, batch.n_step_return, batch.bootstrap_discount, temperature
        )
        self._critics.differentiate(loss)
        self._optimizers["critics"].step()
        metrics = {"critic_loss": loss.detach(), "q_mean": q.detach().mean(), "temperature": temperature}
        if self.num_updates % config.policy_delay == 0:
            metrics |= self._improve_policy(observation, temperature)
        self._target.lerp_(self._critics.vector.detach(), config.target_rate)
        self.num_updates += 1
        return metrics

    def _improve_policy(self, observation: Tensor, temperature: Tensor) -> dict[str, Tensor]:
        """Update actor and temperature on [B, O] observations."""
        action, log_prob = self._sample(observation)
        climbed = 1 if self._config.form == "sac1" else self._config.num_critics
        q = self.critics(torch.cat((observation, action), dim=1), num_members=climbed)[..., 0]
        loss = policy_loss(q, log_prob, temperature)
        self._actor.differentiate(loss)
        self._optimizers["actor"].step()
        log_prob = log_prob.detach()
        if "temperature" in self._optimizers:
            with torch.no_grad():  # the loss is its own gradient
                gradient = temperature_loss(
                    self._log_temperature, log_prob, target_entropy=self._target_entropy
                )
            self._log_temperature.grad = gradient
            self._optimizers["temperature"].step()
        return {"policy_loss": loss.detach(), "entropy": -log_prob.mean()}

    def _sample(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [B, A] of the current policy at [B, O] and their log densities [B]."""
        mean, raw_log_std = self.actor(observation).chunk(2, dim=1)
        noise = torch.randn(mean.shape, generator=self._noise, device=mean.device)
        return tanh_gaussian_sample(mean, bounded_log_std(raw_log_std), noise)

    def weights(self) -> dict[str, Tensor]:
        """What a `Policy` needs: the actor's parameters by name, as CPU copies."""
        vector = self._actor.vector.detach().to("cpu", copy=True)
        sections = vector.split_with_sizes([parameter.numel() for parameter in self._actor.parameters])
        named = zip(self.actor.named_parameters(), sections, strict=True)
        return {name: section.view(parameter.shape) for (name, parameter), section in named}

    def state(self) -> dict[str, Tensor]:
        """Everything that continuation needs, as contiguous CPU copies that share no memory."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._tensors().items()} | {
            "noise": self._noise.get_state().clone(),
            "num_updates": torch.tensor(self.num_updates),
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned; the next updates are bit-equal to those of the original.

        Raises:
            ValueError: an entry is missing, unknown or of another shape (the configuration differs).
        """
        tensors = self._tensors()
        expected = {name: tensor.shape for name, tensor in tensors.items()}
        expected |= {"noise": self._noise.get_state().shape, "num_updates": torch.Size(())}
        for name in sorted(expected.keys() | state.keys()):
            found = tuple(state[name].shape) if name in state else None
            wanted = tuple(expected[name]) if name in expected else None
            if found != wanted:
                raise ValueError(
                    f"{name}: shape {found} in the state, {wanted} here; use the configuration and the "
                    f"environment that wrote it"
                )
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(state[name])
        self._noise.set_state(state["noise"].cpu())
        self.num_updates = int(state["num_updates"])

    def _tensors(self) -> dict[str, Tensor]:
        """The live tensors that updates change, by name."""
        parameters = {
            "actor": self._actor.vector, "critics": self._critics.vector, "temperature": self._log_temperature
        }  # fmt: skip
        named = {f"{name}.value": parameter for name, parameter in parameters.items()}
        named["target_critics.value"] = self._target
        for name, optimizer in self._optimizers.items():
            slots = optimizer.state[parameters[name]]
            named |= {f"{name}.{slot}": slots[slot] for slot in ("step", "exp_avg", "exp_avg_sq")}
        return named


def _adam(parameter: Tensor, config: Config) -> torch.optim.Adam:
    """Adam for one tensor, its slots allocated at once (torch waits for the first step, too late to load)."""
    optimizer = torch.optim.Adam([parameter], lr=config.learning_rate, fused=True)
    optimizer.state[parameter] = {
        "step": torch.zeros((), device=parameter.device),
        "exp_avg": torch.zeros_like(parameter.detach()),
        "exp_avg_sq": torch.zeros_like(parameter.detach()),
    }
    return optimizer


class Policy:
    """The actor for rollout and evaluation: plain NumPy on exported weights.

    A mode depends on its own observation only, to the last bit: each row is a vector-matrix product of its
    own, because a matrix product rounds a row differently by its place and by the number of rows.
    Exploration needs no such promise and takes the faster matrix product.

    Args:
        config: options of the algorithm.
        spec: spaces of the environment.
    """

    def __init__(self, config: Config, spec: EnvSpec) -> None:
        check(config, spec)
        low, high = np.asarray(spec.action_low, np.float32), np.asarray(spec.action_high, np.float32)
        self._low, self._high = low, high
        self._scale = (high - low) / 2
        self._center = (high + low) / 2
        self._action_shape = spec.action_shape
        self._num_inputs = spec.observation_shape[0]
        self._num_layers = len(config.hidden_sizes) + 1
        self._weights: list[np.ndarray[Any, Any]] = []
        self._biases: list[np.ndarray[Any, Any]] = []

    def load(self, weights: Mapping[str, Any]) -> None:
        """Take over what `SAC.weights` returned: CPU tensors, or arrays as they come off the wire."""
        layers = range(self._num_layers)
        self._weights = [np.asarray(weights[f"weights.{i}"], np.float32).copy() for i in layers]
        self._biases = [np.asarray(weights[f"biases.{i}"], np.float32).copy() for i in layers]

    def act(
        self, observation: np.ndarray[Any, Any], *, explore: bool, generator: np.random.Generator
    ) -> np.ndarray[Any, Any]:
        """Choose actions.

        Args:
            observation: [N, O].
            explore: sample the policy; else take its mode, and leave the generator alone.
            generator: source of the exploration noise.

        Returns:
            [N, *A] float32, in the environment's unit, within its bounds.
        """
        size = len(observation)
        x = np.asarray(observation, np.float32).reshape(size, self._num_inputs)
        if not explore:
            x = x[:, None]  # [N, 1, O]: NumPy multiplies row by row
        *hidden, last = zip(self._weights, self._biases, strict=True)
        for weight, bias in hidden:
            x = x @ weight
            x += bias
            np.maximum(x, 0.0, out=x)
        output = (x @ last[0] + last[1]).reshape(size, 2 * len(self._low))
        mean = output[:, : len(self._low)]
        if explore:
            middle, half = (LOG_STD_MAX + LOG_STD_MIN) / 2, (LOG_STD_MAX - LOG_STD_MIN) / 2
            std = np.exp(np.tanh(output[:, len(self._low) :]) * half + middle)
            mean = mean + std * generator.standard_normal(std.shape, dtype=np.float32)
        action = np.tanh(np.ascontiguousarray(mean)) * self._scale + self._center
        # rounding may step over a bound by one unit in the last place
        action = np.clip(action, self._low, self._high)
        return np.ascontiguousarray(action.reshape(size, *self._action_shape), np.float32)

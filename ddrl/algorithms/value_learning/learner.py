"""The learner of action values: networks, target and optimizer; the loss is the algorithm's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic

import torch
from torch import Tensor

from ddrl.algorithms.optim import adam, cpu_copies, optimizer_state, restore, rmsprop, set_options
from ddrl.algorithms.options import changed
from ddrl.algorithms.value_learning.options import AnyOptions
from ddrl.networks.captured import Captured
from ddrl.networks.parameters import FlatParameters, saved_buffers
from ddrl.networks.ranks import ALONE, Ranks
from ddrl.types import EnvSpec


class ValueLearner(Generic[AnyOptions]):
    """Network, target network, optimizer and random state; see `base.Learner`.

    Args:
        config: options of the algorithm.
        spec: spaces of the environment.
        device: where networks and batches are.
        seed: of the initial weights, which are the same on every device, and of the noise of noisy layers.
        loss: of this learner on a batch, or a part of it: the scalar loss, and detached metrics.
        parts: of a batch, one for each optimizer step; None: it is taken as a whole.
        has_target: there is a target network.
        ranks: that learn together.

    Attributes:
        config, spec, ranks: options, spaces of the environment, and the ranks that learn together.
        network: the online network.
        target_network: the target network, if there is one.
        parameters: the online network's, with their gradient.
        buffers: what the online network carries besides its parameters, by name: running statistics, constants of a
            custom network.
    """

    def __init__(
        self,
        config: AnyOptions,
        spec: EnvSpec,
        *,
        device: torch.device,
        seed: int,
        loss: Callable[[ValueLearner[AnyOptions], Any], tuple[Tensor, dict[str, Tensor]]],
        parts: Callable[[ValueLearner[AnyOptions], Any], Iterable[Any]] | None = None,
        has_target: bool = True,
        ranks: Ranks = ALONE,
    ) -> None:
        self.num_updates = 0
        self.from_policy = False
        self.config, self.spec = config, spec
        self.network = config.make_network(spec, generator=torch.Generator().manual_seed(seed)).to(device)
        self.parameters = FlatParameters(self.network, ranks)
        self.buffers = saved_buffers(self.network)
        self._loss, self._parts, self.ranks = loss, parts, ranks
        vector = self.parameters.vector
        self._online = {"value": vector, **self.buffers}
        self._target: dict[str, Tensor] = {}
        if has_target:
            self.target_network = config.make_network(spec).to(device).requires_grad_(False).eval()
            target = FlatParameters(self.target_network).vector.requires_grad_(False)
            self._target = {"value": target, **saved_buffers(self.target_network)}
        self._move_target(1.0)
        self._optimizer: torch.optim.Optimizer
        common = {"learning_rate": config.learning_rate, "weight_decay": config.weight_decay}
        if config.optimizer == "adam":
            self._optimizer = adam(vector, eps=config.adam_eps, **common)
        else:
            self._optimizer = rmsprop(vector, eps=3e-3, decay=0.95, **common)
        self._noise = torch.Generator(device).manual_seed(seed) if self.network.is_noisy else None
        noise = () if self._noise is None else (self._noise,)
        self._captured = Captured(self._learn, device, *noise, ranks=ranks)

    def update(self, batch: Any) -> dict[str, Tensor]:
        """Update the network on a batch, and the target if it is due.

        Args:
            batch: tensors on the learner's device; observations uint8 or float32.

        Returns:
            The algorithm's metrics, and loss, grad_norm before clipping, and epsilon where it follows a schedule; of
            its last part.
        """
        metrics: dict[str, Tensor] = {}
        for part in (batch,) if self._parts is None else self._parts(self, batch):
            metrics = self._step(part)
        if not self.config.epsilon_ladder:
            metrics["epsilon"] = torch.tensor(self._epsilon)
        return metrics

    def _step(self, batch: Any) -> dict[str, Tensor]:
        """Take one optimizer step; move the target if it is due."""
        config: Any = self.config
        self.num_updates += 1
        moves_target = bool(self._target) and (
            config.target_rate is not None or self.num_updates % config.target_period == 0
        )
        return self._captured(batch, moves_target=moves_target)

    def _learn(self, batch: Any, *, moves_target: bool) -> dict[str, Tensor]:
        """Update the network and, where it says so, the target."""
        config: Any = self.config
        loss, metrics = self._loss(self, batch)
        self.parameters.differentiate(loss)
        metrics["loss"] = loss.detach()
        if config.max_grad_norm is not None:
            metrics["grad_norm"] = self.parameters.clip_gradient(config.max_grad_norm)
        self._optimizer.step()
        self.ranks.copy_first(*self.buffers.values())
        if moves_target:
            self._move_target(config.target_rate or 1.0)
        return metrics

    def draw_noise(self, network: Any) -> None:
        """Use fresh noise in the noisy layers, if any, of one of the networks."""
        if self._noise is not None:
            network.draw_noise(self._noise)

    @torch.no_grad()
    def _move_target(self, share: float) -> None:
        """Move the target and its buffers by a share, above 0, of their way to the network; copy counts."""
        for name, target in self._target.items():
            value = self._online[name]
            if share < 1.0 and target.is_floating_point():
                target.lerp_(value, share)
            else:
                target.copy_(value)

    @property
    def _epsilon(self) -> float:
        """The scheduled share of random actions; after a given policy the final one, unless `epsilon` is set."""
        if self.from_policy and "epsilon" not in self.config.model_fields_set:
            return self.config.final_epsilon
        return self.config.epsilon_at(self.num_updates)

    def weights(self) -> dict[str, Tensor]:
        """Return the network's parameters and buffers by name, and epsilon, as CPU copies."""
        return self.parameters.copies() | cpu_copies(self.buffers | {"epsilon": torch.tensor(self._epsilon)})

    def state(self) -> dict[str, Tensor]:
        """Return everything needed to continue, as CPU copies."""
        state = cpu_copies(self._tensors()) | {"num_updates": torch.tensor(self.num_updates)}
        return state if self._noise is None else state | {"noise": self._noise.get_state()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned."""
        noise = {} if self._noise is None else {"noise": self._noise}
        restore(self._tensors(), state, noise, num_updates=torch.Size(()))
        self.num_updates = int(state["num_updates"])

    def apply_options(self, options: AnyOptions) -> None:
        """Apply changed live options from the next update on."""
        self.config = changed(self.config, options)
        set_options(self._optimizer, lr=options.learning_rate, weight_decay=options.weight_decay)
        if options.optimizer == "adam":
            set_options(self._optimizer, eps=options.adam_eps)
        self._captured.forget()

    def load_initial_weights(self, weights: Mapping[str, Tensor]) -> str:
        """Start from a published network, in the target too; return what starts fresh."""
        restore(dict(self.network.named_parameters()) | self.buffers, weights, epsilon=torch.Size(()))
        self._move_target(1.0)
        if self.config.epsilon_ladder:
            return "the optimizer starts fresh"
        return f"the optimizer starts fresh, and epsilon at {self._epsilon:g}"

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors that updates change, by name; not copied."""
        named = optimizer_state("network", self._optimizer, self.parameters.vector)
        named |= {f"network.{name}": tensor for name, tensor in self._online.items()}
        return named | {f"target_network.{name}": tensor for name, tensor in self._target.items()}

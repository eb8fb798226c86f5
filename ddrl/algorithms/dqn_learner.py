"""What learns in DQN: one small class with the network, its target and the optimizer. The losses are in q_losses.py."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ddrl.algorithms import q_training
from ddrl.algorithms.continuation import copies, restore
from ddrl.algorithms.dqn import Config, check
from ddrl.algorithms.live import adopted
from ddrl.algorithms.q_learning import make_network
from ddrl.algorithms.q_losses import categorical_loss, expected_q, q_loss, quantile_loss, support
from ddrl.networks.mlp import FlatParameters
from ddrl.networks.q_network import QNetwork
from ddrl.networks.trunks import to_input
from ddrl.types import Batch, EnvSpec


class DQN:
    """Network, target network, optimizer and random state of one learner.

    Args:
        config: options of the algorithm.
        spec: spaces of the environment.
        device: where networks and batches live.
        seed: of the initial weights, which are the same on every device, and of the noise of noisy layers.
    """

    def __init__(self, config: Config, spec: EnvSpec, *, device: torch.device, seed: int) -> None:
        check(config, spec)
        self.num_updates = 0
        self._config = config
        self.network = make_network(config, spec, generator=torch.Generator().manual_seed(seed)).to(device)
        self.target_network = make_network(config, spec).to(device).requires_grad_(False).eval()
        self._flat = FlatParameters(self.network)
        self._target = FlatParameters(self.target_network).vector.requires_grad_(False)
        self._buffers = q_training.buffers(self.network)
        self._target_buffers = q_training.buffers(self.target_network)
        self._follow(1.0)
        self._optimizer = q_training.make_optimizer(config, self._flat.vector)
        self._noise = torch.Generator(device).manual_seed(seed) if config.noisy else None
        self._atoms: Tensor | None = None
        if config.distribution == "categorical":
            self._atoms = support(config.num_atoms, v_min=config.v_min, v_max=config.v_max, like=self._target)

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """One update of the network and, when it is its time, of the target.

        Args:
            batch: tensors on the learner's device; observations uint8 or float32.

        Returns:
            Detached scalars by name; reading one waits for the device. `q_mean` is the mean over the batch of
            max_a Q(s_t, a), `td_error` the mean size of the errors (not where the distribution is categorical: there
            the loss itself is the surprise). With importance weights also `priority` [B], at least 0.
        """
        config = self._config
        next_q, next_output = self._bootstrap(to_input(batch.next_observation))
        self._draw_noise(self.network)
        output = self.network(to_input(batch.observation))
        loss, surprise = self._loss(output, next_q, next_output, batch)
        self._flat.differentiate(loss)
        metrics = {"loss": loss.detach()}
        if config.max_grad_norm is not None:
            metrics["grad_norm"] = self._flat.clip_gradient(config.max_grad_norm)
        self._optimizer.step()
        self.num_updates += 1
        self._follow(q_training.target_share(config, self.num_updates))
        size = surprise.abs()
        metrics["q_mean"] = expected_q(output.detach(), self._atoms).amax(dim=1).mean()
        if config.distribution != "categorical":
            metrics["td_error"] = size.mean()
        if not config.epsilon_ladder:
            metrics["epsilon"] = torch.tensor(config.epsilon_at(self.num_updates))
        if batch.weight is not None:
            metrics["priority"] = size
        return metrics

    @torch.no_grad()
    def _bootstrap(self, next_observation: Tensor) -> tuple[Tensor, Tensor]:
        """The values [B, A] that pick the next action, and what the target network gives there.

        Double Q-learning takes a forward pass of its own for the choice. One of [s; s'] together would carry the
        gradient through both halves: on a CPU 0.89 instead of 0.80 ms (MLP), 42 instead of 31 ms (Nature).
        Noise is drawn anew for each pass (Fortunato et al. 2018, arXiv:1706.10295, section 3.1).
        """
        self._draw_noise(self.target_network)
        next_output = self.target_network(next_observation)
        if not self._config.double:
            return expected_q(next_output, self._atoms), next_output
        self._draw_noise(self.network)
        if not self._buffers:
            return expected_q(self.network(next_observation), self._atoms), next_output
        self.network.eval()  # whatever picks an action goes by BatchNorm's running statistics, as a policy does
        next_q = expected_q(self.network(next_observation), self._atoms)
        self.network.train()
        return next_q, next_output

    def _loss(
        self, output: Tensor, next_q: Tensor, next_output: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """The loss of the configured kind, and the surprise [B] of each transition."""
        config = self._config
        args = (
            next_q,
            next_output,
            batch.action,
            batch.n_step_return,
            batch.bootstrap_discount,
            batch.weight,
        )
        if config.distribution == "categorical":
            return categorical_loss(output, *args, v_min=config.v_min, v_max=config.v_max)
        if config.distribution == "quantile":
            return quantile_loss(output, *args, huber_delta=config.huber_delta)
        return q_loss(output, *args, loss=config.loss, huber_delta=config.huber_delta)

    def _draw_noise(self, network: QNetwork) -> None:
        """Fresh noise for noisy layers."""
        if self._noise is not None:
            network.draw_noise(self._noise)

    def _follow(self, share: float) -> None:
        """Move the target, and the statistics that it goes by, a share of the way."""
        if not share:
            return
        q_training.follow(self._target, self._flat.vector, share)
        for name, buffer in self._buffers.items():
            q_training.follow(self._target_buffers[name], buffer, share)

    def weights(self) -> dict[str, Tensor]:
        """What a `Policy` needs: the network's parameters and buffers by name, and epsilon; CPU copies."""
        return q_training.weights(self._config, self._flat, self._buffers, self.num_updates)

    def state(self) -> dict[str, Tensor]:
        """Everything that continuation needs, as contiguous CPU copies that share no memory."""
        state = copies(self._tensors()) | {"num_updates": torch.tensor(self.num_updates)}
        return state if self._noise is None else state | {"noise": self._noise.get_state().clone()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned; the next updates are bit-equal to those of the original.

        Raises:
            ValueError: an entry is missing, unknown or of another shape (the configuration differs).
        """
        noise = {} if self._noise is None else {"noise": self._noise.get_state().shape}
        restore(self._tensors(), state, num_updates=torch.Size(()), **noise)
        if self._noise is not None:
            self._noise.set_state(state["noise"].cpu())
        self.num_updates = int(state["num_updates"])

    def adopt(self, options: Config) -> None:
        """Go on with other live options from the next update on.

        Raises:
            ValueError: an option differs that is not live.
        """
        self._config = adopted(self._config, options)
        q_training.retune_optimizer(options, self._optimizer)

    def warm_start(self, weights: Mapping[str, Tensor]) -> str:
        """Begin with a published network, in the target too; what starts fresh.

        Raises:
            ValueError: they are those of another configuration.
        """
        fresh = q_training.warm_start(self._config, self.network, weights)
        self._follow(1.0)
        return fresh

    def _tensors(self) -> dict[str, Tensor]:
        """The live tensors that updates change, by name."""
        return q_training.live_tensors(
            self._flat, self._target, self._optimizer, kept=self._buffers, target_kept=self._target_buffers
        )

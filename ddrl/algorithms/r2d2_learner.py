"""What learns in R2D2: pure functions on sequences, and one small class with networks and optimizer.

Source: Kapturowski et al. 2019, "Recurrent experience replay in distributed reinforcement learning" (ICLR), sections
2.3 and 3. Options and the policy that plays are in r2d2.py.

Training slices have L steps, and L + 1 rows of what is seen: the last row only bootstraps. Value rescaling means that
networks give h(Q) (`returns.rescale`), in which unit TD errors, losses and priorities are too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ddrl.algorithms import q_training
from ddrl.algorithms.continuation import copies, restore
from ddrl.algorithms.live import adopted
from ddrl.algorithms.q_learning import make_network
from ddrl.algorithms.r2d2 import Config, check
from ddrl.networks.device import send
from ddrl.networks.mlp import FlatParameters
from ddrl.networks.q_network import QNetwork
from ddrl.networks.trunks import to_input
from ddrl.returns import rescale, unrescale
from ddrl.types import EnvSpec, Sequences


def sequence_targets(
    q: Tensor, target_q: Tensor, n_step_return: Tensor, bootstrap_discount: Tensor, bootstrap: Tensor,
    *, double: bool = True, rescale_values: bool = True,
) -> Tensor:  # fmt: skip
    """n-step Q-learning targets of sequences: h(R + discount * h^-1(Q'(s_{t+k}, argmax_a Q(s_{t+k}, a)))).

    Source: Kapturowski et al. 2019, section 2.3; h: Pohlen et al. 2018, arXiv:1805.11593, appendix A.1. Where fewer
    than n steps are left in the sequence, k is shorter, as in the authors' later code (SEED RL, arXiv:1910.06591).

    Args:
        q: [L+1, B, A] online network.
        target_q: [L+1, B, A] target network.
        n_step_return: [L, B] sum of gamma^i * r_{t+i} for i < k, in reward units.
        bootstrap_discount: [L, B] gamma^k, or 0 where the episode *terminated* within the k steps.
        bootstrap: [L, B] int64, t + k in 0..L.
        double: the online network picks the action, the target network values it; else the target network does both.
        rescale_values: networks give h(Q); without it h is the identity.

    Returns:
        [L, B] without gradient, in the networks' unit; without meaning where no step was played.
    """
    next_action = (q if double else target_q).detach().argmax(dim=2, keepdim=True)  # [L+1, B, 1]
    value = target_q.detach().gather(2, next_action).squeeze(2).gather(0, bootstrap)  # [L, B]
    if not rescale_values:
        return torch.addcmul(n_step_return, bootstrap_discount, value)
    return rescale(torch.addcmul(n_step_return, bootstrap_discount, unrescale(value)))


def sequence_loss(
    q: Tensor, target: Tensor, action: Tensor, valid: Tensor, weight: Tensor | None,
    *, reduction: Literal["mean", "sum"] = "mean",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Half the squared TD errors of sequences, weighted for prioritized replay.

    Within a sequence they are summed or averaged over the steps that were played, and the B results, times their
    weights, are averaged. The paper does not say which; SEED RL and Acme sum, so that longer sequences count for
    more and the gradient is about L times as long.

    Args:
        q: [L+1, B, A] online network, the only argument through which a gradient is taken; its last row is not used.
        target: [L, B], in the unit of q.
        action: [L, B] int64, the action taken.
        valid: [L, B] bool, a step that was played; what the others hold has no influence.
        weight: [B] importance weight in (0, 1]; None where replay is uniform.
        reduction: over the steps of a sequence.

    Returns:
        The scalar loss, and [L, B] TD errors (target - prediction, detached), 0 where not valid.
    """
    prediction = q[:-1].gather(2, action.unsqueeze(2)).squeeze(2)  # [L, B]
    # Masked before squaring: an error that overflows would give a NaN gradient behind a mask of the loss.
    td = torch.where(valid, target.detach() - prediction, 0.0)
    total = 0.5 * td.square().sum(dim=0)  # [B]
    if reduction == "mean":
        total = total / valid.sum(dim=0).clamp(min=1)
    return (total if weight is None else weight * total).mean(), td.detach()


def sequence_priority(td: Tensor, valid: Tensor, *, mix: float) -> Tensor:
    """How surprising each sequence was: mix * max_t |td_t| + (1 - mix) * mean_t |td_t|, over steps that were played.

    Source: Kapturowski et al. 2019, section 2.3, where mix is eta = 0.9.

    Args:
        td: [L, B] TD errors.
        valid: [L, B] bool.
        mix: share of the largest error, 0 to 1.

    Returns:
        [B], in the unit of td.
    """
    size = torch.where(valid, td.abs(), 0.0)
    mean = size.sum(dim=0) / valid.sum(dim=0).clamp(min=1)
    return mix * size.amax(dim=0) + (1.0 - mix) * mean


class R2D2:
    """Network, target network and optimizer of one learner.

    Args:
        config: options of the algorithm.
        spec: spaces of the environment.
        device: where networks and batches live.
        seed: of the initial weights, which are the same on every device.
    """

    def __init__(self, config: Config, spec: EnvSpec, *, device: torch.device, seed: int) -> None:
        check(config, spec)
        self.num_updates = 0
        self._config = config
        self.network = make_network(config, spec, generator=torch.Generator().manual_seed(seed)).to(device)
        self.target_network = make_network(config, spec).to(device).requires_grad_(False)
        self._flat = FlatParameters(self.network)
        self._target = FlatParameters(self.target_network).vector.requires_grad_(False)
        self._buffers = q_training.buffers(self.network)  # constants of a network of one's own
        self._target_buffers = q_training.buffers(self.target_network)
        self._copy_to_target()
        self._optimizer = q_training.make_optimizer(config, self._flat.vector)

    def update(self, batch: Sequences) -> dict[str, Tensor]:
        """One update of the network and, when it is its time, of the target.

        Args:
            batch: tensors on the learner's device but for burn_in, on the CPU; observations uint8 or float32.

        Returns:
            Detached scalars by name; reading one waits for the device. `q_mean` is the mean over the steps played of
            max_a of what the network gives, `td_error` the mean size of the errors, both in units of h(Q) where
            values are rescaled. With importance weights also `priority` [B], at least 0.
        """
        config = self._config
        observation = to_input(batch.observation)
        q = _unroll(self.network, batch, observation)  # [L+1, B, A]
        with torch.no_grad():
            target_q = _unroll(self.target_network, batch, observation)
        target = sequence_targets(
            q, target_q, batch.n_step_return, batch.bootstrap_discount, batch.bootstrap,
            double=config.double, rescale_values=config.rescale_values,
        )  # fmt: skip
        loss, td = sequence_loss(
            q, target, batch.action, batch.valid, batch.weight, reduction=config.loss_reduction
        )
        self._flat.differentiate(loss)
        metrics = {"loss": loss.detach()}
        if config.max_grad_norm is not None:
            metrics["grad_norm"] = self._flat.clip_gradient(config.max_grad_norm)
        self._optimizer.step()
        self.num_updates += 1
        share = q_training.target_share(config, self.num_updates)
        if share:
            q_training.follow(self._target, self._flat.vector, share)
        num_played = batch.valid.sum()
        best = q.detach()[:-1].amax(dim=2)  # [L, B]
        metrics["q_mean"] = torch.where(batch.valid, best, 0.0).sum() / num_played
        metrics["td_error"] = td.abs().sum() / num_played
        if not config.epsilon_ladder:
            metrics["epsilon"] = torch.tensor(config.epsilon_at(self.num_updates))
        if batch.weight is not None:
            metrics["priority"] = sequence_priority(td, batch.valid, mix=config.priority_mix)
        return metrics

    def _copy_to_target(self) -> None:
        q_training.follow(self._target, self._flat.vector, 1.0)
        for name, buffer in self._buffers.items():
            q_training.follow(self._target_buffers[name], buffer, 1.0)

    def weights(self) -> dict[str, Tensor]:
        """What a `Policy` needs: the network's parameters and buffers by name, and epsilon; CPU copies."""
        return q_training.weights(self._config, self._flat, self._buffers, self.num_updates)

    def state(self) -> dict[str, Tensor]:
        """Everything that continuation needs, as contiguous CPU copies that share no memory."""
        return copies(self._tensors()) | {"num_updates": torch.tensor(self.num_updates)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned; the next updates are bit-equal to those of the original.

        Raises:
            ValueError: an entry is missing, unknown or of another shape (the configuration differs).
        """
        restore(self._tensors(), state, num_updates=torch.Size(()))
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
        self._copy_to_target()
        return fresh

    def _tensors(self) -> dict[str, Tensor]:
        """The live tensors that updates change, by name."""
        return q_training.live_tensors(
            self._flat, self._target, self._optimizer, kept=self._buffers, target_kept=self._target_buffers
        )


def _unroll(network: QNetwork, batch: Sequences, observation: Tensor) -> Tensor:
    """A network's values [L+1, B, A] of the training slices, after burn-in from the stored state.

    Args:
        network: online or target.
        batch: the others of its columns; no gradient enters burn-in.
        observation: [U+L+1, B, *I] float32.
    """
    start = len(observation) - len(batch.action) - 1
    action, reward, state = batch.previous_action, batch.previous_reward, batch.recurrent_state
    if start:
        with torch.no_grad():
            lengths = batch.burn_in.clamp(min=1)
            _, warm = network.sequence(observation[:start], action[:start], reward[:start], state, lengths)
        has_burn_in = send(batch.burn_in.unsqueeze(1) > 0, state.device)  # [B, 1]
        state = torch.where(has_burn_in, warm, state)
    values, _ = network.sequence(observation[start:], action[start:], reward[start:], state)
    return values

"""R2D2's learner: targets, loss and priorities of sequences.

Source: Kapturowski et al. 2019, "Recurrent experience replay in distributed reinforcement learning" (ICLR), sections
2.3 and 3.

Training slices have L steps and L + 1 rows of inputs: the last row only bootstraps. With value rescaling networks give
h(Q) (`returns.rescale`); TD errors, losses and priorities are in that unit.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ddrl.algorithms.r2d2.config import Config
from ddrl.algorithms.value_learning.learner import ValueLearner
from ddrl.networks.device import send
from ddrl.networks.q_network import QNetwork
from ddrl.networks.trunks import to_input
from ddrl.returns import rescale, unrescale
from ddrl.types import EnvSpec, Sequences


def sequence_targets(
    q: Tensor, target_q: Tensor, n_step_return: Tensor, bootstrap_discount: Tensor, bootstrap: Tensor,
    *, double: bool = True, rescale_values: bool = True,
) -> Tensor:  # fmt: skip
    """Return n-step Q-learning targets of sequences: h(R + discount * h^-1(Q'(s_{t+k}, argmax_a Q(s_{t+k}, a)))).

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
        [L, B] without gradient, in the networks' unit; undefined where there is no step.
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
    """Return half the squared TD errors of sequences, weighted for prioritized replay.

    They are summed or averaged over the steps of a sequence, and the B results, times their weights, are averaged.
    The paper does not say which; SEED RL and Acme sum, so that longer sequences count for more and the gradient is
    about L times as long.

    Args:
        q: [L+1, B, A] online network, the only argument through which a gradient is taken; its last row is unused.
        target: [L, B], in the unit of q.
        action: [L, B] int64, the action taken.
        valid: [L, B] bool, False where there is no step; values there have no influence.
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
    """Return each sequence's priority: mix * max_t |td_t| + (1 - mix) * mean_t |td_t| over its steps.

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


def make_learner(config: Config, spec: EnvSpec, **place: Any) -> ValueLearner[Config]:
    """Return a learner with fresh networks; `place`: device, seed and ranks of `ValueLearner`."""
    return ValueLearner(config, spec, loss=batch_loss, **place)


def batch_loss(learner: ValueLearner[Config], batch: Sequences) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a batch of sequences, and its metrics.

    `burn_in` of the batch is on the CPU. Metrics are `q_mean`, the mean over the steps of the network's largest output,
    and `td_error`, the mean size of the errors, both in units of h(Q) where values are rescaled; with importance
    weights also `priority` [B], at least 0.
    """
    config = learner.config
    observation = to_input(batch.observation)
    q = _unroll(learner.network, batch, observation, learner.spec)  # [L+1, B, A]
    with torch.no_grad():
        target_q = _unroll(learner.target_network, batch, observation, learner.spec)
    target = sequence_targets(
        q, target_q, batch.n_step_return, batch.bootstrap_discount, batch.bootstrap,
        double=config.double, rescale_values=config.rescale_values,
    )  # fmt: skip
    loss, td = sequence_loss(
        q, target, batch.action, batch.valid, batch.weight, reduction=config.loss_reduction
    )
    num_steps = batch.valid.sum()
    best = q.detach()[:-1].amax(dim=2)  # [L, B]
    metrics = {
        "q_mean": torch.where(batch.valid, best, 0.0).sum() / num_steps,
        "td_error": td.abs().sum() / num_steps,
    }
    if batch.weight is not None:
        metrics["priority"] = sequence_priority(td, batch.valid, mix=config.priority_mix)
    return loss, metrics


def _unroll(network: QNetwork, batch: Sequences, observation: Tensor, spec: EnvSpec) -> Tensor:
    """Return a network's values [L+1, B, A] of the allowed actions in the training slices, after burn-in.

    Args:
        network: online or target.
        batch: for its other columns, such as the stored state; no gradient enters burn-in.
        observation: [U+L+1, B, *I] float32.
        spec: spaces of the environment.
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
    allowed: Tensor = spec.only_allowed(values, observation[start:])
    return allowed

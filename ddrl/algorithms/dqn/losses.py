"""Losses of value learning on B n-step transitions: pure functions of the networks' outputs.

They share these arguments:

- next_q: [B, A] the values by which the next action is picked: the online network's at s_{t+k} for Double
  Q-learning (van Hasselt et al. 2016, arXiv:1509.06461), the target network's own for the plain one.
- action: [B] int64, the action taken at s_t.
- n_step_return: [B] sum of gamma^i * r_{t+i} for i < k, in reward units.
- bootstrap_discount: [B] gamma^k, or 0 where the episode *terminated* within the k steps. Truncation keeps gamma^k:
  a time limit is not an outcome.
- weight: [B] importance weight in (0, 1] of prioritized replay (Schaul et al. 2016, arXiv:1511.05952, section 3.4),
  which scales a transition's share of the mean; None where replay is uniform.

A gradient is taken through the first argument only.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ddrl.algorithms.quantiles import quantile_huber
from ddrl.networks.heads import support


def q_loss(
    q: Tensor, next_q: Tensor, next_target_q: Tensor, action: Tensor, n_step_return: Tensor,
    bootstrap_discount: Tensor, weight: Tensor | None,
    *, loss: Literal["huber", "mse"] = "huber", huber_delta: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Q-learning loss, plain or Double by `next_q`: the distance of Q(s_t, a_t) from R + discount * Q'(s_{t+k}, a*).

    Source: Mnih et al. 2015 (Nature 518), methods; arXiv:1509.06461, equation 4.

    Args:
        q: [B, A] online Q(s_t, .).
        next_q: [B, A], see the module; so are action, n_step_return, bootstrap_discount and weight.
        next_target_q: [B, A] target-network Q(s_{t+k}, .).
        action: [B] int64.
        n_step_return: [B].
        bootstrap_discount: [B].
        weight: [B] or None.
        loss: "huber" (0.5 d^2 up to huber_delta, linear beyond) or "mse" (0.5 d^2 everywhere, as its limit).
        huber_delta: TD error, in reward units, beyond which the loss is linear.

    Returns:
        The scalar loss, and [B] TD errors (detached) whose size is the new priority.
    """
    next_value = next_target_q.gather(1, next_q.argmax(dim=1, keepdim=True)).squeeze(1)  # [B]
    target = torch.addcmul(n_step_return, bootstrap_discount, next_value).detach()  # [B]
    prediction = q.gather(1, action.unsqueeze(1)).squeeze(1)  # [B]
    if loss == "huber":
        each = F.huber_loss(prediction, target, reduction="none", delta=huber_delta)  # [B]
    else:
        each = 0.5 * (prediction - target).square()
    return _mean(each, weight), target - prediction.detach()


def categorical_loss(
    logits: Tensor, next_q: Tensor, next_target_logits: Tensor, action: Tensor, n_step_return: Tensor,
    bootstrap_discount: Tensor, weight: Tensor | None,
    *, v_min: float, v_max: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Categorical Q-learning loss (C51): the divergence of the predicted from the projected target distribution.

    The target's atoms move to R + discount * z, clipped to the support; each one's probability goes to its two
    neighbors on the support, in proportion to their nearness.
    Source: Bellemare et al. 2017, arXiv:1707.06887, section 4 and algorithm 1, whose cross-entropy differs from the
    divergence by a constant; the priority: Hessel et al. 2018, arXiv:1710.02298, section 3.

    Args:
        logits: [B, A, Z] online logits of the atoms at s_t.
        next_q: [B, A] of *expected* values, see the module; so are the others.
        next_target_logits: [B, A, Z] target-network logits at s_{t+k}.
        action: [B] int64.
        n_step_return: [B].
        bootstrap_discount: [B].
        weight: [B] or None.
        v_min: the lowest atom, in units of the return.
        v_max: the highest atom.

    Returns:
        The scalar loss in nats, and [B] divergences (detached, at least 0), which are the new priorities.
    """
    prob = _of_action(next_target_logits, next_q.argmax(dim=1)).softmax(dim=1)  # [B, Z]
    target = project(prob, n_step_return, bootstrap_discount, v_min=v_min, v_max=v_max).detach()
    log_prob = _of_action(logits, action).log_softmax(dim=1)  # [B, Z]
    divergence = (torch.xlogy(target, target) - target * log_prob).sum(dim=1)  # [B]
    return _mean(divergence, weight), divergence.detach().clamp(min=0.0)


def quantile_loss(
    quantiles: Tensor, next_q: Tensor, next_target_quantiles: Tensor, action: Tensor, n_step_return: Tensor,
    bootstrap_discount: Tensor, weight: Tensor | None,
    *, huber_delta: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Quantile regression loss (QR-DQN): `quantile_huber` of the quantiles against R + discount * those of the target.

    Source: Dabney et al. 2018, arXiv:1710.10044, algorithm 1.

    Args:
        quantiles: [B, A, Z] online quantile values at s_t, in units of the return.
        next_q: [B, A] of *expected* values, see the module; so are the others.
        next_target_quantiles: [B, A, Z] of the target network at s_{t+k}.
        action: [B] int64.
        n_step_return: [B].
        bootstrap_discount: [B].
        weight: [B] or None.
        huber_delta: kappa, in reward units: below it the loss is quadratic, and quantiles turn into expectiles.

    Returns:
        The scalar loss, and [B] TD errors of the expected values (detached), whose size is the new priority.
    """
    next_quantiles = _of_action(next_target_quantiles, next_q.argmax(dim=1))  # [B, Z]
    target = torch.addcmul(n_step_return[:, None], bootstrap_discount[:, None], next_quantiles).detach()
    prediction = _of_action(quantiles, action)  # [B, Z], as the target
    each = quantile_huber(prediction, target, delta=huber_delta)  # [B]
    return _mean(each, weight), (target.mean(dim=1) - prediction.detach().mean(dim=1))


def project(
    prob: Tensor, n_step_return: Tensor, bootstrap_discount: Tensor, *, v_min: float, v_max: float
) -> Tensor:
    """Move a distribution's atoms to R + discount * z and project it back onto the support.

    Atom i gets of each moved atom the share clip(1 - distance / spacing, 0, 1).
    Source: arXiv:1707.06887, equation 7.

    Args:
        prob: [B, Z] probabilities of the atoms.
        n_step_return: [B].
        bootstrap_discount: [B].
        v_min: the lowest atom.
        v_max: the highest atom.

    Returns:
        [B, Z] probabilities.
    """
    num_atoms = prob.shape[1]
    spacing = (v_max - v_min) / (num_atoms - 1)
    atoms = support(num_atoms, v_min=v_min, v_max=v_max, like=prob)  # [Z]
    moved = torch.addcmul(n_step_return[:, None], bootstrap_discount[:, None], atoms)  # [B, Z]
    bounded = moved.clamp(v_min, v_max)
    distance = (bounded[:, None, :] - atoms[:, None]).abs()  # [B, Z (support), Z (moved)]
    share = (1.0 - distance / spacing).clamp(min=0.0)
    return torch.bmm(share, prob[:, :, None]).squeeze(2)


def _of_action(output: Tensor, action: Tensor) -> Tensor:
    """Return the rows of the actions [B] from [B, A, Z]: [B, Z]."""
    return output.gather(1, action[:, None, None].expand(-1, 1, output.shape[2])).squeeze(1)


def _mean(each: Tensor, weight: Tensor | None) -> Tensor:
    """Return the weighted mean of [B] losses, divided by B, not by the sum of the weights."""
    return each.mean() if weight is None else (weight * each).mean()

"""Slow twins: the same maths a second time, shaped like the papers, one sample and one network at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Layers = Sequence[tuple[Tensor, Tensor]]  # (weight [in, out], bias [out]) from input to output


def mlp(layers: Layers, row: Tensor, *, layer_norm: bool = False) -> Tensor:
    """One row [in] through a ReLU network: [out]."""
    for index, (weight, bias) in enumerate(layers):
        row = torch.stack([(row * weight[:, j]).sum() + bias[j] for j in range(len(bias))])
        if index < len(layers) - 1:
            if layer_norm:
                row = (row - row.mean()) / ((row - row.mean()).pow(2).mean() + 1e-5).sqrt()
            row = row.clamp(min=0)
    return row


def sac_act(actor: Layers, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """arXiv:1812.05905, appendix C, for one state: action [A] in (-1, 1) and its log density."""
    output = mlp(actor, observation)
    num_dims = len(output) // 2
    action, log_prob = [], torch.zeros(())
    for i in range(num_dims):
        log_std = -5.0 + 7.0 * (torch.tanh(output[num_dims + i]) + 1) / 2
        u = output[i] + log_std.exp() * noise[i]
        log_prob = log_prob - 0.5 * ((u - output[i]) / log_std.exp()) ** 2 - log_std
        log_prob = log_prob - 0.5 * math.log(2 * math.pi) - torch.log(1 - torch.tanh(u) ** 2)
        action.append(torch.tanh(u))
    return torch.stack(action), log_prob


def soft_q(critic: Layers, observation: Tensor, action: Tensor) -> Tensor:
    """Q(s, a) of one critic for one state and an action in [-1, 1]."""
    return mlp(critic, torch.cat((observation, action)))[0]


def sac_critic_loss(
    actor: Layers, critics: Sequence[Layers], targets: Sequence[Layers], rows: Sequence[Sequence[Tensor]],
    noises: Sequence[Tensor], alpha: float,
) -> Tensor:  # fmt: skip
    """Equations 5 and 6; a row is (s, a in [-1, 1], n-step return, bootstrap discount, s')."""
    total = torch.zeros(())
    for (state, action, return_, discount, next_state), noise in zip(rows, noises, strict=True):
        with torch.no_grad():
            next_action, log_prob = sac_act(actor, next_state, noise)
            smallest = min(float(soft_q(target, next_state, next_action)) for target in targets)
            y = return_ + discount * (smallest - alpha * log_prob)
        for critic in critics:
            total = total + (soft_q(critic, state, action) - y) ** 2
    return total / len(rows)


def sac_policy_loss(
    actor: Layers, critics: Sequence[Layers], states: Sequence[Tensor], noises: Sequence[Tensor], alpha: float
) -> Tensor:
    """Equation 7, climbing the minimum of the given critics."""
    total = torch.zeros(())
    for state, noise in zip(states, noises, strict=True):
        action, log_prob = sac_act(actor, state, noise)
        q = soft_q(critics[0], state, action)
        for critic in critics[1:]:
            other = soft_q(critic, state, action)
            q = other if other < q else q
        total = total + alpha * log_prob - q
    return total / len(states)

"""PQN's learner: lambda-returns of what was just played, then gradient steps on them, without a target network.

Source: Gallici et al. 2025, "Simplifying deep temporal difference learning" (ICLR), arXiv:2407.04811, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddrl import returns
from ddrl.algorithms.pqn.config import Config
from ddrl.algorithms.value_learning.learner import ValueLearner
from ddrl.networks.trunks import to_input
from ddrl.types import EnvSpec, Trajectories

Learner = ValueLearner[Config]


@dataclass(frozen=True)
class Minibatch:
    """Transitions with their targets.

    Attributes:
        observation: [B, *I].
        action: [B] int64.
        target: [B] without gradient, in training units.
    """

    observation: Tensor
    action: Tensor
    target: Tensor


def make_learner(config: Config, spec: EnvSpec, **place: Any) -> Learner:
    """Return a learner with a fresh network; `place`: device, seed and ranks of `ValueLearner`."""
    return ValueLearner(config, spec, loss=minibatch_loss, parts=minibatches, has_target=False, **place)


@torch.no_grad()
def targets(learner: Learner, batch: Trajectories) -> Tensor:
    """Return [T, B] Q(lambda) returns: lambda-returns that bootstrap from the largest value, whatever was played.

    G_t = r_t + d_t * (lambda * G_{t+1} + (1 - lambda) * max_a Q(s_{t+1}, a)).
    Source: Peng and Williams 1994, "Incremental multi-step Q-learning"; arXiv:2407.04811, section 4.
    """
    values = learner.network.expected(learner.network(to_input(batch.observation)))  # [R, A]
    best = learner.spec.only_allowed(values, batch.observation).amax(dim=1)
    return returns.td_lambda(
        batch.reward, batch.discount, best[batch.next_row], batch.continues, lambda_=learner.config.lambda_
    )


def minibatches(learner: Learner, batch: Trajectories) -> Iterator[Minibatch]:
    """Yield the minibatches of an iteration: several epochs over its transitions, shuffled, with constant targets."""
    config, target = learner.config, targets(learner, batch).reshape(-1)
    place = batch.valid.reshape(-1).nonzero().squeeze(1)  # [M]
    row, action = batch.row.reshape(-1), batch.action.reshape(-1)
    # On the CPU, so that every device shuffles alike; a learner that goes on from a state shuffles as that one would.
    generator = torch.Generator().manual_seed(learner.num_updates)
    ranks = learner.ranks
    num = max(1, round(ranks.count(len(place)) / config.minibatch_size))
    for _ in range(config.num_epochs):
        order = torch.randperm(len(place), generator=generator).to(place.device)
        for part in ranks.each(place[order].tensor_split(num), place[:1], num):
            yield Minibatch(batch.observation[row[part]], action[part], target[part])


def minibatch_loss(learner: Learner, batch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return half the mean squared error, and `q_mean` and `td_error`, the mean largest value and size of errors."""
    q = learner.network(to_input(batch.observation))  # [B, A]
    error = batch.target - q.gather(1, batch.action.unsqueeze(1)).squeeze(1)
    best = learner.spec.only_allowed(q.detach(), batch.observation).amax(dim=1)
    return 0.5 * error.square().mean(), {"q_mean": best.mean(), "td_error": error.detach().abs().mean()}

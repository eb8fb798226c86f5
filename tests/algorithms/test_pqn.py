"""PQN: targets by hand, an iteration against a slow twin, and what its policy reports."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithms import DISCRETE, make_learner, make_policy
from support.reference_ppo import make_feed, tensors

from ddrl.algorithms.pqn.learner import targets


def test_targets_bootstrap_from_the_largest_value_whatever_was_played() -> None:
    """Values of s are s and -s: V(s) = |s|. Truncated after the second step, terminated after the third."""
    fragment = replace(
        make_feed(DISCRETE, num_fragments=1)[0],
        observation=np.array([1, -2, 3, -4, 5], np.float32).reshape(5, 1, 1),
        action=np.zeros((4, 1), np.int64),
        reward=np.array([[10], [20], [30], [40]], np.float32),
        terminated=np.arange(4)[:, None] == 2,
        truncated=np.arange(4)[:, None] == 1,
        final_index=np.array([[1, 0]], np.int32),
        final_observation=np.array([[-50]], np.float32),
        extras={"behavior_log_prob": np.zeros((4, 1), np.float32)},
    )
    spec = replace(DISCRETE, observation_shape=(1,), action_sizes=(2,))
    pqn = make_learner("pqn", spec, lambda_=0.5)
    pqn.network.forward = lambda x: torch.cat((x, -x), dim=1)
    found = targets(pqn, tensors([fragment], gamma=0.5))
    second = 20 + 0.5 * 50
    assert found.squeeze(1).tolist() == [10 + 0.5 * (0.5 * 2 + 0.5 * second), second, 30, 40 + 0.5 * 5]


def slow_values(parameters: dict[str, Any], row: torch.Tensor) -> torch.Tensor:
    for layer in (0, 1):
        row = parameters[f"trunk.layers.{layer}.weight"] @ row + parameters[f"trunk.layers.{layer}.bias"]
        row = (row - row.mean()) / (row.var(correction=0) + 1e-5).sqrt()
        row = row.clamp(min=0)
    return parameters["head.advantage.weight"] @ row + parameters["head.advantage.bias"]


def test_an_iteration_equals_a_slow_twin() -> None:
    """Each minibatch of each epoch, with targets of the weights that the iteration began with."""
    pqn, batch = make_learner("pqn", DISCRETE, max_grad_norm=None), tensors(make_feed(DISCRETE))
    parameters = {
        name: value.detach().clone().requires_grad_() for name, value in pqn.network.named_parameters()
    }
    optimizer = torch.optim.Adam(parameters.values(), lr=1e-2, eps=1e-8)
    with torch.no_grad():
        best = torch.stack([slow_values(parameters, row).max() for row in batch.observation])
        target = torch.zeros(batch.reward.shape)
        for t in reversed(range(len(target))):
            for b in range(target.shape[1]):
                value = best[batch.next_row[t, b]]
                if batch.continues[t, b]:
                    value = 0.1 * value + 0.9 * target[t + 1, b]
                target[t, b] = batch.reward[t, b] + batch.discount[t, b] * value
    seen: list[Any] = []
    loss_of = pqn._loss
    pqn._loss = lambda learner, part: seen.append(part) or loss_of(learner, part)
    metrics = pqn.update(batch)
    played = batch.valid.reshape(-1)
    num = int(played.sum())
    assert len(seen) == pqn.num_updates == 2 * round(num / 20)
    rows = batch.observation[batch.row.reshape(-1)[played]]
    actions, goals = batch.action.reshape(-1)[played], target.reshape(-1)[played]
    keys = {tuple(row.tolist()): (int(a), float(g)) for row, a, g in zip(rows, actions, goals, strict=True)}
    for epoch in (seen[: len(seen) // 2], seen[len(seen) // 2 :]):
        assert sum(len(part.action) for part in epoch) == num
    for part in seen:
        for row, action, goal in zip(part.observation, part.action, part.target, strict=True):
            assert (int(action), float(goal)) == pytest.approx(keys[tuple(row.tolist())], rel=1e-4, abs=1e-5)
        values = torch.stack([slow_values(parameters, row) for row in part.observation])
        error = part.target - values[torch.arange(len(values)), part.action]
        optimizer.zero_grad()
        loss = 0.5 * (error**2).mean()
        loss.backward()
        optimizer.step()
    loss, error, values = loss.detach(), error.detach(), values.detach()
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-3)
    assert float(metrics["td_error"]) == pytest.approx(float(error.abs().mean()), rel=1e-3)
    assert float(metrics["q_mean"]) == pytest.approx(float(values.max(dim=1).values.mean()), rel=1e-3)
    for name, value in pqn.network.named_parameters():
        torch.testing.assert_close(value.detach(), parameters[name].detach(), rtol=1e-3, atol=1e-4)


def test_the_policy_reports_the_probability_of_what_it_plays() -> None:
    spec = replace(DISCRETE, observation_shape=(5,), action_sizes=(3,), has_mask=True)
    learner = make_learner("pqn", spec)
    policy = make_policy("pqn", spec, weights=learner.weights() | {"epsilon": torch.tensor(0.3)})
    seen = np.random.default_rng(0).normal(size=(4_000, 5)).astype(np.float32)
    seen[:, 2:] = [1, 0, 1]
    action, columns = policy.explore(seen, np.random.default_rng(1))
    assert columns.keys() == {"behavior_log_prob"} and columns["behavior_log_prob"].dtype == np.float32
    is_best = action == policy.act(seen)
    expected = np.where(is_best, math.log(0.7 + 0.15), math.log(0.15))
    np.testing.assert_allclose(columns["behavior_log_prob"], expected, rtol=1e-5)
    assert abs(is_best.mean() - 0.85) < 0.03 and not (action == 1).any()

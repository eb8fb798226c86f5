"""TD3: hand numbers, the slow twin of updates, delays, the policy's noise."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import reference_q
from support.algorithms import CONTINUOUS, make_learner, make_policy
from torch import Tensor, tensor

from ddrl.algorithms.td3.learner import smoothed
from ddrl.networks.mlp import MLP

make = partial(make_learner, "td3", CONTINUOUS)
make_batch = partial(reference_q.make_batch, spec=CONTINUOUS)
HALF, MIDDLE = tensor([2.0, 0.5]), tensor([0.0, 0.5])  # of the range of actions


def test_smoothed_hand_numbers() -> None:
    action, noise = tensor([[0.0, 0.9], [-0.2, -0.95]]), tensor([[1.0, 9.0], [-9.0, -0.5]])
    found = smoothed(action, noise, scale=0.2, clip=0.5)
    torch.testing.assert_close(found, tensor([[0.2, 1.0], [-0.7, -1.0]]))


def modules(network: MLP) -> list[torch.nn.Sequential]:
    """Return each member as plain torch."""
    found = []
    for e in range(network.num_members or 1):
        layers: list[torch.nn.Module] = []
        for weight, bias in zip(network.weights, network.biases, strict=True):
            w, b = (weight, bias) if network.num_members is None else (weight[e], bias[e, 0])
            linear = torch.nn.Linear(*w.shape)
            linear.weight.data, linear.bias.data = w.detach().T.clone(), b.detach().clone()
            layers += [linear, torch.nn.ReLU()]
        found.append(torch.nn.Sequential(*layers[:-1]))
    return found


def q_of(critic: torch.nn.Module, state: Tensor, action: Tensor) -> Tensor:
    value: Tensor = critic(torch.cat((state, action), dim=1))
    return value[:, 0]


class Twin:
    """Algorithm 1 of the paper, in plain torch."""

    def __init__(self, td3: Any) -> None:
        (self.actor,), self.critics = modules(td3.actor), modules(td3.critics)
        self.target_actor, self.target_critics = deepcopy(self.actor), deepcopy(self.critics)
        rate = td3.config.learning_rate
        self.adam_actor = torch.optim.Adam(self.actor.parameters(), rate)
        self.adam_critics = torch.optim.Adam([p for c in self.critics for p in c.parameters()], rate)
        self.config, self.num = td3.config, 0

    def update(self, batch: Any, noise: Tensor) -> tuple[float, float | None]:
        clip = self.config.target_noise_clip
        with torch.no_grad():
            epsilon = (self.config.target_noise * noise).clamp(-clip, clip)
            action = (torch.tanh(self.target_actor(batch.next_observation)) + epsilon).clamp(-1, 1)
            targets = [q_of(critic, batch.next_observation, action) for critic in self.target_critics]
            y = batch.n_step_return + batch.bootstrap_discount * torch.stack(targets).amin(0)
        played = (batch.action - MIDDLE) / HALF
        losses = [((q_of(critic, batch.observation, played) - y) ** 2).mean() for critic in self.critics]
        loss = sum(losses[1:], losses[0])
        self.adam_critics.zero_grad()
        loss.backward()
        self.adam_critics.step()
        climbed = None
        if self.num % self.config.policy_delay == 0:
            own = torch.tanh(self.actor(batch.observation))
            policy_loss = -q_of(self.critics[0], batch.observation, own).mean()
            self.adam_actor.zero_grad()
            policy_loss.backward()  # type: ignore[no-untyped-call]
            self.adam_actor.step()
            climbed = float(policy_loss.detach())
            pairs = [(self.target_actor, self.actor), *zip(self.target_critics, self.critics, strict=True)]
            with torch.no_grad():
                for target, network in pairs:
                    for one, other in zip(target.parameters(), network.parameters(), strict=True):
                        one.mul_(1 - self.config.target_rate).add_(self.config.target_rate * other)
        self.num += 1
        return float(loss.detach()), climbed


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_updates_equal_the_slow_twin(delay: int) -> None:
    td3 = make(policy_delay=delay, target_noise=0.4)
    twin = Twin(td3)
    for i in range(7):
        noise = torch.Generator()
        noise.set_state(td3.state()["noise"])
        batch = make_batch(i)
        metrics = td3.update(batch)
        loss, climbed = twin.update(batch, torch.randn(6, 2, generator=noise))
        assert float(metrics["critic_loss"]) == pytest.approx(loss, rel=1e-4)
        assert ("policy_loss" in metrics) == (climbed is not None)
        if climbed is not None:
            assert float(metrics["policy_loss"]) == pytest.approx(climbed, rel=1e-4, abs=1e-6)
    for name, target in (("target_actor", twin.target_actor), ("actor", twin.actor)):
        (found,) = modules(getattr(td3, name))
        for one, other in zip(found.parameters(), target.parameters(), strict=True):
            torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-3, atol=1e-5)


def test_a_given_policy_waits_for_the_critics() -> None:
    td3 = make(critic_warmup_updates=4, policy_delay=1)
    td3.from_policy = True
    before = td3.weights()
    for i in range(4):
        assert "policy_loss" not in td3.update(make_batch(i))
    torch.testing.assert_close(td3.weights(), before, rtol=0, atol=0)
    assert "policy_loss" in td3.update(make_batch(4))


def test_exploration_adds_its_noise_within_the_bounds() -> None:
    weights = make().weights()
    rows = np.zeros((4_000, 3), np.float32)
    policy = make_policy("td3", CONTINUOUS, weights=weights, exploration_noise=0.2)
    mode = policy.act(rows[:1])
    action, extras = policy.explore(rows, np.random.default_rng(0))
    assert not extras
    np.testing.assert_allclose(action.std(axis=0), 0.2 * HALF.numpy(), rtol=0.1)
    np.testing.assert_allclose(action.mean(axis=0), mode[0], atol=0.02)
    wild = make_policy("td3", CONTINUOUS, weights=weights, exploration_noise=2.0)
    action, _ = wild.explore(rows, np.random.default_rng(0))
    low, high = np.array(CONTINUOUS.action_low), np.array(CONTINUOUS.action_high)
    assert (action >= low).all() and (action <= high).all() and (action == high).any()

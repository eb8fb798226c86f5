"""SAC: hand numbers, the slow twin of one update, temperature and delays, a game learned, the policy."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import reference_q
from support.algorithms import CONTINUOUS, PICTURES, Options, make_learner, make_policy
from support.reference import Layers, sac_act, sac_critic_loss, sac_policy_loss
from torch import Tensor, tensor

from ddrl.algorithms.sac import learner as sac_learner
from ddrl.algorithms.sac.learner import critic_loss, policy_loss, quantile_critic_loss, temperature_loss
from ddrl.networks.mlp import MLP

ROWS = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)
HALF, MIDDLE = np.array([2.0, 0.5]), np.array([0.0, 0.5])  # of the range of actions


make_batch = partial(reference_q.make_batch, spec=CONTINUOUS)


def make(**options: Any) -> Any:
    return make_learner("sac", CONTINUOUS, **options)


def actor_layers(network: MLP) -> Layers:
    pairs = zip(network.weights, network.biases, strict=True)
    return [(w.detach().clone(), b.detach().clone()) for w, b in pairs]


def critic_layers(network: MLP) -> list[Layers]:
    layers = actor_layers(network)
    return [[(w[e].clone(), b[e, 0].clone()) for w, b in layers] for e in range(network.num_members)]


def leaves(layers: Layers) -> list[Tensor]:
    return [w.requires_grad_() for w, _ in layers] + [b.requires_grad_() for _, b in layers]


def test_critic_loss_hand_numbers() -> None:
    q = tensor([[1.0, 2.0], [0.0, 3.0]], requires_grad=True)
    next_q, log_prob = tensor([[5.0, 9.0], [4.0, 9.0]]), tensor([2.0, 7.0])
    given = q, next_q, log_prob, tensor([1.0, 2.0]), tensor([0.5, 0.0]), tensor(0.5)
    loss, error = critic_loss(*given)
    # targets: 1 + 0.5 (4 - 0.5 * 2) = 2.5 and, terminated, 2
    assert float(loss.detach()) == pytest.approx(((1 - 2.5) ** 2 + 2.5**2 + 0 + 1) / 2)
    (gradient,) = torch.autograd.grad(loss, q)
    torch.testing.assert_close(gradient, tensor([[-1.5, 0.0], [-2.5, 1.0]]))
    torch.testing.assert_close(error, tensor([2.0, 0.5]))
    weighted, _ = critic_loss(*given, tensor([0.5, 0.1]))
    assert float(weighted.detach()) == pytest.approx((0.5 * (1.5**2 + 2.5**2) + 0.1 * 1) / 2)


def test_quantile_critic_loss_hand_numbers_and_slow_twin() -> None:
    """By hand: of the quantiles 1, 2, 3, 9 the largest two are left out; the twin goes pair by pair."""
    q = tensor([[[0.0, 4.0]], [[1.0, 1.0]]], requires_grad=True)  # [E, B, Z] = [2, 1, 2]
    others = tensor([2.0]), tensor([1.0]), tensor([0.5]), tensor(0.5)
    target = tensor([[[3.0, 1.0]], [[9.0, 2.0]]])
    loss, error = quantile_critic_loss(q, target, *others, dropped=1)
    # targets 1 + 0.5 (1 - 1) = 1 and 1 + 0.5 (2 - 1) = 1.5; tau 1/4 and 3/4
    at_0, at_4 = 0.25 * (0.5 + 1.0) / 2, 0.25 * (2.5 + 2.0) / 2
    at_1, other_1 = 0.25 * 0.125 / 2, 0.75 * 0.125 / 2
    assert float(loss.detach()) == pytest.approx((at_0 + at_4 + at_1 + other_1) / 2)
    assert error.tolist() == [pytest.approx(1.5 - 1.25)]
    weighted, _ = quantile_critic_loss(q, target, *others, tensor([0.5]), dropped=1)
    assert float(weighted.detach()) == pytest.approx(float(loss.detach()) / 2)
    generator = torch.Generator().manual_seed(0)
    q, target = (3 * torch.randn(3, 4, 5, generator=generator) for _ in range(2))
    log_prob, return_, discount = (torch.rand(4, generator=generator) for _ in range(3))
    found, _ = quantile_critic_loss(q, target, log_prob, return_, discount, tensor(0.3), dropped=2)
    total = 0.0
    for b in range(4):
        kept = sorted(float(target[e, b, z]) for e in range(3) for z in range(5))[: 3 * 3]
        goals = [float(return_[b] + discount[b] * (y - 0.3 * log_prob[b])) for y in kept]
        for e in range(3):
            for z in range(5):
                for goal in goals:
                    u = goal - float(q[e, b, z])
                    huber = u * u / 2 if abs(u) < 1 else abs(u) - 0.5
                    total += abs((z + 0.5) / 5 - (u < 0)) * huber / (5 * len(goals) * 4)
    assert float(found) == pytest.approx(total, rel=1e-5)


def test_policies_climb_the_mean_of_all_quantiles() -> None:
    sac, batch = make(num_quantiles=4, dropped_quantiles=1, initial_temperature=1.0), make_batch(3)
    noise = torch.Generator()
    noise.set_state(sac.state()["noise"])
    _, current = (torch.randn(6, 2, generator=noise) for _ in range(2))
    before = actor_layers(sac.actor)
    metrics = sac.update(batch)
    total = 0.0
    for row, each in zip(batch.observation, current, strict=True):
        action, log_prob = sac_act(before, row, each)
        quantiles = sac.critics(torch.cat((row, action))[None])  # as just updated
        total += float((log_prob - quantiles.mean()).detach()) / len(current)
    assert float(metrics["policy_loss"]) == pytest.approx(total, rel=1e-4)


def test_policy_loss_hand_numbers() -> None:
    q = tensor([[1.0, 2.0], [0.0, 3.0]], requires_grad=True)
    log_prob = tensor([2.0, -4.0], requires_grad=True)
    loss = policy_loss(q, log_prob, tensor(0.5))
    assert float(loss.detach()) == pytest.approx(((1 - 0) + (-2 - 2)) / 2)
    q_gradient, log_prob_gradient = torch.autograd.grad(loss, (q, log_prob))
    torch.testing.assert_close(q_gradient, tensor([[0.0, -0.5], [-0.5, 0.0]]))
    torch.testing.assert_close(log_prob_gradient, tensor([0.25, 0.25]))


def test_temperature_loss_hand_numbers_and_own_gradient() -> None:
    log_temperature = tensor(math.log(0.5), requires_grad=True)
    loss = temperature_loss(log_temperature, tensor([1.0, 2.0]), target_entropy=-2.0)
    assert float(loss.detach()) == pytest.approx(-0.5 * (1.5 - 2.0))
    (gradient,) = torch.autograd.grad(loss, log_temperature)
    torch.testing.assert_close(gradient, loss.detach())


@pytest.mark.parametrize(
    ("options", "num_members"),
    [({"initial_temperature": 0.3}, 2), ({"form": "sac1", "temperature": 0.3}, 1)],
)
def test_one_update_equals_the_slow_twin(options: Options, num_members: int) -> None:
    sac, batch = make(**options), make_batch(3)
    for i in range(3):  # so that targets differ from critics and temperature from its start
        before = sac.state()
        sac.update(make_batch(i))
        expected = 0.9 * before["target_critics.value"] + 0.1 * sac.state()["critics.value"]
        torch.testing.assert_close(sac.state()["target_critics.value"], expected)
    with torch.no_grad():  # so that the second critic is the smaller one somewhere only, or everywhere
        sac.critics.biases[-1][1] -= 0.1
    temperature = float(sac.state()["temperature.value"].exp())
    noise = torch.Generator()
    noise.set_state(sac.state()["noise"])
    next_noise, current_noise = (list(torch.randn(6, 2, generator=noise)) for _ in range(2))
    actor = actor_layers(sac.actor)
    critics, targets = critic_layers(sac.critics), critic_layers(sac.target_critics)
    unit_action = (batch.action - tensor(MIDDLE)).div(tensor(HALF)).float()
    unit = replace(batch, action=unit_action)
    rows = list(zip(*(column for column in vars(unit).values() if column is not None), strict=True))
    metrics = sac.update(batch)

    parameters = [leaves(critic) for critic in critics]
    loss = sac_critic_loss(actor, critics, targets, rows, next_noise, temperature)
    torch.testing.assert_close(metrics["critic_loss"], loss.detach())
    gradients = [torch.autograd.grad(loss, member, retain_graph=True) for member in parameters]
    expected = torch.cat([torch.stack(pair).flatten() for pair in zip(*gradients, strict=True)])
    torch.testing.assert_close(sac.critic_parameters.vector.grad, expected, atol=1e-6, rtol=1e-4)

    actor_parameters = leaves(actor)
    maximized = critic_layers(sac.critics)[:num_members]  # as just updated
    loss = sac_policy_loss(actor, maximized, list(batch.observation), current_noise, temperature)
    torch.testing.assert_close(metrics["policy_loss"], loss.detach())
    expected = torch.cat([part.flatten() for part in torch.autograd.grad(loss, actor_parameters)])
    torch.testing.assert_close(sac.actor_parameters.vector.grad, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [{"target_entropy": 50.0}, {"target_entropy": -50.0}, {"temperature": 0.0}, {"temperature": 0.2}],
)
def test_temperature_is_fixed_or_moves_towards_the_target_entropy(options: Options) -> None:
    sac = make(**options)
    for i in range(5):
        sac.update(make_batch(i))
    temperature = float(sac.state()["temperature.value"].exp())
    if "temperature" in options:
        assert temperature == pytest.approx(options["temperature"])
        saved = {**sac.weights(), **sac.state()}  # what is not finite is neither published nor saved
        assert all(torch.isfinite(value).all() for value in saved.values() if value.is_floating_point())
    else:
        assert (temperature > 0.2) == (options["target_entropy"] > 0)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_with_dropout_the_policy_climbs_the_mean_of_the_critics(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DroQ, arXiv:2110.02034, algorithm 2, line 10."""
    sac, given, seen = make(dropout=dropout, num_critics=3), [], []

    def loss(q: Tensor, *others: Tensor) -> Tensor:
        given.append(q.amin(dim=0))
        return policy_loss(q, *others)

    monkeypatch.setattr(sac_learner, "policy_loss", loss)
    sac.critics.register_forward_hook(lambda module, inputs, output: seen.append(output[..., 0]))
    sac.update(make_batch(1))
    torch.testing.assert_close(given[-1], seen[-1].mean(dim=0) if dropout else seen[-1].amin(dim=0))


def test_policy_delay_skips_actor_and_temperature() -> None:
    sac = make(policy_delay=3)
    for i in range(6):
        before = sac.state()
        metrics = sac.update(make_batch(i))
        state = sac.state()
        for name in ("actor.value", "temperature.value"):
            assert torch.equal(before[name], state[name]) == (i % 3 != 0)
        assert ("policy_loss" in metrics) == (i % 3 == 0)
        assert not torch.equal(before["critics.value"], state["critics.value"])


def test_with_batch_norm_one_update_equals_the_slow_twin() -> None:
    """CrossQ: both halves of the batch share statistics, there is no target; the actor climbs the running ones."""
    sac, batch = make(batch_norm=True, target_rate=0.01, temperature=0.3), make_batch(3)
    for i in range(3):
        sac.update(make_batch(i))
    actor, critics = deepcopy(sac.actor), deepcopy(sac.critics)
    noise = torch.Generator()
    noise.set_state(sac.state()["noise"])
    next_noise, current_noise = (torch.randn(6, 2, generator=noise) for _ in range(2))
    metrics = sac.update(batch)

    def draw(parameters: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = parameters.chunk(2, dim=1)
        std = (-5 + 3.5 * (raw.tanh() + 1)).exp()
        normal = torch.distributions.Normal(mean, std)
        raw_action = mean + std * noise
        log_prob = normal.log_prob(raw_action) - (1 - raw_action.tanh() ** 2).log()
        return raw_action.tanh(), log_prob.sum(dim=1)

    with torch.no_grad():
        next_action, next_log_prob = draw(actor(batch.next_observation), next_noise)
    action = (batch.action - tensor(MIDDLE)).div(tensor(HALF)).float()
    rows = torch.cat([torch.cat(pair, dim=1) for pair in (
        (batch.observation, action), (batch.next_observation, next_action)
    )])  # fmt: skip
    q, next_q = critics(rows, train=True).chunk(2, dim=1)
    value = next_q[..., 0].detach().amin(dim=0) - 0.3 * next_log_prob
    target = batch.n_step_return + batch.bootstrap_discount * value
    loss = (q[..., 0] - target).square().mean(dim=1).sum()
    torch.testing.assert_close(metrics["critic_loss"], loss.detach())
    expected = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(critics.parameters()))])
    torch.testing.assert_close(sac.critic_parameters.vector.grad, expected, atol=1e-6, rtol=1e-4)
    drawn, log_prob = draw(actor(batch.observation, train=True), current_noise)
    values = sac.critics(torch.cat((batch.observation, drawn), dim=1))[..., 0].amin(dim=0)  # as just updated
    policy = (0.3 * log_prob - values).mean()
    torch.testing.assert_close(metrics["policy_loss"], policy.detach(), atol=1e-5, rtol=1e-4)
    expected = torch.cat([part.flatten() for part in torch.autograd.grad(policy, list(actor.parameters()))])
    torch.testing.assert_close(sac.actor_parameters.vector.grad, expected, atol=1e-5, rtol=1e-3)


def test_only_the_critics_loss_changes_the_network_before_them() -> None:
    """And its target follows it as the critics' does."""
    options = {"network": "conv", "learning_rate": 1e-2, "target_rate": 0.25}
    with_actor, without = (make_learner("sac", PICTURES, **options, policy_delay=k) for k in (1, 9))
    before = {name: tensor.clone() for name, tensor in without.trunk.state_dict().items()}
    for seed in range(2):
        former = {name: tensor.clone() for name, tensor in with_actor.target_trunk.state_dict().items()}
        for learner in (with_actor, without):
            learner.update(reference_q.make_batch(seed, spec=PICTURES))
        for name, moved in with_actor.trunk.state_dict().items():
            found = with_actor.target_trunk.state_dict()[name]
            torch.testing.assert_close(found, former[name].lerp(moved, 0.25))
    assert not torch.equal(with_actor.actor_parameters.vector, without.actor_parameters.vector)
    second = with_actor.trunk.state_dict()
    assert all(not torch.equal(tensor, before[name]) for name, tensor in second.items())


@pytest.mark.parametrize("critics", [{}, {"num_quantiles": 9, "dropped_quantiles": 1}])
def test_learns_the_best_action_of_a_one_step_game(critics: Options) -> None:
    """Reward -(a - best)^2, the episode ends at once: the mode must find `best`."""
    options = {"hidden_sizes": (64, 64), "learning_rate": 3e-3, "temperature": 0.01} | critics
    sac, generator = make(seed=0, **options), torch.Generator().manual_seed(0)
    best, span = tensor([1.0, 0.25]), tensor([4.0, 1.0])
    for i in range(600):
        action = torch.rand(64, 2, generator=generator) * span - tensor([2.0, 0.0])
        reward = -((action - best) / span * 4).square().sum(dim=1)
        batch = replace(make_batch(i, rows=range(64)), action=action, n_step_return=reward)
        sac.update(replace(batch, bootstrap_discount=torch.zeros(64)))
    policy = make_policy("sac", CONTINUOUS, weights=sac.weights(), **options)
    error = (policy.act(ROWS).mean(axis=0) - best.numpy()) / HALF
    np.testing.assert_allclose(error, 0.0, atol=0.1)


def test_policy_has_the_networks_mode_and_spread() -> None:
    sac, row, num = make(), ROWS[:1], 40_000
    policy = make_policy("sac", CONTINUOUS, weights=sac.weights())
    with torch.no_grad():
        output = sac.actor(torch.from_numpy(ROWS)).numpy()
    mode = policy.act(ROWS)
    assert mode.dtype == np.float32
    np.testing.assert_allclose(mode, np.tanh(output[:, :2]) * HALF + MIDDLE, rtol=1e-5, atol=1e-6)
    actions, extras = policy.explore(np.repeat(row, num, 0), np.random.default_rng(0))
    assert (actions.shape, actions.dtype, extras) == ((num, 2), np.float32, {})
    assert np.all(actions >= CONTINUOUS.action_low) and np.all(actions <= CONTINUOUS.action_high)
    pre_tanh = np.arctanh(np.clip((actions - MIDDLE) / HALF, -1 + 1e-7, 1 - 1e-7))
    mean, raw = output[0].reshape(2, 2)
    np.testing.assert_allclose(pre_tanh.mean(0), mean, atol=0.01)
    np.testing.assert_allclose(np.log(pre_tanh.std(0)), -1.5 + 3.5 * np.tanh(raw), atol=0.02)

"""SAC: hand numbers, the slow twin of one update, every option's effect, continuation, the player."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithms import CONTINUOUS, CPU, make_learner, make_policy
from support.algorithms import continuous_batch as make_batch
from support.reference import Layers, sac_critic_loss, sac_policy_loss
from torch import Tensor

from ddrl.algorithms.sac.config import Config
from ddrl.algorithms.sac.learner import SAC, critic_loss, policy_loss, temperature_loss
from ddrl.algorithms.sac.policy import Policy
from ddrl.networks.mlp import MLP

SPEC = CONTINUOUS
BATCH_SIZE = 6


def make(**options: Any) -> SAC:
    sac: SAC = make_learner("sac", SPEC, **options)
    return sac


def after(num_updates: int, **options: Any) -> dict[str, Tensor]:
    sac = make(**options)
    for i in range(num_updates):
        sac.update(make_batch(i))
    return sac.state()


def actor_layers(network: MLP) -> Layers:
    return [
        (w.detach().clone(), b.detach().clone()) for w, b in zip(network.weights, network.biases, strict=True)
    ]


def critic_layers(network: MLP) -> list[Layers]:
    pairs = list(zip(network.weights, network.biases, strict=True))
    return [
        [(w[e].detach().clone(), b[e, 0].detach().clone()) for w, b in pairs]
        for e in range(network.num_members)
    ]


def leaves(layers: Layers) -> list[Tensor]:
    return [w.requires_grad_() for w, _ in layers] + [b.requires_grad_() for _, b in layers]


def test_critic_loss_hand_numbers() -> None:
    q = torch.tensor([[1.0, 2.0], [0.0, 3.0]], requires_grad=True)
    next_q, log_prob = torch.tensor([[5.0, 9.0], [4.0, 9.0]]), torch.tensor([2.0, 7.0])
    loss = critic_loss(
        q, next_q, log_prob, torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0]), torch.tensor(0.5)
    )
    # targets: 1 + 0.5 (4 - 0.5 * 2) = 2.5 and, terminated, 2
    assert float(loss.detach()) == pytest.approx(((1 - 2.5) ** 2 + 2.5**2 + 0 + 1) / 2)
    (gradient,) = torch.autograd.grad(loss, q)
    torch.testing.assert_close(gradient, torch.tensor([[-1.5, 0.0], [-2.5, 1.0]]))


def test_policy_loss_hand_numbers() -> None:
    q = torch.tensor([[1.0, 2.0], [0.0, 3.0]], requires_grad=True)
    log_prob = torch.tensor([2.0, -4.0], requires_grad=True)
    loss = policy_loss(q, log_prob, torch.tensor(0.5))
    assert float(loss.detach()) == pytest.approx(((1 - 0) + (-2 - 2)) / 2)
    q_gradient, log_prob_gradient = torch.autograd.grad(loss, (q, log_prob))
    torch.testing.assert_close(q_gradient, torch.tensor([[0.0, -0.5], [-0.5, 0.0]]))
    torch.testing.assert_close(log_prob_gradient, torch.tensor([0.25, 0.25]))


def test_temperature_loss_hand_numbers_and_own_gradient() -> None:
    log_temperature = torch.tensor(math.log(0.5), requires_grad=True)
    loss = temperature_loss(log_temperature, torch.tensor([1.0, 2.0]), target_entropy=-2.0)
    assert float(loss.detach()) == pytest.approx(-0.5 * (1.5 - 2.0))
    (gradient,) = torch.autograd.grad(loss, log_temperature)
    torch.testing.assert_close(gradient, loss.detach())


@pytest.mark.parametrize(
    ("options", "num_members"),
    [({"initial_temperature": 0.3}, 2), ({"form": "sac1", "temperature": 0.3}, 1)],
)
def test_one_update_equals_the_slow_twin(options: dict[str, Any], num_members: int) -> None:
    sac, batch = make(**options), make_batch(3)
    for i in range(3):  # so that targets differ from critics and temperature from its start
        sac.update(make_batch(i))
    temperature = float(sac.state()["temperature.value"].exp())
    noise = torch.Generator()
    noise.set_state(sac.state()["noise"])
    next_noise, current_noise = (torch.randn(BATCH_SIZE, 2, generator=noise) for _ in range(2))
    actor, critics, targets = (
        actor_layers(sac.actor), critic_layers(sac.critics), critic_layers(sac.target_critics)
    )  # fmt: skip
    unit_action = (batch.action - torch.tensor([0.0, 0.5])) / torch.tensor([2.0, 0.5])
    rows = list(
        zip(batch.observation, unit_action, batch.n_step_return, batch.bootstrap_discount,
            batch.next_observation, strict=True)
    )  # fmt: skip
    metrics = sac.update(batch)

    parameters = [leaves(critic) for critic in critics]
    loss = sac_critic_loss(actor, critics, targets, rows, list(next_noise), temperature)
    torch.testing.assert_close(metrics["critic_loss"], loss.detach())
    gradients = [torch.autograd.grad(loss, member, retain_graph=True) for member in parameters]
    expected = torch.cat([torch.stack(pair).flatten() for pair in zip(*gradients, strict=True)])
    torch.testing.assert_close(sac.critic_parameters.vector.grad, expected, atol=1e-6, rtol=1e-4)

    actor_parameters = leaves(actor)
    maximized = critic_layers(sac.critics)[:num_members]  # as just updated
    loss = sac_policy_loss(actor, maximized, list(batch.observation), list(current_noise), temperature)
    torch.testing.assert_close(metrics["policy_loss"], loss.detach())
    gradients_ = torch.autograd.grad(loss, actor_parameters)
    expected = torch.cat([gradient.flatten() for gradient in gradients_])
    torch.testing.assert_close(sac.actor_parameters.vector.grad, expected, atol=1e-6, rtol=1e-4)


def test_targets_follow_the_critics() -> None:
    sac = make()
    before = sac.state()
    assert torch.equal(before["target_critics.value"], before["critics.value"])
    sac.update(make_batch())
    state = sac.state()
    expected = 0.9 * before["target_critics.value"] + 0.1 * state["critics.value"]
    torch.testing.assert_close(state["target_critics.value"], expected)


def test_temperature_moves_towards_the_target_entropy() -> None:
    assert float(after(5, target_entropy=50.0)["temperature.value"]) > 0
    assert float(after(5, target_entropy=-50.0)["temperature.value"]) < 0


def test_form_sac1_ignores_the_second_critic_in_the_policy_loss() -> None:
    first = {}
    for form in ("sac", "sac1"):
        sac = make(form=form, temperature=0.2)
        with torch.no_grad():
            sac.critics.biases[-1][1] -= 100.0  # the minimum is now the second critic everywhere
        metrics = sac.update(make_batch())
        first[form] = float(metrics["policy_loss"])
    assert first["sac"] > first["sac1"] + 50


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


def test_fixed_temperature_stays_and_may_be_zero() -> None:
    for temperature in (0.0, 0.2):
        state = after(3, temperature=temperature)
        assert float(state["temperature.value"].exp()) == pytest.approx(temperature)
        assert all(torch.isfinite(state[name]).all() for name in ("actor.value", "critics.value"))


def test_learns_the_best_action_of_a_one_step_game() -> None:
    """Reward -(a - best)^2, the episode ends at once: the mode must find `best`."""
    config = Config(hidden_sizes=(64, 64), learning_rate=3e-3, temperature=0.01)
    sac = SAC(config, SPEC, device=CPU, seed=0)
    best, generator = torch.tensor([1.0, 0.25]), torch.Generator().manual_seed(0)
    span = torch.tensor([4.0, 1.0])
    for i in range(600):
        batch = make_batch(i, 64)
        action = torch.rand(64, 2, generator=generator) * span - torch.tensor([2.0, 0.0])
        reward = -((action - best) / span * 4).square().sum(dim=1)
        sac.update(replace(batch, action=action, n_step_return=reward, bootstrap_discount=torch.zeros(64)))
    policy = Policy(config, SPEC)
    policy.load(sac.weights())
    rows = make_batch(7, 64).observation.numpy()
    action = policy.act(rows).mean(axis=0)
    error = (action - best.numpy()) / (span.numpy() / 2)  # as a share of half the range
    np.testing.assert_allclose(error, 0.0, atol=0.1)


@pytest.mark.parametrize("hidden_sizes", [(8, 7), (128, 128), (64,), (400, 300)])
def test_mode_does_not_depend_on_the_number_of_rows(hidden_sizes: tuple[int, ...]) -> None:
    policy = make_policy(
        "sac", SPEC, weights=make(hidden_sizes=hidden_sizes).weights(), hidden_sizes=hidden_sizes
    )
    rows = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)
    one_by_one = np.concatenate([policy.act(row[None]) for row in rows])
    for size in range(1, 65):
        start = 64 - size  # so that a row is seen at every place of a block
        actions = policy.act(rows[start:])
        assert actions.tobytes() == one_by_one[start:].tobytes()


def test_mode_equals_the_actor_network() -> None:
    sac = make()
    sac.update(make_batch())
    rows = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
    actions = make_policy("sac", SPEC, weights=sac.weights()).act(rows)
    with torch.no_grad():
        mode = torch.tanh(sac.actor(torch.from_numpy(rows))[:, :2]).numpy()
    assert actions.dtype == np.float32
    np.testing.assert_allclose(actions, mode * [2.0, 0.5] + [0.0, 0.5], rtol=1e-5, atol=1e-6)


def test_exploration_has_the_actor_networks_spread() -> None:
    sac = make()
    row = np.array([[0.3, -0.2, 0.9]], np.float32)
    actions, extras = make_policy("sac", SPEC, weights=sac.weights()).explore(
        np.repeat(row, 40_000, 0), np.random.default_rng(0)
    )
    assert (actions.shape, actions.dtype, extras) == ((40_000, 2), np.float32, {})
    assert np.all(actions >= SPEC.action_low) and np.all(actions <= SPEC.action_high)
    pre_tanh = np.arctanh(np.clip((actions - [0.0, 0.5]) / [2.0, 0.5], -1 + 1e-7, 1 - 1e-7))
    with torch.no_grad():
        mean, raw = sac.actor(torch.from_numpy(row))[0].numpy().reshape(2, 2)
    np.testing.assert_allclose(pre_tanh.mean(0), mean, atol=0.01)
    np.testing.assert_allclose(np.log(pre_tanh.std(0)), -1.5 + 3.5 * np.tanh(raw), atol=0.02)

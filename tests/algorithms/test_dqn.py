"""DQN: the slow twin of an update, targets, statistics, continuation, toys learned."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from support.algorithms import CPU, digest
from support.reference_q import (
    IMAGES,
    PIXELS,
    VECTORS,
    make_batch,
    play,
    slow_categorical_loss,
    slow_q_loss,
    slow_quantile_loss,
)
from torch import Tensor

from ddrl.algorithms.dqn.config import Config
from ddrl.algorithms.dqn.learner import make_learner as make_dqn
from ddrl.algorithms.dqn.policy import Policy
from ddrl.algorithms.value_learning.learner import ValueLearner
from ddrl.envs.toy import register_toys
from ddrl.types import Batch, EnvSpec

SMALL: dict[str, Any] = {"hidden_sizes": (8, 7), "learning_rate": 1e-2, "target_period": 2, "batch_size": 6}
QUANTILE = {"distribution": "quantile", "num_atoms": 5}
CATEGORICAL = {"distribution": "categorical", "num_atoms": 5, "v_min": -3.0, "v_max": 4.0}


def make(spec: EnvSpec = VECTORS, seed: int = 1, **options: Any) -> ValueLearner[Config]:
    return make_dqn(Config(**(SMALL | options)), spec, device=CPU, seed=seed)


def weighted(size: int = 6) -> np.ndarray:
    return np.linspace(0.2, 1.0, size)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "double": {"double": True},
    "mse": {"loss": "mse", "double": True},
    "delta": {"huber_delta": 0.1},
    "dueling": {"dueling": True},
    "categorical": CATEGORICAL,
    "categorical, double": CATEGORICAL | {"double": True},
    "quantile": QUANTILE | {"huber_delta": 0.5},
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_update_equals_the_slow_twin(kind: str) -> None:
    dqn = make(**KINDS[kind], max_grad_norm=None, prioritized=True)
    config = dqn.config
    for i in range(3):  # so that the target is not the network
        dqn.update(make_batch(i, weight=weighted()))
    network, target, batch = (
        copy.deepcopy(dqn.network),
        copy.deepcopy(dqn.target_network),
        make_batch(7, weight=weighted()),
    )
    output, next_online, next_target = (
        network(batch.observation),
        network(batch.next_observation),
        target(batch.next_observation),
    )

    def values(given: Tensor) -> Tensor:
        if config.distribution == "categorical":
            return (given.softmax(dim=2) * torch.linspace(config.v_min, config.v_max, 5)).sum(dim=2)
        return given.mean(dim=2) if config.distribution == "quantile" else given

    rest = (batch.action, batch.n_step_return, batch.bootstrap_discount, batch.weight)
    args = (output, values(next_online if config.double else next_target).detach(), next_target, *rest)
    if config.distribution == "categorical":
        loss, surprise = slow_categorical_loss(*args, v_min=config.v_min, v_max=config.v_max)
    elif config.distribution == "quantile":
        loss, surprise = slow_quantile_loss(*args, huber_delta=config.huber_delta)
    else:
        loss, surprise = slow_q_loss(*args, loss=config.loss, huber_delta=config.huber_delta)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(network.parameters()))])

    metrics = dqn.update(batch)
    torch.testing.assert_close(metrics["loss"], loss.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(metrics["priority"], torch.tensor(surprise).abs(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(metrics["q_mean"], values(output.detach()).max(dim=1).values.mean())
    torch.testing.assert_close(dqn.parameters.vector.grad, expected, atol=1e-6, rtol=1e-4)


def test_hard_target_is_copied_at_each_period() -> None:
    dqn = make(target_period=3)
    start = dqn.state()["network.value"]
    for i in range(1, 8):
        before = dqn.state()["target_network.value"]
        dqn.update(make_batch(i))
        state = dqn.state()
        expected = state["network.value"] if i % 3 == 0 else before
        assert torch.equal(state["target_network.value"], expected)
        if i == 1:
            assert torch.equal(before, start)


def test_soft_target_moves_by_its_rate() -> None:
    dqn = make(target_period=None, target_rate=0.1)
    before = dqn.state()
    dqn.update(make_batch())
    state = dqn.state()
    expected = 0.9 * before["target_network.value"] + 0.1 * state["network.value"]
    torch.testing.assert_close(state["target_network.value"], expected)


@pytest.mark.parametrize("options", [{"target_period": 2}, {"target_period": None, "target_rate": 0.5}])
def test_statistics_of_batches_reach_target_and_policy(options: dict[str, Any]) -> None:
    dqn = make(PIXELS, network="nature", norm="batch", double=True, **options)
    names = dqn.buffers
    assert len(names) == 6, "two for each convolution"
    for i in range(2):
        before = dqn.state()
        dqn.update(make_batch(i, spec=PIXELS))
    state, weights = dqn.state(), dqn.weights()
    for name in names:
        online, target = state[f"network.{name}"], state[f"target_network.{name}"]
        assert float(online.abs().max()) > 0
        rate = options.get("target_rate", 1.0)
        torch.testing.assert_close(target, (1 - rate) * before[f"target_network.{name}"] + rate * online)
        assert torch.equal(weights[name], online)
    assert dqn.network.training
    policy = Policy(dqn.config, PIXELS)
    policy.load(weights)
    observation = make_batch(3, spec=PIXELS).observation
    with torch.no_grad():
        expected = dqn.network.eval()(observation.float() / 255)
    torch.testing.assert_close(torch.from_numpy(policy.values(observation.numpy(), by_row=False)), expected)


def test_statistics_are_those_of_the_first_state_alone() -> None:
    found = []
    for double in (False, True):
        dqn = make(PIXELS, network="nature", norm="batch", double=double)
        dqn.update(make_batch(spec=PIXELS))
        found.append(digest({name: tensor.clone() for name, tensor in dqn.buffers.items()}))
    assert found[0] == found[1]


def test_double_picks_by_the_network_and_values_by_the_target() -> None:
    """Terminated from nowhere, rewards 0: the error tells which value was bootstrapped from."""
    batch = replace(make_batch(), n_step_return=torch.zeros(6), bootstrap_discount=torch.ones(6))
    for double in (False, True):
        dqn = make(double=double, prioritized=True, target_period=1000)
        for i in range(20):
            dqn.update(make_batch(i))
        with torch.no_grad():
            q, next_q = dqn.network(batch.observation), dqn.network(batch.next_observation)
            target = dqn.target_network(batch.next_observation)
        choice = (next_q if double else target).argmax(dim=1)
        assert next_q.argmax(dim=1).tolist() != target.argmax(dim=1).tolist()
        error = target[torch.arange(6), choice] - q[torch.arange(6), batch.action]
        metrics = dqn.update(replace(batch, weight=torch.ones(6)))
        torch.testing.assert_close(metrics["priority"], error.abs())


def test_pixels_stay_bytes_until_the_network() -> None:
    left, right = (make(IMAGES, network="conv") for _ in range(2))
    batch = make_batch(spec=IMAGES)
    assert batch.observation.dtype == torch.uint8
    left.update(batch)
    pixels = [observation.float() / 255 for observation in (batch.observation, batch.next_observation)]
    right.update(replace(batch, observation=pixels[0], next_observation=pixels[1]))
    assert torch.equal(left.state()["network.value"], right.state()["network.value"])


def test_schedules() -> None:
    dqn = make(epsilon=0.9, final_epsilon=0.1, epsilon_anneal_updates=4)
    assert float(dqn.weights()["epsilon"]) == pytest.approx(0.9)
    for expected in (0.7, 0.5, 0.3, 0.1, 0.1):
        metrics, weights = dqn.update(make_batch()), dqn.weights()
        assert float(metrics["epsilon"]) == float(weights["epsilon"]) == pytest.approx(expected)
        assert weights["epsilon"].dtype == torch.float32 and weights["epsilon"].shape == ()


def test_noisy_layers_learn_their_noise() -> None:
    dqn = make(noisy=True, noise_scale=0.5)
    first = dqn.update(make_batch())["loss"]
    again = make(noisy=True, noise_scale=0.5)
    assert torch.equal(again.update(make_batch())["loss"], first), "seeded"
    start = make(noisy=True, noise_scale=0.5).weights()
    names = [name for name in start if name.endswith("_scale")]
    assert names and all(not torch.equal(start[name], dqn.weights()[name]) for name in names)


@pytest.mark.learning
@pytest.mark.parametrize(
    "options", [{}, {"double": True, "n_step": 3}, CATEGORICAL | {"num_atoms": 51, "v_max": 20.0}, QUANTILE]
)
def test_endless_reward_is_worth_its_sum(options: dict[str, Any]) -> None:
    """1 each step, for ever: 1 / (1 - gamma), whatever is done and however many steps are summed."""
    config = Config(hidden_sizes=(16,), learning_rate=1e-2, gamma=0.9, target_period=10, **options)
    spec = EnvSpec("Toy-v0", (1,), "float32", "discrete", (), (2,))
    dqn, n = make_dqn(config, spec, device=CPU, seed=0), config.n_step
    ones, action = torch.ones(8, 1), torch.arange(8) % 2
    sums = torch.full((8,), sum(0.9**i for i in range(n)))
    for _ in range(1500):
        metrics = dqn.update(Batch(ones, action, sums, torch.full((8,), 0.9**n), ones))
    assert float(metrics["q_mean"]) == pytest.approx(10.0, rel=0.03)


@pytest.mark.learning
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"double": True, "dueling": True},
        {"distribution": "categorical", "v_min": 0.0, "v_max": 12.0},
        {"distribution": "quantile", "num_atoms": 11},
        {"noisy": True},
    ],
    ids=["dqn", "double, dueling", "categorical", "quantile", "noisy"],
)
def test_solves_pick(options: dict[str, Any]) -> None:
    """Its end is a truncation: the best policy is worth 1 / (1 - gamma) everywhere."""
    spec = EnvSpec("ddrl/Pick-v0", (4,), "float32", "discrete", (), (4,))
    schedule = {} if options.get("noisy") else {"epsilon_anneal_updates": 500}
    config = Config(
        hidden_sizes=(32,),
        learning_rate=3e-3,
        gamma=0.8,
        batch_size=32,
        target_period=25,
        **schedule,
        **options,
    )
    dqn = make_dqn(config, spec, device=CPU, seed=0)
    policy = Policy(config, spec)
    register_toys()
    assert play(lambda: gymnasium.make(spec.env_id), dqn, policy, num_steps=1500) == 10.0
    value = policy.values(np.eye(4, dtype=np.float32), by_row=False).max(axis=1)
    np.testing.assert_allclose(value, 5.0, rtol=0.1)

"""DQN: the slow twin of an update, targets, statistics, schedules, toys learned."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.algorithms import DISCRETE, Options, digest, make_learner
from support.reference_q import (
    PIXELS,
    make_batch,
    slow_categorical_loss,
    slow_q_loss,
    slow_quantile_loss,
)
from support.subjects import batch_for
from torch import Tensor

from ddrl.types import Batch, EnvSpec

QUANTILE = {"distribution": "quantile", "num_atoms": 5}
CATEGORICAL = {"distribution": "categorical", "num_atoms": 5, "v_min": -3.0, "v_max": 4.0}
BATCH_NORM = {"network": "nature", "norm": "batch"}


def make(spec: EnvSpec = DISCRETE, **options: Any) -> Any:
    return make_learner("dqn", spec, **options)


KINDS: dict[str, Options] = {
    "plain": {},
    "double": {"double": True},
    "mse": {"loss": "mse", "double": True},
    "delta": {"huber_delta": 0.1},
    "dueling": {"dueling": True},
    "categorical": CATEGORICAL,
    "categorical, double": CATEGORICAL | {"double": True},
    "quantile": QUANTILE | {"huber_delta": 0.5},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_one_update_equals_the_slow_twin(options: Options) -> None:
    dqn = make(**options, max_grad_norm=None, prioritized=True)
    config = dqn.config
    with torch.no_grad():  # the target network prefers other actions than the network
        for parameter in dqn.target_network.parameters():
            parameter.mul_(-1.3).add_(0.1)
    batch = batch_for("dqn", dqn, DISCRETE, 7)
    network, target = copy.deepcopy(dqn.network), copy.deepcopy(dqn.target_network)
    output, next_online = network(batch.observation), network(batch.next_observation)
    next_target = target(batch.next_observation)

    def values(given: Tensor) -> Tensor:
        if config.distribution == "categorical":
            return (given.softmax(dim=2) * torch.linspace(config.v_min, config.v_max, 5)).sum(dim=2)
        return given.mean(dim=2) if config.distribution == "quantile" else given

    assert (values(next_online).argmax(dim=1) != values(next_target).argmax(dim=1)).any()
    rest = (batch.action, batch.n_step_return, batch.bootstrap_discount, batch.weight)
    args = (output, values(next_online if config.double else next_target).detach(), next_target, *rest)
    if config.distribution == "categorical":
        loss, td_error = slow_categorical_loss(*args, v_min=config.v_min, v_max=config.v_max)
    elif config.distribution == "quantile":
        loss, td_error = slow_quantile_loss(*args, huber_delta=config.huber_delta)
    else:
        loss, td_error = slow_q_loss(*args, loss=config.loss, huber_delta=config.huber_delta)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(network.parameters()))])

    metrics = dqn.update(batch)
    torch.testing.assert_close(metrics["loss"], loss.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(metrics["priority"], torch.tensor(td_error).abs(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(metrics["q_mean"], values(output.detach()).max(dim=1).values.mean())
    torch.testing.assert_close(dqn.parameters.vector.grad, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("options", [{"target_period": 2}, {"target_period": None, "target_rate": 0.5}])
def test_statistics_of_batches_reach_target_and_weights(options: Options) -> None:
    dqn = make(PIXELS, double=True, **BATCH_NORM, **options)
    assert len(dqn.buffers) == 6, "two for each convolution"
    for i in range(2):
        before = dqn.state()
        dqn.update(make_batch(i, spec=PIXELS))
    state, weights, rate = dqn.state(), dqn.weights(), options.get("target_rate", 1.0)
    for name in dqn.buffers:
        online, target = state[f"network.{name}"], state[f"target_network.{name}"]
        assert float(online.abs().max()) > 0
        torch.testing.assert_close(target, (1 - rate) * before[f"target_network.{name}"] + rate * online)
        assert torch.equal(weights[name], online)
    assert dqn.network.training


def test_statistics_are_those_of_the_first_state_alone() -> None:
    found = []
    for double in (False, True):
        dqn = make(PIXELS, double=double, **BATCH_NORM)
        dqn.update(make_batch(spec=PIXELS))
        found.append(digest(dqn.buffers))
    assert found[0] == found[1]


ENDLESS = [{}, {"double": True, "n_step": 3}, CATEGORICAL | {"num_atoms": 51, "v_max": 20.0}, QUANTILE]


@pytest.mark.learning
@pytest.mark.parametrize("options", ENDLESS)
def test_endless_reward_is_worth_its_sum(options: Options) -> None:
    """1 each step, for ever: 1 / (1 - gamma), whatever is done and however many steps are summed."""
    spec = EnvSpec("Toy-v0", (1,), "float32", "discrete", (), (2,))
    dqn = make(spec, **{"hidden_sizes": (16,), "gamma": 0.9, "target_period": 10} | options)
    n, ones = dqn.config.n_step, torch.ones(8, 1)
    sums = torch.full((8,), sum(0.9**i for i in range(n)))
    for _ in range(1000):
        metrics = dqn.update(Batch(ones, torch.arange(8) % 2, sums, torch.full((8,), 0.9**n), ones))
    assert float(metrics["q_mean"]) == pytest.approx(10.0, rel=0.03)

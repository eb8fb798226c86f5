"""IMPALA: hand numbers, the slow twin of an update, every option's effect, a toy learned from stale data too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.reference_ppo import (
    CONTINUOUS,
    CPU,
    DISCRETE,
    IMAGES,
    PAIRS,
    digest,
    feed,
    leaves,
    make_feed,
    slow_impala_loss,
    slow_policy,
    slow_rows,
    tensors,
    train,
)
from torch import Tensor

from ddrl.algorithms.actor_critic.learner import ActorCriticLearner
from ddrl.algorithms.impala.config import Config
from ddrl.algorithms.impala.learner import make_learner as make_impala
from ddrl.algorithms.impala.learner import policy_gradient_loss
from ddrl.types import EnvSpec, Trajectories

OWN = "reference_ppo:own_network"
SMALL: dict[str, Any] = {"hidden_sizes": (6, 5), "batch_size": 60}


@pytest.fixture(autouse=True)
def _own_networks_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "reference_ppo")


def make(spec: EnvSpec = DISCRETE, **options: Any) -> ActorCriticLearner[Any]:
    return make_impala(Config(**(SMALL | options)), spec, device=CPU, seed=1)


def after(spec: EnvSpec, options: dict[str, Any]) -> dict[str, Tensor]:
    """The weights that a fixed feed of fragments results in, after 2 or 3 updates."""
    config = Config(**options)
    impala = make_impala(config, spec, device=CPU, seed=1)
    assert len(feed(impala, config, make_feed(spec))) == impala.num_updates
    assert impala.num_updates in (2, 3)
    return impala.weights()


def test_policy_gradient_loss_hand_numbers_and_gradient() -> None:
    log_prob = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    loss = policy_gradient_loss(log_prob, torch.tensor([2.0, -1.0, 0.0]))
    torch.testing.assert_close(loss, torch.tensor((2.0 - 2.0 + 0.0) / 3))
    (gradient,) = torch.autograd.grad(loss, log_prob)
    torch.testing.assert_close(gradient, torch.tensor([-2.0, 1.0, 0.0]) / 3)


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (DISCRETE, {}),
        (DISCRETE, {"estimator": "upgo", "lambda_": 0.7}),
        (PAIRS, {"shared": True, "rho_bar": 1.7, "value_coefficient": 2.0}),
        (CONTINUOUS, {"activation": "relu", "rho_bar": 0.6, "entropy_coefficient": 0.1}),
        (CONTINUOUS, {"reward_clip": 0.5, "estimator": "upgo", "rho_bar": 2.0}),
    ],
)
def test_an_update_equals_the_slow_twin(spec: EnvSpec, options: dict[str, Any]) -> None:
    impala = make(spec, max_grad_norm=None, **options)
    impala.update(tensors(make_feed(spec, num_fragments=4, seed=1)))  # so that it is not where it started
    config = Config(**(SMALL | options))
    begin = leaves(dict(impala.network.named_parameters()))
    batch = tensors(make_feed(spec, num_fragments=4))
    assert not batch.valid.all()
    figures = impala.update(batch)

    learned = batch
    if config.reward_clip is not None:
        clipped = [[min(0.5, max(-0.5, float(reward))) for reward in step] for step in batch.reward]
        assert (learned.reward - torch.tensor(clipped)).abs().max() > 1
        learned = Trajectories(**(vars(batch) | {"reward": torch.tensor(clipped)}))
    rows = slow_rows(
        begin, learned, spec, estimator=config.estimator, lambda_=config.lambda_, activation=config.activation,
        old="behavior", rho_bar=config.rho_bar,
    )  # fmt: skip
    loss = slow_impala_loss(begin, rows, spec, config) * len(rows)  # the paper sums
    gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(begin.values()))])
    torch.testing.assert_close(impala.parameters.vector.grad, gradient, atol=1e-4, rtol=1e-3)

    policies = [slow_policy(begin, row.observation, row.action, spec, config.activation) for row in rows]
    log_prob, entropy = (torch.stack(column).detach() for column in zip(*policies, strict=True))
    ratio = (log_prob - torch.tensor([row.old_log_prob for row in rows])).exp()
    value_error = torch.tensor([row.return_ - row.old_value for row in rows])
    expected = {
        "policy_loss": float(-(torch.tensor([row.advantage for row in rows]) * log_prob).mean()),
        "value_loss": float(0.5 * value_error.square().mean()),
        "entropy": float(entropy.mean()),
        "rho": float(ratio.mean()),
        "learning_rate": 4.8e-4,
    }
    assert {name: float(value) for name, value in figures.items()} == pytest.approx(
        expected, rel=1e-3, abs=1e-5
    )
    assert all(value.shape == () and not value.requires_grad for value in figures.values())


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_steps_of_the_optimizers(optimizer: str) -> None:
    """From slots of zero: rmsprop moves by g / (sqrt(0.01) |g| + 0.1), adam by the sign of g nearly."""
    impala = make(optimizer=optimizer, learning_rate=1e-2, max_grad_norm=None)
    before = impala.parameters.vector.detach().clone()
    impala.update(tensors(make_feed(DISCRETE)))
    gradient, moved = impala.parameters.vector.grad, impala.parameters.vector.detach() - before
    assert gradient is not None
    size = gradient.abs()
    expected = gradient / (0.1 * size + 0.1) if optimizer == "rmsprop" else gradient / (size + 1e-5)
    torch.testing.assert_close(moved, -1e-2 * expected, rtol=1e-3, atol=1e-6)


def test_gradient_is_scaled_down_to_the_norm() -> None:
    learners = [make(max_grad_norm=limit) for limit in (None, 3.0, 1e6)]
    for impala in learners:
        impala.update(tensors(make_feed(DISCRETE)))
    first, second, third = (impala.parameters.vector.grad for impala in learners)
    assert first is not None and second is not None and third is not None
    assert torch.equal(first, third), "never up"
    assert float(first.norm()) > 30.0
    assert float(second.norm()) == pytest.approx(3.0, rel=1e-4)
    torch.testing.assert_close(second / 3.0, first / first.norm(), rtol=1e-4, atol=1e-7)


FLIPS: dict[
    str, tuple[EnvSpec, dict[str, Any], Any]
] = {  # option -> (environment, what it needs, other value)
    "network": (IMAGES, {"network": "conv", "hidden_sizes": (64, 64)}, OWN),
    "network_kwargs": (IMAGES, {"network": OWN, "hidden_sizes": (64, 64)}, {"width": 7}),
    "hidden_sizes": (DISCRETE, {}, (6, 4)),
    "activation": (DISCRETE, {}, "relu"),
    "shared": (DISCRETE, {}, True),
    "initial_log_std": (CONTINUOUS, {}, -0.5),
    "learning_rate": (DISCRETE, {}, 1e-3),
    "final_learning_rate": (DISCRETE, {"final_entropy_coefficient": 0.0, "anneal_steps": 150}, 0.0),
    "entropy_coefficient": (DISCRETE, {}, 0.0),
    "final_entropy_coefficient": (DISCRETE, {"final_learning_rate": 0.0, "anneal_steps": 150}, 0.0),
    "anneal_steps": (DISCRETE, {"final_learning_rate": 0.0, "anneal_steps": 150}, 1000),
    "value_coefficient": (DISCRETE, {}, 1.0),
    "max_grad_norm": (DISCRETE, {}, 1.0),
    "gamma": (DISCRETE, {}, 0.9),
    "lambda_": (DISCRETE, {}, 0.5),
    "batch_size": (DISCRETE, {}, 90),
    "normalize_observations": (DISCRETE, {}, True),
    "normalize_returns": (DISCRETE, {}, True),
    "estimator": (DISCRETE, {}, "upgo"),
    "optimizer": (DISCRETE, {}, "adam"),
    "rho_bar": (DISCRETE, {}, 0.7),
    "reward_clip": (DISCRETE, {}, 0.5),
}


@pytest.mark.parametrize("name", Config.model_fields)
def test_flipping_any_option_changes_the_weights(name: str) -> None:
    spec, needed, other = FLIPS[name]
    options = SMALL | needed
    assert getattr(Config(**options), name) != other
    unchanged = digest(after(spec, options))
    assert digest(after(spec, options)) == unchanged
    assert digest(after(spec, options | {name: other})) != unchanged


def test_rho_bar_is_of_effect_with_upgo_too() -> None:
    """UPGO's own ratio is cut at 1, but the values are V-trace's."""
    options = SMALL | {"estimator": "upgo"}
    assert digest(after(DISCRETE, options)) != digest(after(DISCRETE, options | {"rho_bar": 0.7}))


def test_both_estimators_correct() -> None:
    assert all(Config(estimator=name).corrects_staleness for name in ("vtrace", "upgo"))


@pytest.mark.learning
@pytest.mark.parametrize(
    ("options", "num_iterations"),
    [
        ({}, 300),
        ({"optimizer": "adam", "learning_rate": 5e-3, "estimator": "upgo", "normalize_returns": True}, 80),
    ],
)
def test_learns_a_toy(options: dict[str, Any], num_iterations: int) -> None:
    learning = {"name": "impala", "batch_size": 320, "gamma": 0.5, "hidden_sizes": [32]}
    trained = train("ddrl/Pick-v0", num_iterations, **learning, **options)
    assert trained.return_mean >= 9.9
    assert trained.figures["entropy"] < 0.9, "the draws know it too, not only the mode"

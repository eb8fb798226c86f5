"""IMPALA: hand numbers, the slow twin of an update, its optimizers."""

from __future__ import annotations

import pytest
import torch
from support.algorithms import CONTINUOUS, DISCRETE, PAIRS, Options, make_learner
from support.reference_ppo import leaves, make_feed, slow_impala_loss, slow_policy, slow_rows, tensors

from ddrl.algorithms.impala.learner import policy_gradient_loss
from ddrl.types import EnvSpec, Trajectories


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
def test_an_update_equals_the_slow_twin(spec: EnvSpec, options: Options) -> None:
    impala = make_learner("impala", spec, max_grad_norm=None, **options)
    impala.update(tensors(make_feed(spec, num_fragments=4, seed=1)))  # so that it is not where it started
    config, begin = impala.config, leaves(dict(impala.network.named_parameters()))
    batch = learned = tensors(make_feed(spec, num_fragments=4))
    assert not batch.valid.all()
    figures = impala.update(batch)
    if config.reward_clip is not None:
        clipped = [[min(0.5, max(-0.5, float(reward))) for reward in step] for step in batch.reward]
        learned = Trajectories(**(vars(batch) | {"reward": torch.tensor(clipped)}))
        assert (batch.reward - learned.reward).abs().max() > 1
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
    found = {name: float(value) for name, value in figures.items()}
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_steps_of_the_optimizers(optimizer: str) -> None:
    """From slots of zero: rmsprop moves by g / (sqrt(0.01) |g| + 0.1), adam by the sign of g nearly."""
    options = {"optimizer": optimizer, "learning_rate": 1e-2, "max_grad_norm": None}
    impala = make_learner("impala", DISCRETE, **options)
    before = impala.parameters.vector.detach().clone()
    impala.update(tensors(make_feed(DISCRETE)))
    gradient, moved = impala.parameters.vector.grad, impala.parameters.vector.detach() - before
    size = gradient.abs()
    expected = gradient / (0.1 * size + 0.1) if optimizer == "rmsprop" else gradient / (size + 1e-5)
    torch.testing.assert_close(moved, -1e-2 * expected, rtol=1e-3, atol=1e-6)

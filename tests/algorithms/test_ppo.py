"""PPO: hand numbers, the slow twin of an update, epochs and minibatches, schedules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.algorithms import CONTINUOUS, DISCRETE, PAIRS, Options, digest, make_learner
from support.reference_ppo import (
    leaves,
    make_feed,
    slow_policy,
    slow_ppo_loss,
    slow_rows,
    slow_surrogate,
    slow_value,
    slow_value_loss,
    tensors,
)
from torch import Tensor, tensor

from ddrl.algorithms.ppo.learner import clipped_surrogate, value_loss
from ddrl.types import EnvSpec

ESTIMATORS = ("gae", "td_lambda", "vtrace", "upgo", "monte_carlo")


def make(spec: EnvSpec = DISCRETE, **options: Any) -> Any:
    return make_learner("ppo", spec, **options)


def test_clipped_surrogate_hand_numbers_and_gradient() -> None:
    """Ratios 1.5, 0.5, 1.5, 0.5, 1.1; it is clipped where the advantage pushes on in the same direction."""
    ratio, advantage = tensor([1.5, 0.5, 1.5, 0.5, 1.1]), tensor([2.0, -2.0, -2.0, 2.0, 2.0])
    old = tensor([-1.0, -2.0, -1.0, -2.0, -0.5])
    log_prob = (old + ratio.log()).requires_grad_()
    loss = clipped_surrogate(log_prob, old, advantage, clip=0.2)
    expected = [1.2 * 2, 0.8 * -2, 1.5 * -2, 0.5 * 2, 1.1 * 2]
    torch.testing.assert_close(loss, tensor(-sum(expected) / 5))
    (gradient,) = torch.autograd.grad(loss, log_prob)
    torch.testing.assert_close(gradient, tensor([0.0, 0.0, 3.0, -1.0, -2.2]) / 5)


@pytest.mark.parametrize(
    ("clip", "first", "gradient"),
    # Clipped to 0.2, 0.2, 0.2 and not at all: the first would gain by going on and may not, the others may.
    [(None, 4, [-2.0, 0.5, 3.0, -0.5]), (0.2, 2.8**2, [0.0, 0.5, 3.0, -0.5])],
)
def test_value_loss_hand_numbers(clip: float | None, first: float, gradient: list[float]) -> None:
    value, old = torch.ones(4, requires_grad=True), tensor([0.0, 0.0, 0.0, 0.9])
    loss = value_loss(value, old, tensor([3.0, 0.5, -2.0, 1.5]), clip=clip)
    torch.testing.assert_close(loss, tensor(0.5 * (first + 0.25 + 9 + 0.25) / 4))
    torch.testing.assert_close(torch.autograd.grad(loss, value)[0], tensor(gradient) / 4)


def test_losses_equal_their_slow_twins_sample_by_sample() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(200, generator=generator) for _ in range(3))
    for clip in (0.1, 0.3):
        for loss, twin, sign in ((clipped_surrogate, slow_surrogate, -1), (value_loss, slow_value_loss, 1)):
            each = [twin(x, float(y), float(z), clip=clip) for x, y, z in zip(a, b, c, strict=True)]
            torch.testing.assert_close(loss(a, b, c, clip=clip), sign * torch.stack(each).mean())


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        *((DISCRETE, {"estimator": estimator}) for estimator in ESTIMATORS),
        (PAIRS, {"estimator": "vtrace", "normalize_advantages": False, "value_coefficient": 2.0}),
        (CONTINUOUS, {"estimator": "gae", "value_clip": 0.05}),
        (CONTINUOUS, {"estimator": "upgo", "shared": True, "activation": "relu"}),
    ],
)
def test_updates_equal_the_slow_twin(spec: EnvSpec, options: Options) -> None:
    """One minibatch of all transitions, padding left out; the second epoch is no longer where the first began."""
    options = {
        "batch_size": 72, "minibatch_size": 72, "max_grad_norm": None, "entropy_coefficient": 0.02, "lambda_": 0.8,
        "learning_rate": 0.05,
    } | options  # fmt: skip
    batch, start = tensors(make_feed(spec, num_fragments=4)), make(spec, **options)
    assert not batch.valid.all()
    at = begin = leaves(dict(start.network.named_parameters()))
    config = start.config
    rows = slow_rows(
        begin, batch, spec, estimator=config.estimator, lambda_=config.lambda_, activation=config.activation,
        old="begin" if config.corrects_staleness else "behavior",
    )  # fmt: skip
    for num_epochs in (1, 2):
        ppo = make(spec, **options, num_epochs=num_epochs)
        figures = ppo.update(batch)
        loss = slow_ppo_loss(at, rows, spec, config, normalize=config.normalize_advantages)
        gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(at.values()))])
        torch.testing.assert_close(ppo.parameters.vector.grad, gradient, atol=2e-6, rtol=1e-3)
        at = leaves(dict(ppo.network.named_parameters()))

    log_ratio, moved, entropy, error = [], [], [], []
    with torch.no_grad():
        for row in rows:
            log_prob, spread = slow_policy(at, row.observation, row.action, spec, config.activation)
            first, _ = slow_policy(begin, row.observation, row.action, spec, config.activation)
            log_ratio.append(float(log_prob) - row.old_log_prob)
            moved.append(float(log_prob - first))
            entropy.append(float(spread))
            error.append((float(slow_value(at, row.observation, config.activation)) - row.return_) ** 2)
    left = tensor([row.return_ - row.old_value for row in rows])
    expected = {
        "kl": sum(math.exp(x) - 1 - x for x in moved) / len(rows),
        "clip_fraction": sum(abs(math.exp(x) - 1) > 0.2 for x in log_ratio) / len(rows),
        "entropy": sum(entropy) / len(rows),
        "value_loss": 0.5 * sum(error) / len(rows),
        "explained_variance": 1 - float(left.var() / tensor([row.return_ for row in rows]).var()),
        "learning_rate": 0.05,
        "epochs": 2.0,
    }
    found = {name: float(value) for name, value in figures.items()}
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_kl_ends_epochs_early() -> None:
    """With V-trace, whose ratio starts at 1."""

    def epochs(target_kl: float | None) -> tuple[float, int]:
        ppo = make(num_epochs=6, target_kl=target_kl, estimator="vtrace", learning_rate=2e-3)
        return float(ppo.update(tensors(make_feed(DISCRETE)))["epochs"]), ppo.num_updates

    assert epochs(None) == epochs(1e3) == (6.0, 6 * 11)
    assert epochs(1e-9) == (1.0, 11), "the epoch that goes too far is the last one"
    assert 1.0 < epochs(4e-3)[0] < 6.0


@pytest.mark.parametrize(("minibatch_size", "num"), [(20, 4), (28, 3), (30, 2), (60, 1)])
def test_minibatches_share_the_transitions_evenly(
    minibatch_size: int, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ppo, batch = make(minibatch_size=minibatch_size), tensors(make_feed(DISCRETE, num_fragments=4))
    seen: list[Tensor] = []
    evaluate = ppo.evaluate
    monkeypatch.setattr(ppo, "evaluate", lambda part: seen.append(part.observation) or evaluate(part))
    ppo.update(batch)
    *parts, whole = seen  # the last one is for the figures
    assert ppo.num_updates == len(parts) == 2 * num and len(whole) == 72
    assert all(abs(len(part) - 72 / num) < 1 for part in parts)
    first, second = torch.cat(parts[:num]), torch.cat(parts[num:])
    assert not torch.equal(first, second), "each epoch has its own order"
    for epoch in (first, second):
        assert torch.equal(epoch.sort(dim=0).values, whole.sort(dim=0).values)


def test_schedules_reach_their_final_values() -> None:
    options = {"final_learning_rate": 0.0, "final_clip": 0.1, "final_entropy_coefficient": 0.0}
    ppo = make(anneal_steps=144, entropy_coefficient=0.4, **options)
    batch = tensors(make_feed(DISCRETE, num_fragments=4))
    for expected in ((1e-2, 0.2, 0.4), (5e-3, 0.15, 0.2), (0.0, 0.1, 0.0), (0.0, 0.1, 0.0)):
        found = [ppo.scheduled(name) for name in ("learning_rate", "clip", "entropy_coefficient")]
        assert found == pytest.approx(expected)
        before = digest(ppo.weights())
        assert float(ppo.update(batch)["learning_rate"]) == pytest.approx(expected[0])
        assert (digest(ppo.weights()) == before) == (expected[0] == 0.0)

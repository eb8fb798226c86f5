"""Discrete SAC and SQN: hand numbers, identities, the slow twin of one update, games learned, the policy."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import reference_q
from support.algorithms import DISCRETE, Options, make_learner, make_policy
from torch import Tensor, nn, tensor

from ddrl.algorithms.discrete_sac.learner import critic_loss, policy_loss, soft_maximum, soft_value
from ddrl.types import Batch

SQN = {"form": "sqn", "temperature": 0.3}
make = partial(make_learner, "discrete_sac", DISCRETE)


def test_soft_value_hand_numbers() -> None:
    """Of pi = (1/4, 3/4): 0.25 (2 + 0.5 log 4) + 0.75 (-1 + 0.5 log 4/3)."""
    log_policy, q = tensor([[0.25, 0.75]]).log(), tensor([[2.0, -1.0]])
    expected = 0.25 * (2 + 0.5 * math.log(4)) + 0.75 * (-1 + 0.5 * math.log(4 / 3))
    assert float(soft_value(q, log_policy, tensor(0.5))) == pytest.approx(expected)


def test_the_softmax_of_q_over_the_temperature_has_the_largest_soft_value() -> None:
    generator = torch.Generator().manual_seed(0)
    q = 3 * torch.randn(50, 4, generator=generator)
    for temperature in (tensor(0.1), tensor(2.0)):
        best = soft_maximum(q, temperature)
        torch.testing.assert_close(soft_value(q, (q / temperature).log_softmax(dim=1), temperature), best)
        other = torch.randn(50, 4, generator=generator).log_softmax(dim=1)
        assert (soft_value(q, other, temperature) < best).all()
    torch.testing.assert_close(soft_maximum(q, tensor(1e-4)), q.amax(dim=1), atol=1e-3, rtol=0)


def test_policy_loss_has_no_gradient_at_its_minimum() -> None:
    q, temperature = tensor([[1.0, -2.0, 0.5]]), tensor(0.7, requires_grad=True)
    logits = (q / 0.7).requires_grad_()
    loss = policy_loss(q, logits.log_softmax(dim=1), temperature)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], torch.zeros(1, 3))
    assert float(loss.detach()) == pytest.approx(-float(soft_maximum(q, tensor(0.7))))


def test_critic_loss_hand_numbers_and_clip() -> None:
    """Without a clip (1 - 3)^2 + (5 - 3)^2 and 0; with it, moving by 2 counts as moving by 0.5 where that is worse."""
    q = tensor([[1.0, 2.0], [5.0, 2.0]], requires_grad=True)
    target, target_q = tensor([3.0, 2.0]), tensor([[-1.0, 2.0], [4.9, 2.0]])
    assert float(critic_loss(q, target, target_q, clip=None).detach()) == pytest.approx(8 / 2)
    half = critic_loss(q, target, target_q, torch.full_like(target, 0.5), clip=None)
    assert float(half.detach()) == pytest.approx(8 / 4)
    loss = critic_loss(q, target, target_q, clip=0.5)
    assert float(loss.detach()) == pytest.approx((3.5**2 + 2**2) / 2)
    (gradient,) = torch.autograd.grad(loss, q)
    torch.testing.assert_close(gradient, tensor([[0.0, 0.0], [2.0, 0.0]]))


def slow_update(learner: Any, batch: Batch) -> dict[str, Tensor]:
    """Losses and gradients of an update, row by row and action by action, from copies of the networks."""
    config = learner.config
    critics, targets = copy.deepcopy(learner.critics), copy.deepcopy(learner.target_critics)
    actor = copy.deepcopy(learner.actor)
    alpha = math.exp(float(learner._log_temperature.detach()))
    reduce = np.mean if config.average_critics else np.min

    def values(networks: nn.ModuleList, observation: Tensor) -> list[float]:
        each = np.array([network(observation[None])[0].tolist() for network in networks])
        return [float(reduce(each[:, a])) for a in range(4)]

    def policy(observation: Tensor, q: list[float]) -> list[float]:
        logits = [one / alpha for one in q] if actor is None else actor(observation[None])[0].tolist()
        total = sum(math.exp(one) for one in logits)
        return [math.exp(one) / total for one in logits]

    critic_terms, policy_terms, entropies = [], [], []
    for i in range(len(batch.action)):
        next_q = values(targets, batch.next_observation[i])
        probability = policy(batch.next_observation[i], next_q)
        value = sum(p * (q - alpha * math.log(p)) for p, q in zip(probability, next_q, strict=True))
        y = float(batch.n_step_return[i]) + float(batch.bootstrap_discount[i]) * value
        a = int(batch.action[i])
        for critic, target in zip(critics, targets, strict=True):
            q_taken, old = critic(batch.observation[i][None])[0, a], target(batch.observation[i][None])[0, a]
            errors = [(q_taken - y) ** 2]
            if config.value_clip is not None:
                clip = config.value_clip
                errors.append((old + (q_taken - old).clamp(-clip, clip) - y) ** 2)
            critic_terms.append(max(errors, key=lambda one: float(one.detach())))
        q = values(critics, batch.observation[i])
        entropies.append(-sum(p * math.log(p) for p in policy(batch.observation[i], q)))
        if actor is not None:
            log_p = actor(batch.observation[i][None])[0].log_softmax(dim=0)
            policy_terms.append(sum(log_p[k].exp() * (alpha * log_p[k] - q[k]) for k in range(4)))
    num = len(batch.action)
    found = {"critic_loss": sum(critic_terms) / num, "entropy": tensor(entropies).mean()}
    found["critics"] = flat(torch.autograd.grad(found["critic_loss"], list(critics.parameters())))
    if actor is not None:
        found["policy_loss"] = sum(policy_terms) / num
        found["actor"] = flat(torch.autograd.grad(found["policy_loss"], list(actor.parameters())))
        found["temperature"] = alpha * (found["entropy"] - config.entropy_goal(DISCRETE))
    return found


def flat(gradients: Any) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"average_critics": True, "value_clip": 0.05, "num_critics": 3},
        {"temperature": 0.2, "num_critics": 1, "n_step": 3},
        SQN,
        SQN | {"average_critics": True, "value_clip": 0.05},
    ],
)
def test_an_update_equals_the_slow_twin(options: Options) -> None:
    learner = make(max_grad_norm=None, **options)
    batches = [
        reference_q.make_batch(
            seed, spec=DISCRETE, rows=np.arange(6), gamma=0.9, n_step=learner.config.n_step
        )
        for seed in range(4)
    ]
    for batch in batches[:3]:
        learner.update(batch)  # so that critics and targets differ
    expected = slow_update(learner, batches[3])
    target, log_temperature = learner._target.clone(), learner._log_temperature.detach().clone()
    metrics = learner.update(batches[3])
    for name in {"critic_loss", "policy_loss", "entropy"} & expected.keys():
        torch.testing.assert_close(metrics[name], expected[name].detach().float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        learner.critic_parameters.vector.grad, expected["critics"], rtol=1e-3, atol=1e-5
    )
    torch.testing.assert_close(learner._target, target + 0.1 * (learner.critic_parameters.vector - target))
    if "actor" in expected:
        torch.testing.assert_close(
            learner.actor_parameters.vector.grad, expected["actor"], rtol=1e-3, atol=1e-5
        )
    if learner.config.temperature == "auto":
        torch.testing.assert_close(
            learner._log_temperature.grad, expected["temperature"], rtol=1e-3, atol=1e-5
        )
    else:
        assert torch.equal(learner._log_temperature.detach(), log_temperature)


def test_the_gradient_is_clipped() -> None:
    batch = reference_q.make_batch(1, spec=DISCRETE, rows=np.arange(6))
    free, bound = make(max_grad_norm=None), make(max_grad_norm=0.01)
    for learner in (free, bound):
        learner.update(batch)
    for name in ("critic_parameters", "actor_parameters"):
        before, after = (getattr(one, name).vector.grad for one in (free, bound))
        torch.testing.assert_close(
            after, before * (0.01 / before.norm()).clamp(max=1.0), rtol=1e-3, atol=1e-7
        )


def test_a_given_policy_waits_for_its_fresh_critics() -> None:
    learner = make(critic_warmup_updates=2)
    learner.from_policy = True
    before = learner.actor_parameters.vector.detach().clone()
    moved = []
    for seed in range(3):
        learner.update(reference_q.make_batch(seed, spec=DISCRETE, rows=np.arange(6)))
        moved.append(not torch.equal(learner.actor_parameters.vector.detach(), before))
    assert moved == [False, False, True]


@pytest.mark.parametrize("options", [{}, SQN])
def test_draws_follow_the_softmax_and_acts_its_mode(options: Options) -> None:
    learner = make(**options)
    for seed in range(5):
        learner.update(reference_q.make_batch(seed, spec=DISCRETE, rows=np.arange(6)))
    policy = make_policy("discrete_sac", DISCRETE, weights=learner.weights(), **options)
    observation = np.array([[0.3, -1.0, 2.0]], np.float32)
    seen = torch.from_numpy(observation)
    if learner.actor is None:
        logits = torch.stack([critic(seen) for critic in learner.critics]).amin(dim=0) / 0.3
    else:
        logits = learner.actor(seen)
    probability = logits.softmax(dim=1).detach()[0].numpy()
    drawn, extras = policy.explore(np.repeat(observation, 40_000, axis=0), np.random.default_rng(0))
    assert extras == {} and drawn.dtype == np.int64
    share = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(share, probability, atol=4 * np.sqrt(0.25 / len(drawn)))
    assert policy.act(observation).tolist() == [int(probability.argmax())]

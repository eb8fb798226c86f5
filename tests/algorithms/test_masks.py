"""Masks of allowed actions: nothing else is played, bootstrapped from, or probable, in every discrete algorithm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.algorithms import CPU
from support.learning import learn, toy

from ddrl import envs
from ddrl.algorithms import base
from ddrl.algorithms.base import random_choices
from ddrl.config import RunConfig
from ddrl.types import Batch, EnvSpec

SPEC = EnvSpec("masked", (5,), "float32", "discrete", (), action_sizes=(4,), has_mask=True)
SMALL = {"hidden_sizes": [32], "batch_size": 64}
VALUES = SMALL | {"learning_rate": 3e-3, "gamma": 0.0, "epsilon": 0.5}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {"name": "ppo", "learning_rate": 3e-3, "batch_size": 512, "minibatch_size": 128, "gamma": 0.0},
    "ppo of pairs": {
        **{"name": "ppo", "learning_rate": 3e-3, "batch_size": 512, "minibatch_size": 128, "gamma": 0.0},
        "normalize_observations": True,
    },
    "impala": {"name": "impala", "learning_rate": 3e-3, "gamma": 0.0, "optimizer": "adam", "batch_size": 128},
    "dqn": {"name": "dqn", "double": True, **VALUES},
    "pqn": {
        "name": "pqn",
        "learning_rate": 3e-3,
        "gamma": 0.0,
        "batch_size": 512,
        "epsilon_anneal_updates": 100,
    },
    "c51": {"name": "dqn", "distribution": "categorical", "v_min": 0, "v_max": 5, **VALUES},
    "r2d2": {
        **{"name": "r2d2", "hidden_sizes": [32], "recurrent_size": 16, "batch_size": 16, "gamma": 0.0},
        **{"burn_in": 0, "sequence_length": 5, "overlap": 0, "learning_rate": 3e-3},
    },
    "discrete_sac": {
        "name": "discrete_sac",
        **SMALL,
        "learning_rate": 3e-3,
        "gamma": 0.0,
        "temperature": 0.1,
    },
    "iql": {"name": "iql", **SMALL, "learning_rate": 3e-3, "gamma": 0.0, "inverse_temperature": 10.0},
    "iql of pairs": {
        "name": "iql",
        **SMALL,
        "learning_rate": 3e-3,
        "gamma": 0.0,
        "inverse_temperature": 10.0,
    },
    "sqn": {"name": "discrete_sac", "form": "sqn", **SMALL, "learning_rate": 3e-3, "gamma": 0.0},
}


def run_of(name: str) -> RunConfig:
    env = {"id": "support.odd_envs:Masked", "num_envs": 16, "action_mask": True}
    if "pairs" in name:
        env["kwargs"] = {"pairs": True}
    replay = {"warmup_steps": 200, "samples_per_insert": 16, "slack_steps": 200}
    return toy("ddrl/Pick-v0", ALGORITHMS[name], env=env, replay=replay)


def best_return(run: RunConfig) -> float:
    """Return the mean return of the last allowed action in each step, in the episodes of `learn`'s evaluations."""
    made, total = envs.make_one(run.env), 0.0
    for seed in range(9000, 9020):
        observation, ended = made.reset(seed=seed)[0], False
        while not ended:
            allowed = observation[1:].reshape(-1, 4)
            action = 3 - allowed[:, ::-1].argmax(axis=1)
            observation, reward, terminated, truncated, _ = made.step(
                action if len(action) > 1 else action[0]
            )
            total, ended = total + float(reward), terminated or truncated
    return total / 20


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_discrete_algorithm_learns_the_best_of_what_is_allowed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment raises where a forbidden action is played, at random or not."""
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "support.odd_envs")
    run = run_of(name)
    best = best_return(run)
    found = learn(run, most_steps=30_000, target=0.97 * best, evaluate_every=1_500)
    assert found.return_mean >= 0.97 * best


def seen(*masks: list[int]) -> np.ndarray:
    return np.array([[0.3 * row, *mask] for row, mask in enumerate(masks)], np.float32)


def resolved(**options: Any) -> base.Resolved:
    run = toy("ddrl/Pick-v0", {"hidden_sizes": [8], **options})
    return base.resolve(run, SPEC)


def test_random_choices_are_uniform_over_the_allowed_ones() -> None:
    drawn = random_choices(SPEC, np.repeat(seen([0, 1, 0, 1]), 4_000, axis=0), np.random.default_rng(1))
    assert drawn.shape == (4_000,) and drawn.dtype == np.int64
    assert np.bincount(drawn, minlength=4)[[0, 2]].tolist() == [0, 0]
    assert abs((drawn == 1).mean() - 0.5) < 0.03


@pytest.mark.parametrize("double", [False, True])
def test_dqn_bootstraps_from_the_best_allowed_action(double: bool) -> None:
    learner: Any = resolved(name="dqn", double=double, prioritized=True, gamma=0.9).learner(
        device=CPU, seed=3
    )
    observation, following = seen([1, 1, 1, 1], [1, 1, 0, 1]), seen([0, 1, 0, 0], [1, 0, 0, 1])
    tensors = [torch.from_numpy(one) for one in (observation, following)]
    with torch.no_grad():
        q, next_q = learner.network(tensors[0]), learner.network(tensors[1])  # the target network is equal
    batch = Batch(
        observation=tensors[0],
        action=torch.tensor([2, 0]),
        n_step_return=torch.tensor([1.0, 2.0]),
        bootstrap_discount=torch.tensor([0.9, 0.9]),
        next_observation=tensors[1],
        weight=torch.ones(2),
    )
    best = torch.stack([next_q[0, 1], torch.maximum(next_q[1, 0], next_q[1, 3])])
    expected = (torch.tensor([1.0, 2.0]) + 0.9 * best - torch.stack([q[0, 2], q[1, 0]])).abs()
    assert best[0] < next_q[0].max(), "the seed makes a forbidden action look better"
    torch.testing.assert_close(learner.update(batch)["priority"], expected)


@pytest.mark.parametrize("form", ["sac", "sqn"])
def test_soft_values_are_those_of_the_allowed_actions(form: str) -> None:
    learner: Any = resolved(name="discrete_sac", form=form).learner(device=CPU, seed=3)
    following = torch.from_numpy(seen([0, 1, 0, 0], [1, 0, 0, 1]))
    temperature = torch.tensor(0.7)
    with torch.no_grad():
        value = learner._next_value(following, temperature)
        q = torch.stack([critic(following) for critic in learner.target_critics]).amin(dim=0)
        for row, allowed in enumerate(([1], [0, 3])):
            own = q[row, allowed]
            logits = own / 0.7 if form == "sqn" else learner.actor(following)[row, allowed]
            prob = logits.softmax(dim=0)
            expected = (prob * (own - 0.7 * prob.log())).sum()
            torch.testing.assert_close(value[row], expected)


@pytest.mark.parametrize("target", [None, 0.3])
def test_the_entropy_aimed_at_is_a_share_of_that_of_the_allowed_actions(target: float | None) -> None:
    """Half of log 4 is more than that of any policy, where one or two of four are allowed."""
    made = resolved(name="discrete_sac", target_entropy=target, critic_warmup_updates=0, learning_rate=1e-3)
    learner: Any = made.learner(device=CPU, seed=3)
    observation = torch.from_numpy(seen([0, 1, 0, 0], [1, 0, 0, 1], [0, 1, 1, 0], [1, 0, 0, 0]))
    share = 0.5 if target is None else target / np.log(4)
    assert float(learner._entropy_goal(observation)) == pytest.approx(share * np.log(2) / 2, rel=1e-5)
    ones = torch.ones(4)
    batch = Batch(observation, torch.tensor([1, 0, 1, 0]), ones, 0 * ones, observation)
    for _ in range(20):  # at first the policy is nearly uniform, so that it has more entropy than that
        temperature = float(learner.update(batch)["temperature"])
    assert temperature < learner.config.initial_temperature


@pytest.mark.parametrize("normalized", [False, True])
def test_on_policy_probabilities_are_those_of_the_allowed_actions(normalized: bool) -> None:
    """Policy and learner agree, also where observations, but not their masks, are normalized."""
    made = resolved(name="ppo", normalize_observations=normalized)
    learner: Any = made.learner(device=CPU, seed=3)
    observation = seen([0, 1, 0, 0], [1, 0, 0, 1], [1, 1, 1, 1])
    if normalized:
        learner._statistics["observation_mean"].fill_(0.6)
        learner._statistics["observation_variance"].fill_(4.0)
    policy = made.policy()
    policy.load(learner.weights())
    action, extras = policy.explore(observation, np.random.default_rng(1))
    shown = learner.normalized(torch.from_numpy(observation))
    with torch.no_grad():
        logits = learner.network(shown)[0]
        parameters, _ = learner._forward(shown)
        log_prob, entropy = learner.log_prob(parameters, torch.from_numpy(action))
    for row, allowed in enumerate(([1], [0, 3], [0, 1, 2, 3])):
        prob = logits[row, allowed].softmax(dim=0)
        assert action[row] in allowed
        own = prob[allowed.index(action[row])].log()
        torch.testing.assert_close(log_prob[row], own)
        torch.testing.assert_close(entropy[row], -(prob * prob.log()).sum())
        assert extras["behavior_log_prob"][row] == pytest.approx(float(own), abs=1e-5)

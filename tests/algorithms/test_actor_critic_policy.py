"""The policy of the actor-critics: its actions and log probabilities are those that the learner learns from."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithms import CONTINUOUS, DISCRETE, OWN, PAIRS, make_learner, make_policy
from support.reference_ppo import IMAGES, make_feed, tensors
from torch import Tensor

from ddrl.networks.trunks import to_input
from ddrl.types import EnvSpec

BYTES = replace(DISCRETE, observation_dtype="uint8")  # a vector of bytes, such as the memory of a console
NORMALIZED = {"normalize_observations": True}
CASES: dict[str, tuple[EnvSpec, dict[str, Any]]] = {
    "discrete": (DISCRETE, {}),
    "pairs": (PAIRS, {}),
    "continuous": (CONTINUOUS, {}),
    "relu": (CONTINUOUS, {"activation": "relu", "hidden_sizes": (16,)}),
    "shared": (PAIRS, {"shared": True}),
    "normalized": (CONTINUOUS, NORMALIZED),
    "normalized pairs": (PAIRS, NORMALIZED | {"shared": True, "activation": "relu"}),
    "narrow": (CONTINUOUS, {"initial_log_std": -3.0}),
    "bytes": (BYTES, {}),
    "normalized bytes": (BYTES, NORMALIZED),
    "images": (IMAGES, {"network": "conv", "hidden_sizes": (16,)}),
    "own": (
        IMAGES,
        {"network": OWN, "hidden_sizes": (64, 64), "network_kwargs": {"width": 7}, "shared": True},
    ),
    "own normalized": (CONTINUOUS, {"network": OWN, "hidden_sizes": (64, 64)} | NORMALIZED),
}
each_case = pytest.mark.parametrize(("spec", "options"), CASES.values(), ids=CASES)


def observations(spec: EnvSpec, num: int) -> np.ndarray:
    rng, shape = np.random.default_rng(5), (num, *spec.observation_shape)
    if spec.observation_dtype == "uint8":
        return rng.integers(0, 256, shape).astype(np.uint8)
    return rng.normal(1.0, 2.0, shape).astype(np.float32)


def make(spec: EnvSpec, **options: Any) -> tuple[Any, Any]:
    """A learner with a policy far from uniform and statistics of observations, and a policy with its weights."""
    learner, generator = make_learner("ppo", spec, seed=3, **options), torch.Generator().manual_seed(4)
    batch = tensors(make_feed(replace(spec, observation_dtype="float32") if spec is BYTES else spec))
    learner.observe(replace(batch, observation=batch.observation.to(getattr(torch, spec.observation_dtype))))
    with torch.no_grad():
        for parameter in learner.network.policy_head.parameters():
            parameter.normal_(generator=generator)
        if spec.action_kind == "continuous":
            learner.network.log_std += torch.tensor([0.1, -0.4])
    return learner, make_policy("ppo", spec, weights=learner.weights(), **options)


def learners_parameters(learner: Any, observation: np.ndarray) -> Tensor:
    """[N, P] as the learner computes them."""
    with torch.no_grad():
        parameters, _ = learner.network(to_input(learner.normalized(torch.from_numpy(observation))))
    assert isinstance(parameters, Tensor)
    return parameters


@each_case
def test_drawn_actions_have_the_learners_log_probability(spec: EnvSpec, options: dict[str, Any]) -> None:
    learner, policy = make(spec, **options)
    rows = observations(spec, 500)
    action, columns = policy.explore(rows, np.random.default_rng(0))
    is_continuous = spec.action_kind == "continuous"
    assert columns.keys() == {"behavior_log_prob"} | ({"raw_action"} if is_continuous else set())
    assert action.shape == (500, *spec.action_shape)
    assert action.dtype == (np.float32 if is_continuous else np.int64)
    if is_continuous:
        raw = columns["raw_action"]
        assert (raw.shape, raw.dtype) == ((500, 2), np.float32)
        assert options.get("initial_log_std") or np.abs(raw).max() > 1.2, "it is not clipped"
        expected = np.clip(raw * [2.0, 0.5] + [0.0, 0.5], spec.action_low, spec.action_high)
        np.testing.assert_allclose(action, expected, rtol=1e-6, atol=1e-6)
    else:
        assert np.all(action >= 0) and np.all(action.reshape(500, -1) < spec.action_sizes)
    with torch.no_grad():
        stored = torch.from_numpy(columns.get("raw_action", action))
        expected, _ = learner.log_prob(learners_parameters(learner, rows), stored)
    log_prob = columns["behavior_log_prob"]
    assert (log_prob.shape, log_prob.dtype) == ((500,), np.float32)
    assert log_prob.std() > 0.1
    atol = 3e-4 if options.get("initial_log_std") else 2e-5  # an action is rounded in deviations of 1/20
    np.testing.assert_allclose(log_prob, expected.numpy(), rtol=1e-5, atol=atol)
    again, other = (policy.explore(rows, np.random.default_rng(seed))[0] for seed in (0, 1))
    assert again.tobytes() == action.tobytes() != other.tobytes()


@each_case
def test_act_is_the_learners_mode(spec: EnvSpec, options: dict[str, Any]) -> None:
    learner, policy = make(spec, **options)
    rows = observations(spec, 100)
    action, parameters = policy.act(rows), learners_parameters(learner, rows).numpy()
    assert action.shape == (100, *spec.action_shape)
    if spec.action_kind == "continuous":
        expected = np.clip(parameters * [2.0, 0.5] + [0.0, 0.5], spec.action_low, spec.action_high)
        assert action.dtype == np.float32
        np.testing.assert_allclose(action, expected, rtol=1e-4, atol=1e-5)
    else:
        parts = np.split(parameters, np.cumsum(spec.action_sizes)[:-1], axis=1)
        expected = np.stack([part.argmax(axis=1) for part in parts], axis=1)
        assert action.dtype == np.int64
        assert np.array_equal(action.reshape(100, -1), expected)
        assert all(len(set(column)) > 1 for column in expected.T), "it depends on the observation"


WIDE = {str(sizes): (CONTINUOUS, {"hidden_sizes": sizes}) for sizes in [(64, 64), (128, 128), (400, 300)]}


@pytest.mark.parametrize(("spec", "options"), (CASES | WIDE).values(), ids=CASES | WIDE)
def test_the_mode_does_not_depend_on_the_number_of_rows(spec: EnvSpec, options: dict[str, Any]) -> None:
    _, policy = make(spec, **options)
    rows = observations(spec, 64)
    alone = np.concatenate([policy.act(row[None]) for row in rows])
    for size in (*range(1, 18), 31, 32, 33, 64):
        start = 64 - size  # so that a row is seen at every place of a block
        assert policy.act(rows[start:]).tobytes() == alone[start:].tobytes()


@pytest.mark.parametrize("spec", [DISCRETE, PAIRS], ids=["discrete", "pairs"])
def test_draws_follow_the_categorical_distribution(spec: EnvSpec) -> None:
    """Pearson's statistic of all joint choices; 60,000 draws for one observation."""
    num, (learner, policy), row = 60_000, make(spec), observations(spec, 1)
    chosen, _ = policy.explore(np.repeat(row, num, axis=0), np.random.default_rng(2))
    joint = torch.ones(1)
    for logits in learners_parameters(learner, row)[0].split(list(spec.action_sizes)):
        joint = (joint[:, None] * torch.softmax(logits, dim=0)).flatten()
    index = np.ravel_multi_index(tuple(chosen.reshape(num, -1).T), spec.action_sizes)
    counts, expected = np.bincount(index, minlength=len(joint)), joint.double().numpy() * num
    assert expected.min() > 5
    statistic, freedom = float(((counts - expected) ** 2 / expected).sum()), len(joint) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_draws_follow_the_gaussian() -> None:
    num, (learner, policy), row = 60_000, make(CONTINUOUS), observations(CONTINUOUS, 1)
    _, columns = policy.explore(np.repeat(row, num, axis=0), np.random.default_rng(2))
    mean, std = learners_parameters(learner, row)[0].numpy(), learner.network.log_std.detach().exp().numpy()
    z = (columns["raw_action"] - mean) / std
    assert np.all(np.abs(z.mean(axis=0)) < 4 / math.sqrt(num))
    assert np.all(np.abs(z.std(axis=0) - 1) < 4 / math.sqrt(2 * num))
    assert abs((z[:, 0] * z[:, 1]).mean()) < 4 / math.sqrt(num), "the dimensions are independent"
    assert abs((np.abs(z) < 1).mean() - 0.6827) < 0.005

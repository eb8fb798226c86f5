"""The Policy of the on-policy actor-critics: what it plays is what the learner learns from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithms import CONTINUOUS, CPU, DISCRETE, PAIRS
from support.algorithms import OWN as OWN_NETWORK
from support.reference_ppo import IMAGES, feed, make_feed
from torch import Tensor

from ddrl import policy as policies
from ddrl.algorithms.actor_critic.learner import ActorCriticLearner
from ddrl.algorithms.ppo.config import Config
from ddrl.algorithms.ppo.learner import make_learner as make_ppo
from ddrl.algorithms.ppo.policy import Policy
from ddrl.networks.trunks import to_input
from ddrl.store import weights
from ddrl.types import EnvSpec

OWN = {"network": OWN_NETWORK}
BYTES = replace(DISCRETE, observation_dtype="uint8")  # a vector of bytes, such as the memory of a console
CASES: dict[str, tuple[EnvSpec, dict[str, Any]]] = {
    "discrete": (DISCRETE, {}),
    "pairs": (PAIRS, {}),
    "continuous": (CONTINUOUS, {}),
    "relu": (CONTINUOUS, {"activation": "relu", "hidden_sizes": (16,)}),
    "shared": (PAIRS, {"shared": True}),
    "normalized": (CONTINUOUS, {"normalize_observations": True}),
    "normalized pairs": (PAIRS, {"normalize_observations": True, "shared": True, "activation": "relu"}),
    "narrow": (CONTINUOUS, {"initial_log_std": -3.0}),
    "bytes": (BYTES, {}),
    "normalized bytes": (BYTES, {"normalize_observations": True}),
    "images": (IMAGES, {"network": "conv", "hidden_sizes": (16,)}),
    "own": (IMAGES, OWN | {"network_kwargs": {"width": 7}, "shared": True}),
    "own normalized": (CONTINUOUS, OWN | {"normalize_observations": True}),
}
each_case = pytest.mark.parametrize(("spec", "options"), CASES.values(), ids=CASES)


def observations(spec: EnvSpec, num: int, seed: int = 5) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (num, *spec.observation_shape)
    if spec.observation_dtype == "uint8":
        return rng.integers(0, 256, shape).astype(np.uint8)
    return rng.normal(1.0, 2.0, shape).astype(np.float32)


def make(spec: EnvSpec, **options: Any) -> tuple[ActorCriticLearner[Any], Policy]:
    """A learner with decided preferences, and the player of its weights."""
    config = Config(**({"batch_size": 32, "minibatch_size": 32, "num_epochs": 1} | options))
    ppo = make_ppo(config, spec, device=CPU, seed=3)
    fragments = make_feed(replace(spec, observation_dtype="float32") if spec is BYTES else spec)
    if spec is BYTES:
        fragments = [
            replace(
                one,
                observation=one.observation.astype(np.uint8),
                final_observation=one.final_observation.astype(np.uint8),
            )
            for one in fragments
        ]
    feed(ppo, config, fragments)  # the statistics of observations are no longer 0 and 1
    trainee = ppo
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        trainee.network.policy_head.weight.normal_(generator=generator)
        trainee.network.policy_head.bias.normal_(generator=generator)
        if spec.action_kind == "continuous":
            trainee.network.log_std += torch.tensor([0.1, -0.4])
    policy = Policy(config, spec)
    policy.load(ppo.weights())
    return trainee, policy


def learners_parameters(trainee: ActorCriticLearner[Any], observation: np.ndarray) -> Tensor:
    """[N, P] as the learner computes them."""
    with torch.no_grad():
        normalized = trainee.normalized(torch.from_numpy(observation))
        parameters, _ = trainee.network(to_input(normalized))
    assert isinstance(parameters, Tensor)
    return parameters


@each_case
def test_behavior_log_prob_is_the_learners(spec: EnvSpec, options: dict[str, Any]) -> None:
    trainee, policy = make(spec, **options)
    rows = observations(spec, 200)
    action, columns = policy.explore(rows, np.random.default_rng(0))
    stored = torch.from_numpy(columns.get("raw_action", action))
    with torch.no_grad():
        expected, _ = trainee.log_prob(learners_parameters(trainee, rows), stored)
    log_prob = columns["behavior_log_prob"]
    assert (log_prob.shape, log_prob.dtype) == ((200,), np.float32)
    assert log_prob.std() > 0.1
    atol = 3e-4 if options.get("initial_log_std") else 2e-5  # an action is rounded in deviations of 1/20
    np.testing.assert_allclose(log_prob, expected.numpy(), rtol=1e-5, atol=atol)


@each_case
def test_act_is_the_learners_mode(spec: EnvSpec, options: dict[str, Any]) -> None:
    trainee, policy = make(spec, **options)
    rows = observations(spec, 100)
    action, parameters = policy.act(rows), learners_parameters(trainee, rows).numpy()
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
        assert all(len(set(column)) > 1 for column in expected.T), "nothing is decided by the observation"


@each_case
def test_mode_does_not_depend_on_the_number_of_rows(spec: EnvSpec, options: dict[str, Any]) -> None:
    _, policy = make(spec, **options)
    rows = observations(spec, 33)
    one_by_one = [policy._parameters(row[None], by_row=True)[0] for row in rows]
    acted = np.concatenate([policy.act(row[None]) for row in rows])
    for size in range(1, 34):
        start = 33 - size  # so that a row is seen at every place of a block
        assert (
            policy._parameters(rows[start:], by_row=True).tobytes() == np.stack(one_by_one[start:]).tobytes()
        )
        assert policy.act(rows[start:]).tobytes() == acted[start:].tobytes()


@pytest.mark.parametrize("hidden_sizes", [(64, 64), (128, 128), (400, 300)])
def test_mode_of_wide_networks_does_not_depend_on_the_number_of_rows(hidden_sizes: tuple[int, ...]) -> None:
    _, policy = make(CONTINUOUS, hidden_sizes=hidden_sizes)
    rows = observations(CONTINUOUS, 64)
    one_by_one = np.concatenate([policy.act(row[None]) for row in rows])
    for size in (2, 3, 8, 16, 31, 64):
        assert policy.act(rows[64 - size :]).tobytes() == one_by_one[64 - size :].tobytes()


@each_case
def test_actions_stay_within_the_bounds(spec: EnvSpec, options: dict[str, Any]) -> None:
    _, policy = make(spec, **options)
    rows = observations(spec, 500)
    explored, columns = policy.explore(rows, np.random.default_rng(1))
    for action in (policy.act(rows), explored):
        assert action.shape == (500, *spec.action_shape)
        if spec.action_kind == "continuous":
            assert action.dtype == np.float32
            assert np.all(action >= spec.action_low) and np.all(action <= spec.action_high)
        else:
            assert action.dtype == np.int64
            assert np.all(action >= 0) and np.all(action.reshape(500, -1) < spec.action_sizes)
    assert columns.keys() == {"behavior_log_prob"} | ({"raw_action"} if spec is CONTINUOUS else set())
    if spec.action_kind == "continuous":
        raw = columns["raw_action"]
        assert (raw.shape, raw.dtype) == ((500, 2), np.float32)
        assert np.abs(raw).max() > 1.2, "it is not clipped"
        expected = np.clip(raw * [2.0, 0.5] + [0.0, 0.5], spec.action_low, spec.action_high)
        np.testing.assert_allclose(explored, expected, rtol=1e-6, atol=1e-6)


def test_extremes_of_the_unit_interval_are_the_bounds() -> None:
    _, policy = make(CONTINUOUS)
    action = policy._to_environment(np.array([[-1.0, 1.0], [1.0, -1.0], [0.5, 0.0], [9.0, -9.0]], np.float32))
    assert action.tolist() == [[-2.0, 1.0], [2.0, 0.0], [1.0, 0.5], [2.0, 0.0]]


@pytest.mark.parametrize("spec", [DISCRETE, PAIRS], ids=["discrete", "pairs"])
def test_draws_follow_the_categorical_distribution(spec: EnvSpec) -> None:
    """Pearson's statistic of all joint choices; 60,000 draws for one observation."""
    num = 60_000
    trainee, policy = make(spec)
    row = observations(spec, 1)
    chosen, _ = policy.explore(np.repeat(row, num, axis=0), np.random.default_rng(2))
    logits = learners_parameters(trainee, row)[0].split(list(spec.action_sizes))
    joint = torch.ones(1)
    for part in logits:
        joint = (joint[:, None] * torch.softmax(part, dim=0)).flatten()
    index = np.ravel_multi_index(tuple(chosen.reshape(num, -1).T), spec.action_sizes)
    counts, expected = np.bincount(index, minlength=len(joint)), joint.double().numpy() * num
    assert expected.min() > 5
    statistic, freedom = float(((counts - expected) ** 2 / expected).sum()), len(joint) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_draws_follow_the_gaussian() -> None:
    trainee, policy = make(CONTINUOUS)
    row, num = observations(CONTINUOUS, 1), 60_000
    _, columns = policy.explore(np.repeat(row, num, axis=0), np.random.default_rng(2))
    raw, mean = columns["raw_action"], learners_parameters(trainee, row)[0].numpy()
    std = trainee.network.log_std.detach().exp().numpy()
    z = (raw - mean) / std
    assert np.all(np.abs(z.mean(axis=0)) < 4 / math.sqrt(num))
    assert np.all(np.abs(z.std(axis=0) - 1) < 4 / math.sqrt(2 * num))
    assert abs((z[:, 0] * z[:, 1]).mean()) < 4 / math.sqrt(num), "the dimensions are independent"
    assert abs((np.abs(z) < 1).mean() - 0.6827) < 0.005


def test_same_generator_same_draws() -> None:
    _, policy = make(CONTINUOUS)
    rows = observations(CONTINUOUS, 4)
    first, second, other = (policy.explore(rows, np.random.default_rng(seed))[0] for seed in (1, 1, 2))
    assert first.tobytes() == second.tobytes() != other.tobytes()


def test_weights_come_as_tensors_or_arrays_and_are_copied() -> None:
    trainee, policy = make(CONTINUOUS, normalize_observations=True)
    rows, weights = observations(CONTINUOUS, 4), trainee.weights()
    before = policy.act(rows)
    arrays = {name: tensor.numpy().copy() for name, tensor in weights.items()}
    policy.load(arrays)
    for array in arrays.values():
        array += 1.0
    assert policy.act(rows).tobytes() == before.tobytes()


def without(name: str) -> Any:
    return lambda weights: {key: value for key, value in weights.items() if key != name}


def others(spec: EnvSpec, **options: Any) -> Any:
    def weights(_: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return make_ppo(Config(**options), spec, device=CPU, seed=0).weights()

    return weights


@pytest.mark.parametrize(
    ("case", "change", "name"),
    [
        ("continuous", without("log_std"), "log_std"),
        ("continuous", without("policy_head.bias"), "policy_head.bias"),
        ("continuous", without("actor.layers.1.weight"), "actor.layers.1.weight"),
        ("continuous", others(DISCRETE), "log_std"),
        ("continuous", others(CONTINUOUS, hidden_sizes=(64,)), "actor.layers.1.bias"),
        ("continuous", others(CONTINUOUS, hidden_sizes=(64, 64, 64)), "actor.layers.2.bias"),
        ("continuous", others(CONTINUOUS, hidden_sizes=(64, 32)), "actor.layers.1.bias"),
        ("continuous", others(replace(CONTINUOUS, observation_shape=(4,))), "actor.layers.0.weight"),
        ("continuous", others(CONTINUOUS, normalize_observations=True), "observation_mean"),
        ("normalized", others(CONTINUOUS), "observation_mean"),
        ("normalized", without("observation_std"), "observation_std"),
        ("discrete", others(replace(DISCRETE, action_sizes=(5,))), "policy_head.bias"),
        ("pairs", others(replace(PAIRS, action_sizes=(3, 3))), "policy_head.bias"),
        ("images", others(replace(IMAGES, observation_shape=(7, 6, 2)), network="conv", hidden_sizes=(16,)),
         "layers.0.weight"),
        ("images", without("actor.convolutions.0.bias"), "convolutions.0.bias"),
        ("own", others(IMAGES, **OWN), r"actor\.1\.weight"),
    ],
)  # fmt: skip
def test_weights_of_another_shape_are_refused(case: str, change: Any, name: str) -> None:
    spec, options = CASES[case]
    trainee, policy = make(spec, **options)
    rows = observations(spec, 3)
    before = policy.act(rows)
    with pytest.raises(ValueError, match=name):
        policy.load(change(trainee.weights()))
    if case not in ("images", "own"):
        assert policy.act(rows).tobytes() == before.tobytes(), "nothing was taken over"


def test_a_policy_file_of_another_shape_is_refused(tmp_path: Path) -> None:
    learner = make_ppo(Config(hidden_sizes=(8,)), DISCRETE, device=CPU, seed=0)
    arrays = {name: tensor.numpy() for name, tensor in learner.weights().items()}
    path = tmp_path / "a.policy"
    for size in (8, 9):
        config = {"env": {"id": "Toy-v0"}, "algorithm": {"name": "ppo", "hidden_sizes": [size]}}
        metadata = {"format": policies.FORMAT, "run": "run", "version": "3", "config": json.dumps(config)}
        path.write_bytes(weights.encode_weights(arrays, metadata | {"spaces": json.dumps(asdict(DISCRETE))}))
        if size == 8:
            assert policies.load(path).action(np.zeros(3, np.float32)).shape == ()
    with pytest.raises(
        policies.PolicyFileError, match=r"do not fit .* \(actor\.layers\.0\.bias: shape \(8,\)"
    ):
        policies.load(path)

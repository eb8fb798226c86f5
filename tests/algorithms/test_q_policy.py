"""The policy of value learners: greedy rows by themselves, epsilon and the ladder, noise, columns for priorities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.algorithms import CPU
from support.reference_q import PIXELS, VECTORS, slow_ladder

from ddrl.algorithms.dqn.config import Config
from ddrl.algorithms.dqn.learner import make_learner as make_dqn
from ddrl.algorithms.dqn.policy import Policy
from ddrl.algorithms.value_learning.policy import ladder
from ddrl.types import EnvSpec

SMALL: dict[str, Any] = {"hidden_sizes": (8, 7)}
KINDS: dict[str, tuple[EnvSpec, dict[str, Any]]] = {
    "mlp": (VECTORS, {}),
    "dueling": (VECTORS, {"dueling": True}),
    "categorical": (VECTORS, {"distribution": "categorical", "num_atoms": 5}),
    "quantile": (VECTORS, {"distribution": "quantile", "num_atoms": 5}),
    "noisy": (VECTORS, {"noisy": True}),
    "nature": (PIXELS, {"network": "nature"}),
    "nature, group": (PIXELS, {"network": "nature", "norm": "group"}),
    "nature, batch": (PIXELS, {"network": "nature", "norm": "batch"}),
}


def make(
    spec: EnvSpec = VECTORS, *, producer: int = 0, epsilon: float | None = None, **options: Any
) -> Policy:
    """A policy with the weights of a learner that has not learned, and perhaps another epsilon."""
    config = Config(**(SMALL | options))
    policy = Policy(config, spec, producer=producer)
    weights = make_dqn(config, spec, device=CPU, seed=1).weights()
    policy.load(weights if epsilon is None else weights | {"epsilon": torch.tensor(epsilon)})
    return policy


def rows(spec: EnvSpec, num: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if spec.observation_dtype == "uint8":
        return rng.integers(0, 256, (num, *spec.input_shape), np.uint8)
    return rng.standard_normal((num, *spec.input_shape)).astype(np.float32)


def explore(
    policy: Policy, observation: np.ndarray, seed: int = 0
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    return policy.explore(observation, np.random.default_rng(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_rows_do_not_depend_on_each_other(kind: str) -> None:
    spec, options = KINDS[kind]
    policy, observation = make(spec, **options), rows(spec, 24)
    alone = np.concatenate([policy.act(observation[i : i + 1]) for i in range(24)])
    values = np.concatenate([policy.values(observation[i : i + 1], by_row=True) for i in range(24)])
    for start, rows_ in ((0, observation), (5, np.asfortranarray(observation[5:]))):
        assert policy.act(rows_).tolist() == alone[start:].tolist()
        assert policy.values(rows_, by_row=True).tobytes() == values[start:].tobytes()
    assert (alone.dtype, alone.shape) == (np.int64, (24,))


@pytest.mark.parametrize("kind", ["mlp", "nature"])
def test_greedy_is_the_largest_value_of_the_network(kind: str) -> None:
    spec, options = KINDS[kind]
    learner = make_dqn(Config(**(SMALL | options)), spec, device=CPU, seed=1)
    observation = rows(spec, 50)
    with torch.no_grad():
        pixels = torch.from_numpy(observation).float() / (255 if observation.dtype == np.uint8 else 1)
        expected = learner.network(pixels).numpy()
    policy = make(spec, **options)
    np.testing.assert_allclose(policy.values(observation, by_row=False), expected, rtol=1e-5, atol=1e-6)
    assert policy.act(observation).tolist() == expected.argmax(axis=1).tolist()


@pytest.mark.parametrize("distribution", ["categorical", "quantile"])
def test_distributions_act_by_their_means(distribution: str) -> None:
    options = {"distribution": distribution, "num_atoms": 5}
    options |= {"v_min": 0.0, "v_max": 4.0} if distribution == "categorical" else {}
    learner = make_dqn(Config(**(SMALL | options)), VECTORS, device=CPU, seed=1)
    observation = rows(VECTORS, 50)
    with torch.no_grad():
        output = learner.network(torch.from_numpy(observation)).double()
    mean = output.mean(dim=2)
    if distribution == "categorical":
        mean = (output.exp() / output.exp().sum(dim=2, keepdim=True) * torch.arange(5.0)).sum(dim=2)
    assert make(**options).act(observation).tolist() == mean.argmax(dim=1).tolist()


def test_epsilon_is_the_share_of_random_actions() -> None:
    observation = np.repeat(rows(VECTORS, 1), 40_000, axis=0)
    greedy = make().act(observation[:1])[0]
    for epsilon in (0.0, 0.3, 1.0):
        action, columns = explore(make(epsilon=epsilon), observation)
        assert (action.shape, action.dtype, columns) == ((40_000,), np.int64, {})
        share = np.bincount(action, minlength=4) / 40_000
        expected = np.full(4, epsilon / 4)
        expected[greedy] += 1 - epsilon
        np.testing.assert_allclose(share, expected, atol=0.01 if epsilon else 0.0)


def test_exploration_follows_the_generator() -> None:
    policy, observation = make(epsilon=0.5), rows(VECTORS, 200)
    first = explore(policy, observation, seed=1)[0].tolist()
    assert first == explore(policy, observation, seed=1)[0].tolist()
    assert first != explore(policy, observation, seed=2)[0].tolist()


def test_before_any_weights_epsilon_is_that_of_the_start() -> None:
    policy = Policy(Config(**SMALL, epsilon=1.0), VECTORS)
    action, _ = explore(policy, np.repeat(rows(VECTORS, 1), 400, axis=0))
    assert np.bincount(action).min() > 60


def test_ladder_of_known_values() -> None:
    config = Config(epsilon_ladder=True)
    found = ladder(config, producer=0, num_envs=4)
    assert found.dtype == np.float32
    # 0, 1, 2, 3 backwards in eight bits: 0, 128, 64, 192
    np.testing.assert_allclose(found, [0.4 ** (1 + 7 * x / 255) for x in (0, 128, 64, 192)], rtol=1e-6)
    last = ladder(config, producer=255, num_envs=1)
    np.testing.assert_allclose(last, [0.4**8], rtol=1e-6)


@pytest.mark.parametrize(("producer", "num_envs"), [(0, 1), (3, 16), (7, 100), (1, 600), (10**12 + 1, 5)])
def test_ladder_equals_the_slow_twin(producer: int, num_envs: int) -> None:
    config = Config(epsilon_ladder=True, ladder_base=0.5, ladder_exponent=3.0)
    found = ladder(config, producer=producer, num_envs=num_envs)
    np.testing.assert_allclose(found, slow_ladder(producer, num_envs, 0.5, 3.0), rtol=1e-6)


def test_a_fleet_is_spread_over_the_whole_ladder() -> None:
    config = Config(epsilon_ladder=True)
    fleet = [ladder(config, producer=producer, num_envs=16) for producer in range(16)]
    assert len(np.unique(np.concatenate(fleet))) == 256
    for epsilon in fleet:  # each collector by itself, too: one in each sixteenth of the exponents
        rung = (np.log(epsilon) / np.log(0.4) - 1) / 7 * 255
        assert sorted(np.rint(rung).astype(int) // 16) == list(range(16))


def test_environments_explore_by_their_rung() -> None:
    policy = make(producer=3, epsilon_ladder=True, ladder_exponent=1.0)
    observation, rng = np.repeat(rows(VECTORS, 1), 5, axis=0), np.random.default_rng(0)
    greedy = policy.act(observation[:1])[0]
    strays = np.mean([policy.explore(observation, rng)[0] != greedy for _ in range(4_000)], axis=0)
    expected = np.array(slow_ladder(3, 5, 0.4, 1.0)) * 3 / 4
    assert np.ptp(expected) > 0.1
    np.testing.assert_allclose(strays, expected, atol=0.03)


@pytest.mark.parametrize("options", [{}, {"distribution": "quantile"}])
def test_columns_are_the_values_of_the_network(options: dict[str, Any]) -> None:
    policy, observation = make(prioritized=True, epsilon=0.5, **options), rows(VECTORS, 100)
    action, columns = explore(policy, observation)
    value = policy.values(observation, by_row=False)
    assert set(columns) == {"action_value", "state_value"}
    assert all((column.shape, column.dtype) == ((100,), np.float32) for column in columns.values())
    np.testing.assert_array_equal(columns["state_value"], value.max(axis=1))
    np.testing.assert_array_equal(columns["action_value"], value[np.arange(100), action])
    assert np.any(columns["action_value"] < columns["state_value"])


def test_no_columns_where_priorities_are_in_nats() -> None:
    assert explore(make(prioritized=True, distribution="categorical"), rows(VECTORS, 3))[1] == {}


def test_noise_is_fresh_per_call_seeded_and_not_for_evaluation() -> None:
    observation = rows(VECTORS, 200)
    policy = make(noisy=True, prioritized=True, noise_scale=1.0)
    mean = policy.act(observation).tolist()
    rng = np.random.default_rng(0)
    first, second = (policy.explore(observation, rng)[1]["state_value"] for _ in range(2))
    assert not np.array_equal(first, second)
    assert policy.act(observation).tolist() == mean
    again = make(noisy=True, prioritized=True, noise_scale=1.0)
    np.testing.assert_array_equal(explore(again, observation)[1]["state_value"], first)
    drawn = policy.explore(observation, rng)
    np.testing.assert_array_equal(drawn[1]["action_value"], drawn[1]["state_value"])  # greedy under its noise


def test_evaluation_epsilon_is_reported_and_act_ignores_it() -> None:
    policy, other = make(evaluation_epsilon=1.0), make()
    assert (policy.evaluation_epsilon, other.evaluation_epsilon) == (1.0, 0.0)
    observation = rows(VECTORS, 50)
    assert policy.act(observation).tolist() == other.act(observation).tolist()


def test_weights_may_be_read_only_arrays() -> None:
    policy, observation = make(), rows(VECTORS, 50)
    weights = {
        name: value.numpy()
        for name, value in make_dqn(Config(**SMALL), VECTORS, device=CPU, seed=5).weights().items()
    }
    for array in weights.values():
        array.flags.writeable = False
    policy.load(weights)
    assert policy.act(observation).tolist() != make().act(observation).tolist()
    assert policy.initial_state(3) == {}


def test_weights_that_do_not_fit_are_refused() -> None:
    policy, weights = make(), make_dqn(Config(**SMALL), VECTORS, device=CPU, seed=1).weights()
    with pytest.raises(ValueError, match="epsilon: missing"):
        policy.load({name: value for name, value in weights.items() if name != "epsilon"})
    with pytest.raises(ValueError, match=r"epsilon: shape \(2,\)"):
        policy.load(weights | {"epsilon": torch.zeros(2)})
    with pytest.raises(ValueError, match="Error.* in loading"):
        policy.load(weights | {"extra": torch.zeros(2)})
    with pytest.raises(ValueError, match="size mismatch"):
        make(hidden_sizes=(9, 7)).load(weights)


def test_network_is_made_from_its_generator() -> None:
    config = Config(**SMALL)
    left, right, other = (
        config.make_network(VECTORS, generator=torch.Generator().manual_seed(seed)).state_dict()
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert any(not torch.equal(left[name], other[name]) for name in left)

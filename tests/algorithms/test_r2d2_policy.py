"""R2D2's options and policy: it is the network step by step; rows by themselves, new episodes, exploration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.algorithms import CPU
from support.reference_r2d2 import IMAGES, SMALL, VECTORS

from ddrl.algorithms.base import RecurrentState, advance, initial_state
from ddrl.algorithms.r2d2.config import Config
from ddrl.algorithms.r2d2.learner import make_learner as make_r2d2
from ddrl.algorithms.r2d2.policy import Policy
from ddrl.algorithms.value_learning.learner import ValueLearner
from ddrl.algorithms.value_learning.policy import ladder
from ddrl.types import EnvSpec

KINDS: dict[str, tuple[EnvSpec, dict[str, Any]]] = {
    "lstm": (VECTORS, {}),
    "gru": (VECTORS, {"recurrent": "gru"}),
    "nature": (IMAGES, {"network": "nature", "norm": "group"}),
}
SCHEDULE: dict[str, Any] = {"epsilon_ladder": False, "epsilon": 0.0, "final_epsilon": 0.0}


def learner(spec: EnvSpec = VECTORS, **options: Any) -> ValueLearner[Config]:
    """One whose values differ by the recurrent state, as those of a fresh network hardly do."""
    made = make_r2d2(Config(**(SMALL | options)), spec, device=CPU, seed=1)
    with torch.no_grad():
        for parameter in made.network.core.parameters():  # type: ignore[union-attr]
            parameter.mul_(2.0)
    return made


def make(spec: EnvSpec = VECTORS, *, producer: int = 0, **options: Any) -> Policy:
    policy = Policy(Config(**(SMALL | options)), spec, producer=producer)
    policy.load(learner(spec, **options).weights())
    return policy


def observations(spec: EnvSpec, *shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if spec.observation_dtype == "uint8":
        return rng.integers(0, 256, (*shape, *spec.input_shape), np.uint8)
    return rng.standard_normal((*shape, *spec.input_shape)).astype(np.float32)


def some_state(policy: Policy, size: int, seed: int = 0) -> RecurrentState:
    """That of episodes amid which it is."""
    rng, state = np.random.default_rng(seed), policy.initial_state(size)
    state["hidden"][:] = rng.normal(0, 0.5, state["hidden"].shape)
    state["previous_action"][:] = rng.integers(-1, 4, size)
    state["previous_reward"][:] = rng.normal(size=size)
    return state


def copied(state: RecurrentState) -> RecurrentState:
    return {name: array.copy() for name, array in state.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("explores", [False, True])
def test_step_by_step_it_is_the_network_over_a_sequence(kind: str, explores: bool) -> None:
    spec, options = KINDS[kind]
    options = options | SCHEDULE
    policy, made = make(spec, **options), learner(spec, **options)
    num_steps, size, rng = 7, 5, np.random.default_rng(1)
    seen, reward = observations(spec, num_steps, size), rng.normal(size=(num_steps, size)).astype(np.float32)
    state, ended = policy.initial_state(size), np.zeros(size, np.bool_)
    actions, inputs, states, columns = [], [], [], []
    for step in range(num_steps):
        inputs.append(copied(state))
        if explores:
            action, extras = policy.explore(seen[step], rng, state)
            columns.append(extras)
        else:
            action = policy.act(seen[step], state)
        states.append(state["hidden"].copy())
        assert (action.dtype, action.shape) == (np.int64, (size,))
        for name in ("previous_action", "previous_reward"):  # are the player's to keep
            np.testing.assert_array_equal(state[name], inputs[-1][name])
        advance(state, action, reward[step], ended)
        actions.append(action)

    previous_action = np.concatenate([np.full((1, size), -1), actions[:-1]])
    previous_reward = np.concatenate([np.zeros((1, size), np.float32), reward[:-1]])
    np.testing.assert_array_equal(np.stack([each["previous_action"] for each in inputs]), previous_action)
    pixels = torch.from_numpy(seen).float() / (255 if seen.dtype == np.uint8 else 1)
    with torch.no_grad():
        before = torch.from_numpy(previous_action), torch.from_numpy(previous_reward)
        value, last = made.network.sequence(pixels, *before, torch.zeros(size, made.network.state_size))
    np.testing.assert_allclose(states[-1], last.numpy(), rtol=1e-4, atol=1e-6)
    assert np.array_equal(np.stack(actions), value.argmax(dim=2).numpy())
    if explores:
        for name in ("action_value", "state_value"):  # greedily played, they are the same
            found = np.stack([each[name] for each in columns])
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, value.amax(dim=2).numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_rows_do_not_depend_on_each_other(kind: str) -> None:
    spec, options = KINDS[kind]
    policy, seen = make(spec, **options), observations(spec, 12)
    state = some_state(policy, 12)
    alone = [{name: array[i : i + 1].copy() for name, array in state.items()} for i in range(12)]
    actions = [policy.act(seen[i : i + 1], alone[i])[0] for i in range(12)]
    part = {name: array[5:].copy() for name, array in state.items()}
    assert policy.act(seen, state).tolist() == actions
    assert state["hidden"].tobytes() == np.concatenate([each["hidden"] for each in alone]).tobytes()
    assert policy.act(np.asfortranarray(seen[5:]), part).tolist() == actions[5:]
    assert part["hidden"].tobytes() == state["hidden"][5:].tobytes()


@pytest.mark.parametrize("name", ["hidden", "previous_action", "previous_reward"])
def test_each_part_of_the_recurrent_state_has_an_effect(name: str) -> None:
    policy, seen = make(), observations(VECTORS, 6)
    state = some_state(policy, 6)
    other = copied(state)
    other[name][:] = some_state(policy, 6, seed=7)[name]
    for each in (state, other):
        policy.act(seen, each)
    assert not np.array_equal(state["hidden"], other["hidden"])


def test_rows_whose_episode_ended_start_anew() -> None:
    policy, seen = make(), observations(VECTORS, 3, 4)
    state, ended = some_state(policy, 4), np.array([True, False, True, False])
    going = copied(state)
    for each in (state, going):
        action = policy.act(seen[0], each)
    advance(state, action, np.ones(4, np.float32), ended)
    advance(going, action, np.ones(4, np.float32), ended & False)
    anew = policy.initial_state(4)
    for name, array in state.items():
        np.testing.assert_array_equal(array[ended], anew[name][ended])
        np.testing.assert_array_equal(array[~ended], going[name][~ended])
    for each in (state, going, anew):
        policy.act(seen[1], each)
    assert state["hidden"][ended].tobytes() == anew["hidden"][ended].tobytes()
    assert state["hidden"][~ended].tobytes() == going["hidden"][~ended].tobytes()
    assert not np.array_equal(state["hidden"][ended], going["hidden"][ended])


def test_initial_recurrent_state() -> None:
    for recurrent, size in (("lstm", 14), ("gru", 7)):
        state, expected = make(recurrent=recurrent).initial_state(3), initial_state(3, size)
        assert state.keys() == expected.keys()
        for name, array in state.items():
            assert (array.dtype, array.tolist()) == (expected[name].dtype, expected[name].tolist())


def test_a_recurrent_policy_refuses_a_missing_state() -> None:
    policy, seen, rng = make(), observations(VECTORS, 3), np.random.default_rng(0)
    with pytest.raises(
        ValueError, match=r"state: a recurrent policy needs one; pass what initial_state\(num_envs\)"
    ):
        policy.act(seen)
    with pytest.raises(ValueError, match="state: a recurrent policy needs one"):
        policy.explore(seen, rng)
    with pytest.raises(
        ValueError, match=r"state: hidden has shape \(2, 14\), but 3 observations need \(3, 14\)"
    ):
        policy.act(seen, policy.initial_state(2))
    with pytest.raises(ValueError, match=r"hidden has shape \(3, 14\), but 3 observations need \(3, 7\)"):
        make(recurrent="gru").explore(seen, rng, policy.initial_state(3))


def test_epsilon_of_the_weights_is_the_share_of_random_actions() -> None:
    options = SCHEDULE | {"epsilon": 1.0}
    policy, seen = make(**options), np.repeat(observations(VECTORS, 1), 20_000, axis=0)
    greedy = policy.act(seen[:1], policy.initial_state(1))[0]
    for epsilon in (0.0, 0.3, 1.0):
        policy.load(learner(**options).weights() | {"epsilon": torch.tensor(epsilon)})
        action, columns = policy.explore(seen, np.random.default_rng(0), policy.initial_state(20_000))
        expected = np.full(4, epsilon / 4)
        expected[greedy] += 1 - epsilon
        np.testing.assert_allclose(np.bincount(action, minlength=4) / 20_000, expected, atol=0.015)
        assert np.mean(columns["action_value"] < columns["state_value"]) == pytest.approx(
            epsilon * 3 / 4, abs=0.015
        )
        assert len(np.unique(columns["action_value"])) == len(np.unique(action))


def test_random_actions_update_the_state_too() -> None:
    policy, seen = make(**SCHEDULE | {"epsilon": 1.0}), observations(VECTORS, 3)
    state, greedy = policy.initial_state(3), policy.initial_state(3)
    policy.explore(seen, np.random.default_rng(0), state)
    policy.act(seen, greedy)
    np.testing.assert_allclose(state["hidden"], greedy["hidden"], rtol=1e-5, atol=1e-7)


def test_environments_explore_by_their_rung() -> None:
    options = {"ladder_exponent": 4.0}
    policy, rng = make(producer=1, **options), np.random.default_rng(0)
    seen = np.repeat(observations(VECTORS, 1), 4, axis=0)
    greedy = policy.act(seen[:1], policy.initial_state(1))[0]
    strays = np.mean(
        [policy.explore(seen, rng, policy.initial_state(4))[0] != greedy for _ in range(1_000)], axis=0
    )
    expected = ladder(Config(**SMALL, **options), producer=1, num_envs=4) * 3 / 4
    others = ladder(Config(**SMALL, **options), producer=0, num_envs=4) * 3 / 4
    assert np.abs(expected - others).max() > 0.1 and np.ptp(expected) > 0.1
    np.testing.assert_allclose(strays, expected, atol=0.05)


def test_no_columns_where_replay_is_uniform() -> None:
    uniform: dict[str, Any] = {"prioritized": False}
    policy = make(**uniform)
    assert (
        policy.explore(observations(VECTORS, 3), np.random.default_rng(0), policy.initial_state(3))[1] == {}
    )


def test_weights_are_copied_and_those_that_do_not_fit_are_refused() -> None:
    policy, seen = make(), observations(VECTORS, 50)
    weights = {name: value.numpy() for name, value in learner().weights().items()}
    policy.load(weights)
    action = policy.act(seen, policy.initial_state(50)).tolist()
    for array in weights.values():
        array[...] = 0.0
    assert policy.act(seen, policy.initial_state(50)).tolist() == action
    for other in ({"recurrent": "gru"}, {"recurrent_size": 8}, {"dueling": False}):
        with pytest.raises(ValueError, match="loading state_dict|size mismatch"):
            policy.load(learner(**other).weights())

"""The policies of DQN and R2D2: the network's largest values, rows by themselves, exploration, weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithms import DISCRETE, make_learner, make_policy
from support.reference_q import PIXELS, slow_ladder
from support.reference_r2d2 import IMAGES
from torch import Tensor

from ddrl.algorithms.base import RecurrentState, advance, config_class, initial_state
from ddrl.algorithms.value_learning.policy import ladder
from ddrl.types import EnvSpec

NATURE, GROUP, BATCH = ({"network": "nature", "norm": norm} for norm in ("none", "group", "batch"))
GREEDY: dict[str, Any] = {"epsilon_ladder": False, "epsilon": 0.0, "final_epsilon": 0.0}
GRU = {"recurrent": "gru"}
CATEGORICAL, QUANTILE = ({"distribution": kind, "num_atoms": 5} for kind in ("categorical", "quantile"))
Case = tuple[str, EnvSpec, dict[str, Any]]
FEED_FORWARD: dict[str, Case] = {
    "mlp": ("dqn", DISCRETE, {}),
    "dueling": ("dqn", DISCRETE, {"dueling": True}),
    "categorical": ("dqn", DISCRETE, CATEGORICAL | {"v_min": 0.0, "v_max": 4.0}),
    "quantile": ("dqn", DISCRETE, QUANTILE),
    "noisy": ("dqn", DISCRETE, {"noisy": True}),
    "nature": ("dqn", PIXELS, NATURE),
    "group": ("dqn", PIXELS, GROUP),
    "batch": ("dqn", PIXELS, BATCH),
}
RECURRENT: dict[str, Case] = {
    "lstm": ("r2d2", DISCRETE, {}),
    "gru": ("r2d2", DISCRETE, GRU),
    "recurrent nature": ("r2d2", IMAGES, GROUP),
}
CASES = FEED_FORWARD | RECURRENT
each_case = pytest.mark.parametrize(("name", "spec", "options"), CASES.values(), ids=CASES)
each_name = pytest.mark.parametrize("name", ["dqn", "r2d2"])


def made(
    name: str, spec: EnvSpec = DISCRETE, *, producer: int = 0, epsilon: float | None = None, **options: Any
) -> tuple[Any, Any]:
    """A learner that has not learned, and a policy with its weights, and perhaps another epsilon."""
    learner = make_learner(name, spec, **options)
    if name == "r2d2":  # else values hardly differ by the recurrent state
        with torch.no_grad():
            for parameter in learner.network.core.parameters():
                parameter.mul_(2.0)
    changed = {} if epsilon is None else {"epsilon": torch.tensor(epsilon)}
    return learner, make_policy(name, spec, weights=learner.weights() | changed, producer=producer, **options)


def rows(spec: EnvSpec, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    if spec.observation_dtype == "uint8":
        return rng.integers(0, 256, (*shape, *spec.input_shape), np.uint8)
    return rng.standard_normal((*shape, *spec.input_shape)).astype(np.float32)


def pixels(observation: np.ndarray) -> Tensor:
    return torch.from_numpy(observation).float() / (255 if observation.dtype == np.uint8 else 1)


def some_state(policy: Any, size: int, seed: int = 0) -> RecurrentState:
    """That of episodes in progress; of a feed-forward network none."""
    rng, state = np.random.default_rng(seed), policy.initial_state(size)
    if state:
        state["hidden"][:] = rng.normal(0, 0.5, state["hidden"].shape)
        state["previous_action"][:] = rng.integers(-1, 4, size)
        state["previous_reward"][:] = rng.normal(size=size)
    return state


def part(state: RecurrentState, at: slice = slice(None)) -> RecurrentState:
    return {name: array[at].copy() for name, array in state.items()}


@each_case
def test_greedy_rows_do_not_depend_on_each_other(name: str, spec: EnvSpec, options: dict[str, Any]) -> None:
    _, policy = made(name, spec, **options)
    seen, state = rows(spec, 24), some_state(policy, 24)
    alone = [part(state, slice(i, i + 1)) for i in range(24)]
    values = np.concatenate([policy.values(seen[i : i + 1], part(alone[i]), by_row=True) for i in range(24)])
    actions = np.concatenate([policy.act(seen[i : i + 1], alone[i]) for i in range(24)])
    assert (actions.dtype, actions.shape) == (np.int64, (24,))
    for start, rows_ in ((0, seen), (5, np.asfortranarray(seen[5:]))):
        after = part(state, slice(start, None))
        assert policy.values(rows_, part(after), by_row=True).tobytes() == values[start:].tobytes()
        assert policy.act(rows_, after).tolist() == actions[start:].tolist()
        for column in after:
            expected = np.concatenate([each[column] for each in alone[start:]])
            assert after[column].tobytes() == expected.tobytes()


@pytest.mark.parametrize(("name", "spec", "options"), FEED_FORWARD.values(), ids=FEED_FORWARD)
def test_greedy_is_the_largest_value_of_the_network(
    name: str, spec: EnvSpec, options: dict[str, Any]
) -> None:
    """Of distributions the means."""
    learner, policy = made(name, spec, **options)
    seen = rows(spec, 50)
    with torch.no_grad():
        output = learner.network.eval()(pixels(seen))
    if "distribution" in options:
        is_categorical = options["distribution"] == "categorical"  # over 0, 1, 2, 3, 4
        output = output.softmax(dim=2) @ torch.arange(5.0) if is_categorical else output.mean(dim=2)
    np.testing.assert_allclose(policy.values(seen, by_row=False), output.numpy(), rtol=1e-5, atol=1e-6)
    assert policy.act(seen).tolist() == output.argmax(dim=1).tolist()
    assert policy.initial_state(3) == {}


@pytest.mark.parametrize(("name", "spec", "options"), RECURRENT.values(), ids=RECURRENT)
@pytest.mark.parametrize("explores", [False, True])
def test_step_by_step_it_is_the_network_over_a_sequence(
    name: str, spec: EnvSpec, options: dict[str, Any], explores: bool
) -> None:
    learner, policy = made(name, spec, **options, **GREEDY)
    num_steps, size, rng = 7, 5, np.random.default_rng(1)
    seen, reward = rows(spec, num_steps, size), rng.normal(size=(num_steps, size)).astype(np.float32)
    state, ended = policy.initial_state(size), np.zeros(size, np.bool_)
    expected = initial_state(size, {"gru": 7}.get(options.get("recurrent", "lstm"), 14))
    assert state.keys() == expected.keys()
    for column, array in state.items():
        assert (array.dtype, array.tolist()) == (expected[column].dtype, expected[column].tolist())
    actions, inputs, columns = [], [], []
    for step in range(num_steps):
        inputs.append(part(state))
        if explores:
            action, extras = policy.explore(seen[step], rng, state)
            columns.append(extras)
        else:
            action = policy.act(seen[step], state)
        last_state = state["hidden"].copy()
        assert (action.dtype, action.shape) == (np.int64, (size,))
        for column in ("previous_action", "previous_reward"):  # only `advance` changes them
            np.testing.assert_array_equal(state[column], inputs[-1][column])
        advance(state, action, reward[step], ended)
        actions.append(action)

    previous_action = np.concatenate([np.full((1, size), -1), actions[:-1]])
    previous_reward = np.concatenate([np.zeros((1, size), np.float32), reward[:-1]])
    np.testing.assert_array_equal(np.stack([each["previous_action"] for each in inputs]), previous_action)
    with torch.no_grad():
        before = torch.from_numpy(previous_action), torch.from_numpy(previous_reward)
        start = torch.zeros(size, learner.network.state_size)
        value, last = learner.network.sequence(pixels(seen), *before, start)
    np.testing.assert_allclose(last_state, last.numpy(), rtol=1e-4, atol=1e-6)
    assert np.array_equal(np.stack(actions), value.argmax(dim=2).numpy())
    for column in ("action_value", "state_value") if explores else ():  # of greedy actions they are the same
        found = np.stack([each[column] for each in columns])
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, value.amax(dim=2).numpy(), rtol=1e-4, atol=1e-6)


def test_rows_whose_episode_ended_start_anew() -> None:
    _, policy = made("r2d2")
    state, ended, seen = some_state(policy, 4), np.array([True, False, True, False]), rows(DISCRETE, 4)
    going, anew = part(state), policy.initial_state(4)
    for each, over in ((state, ended), (going, ended & False)):
        advance(each, policy.act(seen, each), np.ones(4, np.float32), over)
    for column, array in state.items():
        np.testing.assert_array_equal(array[ended], anew[column][ended])
        np.testing.assert_array_equal(array[~ended], going[column][~ended])


def test_a_recurrent_policy_refuses_a_missing_or_unsuitable_state() -> None:
    (_, policy), (_, gru), seen = made("r2d2"), made("r2d2", **GRU), rows(DISCRETE, 3)
    explore = partial(policy.explore, generator=np.random.default_rng(0))
    for act in (policy.act, explore):
        with pytest.raises(
            ValueError, match=r"recurrent policy needs one; pass what initial_state\(num_envs\)"
        ):
            act(seen)
        with pytest.raises(
            ValueError, match=r"hidden has shape \(2, 14\), but 3 observations need \(3, 14\)"
        ):
            act(seen, state=policy.initial_state(2))
    with pytest.raises(ValueError, match=r"hidden has shape \(3, 14\), but 3 observations need \(3, 7\)"):
        gru.act(seen, policy.initial_state(3))


@each_name
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_epsilon_is_the_share_of_random_actions(name: str, epsilon: float) -> None:
    _, policy = made(name, epsilon=epsilon, epsilon_ladder=False, prioritized=True)
    seen = np.repeat(rows(DISCRETE, 1), 20_000, axis=0)
    state = policy.initial_state(20_000)
    greedy = policy.act(seen[:1], policy.initial_state(1))[0]
    action, columns = policy.explore(seen, np.random.default_rng(0), state)
    assert (action.shape, action.dtype) == ((20_000,), np.int64)
    expected = np.full(4, epsilon / 4)
    expected[greedy] += 1 - epsilon
    share = np.bincount(action, minlength=4) / 20_000
    np.testing.assert_allclose(share, expected, atol=0.015 if epsilon else 0.0)
    strays = np.mean(columns["action_value"] < columns["state_value"])
    assert strays == pytest.approx(epsilon * 3 / 4, abs=0.015)
    if state:
        after = policy.initial_state(1)
        policy.act(seen[:1], after)
        np.testing.assert_allclose(state["hidden"][-1:], after["hidden"], rtol=1e-5, atol=1e-7)
    first, again, other = (
        policy.explore(seen[:200], np.random.default_rng(seed), policy.initial_state(200))[0].tolist()
        for seed in (1, 1, 2)
    )
    assert first == again and (first == other) == (epsilon == 0.0)


def test_ladder_hand_numbers() -> None:
    """0, 1, 2, 3 backwards in eight bits: 0, 128, 64, 192."""
    config: Any = config_class("dqn")(epsilon_ladder=True)
    found = ladder(config, producer=0, num_envs=4)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [0.4 ** (1 + 7 * x / 255) for x in (0, 128, 64, 192)], rtol=1e-6)
    np.testing.assert_allclose(ladder(config, producer=255, num_envs=1), [0.4**8], rtol=1e-6)


@pytest.mark.parametrize(("producer", "num_envs"), [(0, 1), (3, 16), (7, 100), (1, 600), (10**12 + 1, 5)])
def test_ladder_equals_the_slow_twin(producer: int, num_envs: int) -> None:
    config: Any = config_class("dqn")(epsilon_ladder=True, ladder_base=0.5, ladder_exponent=3.0)
    found = ladder(config, producer=producer, num_envs=num_envs)
    np.testing.assert_allclose(found, slow_ladder(producer, num_envs, 0.5, 3.0), rtol=1e-6)


def test_a_fleet_is_spread_over_the_whole_ladder() -> None:
    config: Any = config_class("dqn")(epsilon_ladder=True)
    fleet = [ladder(config, producer=producer, num_envs=16) for producer in range(16)]
    assert len(np.unique(np.concatenate(fleet))) == 256
    for epsilon in fleet:  # each collector by itself, too: one in each sixteenth of the exponents
        rung = (np.log(epsilon) / np.log(0.4) - 1) / 7 * 255
        assert sorted(np.rint(rung).astype(int) // 16) == list(range(16))


@each_name
def test_environments_explore_by_their_rung(name: str) -> None:
    _, policy = made(name, producer=3, epsilon_ladder=True, ladder_exponent=1.0)
    seen, rng = np.repeat(rows(DISCRETE, 1), 5, axis=0), np.random.default_rng(0)
    greedy = policy.act(seen[:1], policy.initial_state(1))[0]
    strays = np.mean(
        [policy.explore(seen, rng, policy.initial_state(5))[0] != greedy for _ in range(1_000)], axis=0
    )
    expected = np.array(slow_ladder(3, 5, 0.4, 1.0)) * 3 / 4
    assert np.ptp(expected) > 0.1
    np.testing.assert_allclose(strays, expected, atol=0.05)


@pytest.mark.parametrize(
    ("name", "options", "has_columns"),
    [
        ("dqn", {"prioritized": True}, True),
        ("dqn", {"prioritized": True, **QUANTILE}, True),
        ("dqn", {"prioritized": True, **CATEGORICAL}, False),  # whose priorities are in nats
        ("dqn", {}, False),
        ("r2d2", {"prioritized": False}, False),
    ],
)
def test_prioritized_replay_gets_the_values_of_the_network(
    name: str, options: dict[str, Any], has_columns: bool
) -> None:
    _, policy = made(name, epsilon=0.5, **options)
    seen = rows(DISCRETE, 100)
    action, columns = policy.explore(seen, np.random.default_rng(0), policy.initial_state(100))
    assert set(columns) == ({"action_value", "state_value"} if has_columns else set())
    if has_columns:
        value = policy.values(seen, by_row=False)
        assert all((column.shape, column.dtype) == ((100,), np.float32) for column in columns.values())
        np.testing.assert_array_equal(columns["state_value"], value.max(axis=1))
        np.testing.assert_array_equal(columns["action_value"], value[np.arange(100), action])


def test_noise_is_fresh_per_call_seeded_and_not_for_evaluation() -> None:
    options, seen = {"noisy": True, "prioritized": True, "noise_scale": 1.0}, rows(DISCRETE, 200)
    (_, policy), (_, again) = (made("dqn", **options) for _ in range(2))
    mean = policy.act(seen).tolist()
    rng = np.random.default_rng(0)
    first, second = (policy.explore(seen, rng)[1] for _ in range(2))
    assert not np.array_equal(first["state_value"], second["state_value"])
    np.testing.assert_array_equal(second["action_value"], second["state_value"])  # greedy under its noise
    assert policy.act(seen).tolist() == mean
    found = again.explore(seen, np.random.default_rng(0))[1]["state_value"]
    np.testing.assert_array_equal(found, first["state_value"])


def test_evaluation_epsilon_is_reported_and_act_ignores_it() -> None:
    (_, policy), (_, other), seen = made("dqn", evaluation_epsilon=1.0), made("dqn"), rows(DISCRETE, 50)
    assert (policy.evaluation_epsilon, other.evaluation_epsilon) == (1.0, 0.0)
    assert policy.act(seen).tolist() == other.act(seen).tolist()

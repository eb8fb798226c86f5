"""Policies: rows by themselves, actions, exploration, and weights that are copied or refused."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithms import (
    CONTINUOUS,
    DISCRETE,
    OWN,
    PAIRS,
    PICTURES,
    Options,
    digest,
    make_learner,
    make_policy,
)
from support.reference_ppo import IMAGES, make_feed, tensors
from support.reference_q import PIXELS, slow_ladder
from support.reference_r2d2 import IMAGES as STACKED
from torch import Tensor

from ddrl.algorithms.base import RecurrentState, advance, config_class, initial_state
from ddrl.algorithms.value_learning.policy import ladder
from ddrl.networks.trunks import to_input
from ddrl.types import EnvSpec

BYTES = replace(DISCRETE, observation_dtype="uint8")  # a vector of bytes, such as the memory of a console
NORMALIZED, CONV = {"normalize_observations": True}, {"network": "conv", "hidden_sizes": (16,)}
OWN_NETWORK = {"network": OWN, "hidden_sizes": (64, 64)}
NATURE, GROUP, BATCH = ({"network": "nature", "norm": norm} for norm in ("none", "group", "batch"))
CATEGORICAL, QUANTILE = ({"distribution": kind, "num_atoms": 5} for kind in ("categorical", "quantile"))
GREEDY: Options = {"epsilon_ladder": False, "epsilon": 0.0, "final_epsilon": 0.0}
GRU = {"recurrent": "gru"}
MEMORY = {"recurrent": "lstm", "recurrent_size": 7, "shared": True}
Case = tuple[str, EnvSpec, Options]
ACTOR_CRITIC: dict[str, Case] = {
    "discrete": ("ppo", DISCRETE, {}),
    "pairs": ("ppo", PAIRS, {}),
    "continuous": ("ppo", CONTINUOUS, {}),
    "relu": ("ppo", CONTINUOUS, {"activation": "relu", "hidden_sizes": (16,)}),
    "shared": ("ppo", PAIRS, {"shared": True}),
    "normalized": ("ppo", CONTINUOUS, NORMALIZED),
    "normalized pairs": ("ppo", PAIRS, NORMALIZED | {"shared": True, "activation": "relu"}),
    "narrow": ("ppo", CONTINUOUS, {"initial_log_std": -3.0}),
    "bytes": ("ppo", BYTES, {}),
    "normalized bytes": ("ppo", BYTES, NORMALIZED),
    "images": ("ppo", IMAGES, CONV),
    "own": ("ppo", IMAGES, OWN_NETWORK | {"network_kwargs": {"width": 7}, "shared": True}),
    "own normalized": ("ppo", CONTINUOUS, OWN_NETWORK | NORMALIZED),
    "lstm": ("ppo", PAIRS, MEMORY),
    "gru normalized": ("ppo", CONTINUOUS, MEMORY | GRU | NORMALIZED),
    "lstm images": ("ppo", IMAGES, MEMORY | CONV),
}
SOFT: dict[str, Case] = {
    "sac images": ("sac", PICTURES, {"network": "conv"}),
    "sac own": ("sac", PICTURES, {"network": OWN, "network_kwargs": {"width": 7}}),
}
REGRESSION: dict[str, Case] = {
    "bc": ("bc", CONTINUOUS, {}),
    "bc images": ("bc", PICTURES, {"network": "conv"}),
    "iql pairs": ("iql", PAIRS, {"hidden_sizes": (128, 128)}),
    "iql own": ("iql", CONTINUOUS, {"network": OWN}),
}
FEED_FORWARD: dict[str, Case] = {
    "mlp": ("dqn", DISCRETE, {}),
    "dueling": ("dqn", DISCRETE, {"dueling": True}),
    "categorical": ("dqn", DISCRETE, CATEGORICAL | {"v_min": 0.0, "v_max": 4.0}),
    "quantile": ("dqn", DISCRETE, QUANTILE),
    "noisy": ("dqn", DISCRETE, {"noisy": True}),
    "layer norm": ("pqn", DISCRETE, {}),
    "nature": ("dqn", PIXELS, NATURE),
    "group": ("dqn", PIXELS, GROUP),
    "batch": ("dqn", PIXELS, BATCH),
}
RECURRENT: dict[str, Case] = {
    "r2d2 lstm": ("r2d2", DISCRETE, {}),
    "r2d2 gru": ("r2d2", DISCRETE, GRU),
    "recurrent nature": ("r2d2", STACKED, GROUP),
}
SIZES: dict[str, Case] = {
    f"{name} {sizes}": (name, CONTINUOUS, {"hidden_sizes": sizes})
    for name in ("ppo", "sac")
    for sizes in ((8, 7), (64,), (64, 64), (128, 128), (400, 300))
}


def each_of(cases: dict[str, Case]) -> Any:
    return pytest.mark.parametrize(("name", "spec", "options"), cases.values(), ids=cases)


def made(
    name: str, spec: EnvSpec = DISCRETE, *, producer: int = 0, epsilon: float | None = None, **options: Any
) -> tuple[Any, Any]:
    """A learner whose actions depend much on its inputs, and a policy with its weights, and perhaps another epsilon."""
    learner, generator = make_learner(name, spec, seed=3, **options), torch.Generator().manual_seed(4)
    with torch.no_grad():
        if learner.config.recurrent_state_size:
            for parameter in learner.network.core.parameters():
                parameter.mul_(2.0)
        if name == "ppo":
            batch = tensors(make_feed(replace(spec, observation_dtype="float32") if spec is BYTES else spec))
            observation = batch.observation.to(getattr(torch, spec.observation_dtype))
            learner.observe(replace(batch, observation=observation))
            for parameter in learner.network.policy_head.parameters():
                parameter.normal_(generator=generator)
            if spec.action_kind == "continuous":
                learner.network.log_std += torch.tensor([0.1, -0.4])
    changed = {} if epsilon is None else {"epsilon": torch.tensor(epsilon)}
    return learner, make_policy(name, spec, weights=learner.weights() | changed, producer=producer, **options)


def rows(spec: EnvSpec, *shape: int) -> np.ndarray:
    rng, full = np.random.default_rng(5), (*shape, *spec.input_shape)
    if spec.observation_dtype == "uint8":
        return rng.integers(0, 256, full).astype(np.uint8)
    return rng.normal(1.0, 2.0, full).astype(np.float32)


def some_state(policy: Any, size: int) -> RecurrentState:
    """Return a recurrent state in mid-episode; none for a feed-forward network."""
    rng, state = np.random.default_rng(0), policy.initial_state(size)
    if state:
        state["hidden"][:] = rng.normal(0, 0.5, state["hidden"].shape)
    if "previous_action" in state:
        state["previous_action"][:] = rng.integers(-1, 4, size)
        state["previous_reward"][:] = rng.normal(size=size)
    return state


def part(state: RecurrentState, at: slice = slice(None)) -> RecurrentState:
    return {name: array[at].copy() for name, array in state.items()}


def outputs(policy: Any, seen: np.ndarray, state: RecurrentState) -> list[np.ndarray]:
    """Greedy actions, the values if there are any, and the next state."""
    values = [policy.values(seen, part(state), by_row=True)] if hasattr(policy, "values") else []
    return [policy.act(seen, state), *values, *state.values()]


@each_of(ACTOR_CRITIC | SIZES | SOFT | REGRESSION | FEED_FORWARD | RECURRENT)
def test_greedy_rows_do_not_depend_on_each_other(name: str, spec: EnvSpec, options: Options) -> None:
    """To the last bit, at every place of a block, in any layout."""
    _, policy = made(name, spec, **options)
    seen, state = rows(spec, 64), some_state(policy, 64)
    one_by_one = [slice(row, row + 1) for row in range(64)]
    alone = zip(*(outputs(policy, seen[row], part(state, row)) for row in one_by_one), strict=True)
    expected = [np.concatenate(column) for column in alone]
    for size in (*range(1, 18), 31, 32, 33, 64):
        last = slice(64 - size, None)
        for given in (seen[last], np.asfortranarray(seen[last])):
            found = outputs(policy, given, part(state, last))
            assert [column.tobytes() for column in found] == [column[last].tobytes() for column in expected]


# --- weights ---------------------------------------------------------------------------------------------

SPECS = {
    "sac": CONTINUOUS,
    "td3": CONTINUOUS,
    "discrete_sac": DISCRETE,
    "bc": CONTINUOUS,
    "iql": DISCRETE,
    "ppo": CONTINUOUS,
    "dqn": DISCRETE,
    "r2d2": DISCRETE,
    "pqn": DISCRETE,
}
SPECS |= {"docs.own_algorithm": DISCRETE}
each_algorithm = pytest.mark.parametrize(("name", "spec"), SPECS.items())


def actions(policy: Any, spec: EnvSpec) -> Any:
    return policy.act(rows(spec, 50), policy.initial_state(50)).tolist()


@each_algorithm
def test_weights_may_be_read_only_arrays_and_are_copied(name: str, spec: EnvSpec) -> None:
    learner, policy = make_learner(name, spec), make_policy(name, spec)
    arrays = {key: value.numpy().copy() for key, value in learner.weights().items()}
    for array in arrays.values():
        array.flags.writeable = False
    policy.load(arrays)
    before = actions(policy, spec)
    for array in arrays.values():
        array.flags.writeable = True
        array[...] = 0.0
    assert actions(policy, spec) == before


@each_algorithm
def test_missing_and_unknown_weights_are_refused(name: str, spec: EnvSpec) -> None:
    weights = make_learner(name, spec).weights()
    policy = make_policy(name, spec, weights=weights)
    for missing in weights.keys() - ({"log_temperature"} if name == "sac" else set()):  # for learners only
        with pytest.raises(ValueError, match=missing.replace(".", r"\.")):
            policy.load({key: value for key, value in weights.items() if key != missing})
    with pytest.raises(ValueError, match="extra"):
        policy.load(weights | {"extra": torch.zeros(2)})


WIDER, LARGER = replace(CONTINUOUS, observation_shape=(4,)), replace(IMAGES, observation_shape=(7, 6, 2))
OTHERS: list[tuple[str, EnvSpec, Options, EnvSpec, Options, str]] = [
    ("sac", CONTINUOUS, {}, CONTINUOUS, {"hidden_sizes": (8, 7, 7)}, r"biases\.2"),
    ("sac", CONTINUOUS, {}, WIDER, {}, r"weights\.0: shape \(4, 8\) in the weights, \(3, 8\) here"),
    ("sac", PICTURES, {"network": "conv"}, PICTURES, {"network": OWN}, "loading state_dict"),
    (
        "sac",
        PICTURES,
        {"network": OWN},
        PICTURES,
        {"network": OWN, "network_kwargs": {"width": 7}},
        "size mismatch",
    ),
    ("discrete_sac", DISCRETE, {}, DISCRETE, {"form": "sqn"}, "loading state_dict"),
    ("bc", CONTINUOUS, {}, DISCRETE, {}, "log_std"),
    ("iql", DISCRETE, {}, CONTINUOUS, {}, "log_std"),
    (
        "iql",
        DISCRETE,
        {},
        replace(DISCRETE, action_sizes=(5,)),
        {},
        r"biases\.2: shape \(5,\) in the weights",
    ),
    ("ppo", CONTINUOUS, {}, DISCRETE, {}, "log_std"),
    ("ppo", CONTINUOUS, {}, CONTINUOUS, {"hidden_sizes": (6, 5, 5)}, "actor.layers.2.bias"),
    ("ppo", CONTINUOUS, {}, WIDER, {}, "actor.layers.0.weight"),
    ("ppo", CONTINUOUS, {}, CONTINUOUS, NORMALIZED, "observation_mean"),
    ("ppo", DISCRETE, {}, replace(DISCRETE, action_sizes=(5,)), {}, "policy_head.bias"),
    ("ppo", PAIRS, {}, replace(PAIRS, action_sizes=(3, 3)), {}, "policy_head.bias"),
    ("ppo", IMAGES, CONV, LARGER, CONV, "layers.0.weight"),
    ("ppo", IMAGES, OWN_NETWORK | {"network_kwargs": {"width": 7}}, IMAGES, OWN_NETWORK, r"actor\.1\.weight"),
    ("dqn", DISCRETE, {}, DISCRETE, {"hidden_sizes": (9, 7)}, "size mismatch"),
    ("r2d2", DISCRETE, {}, DISCRETE, {"recurrent": "gru"}, "size mismatch"),
    ("r2d2", DISCRETE, {}, DISCRETE, {"dueling": False}, "loading state_dict"),
]


@pytest.mark.parametrize(("name", "spec", "options", "other_spec", "other_options", "words"), OTHERS)
def test_weights_of_another_configuration_are_refused(
    name: str, spec: EnvSpec, options: Options, other_spec: EnvSpec, other_options: Options, words: str
) -> None:
    policy = make_policy(name, spec, weights=make_learner(name, spec, **options).weights(), **options)
    before = None if spec is IMAGES else actions(policy, spec)
    with pytest.raises(ValueError, match=words):
        policy.load(make_learner(name, other_spec, **other_options).weights())
    if name in ("sac", "td3", "bc", "iql", "ppo") and spec is not IMAGES:
        assert actions(policy, spec) == before, "nothing was taken over"


# --- actor-critics: actions and log probabilities are those that the learner learns from ----------------


def learners_parameters(learner: Any, observation: np.ndarray, state: RecurrentState) -> Tensor:
    """[N, P] as the learner computes them; of a recurrent network by sequences of one step."""
    seen = to_input(learner.normalized(torch.from_numpy(observation)))
    given = [torch.from_numpy(state["hidden"]), torch.ones(len(seen), dtype=torch.int64)] if state else []
    with torch.no_grad():
        parameters, _ = learner.network(seen, *given)
    assert isinstance(parameters, Tensor)
    return parameters


@each_of(ACTOR_CRITIC)
def test_drawn_actions_have_the_learners_log_probability(name: str, spec: EnvSpec, options: Options) -> None:
    learner, policy = made(name, spec, **options)
    seen, state = rows(spec, 500), some_state(policy, 500)
    action, columns = policy.explore(seen, np.random.default_rng(0), part(state))
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
        expected, _ = learner.log_prob(learners_parameters(learner, seen, state), stored)
    log_prob = columns["behavior_log_prob"]
    assert (log_prob.shape, log_prob.dtype) == ((500,), np.float32)
    assert log_prob.std() > 0.1
    atol = 3e-4 if options.get("initial_log_std") else 2e-5  # an action is rounded in deviations of 1/20
    np.testing.assert_allclose(log_prob, expected.numpy(), rtol=1e-5, atol=atol)
    again, other = (policy.explore(seen, np.random.default_rng(seed), part(state))[0] for seed in (0, 1))
    assert again.tobytes() == action.tobytes() != other.tobytes()


@each_of(ACTOR_CRITIC)
def test_act_is_the_learners_mode(name: str, spec: EnvSpec, options: Options) -> None:
    learner, policy = made(name, spec, **options)
    seen, state = rows(spec, 100), some_state(policy, 100)
    parameters = learners_parameters(learner, seen, state).numpy()
    action = policy.act(seen, state)
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


@pytest.mark.parametrize("spec", [DISCRETE, PAIRS], ids=["discrete", "pairs"])
def test_draws_follow_the_categorical_distribution(spec: EnvSpec) -> None:
    """Pearson's statistic of all joint choices; 60,000 draws for one observation."""
    num, (learner, policy), row = 60_000, made("ppo", spec), rows(spec, 1)
    chosen, _ = policy.explore(np.repeat(row, num, axis=0), np.random.default_rng(2))
    joint = torch.ones(1)
    for logits in learners_parameters(learner, row, {})[0].split(list(spec.action_sizes)):
        joint = (joint[:, None] * torch.softmax(logits, dim=0)).flatten()
    index = np.ravel_multi_index(tuple(chosen.reshape(num, -1).T), spec.action_sizes)
    counts, expected = np.bincount(index, minlength=len(joint)), joint.double().numpy() * num
    assert expected.min() > 5
    statistic, freedom = float(((counts - expected) ** 2 / expected).sum()), len(joint) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_draws_follow_the_gaussian() -> None:
    num, (learner, policy), row = 60_000, made("ppo", CONTINUOUS), rows(CONTINUOUS, 1)
    _, columns = policy.explore(np.repeat(row, num, axis=0), np.random.default_rng(2))
    mean, std = (
        learners_parameters(learner, row, {})[0].numpy(),
        learner.network.log_std.detach().exp().numpy(),
    )
    z = (columns["raw_action"] - mean) / std
    assert np.all(np.abs(z.mean(axis=0)) < 4 / math.sqrt(num))
    assert np.all(np.abs(z.std(axis=0) - 1) < 4 / math.sqrt(2 * num))
    assert abs((z[:, 0] * z[:, 1]).mean()) < 4 / math.sqrt(num), "the dimensions are independent"
    assert abs((np.abs(z) < 1).mean() - 0.6827) < 0.005


# --- action values ---------------------------------------------------------------------------------------


def pixels(observation: np.ndarray) -> Tensor:
    return torch.from_numpy(observation).float() / (255 if observation.dtype == np.uint8 else 1)


each_name = pytest.mark.parametrize("name", ["dqn", "r2d2"])


@each_of(FEED_FORWARD)
def test_greedy_is_the_largest_value_of_the_network(name: str, spec: EnvSpec, options: Options) -> None:
    """Distributions are compared by their means."""
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


@each_of(RECURRENT)
@pytest.mark.parametrize("explores", [False, True])
def test_steps_are_those_of_the_network_over_a_sequence(
    name: str, spec: EnvSpec, options: Options, explores: bool
) -> None:
    learner, policy = made(name, spec, **options, **GREEDY)
    num_steps, size, rng = 7, 5, np.random.default_rng(1)
    seen, reward = rows(spec, num_steps, size), rng.normal(size=(num_steps, size)).astype(np.float32)
    state, ended = policy.initial_state(size), np.zeros(size, np.bool_)
    assert digest(state) == digest(initial_state(size, 7 if options == GRU else 14))
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
    missing = r"recurrent policy needs one; pass what initial_state\(num_envs\)"
    shape = r"hidden has shape \({}, 14\), but 3 observations need \(3, {}\)"
    for act in (policy.act, explore):
        with pytest.raises(ValueError, match=missing):
            act(seen)
        with pytest.raises(ValueError, match=shape.format(2, 14)):
            act(seen, state=policy.initial_state(2))
    with pytest.raises(ValueError, match=shape.format(3, 7)):
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
def test_prioritized_replay_gets_the_networks_values(name: str, options: Options, has_columns: bool) -> None:
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

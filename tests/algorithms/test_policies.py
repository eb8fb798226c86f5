"""What every policy promises of its weights: it copies them, and refuses those of another configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithms import CONTINUOUS, DISCRETE, OWN, PAIRS, make_learner, make_policy
from support.reference_ppo import IMAGES

from ddrl.types import EnvSpec

SPECS = {"sac": CONTINUOUS, "ppo": CONTINUOUS, "dqn": DISCRETE, "r2d2": DISCRETE}
each_name = pytest.mark.parametrize(("name", "spec"), SPECS.items())


def actions(policy: Any, spec: EnvSpec) -> Any:
    seen = np.random.default_rng(0).standard_normal((50, *spec.observation_shape)).astype(np.float32)
    return policy.act(seen, policy.initial_state(50)).tolist()


@each_name
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


@each_name
def test_missing_and_unknown_weights_are_refused(name: str, spec: EnvSpec) -> None:
    weights = make_learner(name, spec).weights()
    policy = make_policy(name, spec, weights=weights)
    for missing in weights:
        with pytest.raises(ValueError, match=missing.replace(".", r"\.")):
            policy.load({key: value for key, value in weights.items() if key != missing})
    with pytest.raises(ValueError, match="extra"):
        policy.load(weights | {"extra": torch.zeros(2)})


WIDER, LARGER = replace(CONTINUOUS, observation_shape=(4,)), replace(IMAGES, observation_shape=(7, 6, 2))
NORMALIZED, CONV = {"normalize_observations": True}, {"network": "conv", "hidden_sizes": (16,)}
OWN_NETWORK = {"network": OWN, "hidden_sizes": (64, 64)}
OTHERS: list[tuple[str, EnvSpec, dict[str, Any], EnvSpec, dict[str, Any], str]] = [
    ("sac", CONTINUOUS, {}, CONTINUOUS, {"hidden_sizes": (8,)}, r"biases\.1"),
    ("sac", CONTINUOUS, {}, CONTINUOUS, {"hidden_sizes": (8, 7, 7)}, r"biases\.2"),
    ("sac", CONTINUOUS, {}, WIDER, {}, r"weights\.0: shape \(4, 8\) in the weights, \(3, 8\) here"),
    ("ppo", CONTINUOUS, {}, DISCRETE, {}, "log_std"),
    ("ppo", CONTINUOUS, {}, CONTINUOUS, {"hidden_sizes": (6,)}, "actor.layers.1.bias"),
    ("ppo", CONTINUOUS, {}, CONTINUOUS, {"hidden_sizes": (6, 5, 5)}, "actor.layers.2.bias"),
    ("ppo", CONTINUOUS, {}, CONTINUOUS, {"hidden_sizes": (6, 4)}, "actor.layers.1.bias"),
    ("ppo", CONTINUOUS, {}, WIDER, {}, "actor.layers.0.weight"),
    ("ppo", CONTINUOUS, {}, CONTINUOUS, NORMALIZED, "observation_mean"),
    ("ppo", CONTINUOUS, NORMALIZED, CONTINUOUS, {}, "observation_mean"),
    ("ppo", DISCRETE, {}, replace(DISCRETE, action_sizes=(5,)), {}, "policy_head.bias"),
    ("ppo", PAIRS, {}, replace(PAIRS, action_sizes=(3, 3)), {}, "policy_head.bias"),
    ("ppo", IMAGES, CONV, LARGER, CONV, "layers.0.weight"),
    ("ppo", IMAGES, OWN_NETWORK | {"network_kwargs": {"width": 7}}, IMAGES, OWN_NETWORK, r"actor\.1\.weight"),
    ("dqn", DISCRETE, {}, DISCRETE, {"hidden_sizes": (9, 7)}, "size mismatch"),
    ("r2d2", DISCRETE, {}, DISCRETE, {"recurrent": "gru"}, "size mismatch"),
    ("r2d2", DISCRETE, {}, DISCRETE, {"recurrent_size": 8}, "size mismatch"),
    ("r2d2", DISCRETE, {}, DISCRETE, {"dueling": False}, "loading state_dict"),
]


@pytest.mark.parametrize(("name", "spec", "options", "other_spec", "other_options", "words"), OTHERS)
def test_weights_of_another_configuration_are_refused(
    name: str,
    spec: EnvSpec,
    options: dict[str, Any],
    other_spec: EnvSpec,
    other_options: dict[str, Any],
    words: str,
) -> None:
    policy = make_policy(name, spec, weights=make_learner(name, spec, **options).weights(), **options)
    before = None if spec is IMAGES else actions(policy, spec)
    with pytest.raises(ValueError, match=words):
        policy.load(make_learner(name, other_spec, **other_options).weights())
    if name in ("sac", "ppo") and spec is not IMAGES:
        assert actions(policy, spec) == before, "nothing was taken over"

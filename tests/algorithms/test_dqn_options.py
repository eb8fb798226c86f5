"""Options of DQN: each one's effect, what is refused, what gives way to what."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support.reference_q import CPU, IMAGES, PIXELS, VECTORS, digest, make_batch

from ddrl.algorithms.dqn.config import Config
from ddrl.algorithms.dqn.learner import make_learner as make_dqn
from ddrl.algorithms.dqn.policy import Policy
from ddrl.replay.prioritized import Priorities
from ddrl.types import EnvSpec

OWN = "reference_q:own_network"
SMALL: dict[str, Any] = {"hidden_sizes": (8, 7), "learning_rate": 1e-2, "target_period": 2, "batch_size": 6}
QUANTILE = {"distribution": "quantile", "num_atoms": 5}
CATEGORICAL = {"distribution": "categorical", "num_atoms": 5, "v_min": -3.0, "v_max": 4.0}


@pytest.fixture(autouse=True)
def _own_networks_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "reference_q")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads wait for each other where the machine is busy, for longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def after(spec: EnvSpec, options: dict[str, Any]) -> str:
    """A hash of what a few updates and a few steps give."""
    config, found = Config(**options), {}
    dqn = make_dqn(config, spec, device=CPU, seed=1)
    rng = np.random.default_rng(0)
    priorities = Priorities(
        exponent=config.priority_exponent,
        importance_exponent=config.importance_exponent,
        final_importance_exponent=config.final_importance_exponent,
        anneal_updates=config.importance_anneal_updates,
    )
    priorities.append(64)
    for i in range(5):
        rows, weight = rng.choice(64, config.batch_size), None
        if config.prioritized:
            _, rows, weight = priorities.draw(config.batch_size, seed=0, draw=i)
        metrics = dqn.update(
            make_batch(i, spec=spec, rows=rows, gamma=config.gamma, n_step=config.n_step, weight=weight)
        )
        if config.prioritized:
            priorities.update(rows, metrics["priority"])
    policy, observation = (
        Policy(config, spec, producer=3),
        make_batch(spec=spec, rows=range(64)).observation.numpy(),
    )
    policy.load(dqn.weights())
    found["action"], columns = policy.explore(observation, rng)
    found["evaluation_epsilon"] = policy.evaluation_epsilon
    return digest(dqn.weights() | columns | found)


PRIORITIZED, LADDER, NOISY = {"prioritized": True}, {"epsilon_ladder": True}, {"noisy": True}
FLIPS: dict[str, tuple[EnvSpec, dict[str, Any], Any]] = {  # option -> (environment, what it needs, other value)
    "network": (IMAGES, {"network": "conv", "dueling": True, "hidden_sizes": (7,)}, OWN),
    "network_kwargs": (IMAGES, {"network": OWN, "dueling": True, "hidden_sizes": (7,)}, {"width": 7}),
    "hidden_sizes": (VECTORS, {}, (8, 6)),
    "activation": (VECTORS, {}, "tanh"),
    "norm": (PIXELS, {"network": "nature"}, "group"),
    "dueling": (VECTORS, {}, True),
    "double": (VECTORS, {"learning_rate": 0.1, "target_period": 100}, True),
    "learning_rate": (VECTORS, {}, 2e-3),
    "optimizer": (VECTORS, {}, "rmsprop"),
    "adam_eps": (VECTORS, {}, 1e-3),
    "max_grad_norm": (VECTORS, {}, 0.1),
    "gamma": (VECTORS, {}, 0.9),
    "n_step": (VECTORS, {}, 2),
    "batch_size": (VECTORS, {}, 7),
    "prioritized": (VECTORS, {}, True),
    "priority_exponent": (VECTORS, PRIORITIZED, 0.7),
    "importance_exponent": (VECTORS, PRIORITIZED, 0.6),
    "final_importance_exponent": (VECTORS, PRIORITIZED | {"importance_anneal_updates": 10}, 0.9),
    "importance_anneal_updates": (VECTORS, PRIORITIZED, 20),
    "target_period": (VECTORS, {}, 1),
    "target_rate": (VECTORS, {"target_period": None, "target_rate": 0.1}, 0.2),
    "epsilon": (VECTORS, {"epsilon_anneal_updates": 10}, 0.9),
    "final_epsilon": (VECTORS, {"epsilon_anneal_updates": 10}, 0.1),
    "epsilon_anneal_updates": (VECTORS, {}, 20),
    "epsilon_ladder": (VECTORS, {}, True),
    "ladder_base": (VECTORS, LADDER, 0.9),
    "ladder_exponent": (VECTORS, LADDER, 0.5),
    "evaluation_epsilon": (VECTORS, {}, 0.05),
    "distribution": (VECTORS, QUANTILE, "categorical"),
    "num_atoms": (VECTORS, QUANTILE, 7),
    "v_min": (VECTORS, CATEGORICAL, -2.0),
    "v_max": (VECTORS, CATEGORICAL, 3.0),
    "noisy": (VECTORS, {}, True),
    "noise_scale": (VECTORS, NOISY, 0.1),
    "loss": (VECTORS, {}, "mse"),
    "huber_delta": (VECTORS, {}, 0.2),
}  # fmt: skip


@pytest.mark.parametrize("name", Config.model_fields)
def test_flipping_any_option_changes_what_is_learned_or_played(name: str) -> None:
    spec, needed, other = FLIPS[name]
    options = SMALL | needed
    assert getattr(Config(**options), name) != other
    unchanged = after(spec, options)
    assert after(spec, options) == unchanged
    assert after(spec, options | {name: other}) != unchanged


def test_each_kind_of_norm_and_distribution_learns_otherwise() -> None:
    assert len({after(VECTORS, SMALL | kind) for kind in ({}, QUANTILE, CATEGORICAL)}) == 3
    assert (
        len(
            {
                after(PIXELS, SMALL | {"network": "nature", "norm": norm})
                for norm in ("none", "group", "batch")
            }
        )
        == 3
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_period": None}, "target_period=None, target_rate=None: .*set one"),
        ({"target_period": 10, "target_rate": 0.1}, "target_period=10, target_rate=0.1: .*leave the other None"),
        ({"priority_exponent": 0.7}, "priority_exponent=0.7: has no effect without prioritized=true; remove it"),
        ({"importance_exponent": 0.7}, "importance_exponent=0.7: has no effect without prioritized"),
        ({"final_importance_exponent": 0.7}, "final_importance_exponent=0.7: has no effect without prioritized"),
        ({"importance_anneal_updates": 7}, "importance_anneal_updates=7: has no effect without prioritized"),
        (
            {"prioritized": True, "importance_exponent": 1.0, "importance_anneal_updates": 7},
            "importance_anneal_updates=7: has no effect where",
        ),
        ({"epsilon_ladder": True, "epsilon": 0.5}, "epsilon=0.5: has no effect with epsilon_ladder"),
        ({"epsilon_ladder": True, "final_epsilon": 0.5}, "final_epsilon=0.5: has no effect with"),
        ({"epsilon_ladder": True, "epsilon_anneal_updates": 5}, "epsilon_anneal_updates=5: has no effect with"),
        ({"epsilon": 0.05, "epsilon_anneal_updates": 5}, "epsilon_anneal_updates=5: has no effect where"),
        ({"ladder_base": 0.5}, "ladder_base=0.5: has no effect without epsilon_ladder=true"),
        ({"ladder_exponent": 5.0}, "ladder_exponent=5.0: has no effect without"),
        ({"optimizer": "rmsprop", "adam_eps": 1e-3}, "adam_eps=0.001: has no effect with optimizer=rmsprop"),
        ({"network_kwargs": {"a": 1}}, "network_kwargs: are for your own network; mlp takes none"),
        ({"norm": "group"}, "norm=group: has no effect on mlp"),
        ({"num_atoms": 7}, "num_atoms=7: has no effect without a distribution"),
        ({"v_min": -5.0}, "v_min=-5.0: has no effect without distribution=categorical"),
        ({"v_max": 5.0, "distribution": "quantile"}, "v_max=5.0: has no effect without distribution=categorical"),
        ({"v_max": -20.0, "distribution": "categorical"}, "v_min=-10.0, v_max=-20.0: .*v_min must be less"),
        ({"v_max": math.inf, "distribution": "categorical"}, "v_max=inf: "),
        ({"loss": "mse", "distribution": "categorical"}, "loss=mse: has no effect with distribution=categorical"),
        ({"loss": "mse", "distribution": "quantile"}, "loss=mse: has no effect with distribution=quantile"),
        ({"huber_delta": 2.0, "distribution": "categorical"}, "huber_delta=2.0: has no effect with"),
        ({"huber_delta": 2.0, "loss": "mse"}, "huber_delta=2.0: has no effect with loss=mse"),
        ({"noise_scale": 0.1}, "noise_scale=0.1: has no effect without noisy=true"),
        ({"noisy": True, "epsilon_anneal_updates": 5}, "epsilon_anneal_updates=5: has no effect where"),
        ({"network": "a:b", "hidden_sizes": (5,)}, r"hidden_sizes=\(5,\): has no effect on a:b"),
        ({"network": "a:b", "activation": "tanh"}, "activation=tanh: has no effect on a:b"),
        (
            {"network": "a:b", "dueling": True, "hidden_sizes": (6, 5)},
            r"hidden_sizes=\(6, 5\): only the last one is used on a:b, .*; set \(5,\)",
        ),
        ({"network": "a:b", "noisy": True, "hidden_sizes": (6, 5)}, "only the last one is used"),
        ({"gama": 0.9}, "gama"),
        ({"hidden_sizes": ()}, "hidden_sizes"),
        ({"num_atoms": 1, "distribution": "quantile"}, "num_atoms"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){words}"):
        Config(**options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_rate": 0.01},
        {"noisy": True},
        LADDER,
        PRIORITIZED | CATEGORICAL,
        {"noisy": True} | LADDER,
    ],
)
def test_config_survives_json(options: dict[str, Any]) -> None:
    config = Config(**options)
    assert Config.model_validate_json(config.model_dump_json()) == config
    assert Config(**config.model_dump()) == config


def test_defaults_give_way_to_what_takes_their_place() -> None:
    config = Config(target_rate=0.01)
    assert config.target_period is None
    config = Config(noisy=True)
    assert (config.epsilon, config.final_epsilon) == (0.0, 0.0)
    config = Config(noisy=True, epsilon=0.2)
    assert (config.epsilon, config.final_epsilon) == (0.2, 0.0)
    config = Config(noisy=True, final_epsilon=0.1)
    assert (config.epsilon, config.final_epsilon) == (0.0, 0.1)
    assert Config(network=OWN, dueling=True).hidden_sizes == (128, 128), "the default, of which one is used"


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        (
            {},
            {"action_kind": "continuous"},
            "Toy-v0: action_kind is 'continuous', but dqn needs .*sac or ppo",
        ),
        (
            {},
            {"action_kind": "multi_discrete"},
            "Toy-v0: action_kind is 'multi_discrete', .*algorithm.name ppo",
        ),
        (
            {},
            {"observation_shape": (8, 8)},
            r"algorithm.network: mlp needs a vector, .*Toy-v0 .*\(8, 8\); use .*conv",
        ),
        ({"network": "nature"}, {}, "nature"),
        ({"network": "nature"}, {"observation_shape": (9, 9), "frame_stack": 4}, "nature"),
        ({"network": "nonsense"}, {}, "nonsense.*unknown"),
        ({"network": "nobody:knows"}, {}, "DDRL_ALLOW_MODULES"),
    ],
)
def test_check_names_thing_value_and_remedy(
    options: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    Config().check(VECTORS)
    with pytest.raises(ValueError, match=words):
        Config(**options).check(replace(VECTORS, **changes))

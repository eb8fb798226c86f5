"""Options: each one has an effect, contradictions and unsuitable environments are refused, defaults, no torch."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import algorithms
from support.algorithms import CONTINUOUS, DISCRETE, OWN, PAIRS, Options, digest, make_learner, make_policy
from support.reference_ppo import IMAGES, feed, make_feed
from support.reference_q import IMAGES as STACKED
from support.reference_q import PIXELS, make_batch
from support.subjects import SPECS, batch_for

from ddrl.algorithms import base
from ddrl.algorithms.base import config_class
from ddrl.config import ConfigError, parse, validate
from ddrl.types import EnvSpec, SequenceShape

QUANTILE = {"distribution": "quantile", "num_atoms": 5}
CATEGORICAL = {"distribution": "categorical", "num_atoms": 5, "v_min": -3.0, "v_max": 4.0}
PRIORITIZED, LADDER, NOISY = {"prioritized": True}, {"epsilon_ladder": True}, {"noisy": True}
ON_POLICY = {
    "hidden_sizes": (6, 4), "activation": "relu", "shared": True, "learning_rate": 2e-3, "value_coefficient": 1.0,
    "max_grad_norm": 0.1, "gamma": 0.9, "lambda_": 0.5, "batch_size": 90, "normalize_observations": True,
    "normalize_returns": True,
}  # fmt: skip


def learned(name: str, spec: EnvSpec, options: Options) -> str:
    """Return a hash of what a few updates result in: the weights, and what a policy does by them."""
    learner = make_learner(name, spec, **options)
    if name in ("ppo", "impala"):
        assert len(feed(learner, learner.config, make_feed(spec))) in (2, 3)
    else:
        for seed in range(5):
            learner.update(batch_for(name, learner, spec, seed))
    policy = make_policy(name, spec, weights=learner.weights(), producer=3, **options)
    seen = make_batch(spec=spec, rows=range(64)).observation.numpy()
    action, columns = policy.explore(seen, np.random.default_rng(0), policy.initial_state(64))
    played = {"action": action, "evaluation_epsilon": policy.evaluation_epsilon, **columns}
    return digest(learner.weights() | played)


# Of options that have an effect alone: another value.
SIMPLE: dict[str, Options] = {
    "dqn": {
        "hidden_sizes": (8, 6), "activation": "tanh", "dueling": True, "learning_rate": 2e-3, "optimizer": "rmsprop",
        "adam_eps": 1e-3, "max_grad_norm": 0.1, "gamma": 0.9, "n_step": 2, "batch_size": 7, "prioritized": True,
        "target_period": 1, "epsilon_anneal_updates": 20, "epsilon_ladder": True, "evaluation_epsilon": 0.05,
        "noisy": True, "loss": "mse", "huber_delta": 0.2,
    },
    "ppo": ON_POLICY | {
        "entropy_coefficient": 0.01, "estimator": "vtrace", "clip": 0.1, "value_clip": 0.01, "num_epochs": 3,
        "minibatch_size": 30, "target_kl": 1e-6, "normalize_advantages": False,
    },
    "impala": ON_POLICY | {
        "entropy_coefficient": 0.0, "estimator": "upgo", "optimizer": "adam", "rho_bar": 0.7, "reward_clip": 0.5,
    },
    "sac": {
        "hidden_sizes": (8,), "learning_rate": 1e-3, "target_rate": 0.5, "temperature": 0.1, "batch_size": 7,
        "target_entropy": 3.0, "initial_temperature": 0.1, "policy_delay": 2, "num_critics": 3, "layer_norm": True,
    },
    "r2d2": {
        "double": False, "dueling": False, "rescale_values": False, "recurrent": "gru", "loss_reduction": "sum",
        "learning_rate": 2e-2, "adam_eps": 1e-2, "max_grad_norm": 1e-3, "target_period": 2,
    },
}  # fmt: skip
CONV = {"network": "conv", "dueling": True, "hidden_sizes": (7,)}
ANNEALED = {"final_learning_rate": 0.0, "anneal_steps": 150}
ANNEALED_ENTROPY = {"final_entropy_coefficient": 0.0, "entropy_coefficient": 0.01, "anneal_steps": 150}
SOFT = {"target_period": None, "target_rate": 0.1}
# Of the others: the environment, what they need, another value.
NEEDING: dict[str, dict[str, tuple[EnvSpec, Options, Any]]] = {
    "dqn": {
        "network": (STACKED, CONV, OWN),
        "network_kwargs": (STACKED, CONV | {"network": OWN}, {"width": 7}),
        "norm": (PIXELS, {"network": "nature"}, "group"),
        "double": (DISCRETE, {"learning_rate": 0.1, "target_period": 100}, True),
        "target_rate": (DISCRETE, SOFT, 0.2),
        "epsilon": (DISCRETE, {"epsilon_anneal_updates": 10}, 0.9),
        "final_epsilon": (DISCRETE, {"epsilon_anneal_updates": 10}, 0.1),
        "ladder_base": (DISCRETE, LADDER, 0.9),
        "ladder_exponent": (DISCRETE, LADDER, 0.5),
        "distribution": (DISCRETE, QUANTILE, "categorical"),
        "num_atoms": (DISCRETE, QUANTILE, 7),
        "v_min": (DISCRETE, CATEGORICAL, -2.0),
        "v_max": (DISCRETE, CATEGORICAL, 3.0),
        "noise_scale": (DISCRETE, NOISY, 0.1),
    },
    **{
        name: {
            "network": (IMAGES, {"network": "conv", "hidden_sizes": (64, 64)}, OWN),
            "network_kwargs": (IMAGES, {"network": OWN, "hidden_sizes": (64, 64)}, {"width": 7}),
            "initial_log_std": (CONTINUOUS, {}, -0.5),
            "final_learning_rate": (DISCRETE, ANNEALED_ENTROPY, 0.0),
            "final_entropy_coefficient": (DISCRETE, ANNEALED | {"entropy_coefficient": 0.01}, 0.0),
            "anneal_steps": (DISCRETE, ANNEALED, 1000),
        }
        for name in ("ppo", "impala")
    },
    "sac": {},
    "r2d2": {"target_rate": (DISCRETE, SOFT, 0.5), "optimizer": (DISCRETE, {"adam_eps": 1e-3}, "rmsprop")},
}
NEEDING["ppo"]["final_clip"] = (DISCRETE, ANNEALED, 0.1)
FLIPS = [
    *((name, option, *flip) for name, flips in NEEDING.items() for option, flip in flips.items()),
    *(
        (name, option, SPECS[name], {}, other)
        for name, others in SIMPLE.items()
        for option, other in others.items()
    ),
]


@pytest.mark.parametrize("name", ["dqn", "ppo", "impala"])
def test_each_option_is_flipped(name: str) -> None:
    of_replay = {
        option for option in config_class("dqn").model_fields if re.match("priority|.*importance", option)
    }
    flipped = {flip[1] for flip in FLIPS if flip[0] == name}
    assert flipped == config_class(name).model_fields.keys() - of_replay


@pytest.mark.parametrize(("name", "option", "spec", "options", "other"), FLIPS)
def test_each_option_has_an_effect(
    name: str, option: str, spec: EnvSpec, options: Options, other: Any
) -> None:
    assert getattr(config_class(name)(**algorithms.SMALL[name] | options), option) != other
    assert learned(name, spec, options | {option: other}) != learned(name, spec, options)


CONTRADICTIONS: list[tuple[str, Options, str]] = [
    ("dqn", {"target_period": None}, "target_period=None, target_rate=None: .*set one"),
    ("dqn", {"target_period": 10, "target_rate": 0.1}, "target_period=10, target_rate=0.1: .*leave the other None"),
    *(("dqn", {option: value}, f"{option}={value}: has no effect without {needed}") for option, value, needed in (
        ("priority_exponent", 0.7, "prioritized=true; remove it"), ("importance_exponent", 0.7, "prioritized"),
        ("final_importance_exponent", 0.7, "prioritized"), ("importance_anneal_updates", 7, "prioritized"),
        ("ladder_base", 0.5, "epsilon_ladder=true"), ("ladder_exponent", 5.0, "epsilon_ladder=true"),
        ("num_atoms", 7, "a distribution"), ("v_min", -5.0, "distribution=categorical"),
        ("noise_scale", 0.1, "noisy=true"),
    )),
    *(("dqn", LADDER | {option: 0.5}, f"{option}=0.5: has no effect with epsilon_ladder") for option in
      ("epsilon", "final_epsilon")),
    ("dqn", LADDER | {"epsilon_anneal_updates": 5}, "epsilon_anneal_updates=5: has no effect with"),
    ("dqn", NOISY | {"epsilon_anneal_updates": 5}, "epsilon_anneal_updates=5: has no effect where"),
    ("dqn", {"epsilon": 0.05, "epsilon_anneal_updates": 5}, "epsilon_anneal_updates=5: has no effect where"),
    ("dqn", PRIORITIZED | {"importance_exponent": 1.0, "importance_anneal_updates": 7},
     "importance_anneal_updates=7: has no effect where"),
    ("dqn", {"optimizer": "rmsprop", "adam_eps": 1e-3}, "adam_eps=0.001: has no effect with optimizer=rmsprop"),
    ("dqn", {"network_kwargs": {"a": 1}}, "network_kwargs: are for your own network; mlp takes none"),
    ("dqn", {"norm": "group"}, "norm=group: has no effect on mlp"),
    ("dqn", QUANTILE | {"v_max": 5.0}, "v_max=5.0: has no effect without distribution=categorical"),
    ("dqn", CATEGORICAL | {"v_max": -20.0}, "v_min=-3.0, v_max=-20.0: .*v_min must be less"),
    ("dqn", CATEGORICAL | {"v_max": math.inf}, "v_max=inf: "),
    ("dqn", CATEGORICAL | {"loss": "mse"}, "loss=mse: has no effect with distribution=categorical"),
    ("dqn", QUANTILE | {"loss": "mse"}, "loss=mse: has no effect with distribution=quantile"),
    ("dqn", CATEGORICAL | {"huber_delta": 2.0}, "huber_delta=2.0: has no effect with"),
    ("dqn", {"huber_delta": 2.0, "loss": "mse"}, "huber_delta=2.0: has no effect with loss=mse"),
    ("dqn", {"network": "a:b", "hidden_sizes": (5,)}, r"hidden_sizes=\(5,\): has no effect on a:b"),
    ("dqn", {"network": "a:b", "activation": "tanh"}, "activation=tanh: has no effect on a:b"),
    ("dqn", {"network": "a:b", "noisy": True, "hidden_sizes": (6, 5)}, "only the last one is used"),
    *((name, {"network": "a:b", "dueling": True, "hidden_sizes": (6, 5)},
       r"hidden_sizes=\(6, 5\): only the last one is used on a:b, .*; set \(5,\)") for name in ("dqn", "r2d2")),
    ("r2d2", {"overlap": 80}, "overlap=80: sequences of 80 steps would not advance; use at most 79"),
    ("r2d2", {"sequence_length": 4, "overlap": 1}, "n_step=5: is longer than a sequence of 4 steps; use at most 4"),
    ("r2d2", {"network": "nature", "norm": "batch"}, "norm=batch: .* use group"),
    ("r2d2", {"prioritized": False, "priority_mix": 0.5}, "priority_mix=0.5: has no effect without prioritized"),
    ("r2d2", {"epsilon": 0.5}, "epsilon=0.5: has no effect with epsilon_ladder=true; remove it"),
    ("r2d2", {"noisy": True}, "algorithm.noisy: unknown option"),
    ("sac", {"form": "sac1"}, "temperature='auto'.*set temperature=0.2"),
    ("sac", {"temperature": 0.1, "target_entropy": -1.0}, "target_entropy=-1.0.*remove it"),
    ("sac", {"temperature": 0.1, "initial_temperature": 0.5}, "initial_temperature=0.5.*remove it"),
    ("sac", {"temperature": -1.0}, "temperature=-1.0.*>= 0"),
    ("sac", {"temperature": math.nan}, "temperature=nan.*>= 0"),
    ("sac", {"hidden_sizes": ()}, "hidden_sizes"),
    ("ppo", {"batch_size": 100, "minibatch_size": 128},
     "algorithm.minibatch_size=128: is larger than batch_size; use at most 100"),
    ("ppo", {"final_clip": 0.1}, "algorithm.final_clip: needs anneal_steps, .* set it"),
    ("impala", {"final_learning_rate": 0.0}, "algorithm.final_learning_rate: needs anneal_steps"),
    ("ppo", {"anneal_steps": 1000}, "algorithm.anneal_steps=1000: has no effect without a final_"),
    ("ppo", {"network_kwargs": {"width": 3}}, "algorithm.network_kwargs: .*; mlp takes none"),
    ("impala", {"network": "conv", "network_kwargs": {"width": 3}}, "network_kwargs: .*; conv takes none"),
    ("ppo", {"network": OWN, "hidden_sizes": [8]},
     rf"algorithm.hidden_sizes=\(8,\): has no effect on {OWN}; pass it in network_kwargs"),
    ("ppo", {"network": OWN, "activation": "relu"}, f"algorithm.activation=relu: has no effect on {OWN}"),
    ("impala", {"estimator": "gae"},
     "algorithm.estimator: 'gae' cannot be used; impala needs importance-corrected returns; use vtrace or upgo"),
    ("ppo", {"entropy_coeficient": 0.1}, r"algorithm.entropy_coeficient: unknown option; did you mean entropy_coeff"),
    ("impala", {"clip": 0.1}, "algorithm.clip: unknown option"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "words"), CONTRADICTIONS)
def test_contradictions_are_refused(name: str, options: Options, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(config_class(name), options, prefix="algorithm.")


def bounded(low: float, high: float) -> EnvSpec:
    return EnvSpec("Toy-v0", (3,), "float32", "continuous", (1,), (), (low,), (high,))


SQUARE = replace(DISCRETE, observation_shape=(8, 8))
UNSUITABLE: list[tuple[str, EnvSpec, Options, str]] = [
    ("ppo", DISCRETE, {"network": "cnn"}, "network cnn: is unknown; use mlp, conv, nature"),
    ("ppo", DISCRETE, {"network": OWN, "network_kwargs": {"depth": 3}}, "depth"),
    ("ppo", DISCRETE, {"initial_log_std": -1.0},
     "algorithm.initial_log_std: -1.0 has no effect on Toy-v0, whose actions are discrete; remove it"),
    ("impala", PAIRS, {"initial_log_std": -1.0}, "whose actions are multi_discrete; remove it"),
    ("ppo", IMAGES, {}, r"algorithm.network: mlp needs a vector, but Toy-v0 has .*\(6, 6, 2\); use nature or conv"),
    ("ppo", IMAGES, {"network": "conv", "normalize_observations": True},
     "algorithm.normalize_observations: Toy-v0 has .* not a vector; set it to false"),
    ("impala", bounded(-math.inf, 1.0), {}, "Toy-v0: actions have no bounds, but impala needs finite ones"),
    ("ppo", bounded(1.0, 1.0), {}, "is not below"),
    ("dqn", CONTINUOUS, {}, "Toy-v0: action_kind is 'continuous', but dqn needs .*sac or ppo"),
    ("dqn", PAIRS, {}, "Toy-v0: action_kind is 'multi_discrete', .*algorithm.name ppo"),
    ("dqn", SQUARE, {}, r"algorithm.network: mlp needs a vector, .*Toy-v0 .*\(8, 8\); use .*conv"),
    ("dqn", DISCRETE, {"network": "nobody:knows"}, "DDRL_ALLOW_MODULES"),
    ("r2d2", CONTINUOUS, {}, "r2d2 needs discrete actions"),
    ("r2d2", PIXELS, {}, "mlp needs a vector"),
    ("sac", DISCRETE, {}, "^Toy-v0: action_kind is 'discrete'.*choose an environment"),
    ("sac", PAIRS, {}, "^Toy-v0: action_kind is 'multi_discrete'.*Box of"),
    ("sac", bounded(-math.inf, 1.0), {}, "^Toy-v0: action_low is .*RescaleAction"),
    ("sac", replace(CONTINUOUS, action_low=()), {}, "^Toy-v0: action_low is .*2 finite bounds"),
    ("sac", bounded(2.0, 0.0), {}, "^Toy-v0: action_low .* is not below"),
    ("sac", replace(CONTINUOUS, observation_shape=(84, 84)), {}, "^Toy-v0: observation_shape is .*FlattenObservation"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "spec", "options", "message"), UNSUITABLE)
def test_unsuitable_environments_are_refused(
    name: str, spec: EnvSpec, options: Options, message: str
) -> None:
    config = validate({"env": {"id": "Toy-v0"}, "algorithm": {"name": name, **options}})
    with pytest.raises(ConfigError, match=message) as refused:
        base.resolve(config, spec)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("dqn", o) for o in ({}, {"target_rate": 0.01}, NOISY, LADDER, PRIORITIZED | CATEGORICAL, NOISY | LADDER)),
        ("sac", {"form": "sac1", "temperature": 0.2}),
        ("r2d2", {}),
        ("ppo", {"lambda": 0.5, "estimator": "monte_carlo"}),
    ],
)  # fmt: skip
def test_options_survive_json(name: str, options: Options) -> None:
    config = config_class(name)(**options)
    assert type(config).model_validate_json(config.model_dump_json(by_alias=True)) == config
    assert type(config)(**config.model_dump()) == config


def test_defaults_give_way_to_what_replaces_them() -> None:
    dqn: Any = config_class("dqn")
    assert dqn(target_rate=0.01).target_period is None
    for options, expected in (
        ({}, (0.0, 0.0)),
        ({"epsilon": 0.2}, (0.2, 0.0)),
        ({"final_epsilon": 0.1}, (0.0, 0.1)),
    ):
        config = dqn(noisy=True, **options)
        assert (config.epsilon, config.final_epsilon) == expected
    assert dqn(network=OWN, dueling=True).hidden_sizes == (128, 128), "the default, of which one is used"


def test_defaults_of_r2d2_are_the_papers() -> None:
    config: Any = config_class("r2d2")()
    assert config.sequences == SequenceShape(burn_in=40, length=80, overlap=40)
    assert (config.n_step, config.gamma, config.batch_size, config.target_period) == (5, 0.997, 64, 2500)
    assert (config.learning_rate, config.adam_eps, config.max_grad_norm) == (1e-4, 1e-3, 40.0)
    assert (config.priority_exponent, config.importance_exponent, config.priority_mix) == (0.9, 0.6, 0.9)
    assert config.final_importance_exponent == 0.6
    assert config.double and config.dueling and config.prioritized and config.rescale_values
    assert config.epsilon_ladder and (config.recurrent, config.recurrent_size) == ("lstm", 512)
    assert config.transitions_per_update == 64 * 80


def test_estimators_with_importance_weights_correct_staleness() -> None:
    ppo: Any = config_class("ppo")
    names = ("gae", "td_lambda", "vtrace", "upgo", "monte_carlo")
    assert [name for name in names if ppo(estimator=name).corrects_staleness] == ["vtrace", "upgo"]
    assert all(config_class("impala")(estimator=name).corrects_staleness for name in ("vtrace", "upgo"))


def test_options_and_numpy_policies_need_no_torch() -> None:
    code = """
import sys
from ddrl.algorithms.base import Resolved, config_class, names
from ddrl.types import EnvSpec
discrete = EnvSpec("a", (3,), "float32", "discrete", (), (2,))
continuous = EnvSpec("a", (3,), "float32", "continuous", (1,), (), (-1.0,), (1.0,))
for name in names():
    spec = continuous if name == "sac" else discrete
    config_class(name)().check(spec)
    if name in ("sac", "ppo", "impala"):
        Resolved(name, config_class(name)(), spec).policy()
print("torch" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"

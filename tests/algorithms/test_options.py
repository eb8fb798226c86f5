"""Options: each one has an effect, contradictions and unsuitable environments are refused, defaults, no torch."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import algorithms
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
from support.reference_ppo import IMAGES, feed, make_feed
from support.reference_q import IMAGES as STACKED
from support.reference_q import PIXELS, make_batch
from support.subjects import CATEGORICAL, QUANTILE, SPECS, batch_for

from ddrl.algorithms import base
from ddrl.algorithms.base import config_class
from ddrl.config import ConfigError, live_options, parse, validate
from ddrl.config import options as options_of
from ddrl.types import EnvSpec

PRIORITIZED, LADDER, NOISY = {"prioritized": True}, {"epsilon_ladder": True}, {"noisy": True}
ON_POLICY = {
    "hidden_sizes": (6, 4), "activation": "relu", "shared": True, "gamma": 0.9, "batch_size": 90,
    "normalize_observations": True, "normalize_returns": True,
}  # fmt: skip


def learned(name: str, spec: EnvSpec, options: Options) -> str:
    """Return a hash of what a few updates result in: the weights, and what a policy does by them."""
    learner = make_learner(name, spec, **options)
    if learner.config.on_policy:
        fragments = make_feed(spec, state_size=learner.config.recurrent_state_size)
        assert len(feed(learner, learner.config, fragments)) in (2, 3)
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
        "hidden_sizes": (8, 6), "activation": "tanh", "dueling": True, "optimizer": "rmsprop", "gamma": 0.9,
        "n_step": 2, "batch_size": 7, "prioritized": True, "epsilon_ladder": True, "evaluation_epsilon": 0.05,
        "noisy": True, "loss": "mse",
    },
    "ppo": ON_POLICY | {"estimator": "vtrace", "normalize_advantages": False},
    "impala": ON_POLICY | {"estimator": "upgo", "optimizer": "adam"},
    "pqn": {
        "hidden_sizes": (8, 6), "activation": "tanh", "dueling": True, "optimizer": "rmsprop", "gamma": 0.9,
        "batch_size": 90, "epsilon_ladder": True, "evaluation_epsilon": 0.05, "norm": "none",
    },
    "sac": {
        "hidden_sizes": (8,), "batch_size": 7, "initial_temperature": 0.1, "num_critics": 3, "layer_norm": True,
        "gamma": 0.9, "n_step": 2, "prioritized": True, "dropout": 0.1, "num_quantiles": 5,
    },
    "discrete_sac": {
        "hidden_sizes": (8,), "activation": "tanh", "batch_size": 7, "gamma": 0.9, "n_step": 2, "prioritized": True,
        "initial_temperature": 0.1, "num_critics": 3, "average_critics": True, "form": "sqn",
    },
    "td3": {
        "hidden_sizes": (8,), "batch_size": 7, "exploration_noise": 0.3, "num_critics": 3, "layer_norm": True,
        "gamma": 0.9, "n_step": 2, "prioritized": True,
    },
    "bc": {"hidden_sizes": (8,), "batch_size": 7},
    "iql": {"hidden_sizes": (8,), "batch_size": 7, "gamma": 0.9, "n_step": 2, "num_critics": 3},
    "r2d2": {
        "double": False, "dueling": False, "rescale_values": False, "recurrent": "gru", "loss_reduction": "sum",
    },
}  # fmt: skip
RECURRENT = {"recurrent": "lstm", "recurrent_size": 7, "shared": True}
CONV = {"network": "conv", "dueling": True, "hidden_sizes": (7,)}
# Of the others: the environment, what they need, another value.
NEEDING: dict[str, dict[str, tuple[EnvSpec, Options, Any]]] = {
    "dqn": {
        "network": (STACKED, CONV, OWN),
        "network_kwargs": (STACKED, CONV | {"network": OWN}, {"width": 7}),
        "norm": (PIXELS, {"network": "nature"}, "group"),
        "double": (DISCRETE, {"learning_rate": 0.1, "target_period": 100}, True),
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
            "recurrent": (DISCRETE, RECURRENT, "gru"),
            "recurrent_size": (DISCRETE, RECURRENT, 6),
        }
        for name in ("ppo", "impala")
    },
    "pqn": {
        "network": (IMAGES, CONV, OWN),
        "network_kwargs": (IMAGES, CONV | {"network": OWN}, {"width": 7}),
        "ladder_base": (DISCRETE, LADDER, 0.9),
        "ladder_exponent": (DISCRETE, LADDER, 0.5),
    },
    "sac": {
        "network": (PICTURES, {"network": "conv"}, OWN),
        "network_kwargs": (PICTURES, {"network": OWN}, {"width": 7}),
        "batch_norm": (CONTINUOUS, {"target_rate": 0.01}, True),
        "form": (CONTINUOUS, {"num_critics": 5, "temperature": 0.2}, "sac1"),
        "dropped_quantiles": (CONTINUOUS, {"num_quantiles": 7}, 1),
    },
    "discrete_sac": {
        "network": (STACKED, {"network": "conv", "hidden_sizes": (128, 128)}, OWN),
        "network_kwargs": (STACKED, {"network": OWN, "hidden_sizes": (128, 128)}, {"width": 7}),
        "norm": (PIXELS, {"network": "nature"}, "group"),
    },
    **{
        name: {
            "network": (PICTURES, {"network": "conv"}, OWN),
            "network_kwargs": (PICTURES, {"network": OWN}, {"width": 7}),
        }
        for name in ("bc", "iql")
    },
    "r2d2": {"optimizer": (DISCRETE, {"adam_eps": 1e-3}, "rmsprop")},
}
FLIPS = [
    *((name, option, *flip) for name, flips in NEEDING.items() for option, flip in flips.items()),
    *(
        (name, option, SPECS[name], {}, other)
        for name, others in SIMPLE.items()
        for option, other in others.items()
    ),
]


@pytest.mark.parametrize("name", ["sac", "discrete_sac", "dqn", "ppo", "impala", "td3", "bc", "iql", "pqn"])
def test_each_option_is_tried(name: str) -> None:
    """Live ones are tried in learner/test_live_options.py, the other three with the replay and with given policies."""
    config = config_class(name)
    tried = {flip[1] for flip in FLIPS if flip[0] == name}
    assert tried == options_of(config).keys() - live_options(config) - {
        "priority_exponent",
        "importance_maximum",
        "critic_warmup_updates",
    }


@pytest.mark.parametrize(("name", "option", "spec", "options", "other"), FLIPS)
def test_each_option_matters(name: str, option: str, spec: EnvSpec, options: Options, other: Any) -> None:
    assert getattr(config_class(name)(**algorithms.SMALL[name] | options), option) != other
    assert learned(name, spec, options | {option: other}) != learned(name, spec, options)


CONTRADICTIONS: list[tuple[str, Options, str]] = [
    ("dqn", {"target_period": None}, "target_period=None, target_rate=None: .*set one"),
    ("dqn", {"target_period": 10, "target_rate": 0.1}, "target_period=10, target_rate=0.1: .*leave the other None"),
    *(("dqn", {option: value}, f"{option}={value}: has no effect without {needed}") for option, value, needed in (
        ("priority_exponent", 0.7, "prioritized=true; remove it"), ("importance_exponent", 0.7, "prioritized"),
        ("final_importance_exponent", 0.7, "prioritized"), ("importance_anneal_updates", 7, "prioritized"),
        ("importance_maximum", "replay", "prioritized"),
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
    ("dqn", CATEGORICAL | {"v_max": math.inf}, "v_max: inf cannot be used"),
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
    ("sac", {"form": "sac1"}, "temperature='auto'.*set temperature=0.2"),
    ("sac", {"temperature": 0.1, "target_entropy": -1.0}, "target_entropy=-1.0.*remove it"),
    ("sac", {"temperature": 0.1, "initial_temperature": 0.5}, "initial_temperature=0.5.*remove it"),
    ("sac", {"temperature": -1.0}, "temperature=-1.0.*>= 0"),
    ("sac", {"temperature": math.nan}, "temperature.*nan cannot be used"),
    ("sac", {"hidden_sizes": ()}, "hidden_sizes"),
    ("sac", {"batch_norm": True, "target_rate": 0.1}, "target_rate=0.1: has no effect with batch_norm=true"),
    ("sac", {"dropped_quantiles": 3}, "dropped_quantiles=3: has no effect without num_quantiles"),
    ("sac", {"num_quantiles": 5, "dropped_quantiles": 5}, "dropped_quantiles=5: leaves none of 5; use fewer"),
    ("sac", {"num_quantiles": 5, "form": "sac1", "temperature": 0.2}, "num_quantiles=5: form 'sac1' has none"),
    ("impala", {"final_learning_rate": 0.0}, "algorithm.final_learning_rate: needs anneal_steps"),
    ("ppo", {"anneal_steps": 1000}, "algorithm.anneal_steps=1000: has no effect without a final_"),
    ("ppo", {"network": OWN, "hidden_sizes": [8]},
     rf"algorithm.hidden_sizes=\(8,\): has no effect on {OWN}; pass it in network_kwargs"),
    ("ppo", {"network": OWN, "activation": "relu"}, f"algorithm.activation=relu: has no effect on {OWN}"),
    ("ppo", {"recurrent_size": 64}, "recurrent_size=64: has no effect without recurrent; set recurrent to lstm or gru"),
    ("bc", {"gamma": 0.9}, "gamma"),
    ("iql", {"expectile": 0.4}, "expectile"),
    ("pqn", {"minibatch_size": 4096}, "minibatch_size=4096: is larger than batch_size; use at most 2048"),
    ("pqn", {"network": "a:b", "hidden_sizes": (5,)}, r"hidden_sizes=\(5,\): has no effect on a:b"),
    ("impala", {"recurrent": "gru"}, "recurrent=gru: the critic reads the actor's memory; set shared to true"),
    ("impala", {"estimator": "gae"},
     "algorithm.estimator: 'gae' cannot be used; impala needs importance-corrected returns; use vtrace or upgo"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "words"), CONTRADICTIONS)
def test_contradictions_are_refused(name: str, options: Options, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(config_class(name), options, prefix="algorithm.")


def bounded(low: float, high: float) -> EnvSpec:
    return EnvSpec("Toy-v0", (3,), "float32", "continuous", (1,), (), (low,), (high,))


PACKED = replace(PICTURES, observation_shape=(6 * 6 * 2 + 4 * 3,), image_shapes=((6, 6, 2),))
UNSUITABLE: list[tuple[str, EnvSpec, Options, str]] = [
    ("ppo", DISCRETE, {"network": "cnn"}, "network cnn: is unknown; use mlp, conv, nature"),
    ("ppo", DISCRETE, {"network": OWN, "network_kwargs": {"depth": 3}}, "depth"),
    ("ppo", DISCRETE, {"initial_log_std": -1.0},
     "algorithm.initial_log_std: -1.0 has no effect on Toy-v0, whose actions are discrete; remove it"),
    ("impala", PAIRS, {"initial_log_std": -1.0}, "whose actions are multi_discrete; remove it"),
    ("ppo", IMAGES, {}, r"algorithm.network: mlp needs a vector, but Toy-v0 has .*\(6, 6, 2\); use nature or conv"),
    ("ppo", IMAGES, {"network": "conv", "normalize_observations": True},
     "algorithm.normalize_observations: Toy-v0 has .* not a vector; set it to false"),
    ("impala", bounded(-math.inf, 1.0), {}, "Toy-v0: action_low is .* impala needs 1 finite bounds"),
    ("ppo", bounded(1.0, 1.0), {}, "is not below"),
    ("dqn", DISCRETE, {"network": "nobody:knows"}, "DDRL_ALLOW_MODULES"),
    ("sac", DISCRETE, {}, "^Toy-v0: action_kind is 'discrete'.*choose an environment with a Box of"),
    ("sac", bounded(-math.inf, 1.0), {}, "^Toy-v0: action_low is .*RescaleAction"),
    ("sac", replace(CONTINUOUS, action_low=()), {}, "^Toy-v0: action_low is .*2 finite bounds"),
    ("sac", bounded(2.0, 0.0), {}, "^Toy-v0: action_low .* is not below"),
    ("td3", replace(CONTINUOUS, observation_shape=(84, 84)), {}, "^Toy-v0: observation_shape is .*FlattenObservation"),
    ("sac", PICTURES, {}, r"algorithm.network: mlp needs a vector, but Toy-v0 has .*\(6, 6, 2\); use nature or conv"),
    ("sac", PICTURES, {"network": "nature"}, "network nature: needs images of 36x36 pixels or more"),
    ("sac", CONTINUOUS, {"network": "cnn"}, "network cnn: is unknown; use mlp, conv, nature"),
    *((name, PACKED, {}, rf"mlp needs a vector, but Toy-v0 has .*\({shape},\); use nature or conv")
      for name, shape in (("ppo", r"\(6, 6, 2\)"), ("sac", r"\(6, 6, 2\)"))),
    ("td3", PACKED, {}, r"observation_shape is \(\(6, 6, 2\),\), but td3 needs a vector; use algorithm.name sac"),
    ("bc", bounded(-math.inf, 1.0), {}, "^Toy-v0: action_low is .* bc needs 1 finite bounds"),
    ("iql", bounded(1.0, 1.0), {}, "is not below"),
    *((name, IMAGES, {}, "algorithm.network: mlp needs a vector") for name in ("bc", "iql")),
    ("ppo", PACKED, {"network": "conv", "normalize_observations": True}, "normalize_observations: .* not a vector"),
    ("ppo", PACKED, {"network": OWN}, r"takes no images beside numbers, as of shapes \[\(6, 6, 2\)\]; use conv"),
    ("impala", PACKED, {"network": "nature"}, "network nature: needs images of 36x36 pixels or more"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "spec", "options", "words"), UNSUITABLE)
def test_unsuitable_environments_are_refused(name: str, spec: EnvSpec, options: Options, words: str) -> None:
    config = validate({"env": {"id": "Toy-v0"}, "algorithm": {"name": name, **options}})
    with pytest.raises(ConfigError, match=words) as refused:
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


def test_estimators_with_importance_weights_correct_staleness() -> None:
    ppo: Any = config_class("ppo")
    names = ("gae", "td_lambda", "vtrace", "upgo", "monte_carlo")
    assert [name for name in names if ppo(estimator=name).corrects_staleness] == ["vtrace", "upgo"]
    assert all(config_class("impala")(estimator=name).corrects_staleness for name in ("vtrace", "upgo"))


def test_options_and_numpy_policies_need_no_torch() -> None:
    code = f"""
import sys
from ddrl.algorithms.base import Resolved, config_class
from ddrl.types import EnvSpec
for name, spec in {SPECS}.items():
    config = config_class(name)()
    config.check(spec)
    if name not in ("discrete_sac", "dqn", "r2d2", "pqn"):
        Resolved(name, config, spec).policy()
print("torch" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_learners_do_not_load_torchs_compiler() -> None:
    """Its import takes more than a second of a learner's start."""
    code = """
import sys
from support.algorithms import DISCRETE, CONTINUOUS, make_learner
from support.subjects import batch_for
for name, spec in {"sac": CONTINUOUS, "dqn": DISCRETE, "r2d2": DISCRETE, "ppo": DISCRETE, "impala": DISCRETE}.items():
    learner = make_learner(name, spec)
    learner.update(batch_for(name, learner, spec, 0))
print("torch._dynamo" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "False"

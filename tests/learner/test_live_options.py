"""Options that change while a run goes on: each takes effect with the next update, and survives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from support.algorithms import Options, digest, make_learner
from support.subjects import SPECS, batch_for

from ddrl.algorithms import base
from ddrl.config import live_options, validate
from ddrl.replay.experience import make_experience

Table = dict[str, tuple[Options, Any]]  # option -> (what it needs, other value)
DRAWN = {"prioritized": True, "importance_exponent": 0.4, "final_importance_exponent": 0.5}
ANNEALED = {"final_learning_rate": 0.0, "anneal_steps": 2000}
ON_POLICY: Table = {
    "learning_rate": ({}, 2e-3),
    "final_learning_rate": (ANNEALED, 1e-4),
    "entropy_coefficient": ({}, 0.1),
    "final_entropy_coefficient": (ANNEALED | {"entropy_coefficient": 0.1}, 0.01),
    "anneal_steps": (ANNEALED, 3000),
    "value_coefficient": ({}, 2.0),
    "max_grad_norm": ({"max_grad_norm": 0.5}, 0.1),
    "lambda": ({}, 0.5),
}
PRIORITIES: Table = {
    "importance_exponent": (DRAWN, 0.9),
    "final_importance_exponent": (DRAWN | {"importance_anneal_updates": 4}, 1.0),
    "importance_anneal_updates": (DRAWN, 5),
}
VALUES = PRIORITIES | {
    "learning_rate": ({}, 2e-3),
    "adam_eps": ({}, 1e-2),
    "weight_decay": ({}, 0.5),
    "max_grad_norm": ({}, 0.01),
    "target_period": ({}, 3),
    "target_rate": ({"target_period": None, "target_rate": 0.1}, 0.5),
    "epsilon": ({}, 0.5),
    "final_epsilon": ({}, 0.5),
    "epsilon_anneal_updates": ({}, 10),
}
LIVE: dict[str, Table] = {
    "sac": PRIORITIES
    | {
        "learning_rate": ({}, 1e-4),
        "target_rate": ({}, 0.5),
        "temperature": ({}, 0.02),
        "target_entropy": ({}, 1.5),
        "policy_delay": ({}, 2),
    },
    "td3": PRIORITIES
    | {
        "learning_rate": ({}, 1e-4),
        "target_rate": ({"policy_delay": 1}, 0.5),
        "policy_delay": ({}, 1),
        "target_noise": ({}, 1.0),
        "target_noise_clip": ({}, 0.01),
    },
    "discrete_sac": PRIORITIES
    | {
        "learning_rate": ({}, 1e-4),
        "max_grad_norm": ({}, 0.01),
        "target_rate": ({}, 0.5),
        "temperature": ({}, 0.02),
        "target_entropy": ({}, 0.1),
        "value_clip": ({}, 0.01),
    },
    "bc": {"learning_rate": ({}, 1e-4)},
    "iql": {
        "learning_rate": ({}, 1e-4),
        "target_rate": ({}, 0.5),
        "expectile": ({}, 0.9),
        "inverse_temperature": ({}, 0.1),
    },
    "dqn": VALUES | {"huber_delta": ({}, 0.1)},
    "r2d2": VALUES,
    "ppo": ON_POLICY
    | {
        "clip": ({}, 0.05),
        "final_clip": (ANNEALED, 0.01),
        "value_clip": ({}, 0.01),
        "num_epochs": ({}, 3),
        "minibatch_size": ({}, 30),
        "target_kl": ({}, 1e-7),
    },
    "impala": ON_POLICY | {"rho_bar": ({}, 0.7), "reward_clip": ({}, 0.5)},
    "pqn": {
        "lambda": ({}, 0.5),
        "num_epochs": ({}, 3),
        "minibatch_size": ({}, 30),
        **{name: case for name, case in VALUES.items() if "target" not in name and "importance" not in name},
    },
}
REPLAY = {"capacity": 2000, "warmup_steps": 100}
RUN = validate({"env": {"id": "CartPole-v1"}, "algorithm": {"name": "dqn"}, "replay": REPLAY})
CASES = [(name, option, *LIVE[name][option]) for name in LIVE for option in LIVE[name]]


class Subject:
    """A learner with the draws of its replay, and batches by number."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        small = {"target_period": 2, "batch_size": 6, "epsilon_ladder": False} if name == "r2d2" else {}
        self._name = name
        self.learner = make_learner(name, SPECS[name], **small | options)
        self._experience = make_experience(RUN, self.config, SPECS[name])
        self._priorities = getattr(self._experience, "priorities", None)
        if self._priorities is not None:
            self._priorities.append(6, np.linspace(0.1, 3.0, 6))

    @property
    def config(self) -> Any:
        """The options of the algorithm."""
        return self.learner.config

    def adopt(self, **options: Any) -> None:
        """Do what a learner does when its run's config has changed."""
        changed = self.config.model_dump(by_alias=True) | options
        self.learner.apply_options(type(self.config).model_validate(changed))
        self._experience.apply_options(self.config)

    def update(self, number: int) -> str:
        """Return a hash of all that an update on the batch of that number gives and leaves."""
        batch = batch_for(self._name, self.learner, SPECS[self._name], number)
        if self._priorities is not None:
            weight = self._priorities.draw(6, seed=0, draw=number)[2]
            batch = replace(batch, weight=torch.from_numpy(weight.astype(np.float32)))
        figures = self.learner.update(batch)
        return digest(figures) + digest(self.learner.state()) + digest(self.learner.weights())


def trained(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint after three updates."""
    subject = Subject(name, options)
    for number in range(3):
        subject.update(number)
    return load(save(dict(subject.learner.state())))


def continued(name: str, options: Mapping[str, Any], state: Mapping[str, Any]) -> Subject:
    """Return another learner that goes on from a checkpoint."""
    subject = Subject(name, options)
    subject.learner.load_state(state)
    return subject


def test_every_live_option_is_in_the_table() -> None:
    assert LIVE.keys() == set(base.names())
    for name, table in LIVE.items():
        assert table.keys() == live_options(base.config_class(name)).keys()


@pytest.mark.parametrize(("name", "option", "needed", "other"), CASES)
def test_live_options_apply_from_the_next_update(name: str, option: str, needed: Options, other: Any) -> None:
    """The learner then equals one that was built with the option from the same state."""
    state = trained(name, needed)
    unchanged, adopting = continued(name, needed, state), continued(name, needed, state)
    built = continued(name, needed | {option: other}, state)
    adopting.adopt(**{option: other})
    before, expected = unchanged.update(3), built.update(3)
    assert adopting.update(3) == expected != before
    later = continued(name, needed | {option: other}, load(save(dict(adopting.learner.state()))))
    assert adopting.update(4) == built.update(4) == later.update(4)
    unchanged.adopt()  # no change is none
    again = continued(name, needed, state)
    again.update(3)
    assert unchanged.update(4) == again.update(4)


@pytest.mark.parametrize(
    ("before", "after"), [*combinations(("auto", 0.2, 0.0), 2), (0.2, "auto"), (0.0, "auto"), (0.0, 0.2)]
)
def test_a_temperature_becomes_fixed_or_automatic(before: Any, after: Any) -> None:
    """Its optimizer is kept meanwhile, so that checkpoints of before and after fit both."""
    state = trained("sac", {"temperature": before})
    adopting, built = (continued("sac", {"temperature": option}, state) for option in (before, after))
    adopting.adopt(temperature=after)
    temperatures = []
    for number in range(3, 6):
        assert adopting.update(number) == built.update(number)
        temperatures.append(float(adopting.learner.state()["temperature.value"].exp()))
    if after == "auto":
        start = {"auto": None, 0.2: 0.2, 0.0: 0.2}[before]
        assert temperatures[0] == pytest.approx(start, rel=0.05) and len(set(temperatures)) == 3
    else:
        assert temperatures == pytest.approx([after] * 3)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("sac", {"gamma": 0.5}, r"algorithm\.gamma: 0\.99 cannot become 0\.5 during a run"),
        ("ppo", {"estimator": "vtrace"}, r"algorithm\.estimator: gae cannot become vtrace"),
        ("impala", {"optimizer": "adam"}, r"algorithm\.optimizer: rmsprop cannot become adam"),
        ("dqn", {"n_step": 2, "learning_rate": 1.0}, r"algorithm\.n_step: 1 cannot become 2"),
        ("r2d2", {"burn_in": 1}, r"algorithm\.burn_in: 4 cannot become 1"),
    ],
)
def test_other_options_are_refused_and_nothing_changes(name: str, change: Options, message: str) -> None:
    subject, twin = Subject(name, {}), Subject(name, {})
    with pytest.raises(ValueError, match=message):
        subject.adopt(**change)
    assert subject.update(0) == twin.update(0)


@pytest.mark.parametrize(("name", "option", "needed", "other"), CASES)
def test_policies_do_not_need_live_options(name: str, option: str, needed: Options, other: Any) -> None:
    """A player with the old options plays the same weights in the same way."""
    learner = Subject(name, needed | {option: other}).learner
    played = [
        _play(base.Resolved(name, Subject(name, options).config, SPECS[name]).policy, learner.weights())
        for options in (needed, needed | {option: other})
    ]
    assert played[0] == played[1]


def _play(policy: Callable[..., base.Policy], weights: Mapping[str, Any]) -> str:
    player = policy(producer=3)
    player.load({name: value.numpy() for name, value in weights.items()})
    observation = np.random.default_rng(1).standard_normal((16, 3)).astype(np.float32)
    action, columns = player.explore(observation, np.random.default_rng(2), player.initial_state(16))
    mode = player.act(observation, player.initial_state(16))
    share = np.array(player.evaluation_epsilon)
    return digest({"action": action, "mode": mode, "share": share, **columns})

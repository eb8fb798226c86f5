"""Learning that must work: toys, a value known beforehand, what only a memory can solve, and catch from pixels."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support.algorithms import ALLOWED, OWN, Options
from support.learning import learn, toy

from ddrl import config
from ddrl.config import RunConfig

pytestmark = pytest.mark.learning
CONFIGS = Path(__file__).parents[2] / "configs"
FIXED_LENGTH = ("rollout.fragment_s=5", "rollout.max_fragment_steps=16")
# Of 200 episodes with scores 0 or 1: the mean is within 0.11 of chance, by 3 sigma.
solve = partial(learn, target=0.95, num_episodes=200)

PPO = {"name": "ppo", "batch_size": 512, "minibatch_size": 128, "learning_rate": 3e-3, "hidden_sizes": [32]}
IMPALA = {"name": "impala", "batch_size": 320, "hidden_sizes": [32]}
ADAM = {"optimizer": "adam", "learning_rate": 5e-3, "estimator": "upgo", "normalize_returns": True}
QUICK = {"samples_per_insert": 16, "warmup_steps": 1_000}
NORMALIZED = {"normalize_observations": True, "normalize_returns": True}
PQN = {
    "name": "pqn",
    "batch_size": 512,
    "learning_rate": 3e-3,
    "hidden_sizes": [32],
    "epsilon_anneal_updates": 100,
}


@pytest.mark.parametrize(
    ("env_id", "algorithm", "num_iterations", "close"),  # the last: a return close to the best
    [
        ("ddrl/Pick-v0", PPO, 15, 9.9),
        ("ddrl/Pairs-v0", PPO | {"shared": True}, 20, 9.9),
        ("ddrl/Spot-v0", PPO | {"network": "conv", "num_epochs": 5}, 15, 9.5),
        ("ddrl/Target-v0", PPO | NORMALIZED, 30, -0.1),
        ("ddrl/Pick-v0", IMPALA, 300, 9.9),
        ("ddrl/Pick-v0", IMPALA | ADAM, 80, 9.9),
        ("ddrl/Pick-v0", PQN, 15, 9.9),
        ("ddrl/Spot-v0", PQN | {"network": "conv"}, 20, 9.5),
    ],
)
def test_on_policy_toys(env_id: str, algorithm: Options, num_iterations: int, close: float) -> None:
    run = toy(env_id, algorithm | {"gamma": 0.5})
    outcome = learn(run, most_steps=algorithm["batch_size"] * num_iterations)
    assert outcome.return_mean >= close
    if algorithm["name"] == "impala":
        assert outcome.figures["entropy"] < 0.9, "the draws know it too, not only the mode"


def test_truncation_bootstraps() -> None:
    """Reward 1 for ever: the value is 1 / (1 - gamma) = 10, though episodes are cut after 100 steps."""
    learner = learn(toy("ddrl/Endless-v0", PPO | {"gamma": 0.9}), most_steps=512 * 30).learner
    value = learner.network(learner.normalized(torch.ones(1, 1)))[1]
    mean, std = learner.return_scale
    assert float(value.detach()) * std + mean == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize("frame_stack", [1, 2])
def test_ppo_uses_its_stack(frame_stack: int) -> None:
    """Recall without delay: the cue is in the observation before the question, so two frames solve it, one does not."""
    env = {"id": "ddrl/Recall-v0", "kwargs": {"delay": 0}, "num_envs": 8, "frame_stack": frame_stack}
    run = toy("ddrl/Recall-v0", PPO | {"batch_size": 256, "minibatch_size": 64, "num_epochs": 4}, env=env)
    outcome = solve(run, most_steps=12_000, evaluate_every=2_000)
    assert outcome.return_mean >= 0.95 if frame_stack == 2 else outcome.return_mean < 0.65, outcome


PICK: dict[str, Options] = {
    "none": {},
    "double": {"double": True},
    "dueling": {"dueling": True},
    "n_step": {"n_step": 3},
    "prioritized": {"prioritized": True},
    "categorical": {"distribution": "categorical", "v_min": 0.0, "v_max": 12.0},
    "quantile": {"distribution": "quantile", "num_atoms": 11},
    "noisy": {"noisy": True},
    "epsilon_ladder": {"epsilon_ladder": True},
    "target_rate": {"target_rate": 0.05},
    "rmsprop": {"optimizer": "rmsprop"},
}


@pytest.mark.parametrize("options", PICK.values(), ids=PICK)
def test_dqn_solves_pick_by_each_option_alone(options: Options) -> None:
    """Its end is a truncation: the best policy is worth 1 / (1 - gamma) everywhere."""
    algorithm = {"name": "dqn", "hidden_sizes": [32], "learning_rate": 3e-3, "gamma": 0.8, "batch_size": 32}
    algorithm |= {"target_period": None if "target_rate" in options else 25} | options
    if not options.keys() & {"noisy", "epsilon_ladder"}:
        algorithm["epsilon_anneal_updates"] = 300
    rollout = {"fragment_s": 5, "max_fragment_steps": 16}
    env = {"id": "ddrl/Pick-v0", "num_envs": 8}
    run = toy(env["id"], algorithm, env=env, rollout=rollout, replay={"samples_per_insert": 8})
    outcome = learn(run, most_steps=4_000)
    assert outcome.return_mean == 10.0, outcome
    if "n_step" not in options:  # several steps of old policies are worth less
        value = outcome.policy.values(np.eye(4, dtype=np.float32), by_row=False).max(axis=1)
        np.testing.assert_allclose(value, 5.0, rtol=0.1)


def test_hindsight_flips_bits() -> None:
    """At random the reward is almost always -1; the best policies get -4 of 10 bits on average."""
    run = config.validate(
        {
            "env": {"id": "ddrl/Flip-v0", "num_envs": 8},
            "algorithm": {"name": "dqn", "learning_rate": 1e-3},
            "rollout": {"fragment_s": 5, "max_fragment_steps": 30},
            "replay": {"hindsight": 4},
        }
    )
    assert learn(run, target=-4.5, most_steps=20_000, evaluate_every=2_000).return_mean >= -4.5
    blind = config.validate(run.model_dump(by_alias=True) | {"replay": {}})
    assert learn(blind, most_steps=6_000).return_mean < -8.5


DISCRETE_SAC = {"name": "discrete_sac", "hidden_sizes": [32]}


@pytest.mark.parametrize(
    "options",
    [
        DISCRETE_SAC,
        DISCRETE_SAC | {"form": "sqn"},
        DISCRETE_SAC | {"prioritized": True},
        DISCRETE_SAC | {"average_critics": True, "value_clip": 0.5},
        {"name": "docs.own_algorithm", "hidden_sizes": [32]},
    ],
)
def test_soft_policies_solve_pick(options: Options) -> None:
    algorithm = {"learning_rate": 3e-3, "gamma": 0.8, "batch_size": 32, "target_rate": 0.05} | options
    env, rollout = {"id": "ddrl/Pick-v0", "num_envs": 8}, {"fragment_s": 5, "max_fragment_steps": 16}
    run = toy(env["id"], algorithm, env=env, rollout=rollout, replay={"samples_per_insert": 8})
    assert learn(run, most_steps=4_000).return_mean == 10.0


@pytest.mark.parametrize(
    "options",
    [
        {"name": "td3"},
        {"name": "td3", "prioritized": True, "layer_norm": True},
        {"name": "sac", "batch_norm": True, "target_entropy": -3.0},
    ],
)
def test_target_is_solved_off_policy(options: Options) -> None:
    algorithm = {"hidden_sizes": [32], "learning_rate": 3e-3, "gamma": 0.5, "batch_size": 64, "n_step": 1}
    env, rollout = {"id": "ddrl/Target-v0", "num_envs": 8}, {"fragment_s": 5, "max_fragment_steps": 16}
    run = toy(env["id"], algorithm | options, env=env, rollout=rollout, replay=QUICK)
    assert learn(run, target=-0.2, most_steps=15_000, evaluate_every=2_000).return_mean >= -0.2


@pytest.mark.parametrize(
    "options",
    [pytest.param({"network": "conv"}, marks=pytest.mark.long), {"network": OWN, "num_quantiles": 11}],
)
def test_sac_solves_dial_from_pixels(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """At random -6.6; a policy that ignores the image gets -3.3 at best."""
    monkeypatch.setenv("DDRL_ALLOW_MODULES", ALLOWED)
    algorithm = {"name": "sac", "hidden_sizes": [32], "learning_rate": 3e-3, "gamma": 0.5, "batch_size": 64}
    algorithm |= {"target_entropy": -3.0, "target_rate": 0.05, "n_step": 1} | options
    env, rollout = (
        {"id": "support.algorithms:dial", "num_envs": 8},
        {"fragment_s": 5, "max_fragment_steps": 16},
    )
    run = toy(env["id"], algorithm, env=env, rollout=rollout, replay=QUICK)
    assert learn(run, target=-0.2, most_steps=15_000, evaluate_every=2_000).return_mean >= -0.2


@pytest.mark.parametrize(
    ("options", "most_steps", "close"),
    [
        (
            {"name": "ppo", "shared": True, "batch_size": 512, "minibatch_size": 128, "num_epochs": 5},
            30_000,
            9.0,
        ),
        ({"name": "dqn", "batch_size": 64, "target_rate": 0.05, "epsilon_anneal_updates": 500}, 8_000, 9.0),
        ({"name": "sac", "batch_size": 64, "target_entropy": -3.0, "target_rate": 0.05}, 8_000, -0.7),
    ],
)
def test_a_gauge_is_read_from_its_image_and_its_sign(options: Options, most_steps: int, close: float) -> None:
    """One of them alone is worth 5 of 10, or -3.3."""
    algorithm = {"network": "conv", "hidden_sizes": [64], "learning_rate": 3e-3, "gamma": 0.0} | options
    env = {"id": "ddrl/Gauge-v0", "kwargs": {"discrete": options["name"] != "sac"}, "num_envs": 8}
    run = toy(
        env["id"], algorithm, env=env, rollout={"fragment_s": 5, "max_fragment_steps": 16},
        **({} if options["name"] == "ppo" else {"replay": QUICK}),
    )  # fmt: skip
    outcome = learn(run, most_steps=most_steps, target=close, evaluate_every=2_000)
    assert outcome.return_mean >= close, outcome


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), marks=pytest.mark.long),
        ("double=true", "dueling=true", "prioritized=true", "n_step=3"),
    ],
)
def test_dqn_solves_catch_from_pixels(options: tuple[str, ...]) -> None:
    """84x84 pixels, within 12,000 steps; at random -0.71."""
    settings = [
        *FIXED_LENGTH,
        "replay.observations=compressed",
        *(f"algorithm.{option}" for option in options),
    ]
    run = config.load(CONFIGS / "catch.yaml", settings)
    outcome = learn(run, target=0.95, most_steps=12_000, evaluate_every=500, num_episodes=50)
    assert outcome.return_mean >= 0.95, outcome


def recall(*settings: str) -> RunConfig:
    return config.load(CONFIGS / "recall.yaml", [*FIXED_LENGTH, *settings])


@pytest.mark.parametrize("recurrent", ["lstm", "gru"])
def test_r2d2_solves_recall(recurrent: str) -> None:
    """Within 24,000 steps; of seven seeds the slowest took 8,400. Chance is 0.5."""
    outcome = solve(recall(f"algorithm.recurrent={recurrent}"), most_steps=24_000, evaluate_every=4_000)
    assert outcome.return_mean >= 0.95, outcome


def recall_by_dqn(frame_stack: int) -> RunConfig:
    """The same task and pace for a network without memory."""
    tree = recall(f"env.frame_stack={frame_stack}").model_dump(mode="json", by_alias=True)
    tree["algorithm"] = {
        "name": "dqn", "hidden_sizes": [64, 64], "learning_rate": 2e-3, "batch_size": 32, "n_step": 5,
        "target_period": 50, "prioritized": True, "epsilon_anneal_updates": 500,
    }  # fmt: skip
    return config.validate(tree)


def test_dqn_solves_recall_only_by_a_stack_that_reaches_back_to_the_cue() -> None:
    """The cue is 9 observations older than the question: a stack of 10 shows it, the usual one of 4 does not."""
    reaches = solve(recall_by_dqn(10), most_steps=16_000, evaluate_every=2_000)
    assert reaches.return_mean >= 0.95, reaches
    forgets = solve(recall_by_dqn(4), most_steps=8_000, evaluate_every=4_000)
    assert forgets.updates > 1_000 > reaches.updates, forgets  # it had its time
    assert forgets.return_mean < 0.65, forgets  # 0.5 and four sigma


@pytest.mark.parametrize(
    ("algorithm", "continuous"),
    [
        ({"name": "sac"}, True),
        ({"name": "td3"}, True),
        ({"name": "bc"}, True),
        ({"name": "iql"}, False),
        (PPO, True),
        (PPO, False),
        (IMPALA, False),
        ({"name": "dqn"}, False),
        ({"name": "pqn", "batch_size": 256}, False),
        ({"name": "discrete_sac"}, False),
        ({"name": "r2d2", "sequence_length": 8, "overlap": 4, "burn_in": 4}, False),
    ],
)
def test_every_algorithm_takes_vectors_of_integers(
    algorithm: Options, continuous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "support.odd_envs")
    env = {"id": "support.odd_envs:Counts", "kwargs": {"continuous": continuous}, "num_envs": 8}
    small = {} if algorithm["name"] in ("ppo", "impala", "pqn") else {"replay": {"warmup_steps": 100}}
    outcome = learn(toy(env["id"], {"hidden_sizes": [8]} | algorithm, env=env, **small), most_steps=1_000)
    assert outcome.updates > 0 and outcome.return_mean == 5.0

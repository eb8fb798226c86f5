"""Submission: accepted combinations, and refusals whose remedy is tried; tests/cli/test_refusals.py has the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from redis import Redis
from support.algorithms import Options
from support.runs import start

from ddrl import config, envs
from ddrl.algorithms import base
from ddrl.config import ConfigError, RunConfig
from ddrl.runs import submit
from ddrl.store import runs
from ddrl.worker.collector import Collector

CARTPOLE, CATCH = {"id": "CartPole-v1", "num_envs": 4}, {"id": "ddrl/Catch-v0", "num_envs": 4}
ENDLESS = {"id": "ddrl/Endless-v0", "kwargs": {"max_steps": 10_000, "discrete": True}}
DQN = {"name": "dqn", "hidden_sizes": [16]}
CATCH_DQN = {"name": "dqn", "network": "data_efficient", "hidden_sizes": [16]}
SEQUENCES = {"sequence_length": 20, "overlap": 10, "burn_in": 5}  # a stride of 10
R2D2 = {"name": "r2d2", "hidden_sizes": [16], "recurrent_size": 8, "batch_size": 16, **SEQUENCES}
PPO = {"name": "ppo"}
SAC = {"name": "sac", "hidden_sizes": [16]}


def tree(env: Options, algorithm: Options, **sections: Any) -> RunConfig:
    return config.validate({"env": env, "algorithm": algorithm, **sections})


def refused(env: Options, algorithm: Options, **sections: Any) -> str:
    """The message of the refusal."""
    with pytest.raises((ConfigError, envs.EnvError)) as caught:
        submit.prepare(tree(env, algorithm, **sections))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300
    return message


@pytest.mark.parametrize(
    ("env", "algorithm", "sections"),
    [
        (CARTPOLE, DQN, {}),
        ({**CARTPOLE, "frame_stack": 4}, DQN, {}),
        ({**CATCH, "frame_stack": 4}, CATCH_DQN, {"replay": {"observations": "compressed"}}),
        (CATCH, CATCH_DQN, {"replay": {"observations": "compressed", "threads": 3}}),
        (CATCH, CATCH_DQN, {"replay": {"memory_bytes": "1MiB", "threads": 0}}),
        (CARTPOLE, R2D2, {"rollout": {"random_until_learned": False}}),
        ({**CATCH, "frame_stack": 2}, {**R2D2, "network": "nature"}, {}),
        ({**CARTPOLE, "frame_stack": 2}, PPO, {}),
    ],
)
def test_what_can_be_done_is_accepted(env: Options, algorithm: Options, sections: Options) -> None:
    assert submit.prepare(tree(env, algorithm, **sections)).frame_stack == env.get("frame_stack", 1)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            {"env": {**CARTPOLE, "action_repeat": 2}},
            {"env": {**CARTPOLE, "action_mask": True}},
            "env.action_repeat: 2 would repeat actions that env.action_mask forbids meanwhile; use 1",
        ),
        (
            {"learner": {"num_learners": 2}},
            {"learner": {"stall_s": 10}},
            "learner.rank_timeout_s: 10 is not less than learner.stall_s 10, ",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(first: Options, second: Options, message: str) -> None:
    spaces = envs.describe(tree(CARTPOLE, DQN).env)
    both = {name: {**value, **second[name]} for name, value in first.items()}
    for sections in (first, second):
        submit.check(tree(**{"env": CARTPOLE, "algorithm": DQN, **sections}), spaces)
    with pytest.raises(ConfigError, match=f"^{message}"):
        submit.check(tree(**{"env": CARTPOLE, "algorithm": DQN, **both}), spaces)


def test_what_no_onnx_file_can_hold_is_refused_at_once() -> None:
    gauge, files = {"id": "ddrl/Gauge-v0"}, {"weights": {"onnx": True}}
    line = refused(gauge, {**SAC, "network": "conv"}, **files)
    assert line == "weights.onnx: numbers beside images are not for ONNX; remove it, or the numbers"
    assert submit.prepare(tree(CARTPOLE, DQN, **files))


def test_a_run_names_the_options_whose_defaults_have_changed(client: Redis) -> None:
    """One that does not is older, and keeps the defaults of its time."""
    named = {"learning_rate": 1e-3, "normalize_observations": True, "normalize_returns": True}
    for given in ({}, {"normalize_returns": False}):
        run = start(client, tree(CARTPOLE, PPO | given))
        assert runs.config(client, run).algorithm == PPO | named | given
    options, spaces = tree(CARTPOLE, PPO), runs.spaces(client, run)
    older = runs.config(client, runs.create(client, options, spaces))
    assert older.algorithm == PPO | {
        "learning_rate": 3e-4, "normalize_observations": False, "normalize_returns": False,
    }  # fmt: skip
    assert base.resolve(options, spaces).config.normalize_observations


@pytest.mark.parametrize(
    ("env", "network"), [(CATCH, "nature"), (CARTPOLE, "support.algorithms:own_network")]
)
def test_images_and_networks_of_ones_own_get_observations_as_they_are(
    env: Options, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "support.algorithms")
    options = tree(env, PPO | {"network": network})
    assert base.resolve(options, submit.prepare(options)).config.normalize_observations is False


LONG = {**R2D2, "sequence_length": 80, "overlap": 70}
STRIDE_20 = {**R2D2, "sequence_length": 25, "overlap": 5}


@pytest.mark.parametrize(
    ("algorithm", "name", "too_tight", "fits", "others", "message"),
    [
        (LONG, "replay.capacity", 79, 80, {"rollout.max_fragment_steps": 10},
         "replay.capacity: 79 cannot hold one sequence of 80 steps; use at least 80"),
        (DQN, "rollout.max_fragment_steps", 500, 499, {"replay.capacity": 1999},
         "rollout.max_fragment_steps: 500 steps of 4 environments exceed replay.capacity 1999; use at most 499"),
        # Collectors of sequences round T up to their stride: all that may come must fit.
        (STRIDE_20, "replay.capacity", 79, 80, {"rollout.max_fragment_steps": 20},
         "in strides of 20, exceed replay.capacity 79; use replay.capacity 80"),
        (STRIDE_20, "replay.capacity", 159, 160, {"rollout.max_fragment_steps": 39},
         "in strides of 20, exceed replay.capacity 159; use at most 20"),
        (STRIDE_20, "rollout.max_fragment_steps", 21, 20, {"replay.capacity": 159},
         "in strides of 20, exceed replay.capacity 159; use at most 20"),
        (R2D2, "rollout.max_fragment_steps", 9, 10, {},
         "rollout.max_fragment_steps: 9 is less than the stride of 10 steps between sequences; use at least 10, or a "
         "larger algorithm.overlap"),
        (R2D2, "algorithm.overlap", 10, 11, {"rollout.max_fragment_steps": 9}, "or a larger algorithm.overlap"),
        # 16 sequences of 20 steps an update, at 1 sample per insert: slack for 320 transitions.
        (R2D2, "replay.slack_steps", 319, 320, {"replay.samples_per_insert": 1}, "use at least 320"),
    ],
)  # fmt: skip
def test_lengths_and_sizes_that_do_not_fit_are_refused_and_the_remedy_is_accepted(
    algorithm: Options, name: str, too_tight: int, fits: int, others: dict[str, int], message: str
) -> None:
    def sections(value: int) -> Options:
        made: Options = {"env": CARTPOLE, "algorithm": dict(algorithm), "replay": {"warmup_steps": 10}}
        for dotted, number in {"replay.slack_steps": 320, **others, name: value}.items():
            section, _, option = dotted.partition(".")
            made.setdefault(section, {})[option] = number
        return made

    assert refused(**sections(too_tight)).endswith(message)
    submit.prepare(tree(**sections(fits)))


def test_sequences_bring_their_context_into_memory() -> None:
    """4,000 images of 7,056 bytes are 4,500 rows, 32 MB; as sequences, by 40 with 16 of context, 5,700, 40 MB."""
    replay = {"capacity": 4_000, "memory_bytes": 36_000_000, "threads": 2}
    assert "dense" in refused(CATCH, CATCH_DQN, replay=replay)
    submit.prepare(tree(CATCH, {**R2D2, "network": "nature"}, replay=replay))


@pytest.mark.parametrize(
    ("env", "algorithm"),
    [
        (CARTPOLE, {**DQN, "prioritized": True}),
        (ENDLESS, {**R2D2, "recurrent_size": 64}),  # each sequence begins amid an episode
        (CARTPOLE, {**PPO, "batch_size": 800}),
        ({"id": "ddrl/Target-v0", "num_envs": 4}, SAC),
    ],
    ids=["dqn", "r2d2", "ppo", "sac"],
)
def test_the_stream_holds_some_of_the_largest_fragments(env: Options, algorithm: Options) -> None:
    """Eight as they are played, uncompressed, with all their columns and context; and the remedies work."""
    env = {**env, "num_envs": 16, "frame_stack": 3}
    sections: Options = {"rollout": {"max_fragment_steps": 60, "fragment_s": 5}}
    message = refused(env, algorithm, **sections, replay={"max_bytes": 65536})
    least = int(message.split("use at least ")[1].split(",")[0])
    run = tree(env, algorithm, **sections, replay={"max_bytes": least})
    spec = submit.prepare(run)
    assert f"at least {least}, or" in refused(env, algorithm, **sections, replay={"max_bytes": least - 1})

    resolved = base.resolve(run, spec)
    identity = {"run": "run", "producer": 1, "incarnation": 1}
    collector = Collector(config=run, resolved=resolved, random_until_learned=False, **identity)
    collector.load(1, resolved.learner(device=torch.device("cpu"), seed=1).weights())
    most = 60 if not resolved.on_policy else 800 // 16 + 1
    fragments = [collector.collect(max_steps=most) for _ in range(4)]
    collector.close()
    assert fragments[-1].num_steps == most and fragments[-1].context == resolved.context
    columns = ((*vars(one).values(), *one.extras.values()) for one in fragments)
    largest = max(sum(getattr(column, "nbytes", 0) for column in one) for one in columns)
    assert 0.5 * least < 8 * largest <= least

    half = {"max_bytes": least // 2}
    steps = int(refused(env, algorithm, **sections, replay=half).rsplit(" ", 1)[1])
    submit.prepare(tree(env, algorithm, rollout={"max_fragment_steps": steps}, replay=half))
    refused(env, algorithm, rollout={"max_fragment_steps": steps + 1}, replay=half)

"""Submission: accepted combinations, and refusals whose remedy is tried; tests/cli/test_refusals.py has the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddrl import config, envs
from ddrl.algorithms import base
from ddrl.config import ConfigError, RunConfig
from ddrl.runs import submit
from ddrl.worker.collector import Collector

CARTPOLE, CATCH = {"id": "CartPole-v1", "num_envs": 4}, {"id": "ddrl/Catch-v0", "num_envs": 4}
ENDLESS = {"id": "ddrl/Endless-v0", "kwargs": {"max_steps": 10_000, "discrete": True}}
DQN = {"name": "dqn", "hidden_sizes": [16]}
CATCH_DQN = {"name": "dqn", "network": "data_efficient", "hidden_sizes": [16]}
R2D2 = {
    "name": "r2d2",
    "hidden_sizes": [16],
    "recurrent_size": 8,
    "sequence_length": 20,
    "overlap": 10,
    "burn_in": 5,
    "batch_size": 16,
}
PPO = {"name": "ppo"}
SAC = {"name": "sac", "hidden_sizes": [16]}


def tree(env: dict[str, Any], algorithm: dict[str, Any], **sections: Any) -> RunConfig:
    return config.validate({"env": env, "algorithm": algorithm, **sections})


def refused(env: dict[str, Any], algorithm: dict[str, Any], **sections: Any) -> str:
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
        (
            {**CATCH, "frame_stack": 4, "reward_sign": True},
            CATCH_DQN,
            {"replay": {"observations": "compressed"}},
        ),
        (CATCH, CATCH_DQN, {"replay": {"observations": "compressed", "threads": 3}}),
        (CATCH, CATCH_DQN, {"replay": {"memory_bytes": "1MiB", "threads": 0}}),
        (CARTPOLE, R2D2, {"rollout": {"random_until_learned": False}}),
        ({**CATCH, "frame_stack": 2}, {**R2D2, "network": "nature"}, {}),
        ({**CARTPOLE, "frame_stack": 2}, PPO, {}),
    ],
)
def test_what_can_be_done_is_accepted(
    env: dict[str, Any], algorithm: dict[str, Any], sections: dict[str, Any]
) -> None:
    assert submit.prepare(tree(env, algorithm, **sections)).frame_stack == env.get("frame_stack", 1)


def test_capacity_must_hold_a_sequence() -> None:
    long = {**R2D2, "sequence_length": 80, "overlap": 70}
    rollout = {"max_fragment_steps": 10}
    message = refused(CARTPOLE, long, replay={"capacity": 60, "warmup_steps": 50}, rollout=rollout)
    assert message.startswith("replay.capacity: 60 cannot hold one sequence of 80 steps; use at least ")
    remedy = int(message.rsplit(" ", 1)[1])
    submit.prepare(tree(CARTPOLE, long, replay={"capacity": remedy, "warmup_steps": 50}, rollout=rollout))


def test_capacity_must_hold_a_fragment() -> None:
    message = refused(CARTPOLE, DQN, replay={"capacity": 1999})
    assert message.startswith(
        "rollout.max_fragment_steps: 512 steps of 4 environments exceed replay.capacity 1999"
    )
    remedy = int(message.rsplit(" ", 1)[1])
    rollout = {"max_fragment_steps": remedy}
    submit.prepare(tree(CARTPOLE, DQN, replay={"capacity": 1999}, rollout=rollout))
    rollout = {"max_fragment_steps": remedy + 1}
    assert "max_fragment_steps" in refused(CARTPOLE, DQN, replay={"capacity": 1999}, rollout=rollout)


@pytest.mark.parametrize("max_fragment_steps", [20, 21, 39])
def test_capacity_must_hold_a_fragment_of_whole_strides(max_fragment_steps: int) -> None:
    """Collectors of sequences round T up to their stride: what may come must fit, or all of it would be refused."""
    algorithm = {**R2D2, "sequence_length": 25, "overlap": 5}  # stride 20
    most = -(-max_fragment_steps // 20) * 20 * 4
    rollout = {"max_fragment_steps": max_fragment_steps}
    pace = {"warmup_steps": 10, "slack_steps": 100}
    submit.prepare(tree(CARTPOLE, algorithm, replay={"capacity": most, **pace}, rollout=rollout))
    message = refused(CARTPOLE, algorithm, replay={"capacity": most - 1, **pace}, rollout=rollout)
    if max_fragment_steps == 20:
        assert message.endswith(f"in strides of 20, exceed replay.capacity 79; use replay.capacity {most}")
    else:
        assert message.endswith("in strides of 20, exceed replay.capacity 159; use at most 20")
        submit.prepare(
            tree(
                CARTPOLE, algorithm, replay={"capacity": most - 1, **pace}, rollout={"max_fragment_steps": 20}
            )
        )


def test_fragments_hold_a_stride_at_least() -> None:
    message = refused(CARTPOLE, R2D2, rollout={"max_fragment_steps": 9})
    assert message == (
        "rollout.max_fragment_steps: 9 is less than the stride of 10 steps between sequences; use at least 10, or a "
        "larger algorithm.overlap"
    )
    submit.prepare(tree(CARTPOLE, R2D2, rollout={"max_fragment_steps": 10}))
    submit.prepare(tree(CARTPOLE, {**R2D2, "overlap": 11}, rollout={"max_fragment_steps": 9}))


def test_the_pace_of_sequences_counts_their_steps() -> None:
    """16 sequences of 20 steps an update, at 1 sample per insert: slack for 320 transitions."""
    replay = {"samples_per_insert": 1, "slack_steps": 319}
    assert "use at least 320" in refused(CARTPOLE, R2D2, replay=replay)
    submit.prepare(tree(CARTPOLE, R2D2, replay={**replay, "slack_steps": 320}))


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
def test_the_stream_holds_some_of_the_largest_fragments(
    env: dict[str, Any], algorithm: dict[str, Any]
) -> None:
    """Eight as they are played, uncompressed, with all their columns and context; and the remedies work."""
    env = {**env, "num_envs": 16, "frame_stack": 3}
    sections: dict[str, Any] = {"rollout": {"max_fragment_steps": 60, "fragment_s": 5}}
    message = refused(env, algorithm, **sections, replay={"max_bytes": 65536})
    least = int(message.split("use at least ")[1].split(",")[0])
    run = tree(env, algorithm, **sections, replay={"max_bytes": least})
    spec = submit.prepare(run)
    assert f"at least {least}, or" in refused(env, algorithm, **sections, replay={"max_bytes": least - 1})

    resolved = base.resolve(run, spec)
    collector = Collector(
        run="run",
        producer=1,
        incarnation=1,
        config=run,
        resolved=resolved,
        random_until_learned=False,
    )
    collector.load(1, resolved.learner(device=torch.device("cpu"), seed=1).weights())
    most = 60 if not resolved.on_policy else 800 // 16 + 1
    fragments = [collector.collect(max_steps=most) for _ in range(4)]
    collector.close()
    assert fragments[-1].num_steps == most and fragments[-1].context == resolved.context
    largest = max(
        sum(
            column.nbytes
            for column in [*vars(one).values(), *one.extras.values()]
            if hasattr(column, "nbytes")
        )
        for one in fragments
    )
    assert 0.5 * least < 8 * largest <= least

    half = {"max_bytes": least // 2}
    steps = int(refused(env, algorithm, **sections, replay=half).rsplit(" ", 1)[1])
    submit.prepare(tree(env, algorithm, rollout={"max_fragment_steps": steps}, replay=half))
    refused(env, algorithm, rollout={"max_fragment_steps": steps + 1}, replay=half)

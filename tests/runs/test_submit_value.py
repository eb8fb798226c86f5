"""What value learning refuses at submission, each in one line that names the setting and a remedy that works."""

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


def test_stacks_are_of_vectors_and_grey_images() -> None:
    message = refused({"id": "ddrl/Spot-v0", "frame_stack": 4}, {**DQN, "network": "conv"})
    assert message.startswith("ddrl/Spot-v0: env.frame_stack is 4, but observations [8, 8, 1] are neither")
    assert "set it to 1" in message
    assert "env.frame_stack: 0" in _invalid(env={**CARTPOLE, "frame_stack": 0})


def test_a_game_that_does_not_exist_has_near_ones() -> None:
    message = refused({"id": "ALE/Asterics-v5"}, {**CATCH_DQN, "network": "nature"})
    assert message == "ALE/Asterics-v5: no such game; did you mean ALE/Asterix-v5?" or (
        message.startswith("ALE/Asterics-v5: no such game; did you mean ") and "ALE/Asterix-v5" in message
    )
    assert "games are named as in ALE/Asterix-v5" in refused({"id": "ALE/Xyzzyx-v5"}, CATCH_DQN)


def test_what_is_for_games_is_refused_elsewhere() -> None:
    message = refused({**CARTPOLE, "atari": {"sticky": 0.25}}, DQN)
    assert message == "CartPole-v1: env.atari is set, but this is no ALE game; remove it"
    message = refused({"id": "ALE/Asterix-v5", "action_repeat": 4}, CATCH_DQN)
    assert "env.action_repeat is 4" in message and "env.atari.frame_skip" in message


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
        "rollout.max_fragment_steps: 9 is less than the 10 steps from one sequence to the next, by which fragments "
        "grow; use at least 10, or more algorithm.overlap"
    )
    submit.prepare(tree(CARTPOLE, R2D2, rollout={"max_fragment_steps": 10}))
    submit.prepare(tree(CARTPOLE, {**R2D2, "overlap": 11}, rollout={"max_fragment_steps": 9}))


def test_n_step_must_fit_into_a_fragment() -> None:
    rollout = {"max_fragment_steps": 4}
    message = refused(CARTPOLE, {**DQN, "n_step": 5}, rollout=rollout)
    assert message == (
        "algorithm.n_step: 5 is longer than a fragment, rollout.max_fragment_steps 4; use at most 4"
    )
    submit.prepare(tree(CARTPOLE, {**DQN, "n_step": 4}, rollout=rollout))


def test_the_pace_of_sequences_counts_their_steps() -> None:
    """16 sequences of 20 steps an update, at 1 sample per insert: slack for 320 transitions."""
    replay = {"samples_per_insert": 1, "slack_steps": 319}
    assert "use at least 320" in refused(CARTPOLE, R2D2, replay=replay)
    submit.prepare(tree(CARTPOLE, R2D2, replay={**replay, "slack_steps": 320}))


def test_vectors_are_not_compressed() -> None:
    message = refused(CARTPOLE, DQN, replay={"observations": "compressed"})
    assert message == (
        "replay.observations: compressed is for images, but CartPole-v1 has observations float32 [4]; use dense"
    )


@pytest.mark.parametrize(
    ("env", "replay"),
    [
        (CARTPOLE, {"threads": 2}),
        (CATCH, {"threads": 0, "observations": "dense"}),
        (CATCH, {"threads": 2, "capacity": 10_000}),  # auto, and little enough to stay dense
    ],
)
def test_threads_are_for_compressed_observations(env: dict[str, Any], replay: dict[str, Any]) -> None:
    algorithm = DQN if env is CARTPOLE else CATCH_DQN
    message = refused(env, algorithm, replay=replay)
    assert message == (
        f"replay.threads: {replay['threads']} has no effect on a view whose observations are dense; remove it"
    )


@pytest.mark.parametrize("observations", ["dense", "compressed"])
def test_memory_decides_only_where_it_is_asked(observations: str) -> None:
    replay = {"observations": observations, "memory_bytes": "1GiB"}
    message = refused(CATCH, CATCH_DQN, replay=replay)
    assert message.startswith("replay.memory_bytes: ")
    assert message.endswith(f"has no effect on observations: {observations}; remove it")


@pytest.mark.parametrize("algorithm", [DQN, R2D2])
def test_memory_is_for_images(algorithm: dict[str, Any]) -> None:
    message = refused(CARTPOLE, algorithm, replay={"memory_bytes": "1GiB"})
    assert message.startswith("replay.memory_bytes: ")
    assert message.endswith(" has no effect on observations that are no images; remove it")


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
        env=run.env,
        rollout=run.rollout,
        spec=spec,
        policy=resolved.policy(producer=1),
        random_until_learned=False,
        seed=1,
        context=resolved.context,
        sequences=resolved.sequences,
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


def test_recurrent_learning_cannot_begin_at_random() -> None:
    message = refused(CARTPOLE, R2D2, rollout={"random_until_learned": True})
    assert message == (
        "rollout.random_until_learned: true gives no recurrent states, which r2d2 needs; remove it"
    )


@pytest.mark.parametrize(
    "replay",
    [
        {"capacity": 5000},
        {"observations": "dense"},
        {"threads": 2},
        {"memory_bytes": "1GiB"},
        {"samples_per_insert": 4},
    ],
)
def test_replay_is_not_for_ppo(replay: dict[str, Any]) -> None:
    (name, _), *_ = replay.items()
    message = refused(CARTPOLE, PPO, replay=replay)
    assert message.startswith(f"replay.{name}: ") and message.endswith(
        "has no effect on algorithm ppo; remove it"
    )


@pytest.mark.parametrize("algorithm", [DQN, R2D2])
def test_noise_on_actions_is_for_continuous_ones(algorithm: dict[str, Any]) -> None:
    message = refused(CARTPOLE, algorithm, rollout={"action_noise": 0.1})
    name = algorithm["name"]
    assert (
        message
        == f"rollout.action_noise: 0.1 has no effect on algorithm {name} with discrete actions; remove it"
    )
    submit.prepare(tree({"id": "ddrl/Target-v0", "num_envs": 4}, SAC, rollout={"action_noise": 0.1}))


@pytest.mark.parametrize("algorithm", [DQN, R2D2])
def test_on_policy_settings_are_not_for_replay(algorithm: dict[str, Any]) -> None:
    message = refused(CARTPOLE, algorithm, on_policy={"max_staleness": 4})
    assert message.startswith("on_policy.max_staleness: 4 has no effect on ")


@pytest.mark.parametrize(
    ("env", "algorithm", "words"),
    [
        ({"id": "ddrl/Target-v0"}, DQN, "needs discrete actions"),
        ({"id": "ddrl/Pairs-v0"}, R2D2, "needs discrete actions"),
        (CATCH, DQN, "algorithm.network: mlp needs a vector"),
        ({**CATCH, "frame_stack": 4}, R2D2, "algorithm.network: mlp needs a vector"),
        (CARTPOLE, {**DQN, "network": "nature"}, "nature"),
        (CARTPOLE, {**R2D2, "overlap": 20}, "overlap"),
        (CARTPOLE, {**R2D2, "n_step": 21}, "n_step"),
        (CARTPOLE, {**DQN, "priority_exponent": 0.7}, "has no effect without prioritized=true"),
        (CARTPOLE, {**DQN, "double_q": True}, "algorithm.double_q: unknown option; did you mean double?"),
    ],
)
def test_an_algorithm_that_does_not_fit_is_one_line(
    env: dict[str, Any], algorithm: dict[str, Any], words: str
) -> None:
    assert words in refused(env, algorithm)


def _invalid(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config.validate({"env": CARTPOLE, "algorithm": DQN, **sections})
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"replay": {"observations": "packed"}}, "replay.observations: 'packed' cannot be used"),
        ({"replay": {"threads": -1}}, "replay.threads: -1 cannot be used"),
        ({"replay": {"memory_bytes": "1KiB"}}, "replay.memory_bytes: '1KiB' cannot be used"),
        ({"replay": {"warmup_steps": 6000, "capacity": 5000}}, "learning would never start"),
        ({"env": {**CARTPOLE, "frame_stack": 17}}, "env.frame_stack: 17 cannot be used"),
        ({"env": {**CARTPOLE, "reward_sign": "maybe"}}, "env.reward_sign: 'maybe' cannot be used"),
        ({"env": {**CARTPOLE, "reward_signs": True}}, "did you mean reward_sign?"),
    ],
)
def test_values_out_of_range_are_one_line(sections: dict[str, Any], words: str) -> None:
    assert words in _invalid(**sections)

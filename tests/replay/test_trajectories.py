"""Fragments laid side by side, against a walk through each fragment step by step."""

from __future__ import annotations

import dataclasses
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_returns import make_fragment
from support.reference_stacks import Player

from ddrl.replay.trajectories import check_trajectory, trajectories
from ddrl.types import Fragment


def make(seed: int, producer: int, seq: int, num_steps: int, num_envs: int, context: int = 0) -> Fragment:
    """A fragment with random endings, and log probabilities that differ from step to step."""
    made = make_fragment(
        seed, num_steps=num_steps, num_envs=num_envs, context=context, serial=seed, end_probability=0.2
    )
    log_prob = np.random.default_rng(seed).normal(size=made.reward.shape).astype(np.float32)
    return dataclasses.replace(
        made, producer=producer, incarnation=7, seq=seq, extras={"behavior_log_prob": log_prob}
    )


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 5), st.integers(0, 2)), min_size=1, max_size=8
    ),
    gaps=st.sets(st.integers(0, 7)),
)
def test_every_step_is_there_once_with_its_neighbors(
    sizes: list[tuple[int, int, int]], gaps: set[int]
) -> None:
    """Producers' fragments come interleaved, some missing; producer p plays p + 1 environments."""
    fragments, seqs = [], {}
    for number, (producer, num_steps, context) in enumerate(sizes):
        seqs[producer] = seqs.get(producer, -1) + (2 if number in gaps else 1)
        fragments.append(make(number, producer, seqs[producer], num_steps, producer + 1, context))
    batch = trajectories(fragments, gamma=0.5)

    steps = {}  # (serial, step, lane) -> position in the batch
    for position in np.argwhere(batch.valid):
        t, b = (int(i) for i in position)
        serial, step, lane, kind = (int(x) for x in batch.observation[batch.row[t, b]])
        assert kind == 0 and (serial, step, lane) not in steps
        steps[serial, step, lane] = (t, b)
    assert len(steps) == sum(fragment.num_transitions for fragment in fragments)
    follows = {(one.producer, one.seq): number for number, one in enumerate(fragments)}
    for (serial, step, lane), (t, b) in steps.items():
        one = fragments[serial]
        assert batch.reward[t, b] == one.reward[step, lane]
        assert batch.action[t, b].tolist() == one.action[step, lane].tolist()
        assert batch.behavior_log_prob[t, b] == one.extras["behavior_log_prob"][step, lane]
        assert batch.discount[t, b] == (0.0 if one.terminated[step, lane] else 0.5)
        after = batch.observation[batch.next_row[t, b]].tolist()
        if one.truncated[step, lane]:
            assert after == [serial, step, lane, 1], "the true final observation"
        elif not one.terminated[step, lane]:
            assert after == [serial, step + 1, lane, 0]
        successor = (serial, step + 1, lane)
        if step + 1 == len(one.reward):
            number = follows.get((one.producer, one.seq + 1))
            successor = (-1, 0, 0) if number is None else (number, fragments[number].context, lane)
        ended = one.terminated[step, lane] or one.truncated[step, lane]
        assert batch.continues[t, b] == (not ended and successor in steps)
        if successor in steps:
            assert steps[successor] == (t + 1, b), "a producer's next step is the next row of its lane"
    padding = ~batch.valid
    assert not batch.discount[padding].any() and not batch.continues[padding].any()
    assert not batch.reward[padding].any()
    assert batch.next_row.max() < len(batch.observation)


def test_what_the_policy_drew_is_the_action() -> None:
    one = make(0, 1, 0, 3, 2)
    raw = np.random.default_rng(1).normal(size=one.action.shape).astype(np.float32)
    batch = trajectories([dataclasses.replace(one, extras={**one.extras, "raw_action": raw})], gamma=0.9)
    assert np.array_equal(batch.action, raw)


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({}, "no column behavior_log_prob"),
        ({"behavior_log_prob": np.zeros((3, 2), np.float64)}, "no column behavior_log_prob, float32"),
        ({"behavior_log_prob": np.zeros((3, 2, 1), np.float32)}, "no column behavior_log_prob"),
        (
            {"behavior_log_prob": np.zeros((3, 2), np.float32), "raw_action": np.zeros((3, 2), np.float32)},
            "raw_action differs in shape",
        ),
        (
            {
                "behavior_log_prob": np.zeros((3, 2), np.float32),
                "raw_action": np.zeros((3, 2, 2), np.float16),
            },
            "or dtype",
        ),
    ],
)
def test_columns_of_another_algorithm_are_refused(extras: dict[str, np.ndarray], message: str) -> None:
    one = dataclasses.replace(make(0, 1, 0, 3, 2), extras=extras)
    with pytest.raises(ValueError, match=message):
        check_trajectory(one)


def test_checks_copy_no_images() -> None:
    one = make(0, 1, 0, 60, 2)
    images = np.zeros((61, 2, 84, 84), np.uint8)  # 840 KiB
    finals = np.zeros((len(one.final_index), 84, 84), np.uint8)
    one = dataclasses.replace(one, observation=images, final_observation=finals)
    tracemalloc.start()
    check_trajectory(one)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < images.nbytes / 3


@pytest.mark.parametrize(("shape", "dtype"), [((5, 3), "uint8"), ((3,), "float32")])
def test_stacks_equal_those_of_the_environment(shape: tuple[int, ...], dtype: str) -> None:
    """Two producers, the fragments of each joined; the first has less context than a stack."""
    players = [Player(seed, num_envs=2, shape=shape, dtype=dtype) for seed in (1, 2)]
    fragments = []
    for num_steps in (2, 9, 30):
        for producer, player in enumerate(players):
            one = player.fragment(num_steps, context=3 if num_steps < 30 else 5)
            log_prob = np.zeros(one.reward.shape, np.float32)
            fragments.append(
                dataclasses.replace(one, producer=producer, extras={"behavior_log_prob": log_prob})
            )
    batch = trajectories(fragments, gamma=0.5, frame_stack=4)
    assert batch.valid.shape == (41, 4) and batch.valid.all()
    inputs = (4, *shape) if len(shape) > 1 else (4 * shape[0],)
    assert batch.observation.shape[1:] == inputs
    for lane in range(4):
        for time, row in enumerate(players[lane // 2].steps):
            step = row[lane % 2]
            assert batch.action[time, lane] == step.action
            seen = batch.observation[batch.row[time, lane]]
            np.testing.assert_array_equal(seen, step.stack.reshape(inputs))
            if not step.terminated:
                after = batch.observation[batch.next_row[time, lane]]
                np.testing.assert_array_equal(after, step.next_stack.reshape(inputs))
    truncated = sum(int(one.truncated[one.context :].sum()) for one in fragments)
    assert len(batch.observation) == 2 * 2 * (41 + 3) + truncated, "no row for what only stacks reach into"

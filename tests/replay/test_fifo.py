"""The on-policy queue: order, staleness, step budget, against a simulated fleet; and trajectories against a walk."""

from __future__ import annotations

import dataclasses
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_returns import make_fragment
from support.reference_stacks import Player

from ddrl.replay.fifo import Fifo, check_trajectory, trajectories
from ddrl.types import Fragment, Trajectories

B = 32


def fragment(version: int, *, num_steps: int = 4, producer: int = 0, seq: int = 0) -> Fragment:
    """T steps of 2 environments whose rewards name their version and producer."""
    made = make_fragment(seq, num_steps=num_steps, num_envs=2, end_probability=0.1)
    log_prob = np.zeros(made.reward.shape, np.float32)
    return dataclasses.replace(
        made,
        producer=producer,
        seq=seq,
        policy_version=version,
        reward=np.full(made.reward.shape, 1000 * version + producer, np.float32),
        extras={"behavior_log_prob": log_prob},
    )


def make(**options: Any) -> Fifo:
    """A queue with batches of B transitions."""
    settings_of = {"collect": "async", "max_staleness": 1} | options
    return Fifo(batch_size=B, gamma=0.9, **settings_of)


def draw(fifo: Fifo, version: int) -> Trajectories | None:
    return fifo.draw(num_steps=0, num_updates=0, version=version)


def versions(batch: Trajectories) -> set[int]:
    """Of the fragments in a batch."""
    return {int(reward) // 1000 for reward in batch.reward[batch.valid]}


def test_each_fragment_is_drawn_once_whole_and_in_order() -> None:
    fifo = make()
    for seq in range(9):  # 8 transitions each
        fifo.admit(fragment(0, producer=seq, seq=seq), b"%d-0" % seq, version=0)
    assert (len(fifo), fifo.oldest_entry_id) == (72, b"0-0")
    first = draw(fifo, 0)
    assert first is not None and (len(fifo), fifo.oldest_entry_id) == (40, b"4-0")
    second = draw(fifo, 1)
    assert second is not None and (len(fifo), fifo.oldest_entry_id) == (8, b"8-0")
    assert draw(fifo, 2) is None, "less than a batch waits"
    drawn = [sorted(int(r) for r in set(batch.reward[batch.valid])) for batch in (first, second)]
    assert drawn == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert first.valid.sum() == second.valid.sum() == B


def test_a_stale_fragment_is_dropped_and_counted_wherever_it_turned_stale() -> None:
    fifo = make()
    fifo.admit(fragment(3, producer=1), b"1-0", version=4)
    fifo.admit(fragment(2, producer=2), b"2-0", version=4)  # too old on arrival
    assert (fifo.num_dropped, len(fifo)) == (1, 8)
    for seq in range(4):
        fifo.admit(fragment(5, producer=3, seq=seq), b"%d-0" % (3 + seq), version=5)
    batch = draw(fifo, 5)  # by now version 3 is two versions behind
    assert batch is not None and versions(batch) == {5}
    assert fifo.num_dropped == 2
    assert fifo.figures(num_steps=0, num_updates=0) == {
        "queued_steps": 0, "dropped": 2, "staleness": 0, "max_staleness": 0
    }  # fmt: skip


def test_dropping_may_leave_less_than_a_batch() -> None:
    fifo = make()
    for seq in range(3):
        fifo.admit(fragment(1, seq=seq), b"%d-0" % seq, version=1)
    fifo.admit(fragment(3, seq=3), b"3-0", version=1)
    assert draw(fifo, 3) is None and len(fifo) == 8
    assert fifo.num_dropped == 3 and fifo.oldest_entry_id == b"3-0"


def test_correct_keeps_stale_fragments_and_reports_their_staleness() -> None:
    fifo = make(stale="correct")
    for seq in range(4):
        fifo.admit(fragment(seq, seq=seq), b"%d-0" % seq, version=9)
    assert draw(fifo, 9) is not None
    figures = fifo.figures(num_steps=0, num_updates=0)
    assert (figures["dropped"], figures["staleness"], figures["max_staleness"]) == (0, 7.5, 9)
    assert "staleness" not in fifo.figures(num_steps=0, num_updates=0), "of what was learned from since"


@pytest.mark.parametrize(("collect", "lead"), [("sync", 0), ("async", 2)])
def test_the_step_budget_grows_with_the_version_not_with_the_draw(collect: str, lead: int) -> None:
    fifo = make(collect=collect, max_staleness=2)

    def budget(num_steps: int, version: int) -> int:
        return fifo.step_budget(num_steps=num_steps, num_updates=0, version=version)

    assert budget(0, 0) == (1 + lead) * B
    for seq in range(5):
        fifo.admit(fragment(0, seq=seq), b"%d-0" % seq, version=0)
    assert budget(40, 0) == (1 + lead) * B
    assert draw(fifo, 0) is not None
    assert budget(40, 0) == (1 + lead) * B, "the batch is not done yet"
    assert budget(40, 1) == B + (1 + lead) * B, "with its version it is"


def test_dropped_steps_are_given_back() -> None:
    fifo = make(collect="sync", max_staleness=0)
    fifo.admit(fragment(0), b"1-0", version=5)  # 8 stale transitions of a process that slept
    assert fifo.step_budget(num_steps=8, num_updates=0, version=5) == 8 + B


def test_the_collectors_that_share_the_step_budget() -> None:
    fifo = make()
    assert fifo.num_collectors == 1
    for producer in range(4):
        fifo.admit(fragment(0, producer=producer), b"%d-0" % producer, version=0)
    assert draw(fifo, 0) is not None
    assert fifo.num_collectors == 4


def test_a_fragment_of_another_algorithm_is_refused() -> None:
    fifo = make()
    with pytest.raises(ValueError, match="behavior_log_prob"):
        fifo.pack(dataclasses.replace(fragment(0), extras={}))
    assert len(fifo) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collect": "async", "max_staleness": 0}, "max_staleness: 0 .* use 1, or on_policy.collect: sync"),
        ({"forced_lag": 8}, "max_staleness: 1 is below on_policy.forced_lag 8; use at least 8"),
    ],
)
def test_a_bound_that_cannot_be_met_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_fleet_can_stall_it_or_make_it_learn_from_stale_fragments(data: st.DataObject) -> None:
    """Processes that play, wait, sleep for long, or die; a server that counts; a learner that takes its time."""
    collect = data.draw(st.sampled_from(["sync", "async"]))
    bound = data.draw(st.integers(1 if collect == "async" else 0, 3))
    lag = data.draw(st.integers(0, bound))
    num_processes = data.draw(st.integers(1, 4))
    fifo = make(collect=collect, max_staleness=bound, forced_lag=lag)
    version = appended = iterations = 0
    budget = fifo.step_budget(num_steps=0, num_updates=0, version=0)
    in_hand: list[int | None] = [None] * num_processes  # version under which each plays now
    seqs = [0] * num_processes
    learning: int | None = None  # the version whose successor is being made
    for _ in range(data.draw(st.integers(10, 80))):
        process = data.draw(st.integers(0, num_processes))
        if process < num_processes:  # begins or ends a fragment
            played = in_hand[process]
            if played is None:
                if appended < budget:
                    in_hand[process] = version
                continue
            one = fragment(
                played, num_steps=data.draw(st.integers(1, 9)), producer=process, seq=seqs[process]
            )
            appended += one.num_transitions
            fifo.admit(one, b"%d-0" % appended, version=version)
            seqs[process], in_hand[process] = seqs[process] + 1, None
        elif learning is not None:  # publishes
            version, learning = learning + 1, None
        else:
            batch = draw(fifo, version)
            if batch is not None:
                learning, iterations = version, iterations + 1
                ages = {version - played for played in versions(batch)}
                assert max(ages) <= bound
                assert batch.valid.sum() >= B
        budget = max(budget, fifo.step_budget(num_steps=appended, num_updates=0, version=version))
        assert appended + sum(played is not None for played in in_hand) * 18 - budget <= num_processes * 18
    # Then one process alone, the others dead: the next iterations come.
    for _ in range(3):
        version, learning = (version, None) if learning is None else (learning + 1, None)
        budget = max(budget, fifo.step_budget(num_steps=appended, num_updates=0, version=version))
        while (batch := draw(fifo, version)) is None:
            budget = max(budget, fifo.step_budget(num_steps=appended, num_updates=0, version=version))
            assert appended < budget, "the last living process waits, and so does the learner"
            one = fragment(version, seq=seqs[0])
            seqs[0] += 1
            appended += one.num_transitions
            fifo.admit(one, b"%d-0" % appended, version=version)
        learning = version


def test_a_forced_lag_is_exact_once_it_has_built_up() -> None:
    fifo = make(max_staleness=3, forced_lag=3)
    version = appended = 0
    seen = []
    while version < 12:
        budget = fifo.step_budget(num_steps=appended, num_updates=0, version=version)
        while appended < budget:
            fifo.admit(fragment(version, seq=appended), b"%d-0" % appended, version=version)
            appended += 8
        batch = draw(fifo, version)
        assert batch is not None
        seen.append({version - played for played in versions(batch)})
        version += 1
    assert seen == [{0}, {1}, {2}, *[{3}] * 9]


# --- trajectories -----------------------------------------------------------------------------------------------------


def make_part(
    seed: int, producer: int, seq: int, num_steps: int, num_envs: int, context: int = 0
) -> Fragment:
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
        fragments.append(make_part(number, producer, seqs[producer], num_steps, producer + 1, context))
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


def test_the_raw_action_is_the_action() -> None:
    one = make_part(0, 1, 0, 3, 2)
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
    one = dataclasses.replace(make_part(0, 1, 0, 3, 2), extras=extras)
    with pytest.raises(ValueError, match=message):
        check_trajectory(one)


def test_checks_copy_no_images() -> None:
    one = make_part(0, 1, 0, 60, 2)
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

"""The queue of on-policy experience: order, staleness, allowance; against a simulated fleet of any behavior."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_returns import make_fragment

from ddrl.replay.fifo import Fifo
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


def test_correct_keeps_what_is_stale_and_shows_how_stale() -> None:
    fifo = make(stale="correct")
    for seq in range(4):
        fifo.admit(fragment(seq, seq=seq), b"%d-0" % seq, version=9)
    assert draw(fifo, 9) is not None
    figures = fifo.figures(num_steps=0, num_updates=0)
    assert (figures["dropped"], figures["staleness"], figures["max_staleness"]) == (0, 7.5, 9)
    assert "staleness" not in fifo.figures(num_steps=0, num_updates=0), "of what was learned from since"


@pytest.mark.parametrize(("collect", "lead"), [("sync", 0), ("async", 2)])
def test_the_allowance_opens_with_the_version_not_with_the_draw(collect: str, lead: int) -> None:
    fifo = make(collect=collect, max_staleness=2)

    def allowance(num_steps: int, version: int) -> int:
        return fifo.allowance(num_steps=num_steps, num_updates=0, version=version)

    assert allowance(0, 0) == (1 + lead) * B
    for seq in range(5):
        fifo.admit(fragment(0, seq=seq), b"%d-0" % seq, version=0)
    assert allowance(40, 0) == (1 + lead) * B
    assert draw(fifo, 0) is not None
    assert allowance(40, 0) == (1 + lead) * B, "the batch is not done yet"
    assert allowance(40, 1) == B + (1 + lead) * B, "with its version it is"


def test_what_is_dropped_is_given_back() -> None:
    fifo = make(collect="sync", max_staleness=0)
    fifo.admit(fragment(0), b"1-0", version=5)  # 8 stale transitions of a process that slept
    assert fifo.allowance(num_steps=8, num_updates=0, version=5) == 8 + B


def test_the_players_that_share_the_allowance() -> None:
    fifo = make()
    assert fifo.players == 1
    for producer in range(4):
        fifo.admit(fragment(0, producer=producer), b"%d-0" % producer, version=0)
    assert draw(fifo, 0) is not None
    assert fifo.players == 4


def test_a_fragment_of_another_algorithm_is_refused() -> None:
    fifo = make()
    with pytest.raises(ValueError, match="behavior_log_prob"):
        fifo.admit(dataclasses.replace(fragment(0), extras={}), b"1-0", version=0)
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
    allowance = fifo.allowance(num_steps=0, num_updates=0, version=0)
    in_hand: list[int | None] = [None] * num_processes  # version under which each plays now
    seqs = [0] * num_processes
    learning: int | None = None  # the version whose successor is being made
    for _ in range(data.draw(st.integers(10, 80))):
        process = data.draw(st.integers(0, num_processes))
        if process < num_processes:  # begins or ends a fragment
            played = in_hand[process]
            if played is None:
                if appended < allowance:
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
        allowance = max(allowance, fifo.allowance(num_steps=appended, num_updates=0, version=version))
        assert appended + sum(played is not None for played in in_hand) * 18 - allowance <= num_processes * 18
    # Then one process alone, the others dead: the next iterations come.
    for _ in range(3):
        version, learning = (version, None) if learning is None else (learning + 1, None)
        allowance = max(allowance, fifo.allowance(num_steps=appended, num_updates=0, version=version))
        while (batch := draw(fifo, version)) is None:
            allowance = max(allowance, fifo.allowance(num_steps=appended, num_updates=0, version=version))
            assert appended < allowance, "the last living process waits, and so does the learner"
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
        allowance = fifo.allowance(num_steps=appended, num_updates=0, version=version)
        while appended < allowance:
            fifo.admit(fragment(version, seq=appended), b"%d-0" % appended, version=version)
            appended += 8
        batch = draw(fifo, version)
        assert batch is not None
        seen.append({version - played for played in versions(batch)})
        version += 1
    assert seen == [{0}, {1}, {2}, *[{3}] * 9]

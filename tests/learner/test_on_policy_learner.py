"""The learner on-policy, against a real server: each fragment once, no staler than the bound, none stalls it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.algorithms import assert_same
from support.learners import Run, finished, pick_config, playing, training, until

from ddrl import codec
from ddrl.learner import publisher
from ddrl.learner.loop import Learner
from ddrl.store import checkpoints, keys, stream
from ddrl.types import Fragment
from ddrl.worker.segment import Player


def pick_run(server, **sections: Any) -> Run:
    return Run(server, pick_config(**sections))


def play_until(run: Run, condition: Callable[[], object], *, num: int = 1) -> None:
    """Play in threads until a condition holds."""
    with playing(run.url, run.id, num=num):
        until(condition)


def append_unasked(run: Run, player: Player, *, max_steps: int) -> Fragment:
    """Play a fragment and append it, whatever the allowance; return it."""
    one = player.collector.collect(max_steps=max_steps)
    who = {"producer": player.producer, "seq": one.seq, "num_transitions": one.num_transitions}
    run.append(codec.encode(one), **who)
    return one


def test_each_transition_is_learned_from_once(server) -> None:
    run = pick_run(server, on_policy={"stale": "correct"}, algorithm={"estimator": "vtrace"})
    learner, learned = run.learner(), []
    update = learner.algorithm.update

    def note(batch: Any) -> Any:
        learned.append(int(batch.valid.sum()))
        return update(batch)

    learner.algorithm.update = note
    with training(learner):
        play_until(run, lambda: learner.shared.version >= 10, num=2)
    learner.finish()
    assert learner.counters.dropped == 0
    assert sum(learned) + len(learner.replay) == learner.shared.env_steps


def most_stale(run: Run) -> float:
    return max(row.get("max_staleness", 0.0) for row in run.rows)


@pytest.mark.parametrize(
    ("pace", "least", "most"),
    [
        ({"collect": "sync", "max_staleness": 0}, 0, 0),
        ({"collect": "sync"}, 0, 1),
        ({"collect": "async", "max_staleness": 2}, 0, 2),
        ({"collect": "async", "max_staleness": 4, "forced_lag": 4}, 3, 4),
    ],
)
def test_staleness_is_bounded_and_versions_count_iterations(server, pace: Any, least: int, most: int) -> None:
    run = pick_run(server, on_policy=pace)
    with finished(run) as learner, playing(run.url, run.id, num=2):
        shared = learner.shared
        until(lambda: shared.version >= 30)
        until(lambda: sum("staleness" in row for row in run.rows) >= 3)
    assert most_stale(run) <= most
    assert [row for row in run.rows if "staleness" in row][-1]["staleness"] >= least
    state = run.state
    assert learner.counters.admitted + learner.counters.dead <= state.appended_fragments
    iterations = shared.updates // 4  # two minibatches of two epochs, of 64 transitions or little more
    assert abs(run.index.latest - iterations) <= 0.3 * iterations
    assert state.appended_steps <= state.allowance + 2 * 4 * 20, "overshoot: a fragment a process"
    lead = 0 if pace["collect"] == "sync" else most
    assert shared.env_steps >= 64 * (state.version - 1 - lead)


def test_an_iteration_waits_for_the_publication_of_the_last_one(server) -> None:
    run = pick_run(server, on_policy={"max_staleness": 4})
    learner = run.learner()
    with playing(run.url, run.id), training(learner, serves=False):
        until(lambda: learner.shared.updates > 0)
        until(lambda: run.state.appended_steps >= 5 * 64)  # more than enough for the next one
        time.sleep(0.3)
        done = learner.shared.updates
        assert done <= 2 * 6, "one iteration: two epochs over one batch"
        learner.publisher.round()
        until(lambda: learner.shared.updates > done)


def test_of_what_no_allowance_allowed_only_an_iteration_is_held(server) -> None:
    run = pick_run(server)
    player, learner = Player(run.client, run.id), run.learner()
    player.load(run.client, run.index.latest)
    for _ in range(40):
        one = append_unasked(run, player, max_steps=8)
    with training(learner, serves=False):  # so it learns once
        until(lambda: learner.shared.updates > 0)
        until(lambda: not learner.replay.has_room())
        time.sleep(0.2)
        assert len(learner.replay) < 64 + one.num_transitions and run.state.appended_steps >= 40 * 8


def test_a_fragment_of_more_than_an_iteration_is_refused(server) -> None:
    """A batch is whole fragments: a forged one could be many times what the learner has memory and time for."""
    run = pick_run(server, rollout={"segment_s": 60, "fragment_s": 60})
    player, learner = Player(run.client, run.id), run.learner()
    player.load(run.client, run.index.latest)
    most = 64 // player.config.env.num_envs
    for num_steps in (most, most + 1):
        assert append_unasked(run, player, max_steps=num_steps).num_steps == num_steps
    with training(learner):
        run.catch_up(learner)
    learner.finish()
    assert [b"T, N, C" in reason for reason in run.dead] == [True] and learner.counters.admitted == 1


@pytest.mark.parametrize(("stale", "num_dropped"), [("drop", 4), ("correct", 0)])
def test_stale_fragments_are_dropped_or_corrected(server, stale: str, num_dropped: int) -> None:
    """Their steps are given back: the allowance does not run out."""
    run = pick_run(server, on_policy={"collect": "sync", "stale": stale}, algorithm={"estimator": "vtrace"})
    player, is_corrected = Player(run.client, run.id), num_dropped == 0
    with finished(run) as learner:
        play_until(run, lambda: learner.shared.version >= 8)
        for _ in range(4):  # uses up the allowance of an iteration, and more
            player.load(run.client, run.index.latest)
            old = replace(player.collector.collect(max_steps=8), policy_version=0)
            who = {"producer": player.producer, "seq": old.seq, "num_transitions": old.num_transitions}
            run.append(codec.encode(old), **who)
        goal = learner.shared.version + 5
        play_until(run, lambda: learner.shared.version >= goal and (most_stale(run) >= 7) == is_corrected)
    assert learner.counters.dropped == num_dropped
    assert run.audit().total("consumed") == learner.counters.admitted  # the dropped ones, too
    assert is_corrected or most_stale(run) <= 1


@pytest.mark.parametrize("is_appended", [False, True])
def test_an_entry_of_junk_larger_than_the_room_is_soon_forgotten(
    server, monkeypatch: pytest.MonkeyPatch, is_appended: bool
) -> None:
    """What waits for others is dropped at most once, and no checkpoint is stored for its sake later."""
    saved, save = [], checkpoints.save
    monkeypatch.setattr(checkpoints, "save", lambda *args: (saved.append(time.monotonic()), save(*args)))
    monkeypatch.setattr(publisher, "STUCK_S", 0.3)
    replay, late = {"max_bytes": 200_000}, {"checkpoint_every_s": 3600}
    pace = {"on_policy": {"stale": "correct"}, "algorithm": {"estimator": "vtrace"}}
    run = pick_run(server, replay=replay, learner=late, **pace)
    player, learner = Player(run.client, run.id), run.learner()
    player.load(run.client, run.index.latest)
    junk = {b"x": random.Random(1).randbytes(150_000)}
    with training(learner):
        append_unasked(run, player, max_steps=4)
        run.catch_up(learner)
        if is_appended:
            run.append(junk, producer=10**6, seq=0)
        else:
            run.client.xadd(keys.experience(run.id), junk)
        until(lambda: run.dead)
        time.sleep(1.0)  # several times STUCK_S
        assert learner.counters.dropped == int(is_appended)
        until(lambda: time.monotonic() - max([0.0, *saved]) > 1.0)
        num_saved = len(saved)
        for _ in range(4):  # an iteration together
            append_unasked(run, player, max_steps=4)
            time.sleep(0.5)
        until(lambda: learner.shared.updates > 0)
        assert learner.counters.dropped == int(is_appended) and len(saved) == num_saved
    learner.finish()
    assert run.audit() and len(run.dead) == 1


# --- restoring -------------------------------------------------------------------------------------------


def trained(run: Run, condition: Callable[[Learner], object]) -> Learner:
    """Return a learner that learned until a condition held; it has not finished."""
    learner = run.learner()
    with training(learner):
        play_until(run, lambda: condition(learner))
    return learner


def test_a_restored_learner_goes_on_from_its_checkpoint_and_learns_nothing_twice(server) -> None:
    run = pick_run(server)
    first = trained(run, lambda learner: learner.shared.version >= 10)
    first.finish()
    queued, second = len(first.replay), run.learner()
    assert second.shared.updates == first.shared.updates
    assert second.shared.version == first.shared.version, "its weights are the published ones"
    assert len(second.replay) == queued, "what waited waits again"
    assert second.counters.admitted == first.counters.admitted
    assert_same(first.algorithm.state(), second.algorithm.state())
    with training(second):
        play_until(run, lambda: second.shared.version >= first.shared.version + 5)
    second.finish()
    unread = len(stream.read(run.client, run.id, second.counters.cursor.encode(), count=10**6))
    assert second.counters.admitted == run.state.appended_fragments - unread


def test_a_full_server_gets_no_memory_back_from_what_a_checkpoint_waits_with(
    server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner that trims for room and dies then leaves the next one all that nobody has learned from."""
    run = pick_run(server, on_policy={"stale": "correct"}, algorithm={"estimator": "vtrace"})
    player, first = Player(run.client, run.id), run.learner()
    player.load(run.client, run.index.latest)
    for _ in range(11):
        append_unasked(run, player, max_steps=4)
    with training(first):
        run.catch_up(first)
        until(lambda: first.replay.has_room())
    first.finish()
    waiting, second = first.counters.waiting, run.learner()
    assert waiting > 1
    monkeypatch.setattr(publisher, "SLOW_S", 0.05)  # until it trims, and between two times
    monkeypatch.setattr(publisher, "SHED_S", 0.05)
    with training(second) as outages:
        used = int(run.client.info("memory")["used_memory"])
        run.client.config_set("maxmemory", used - 20_000)
        until(lambda: any("memory is full" in text for text in outages))
        time.sleep(1.0)
    run.client.config_set("maxmemory", 0)
    third = run.learner()
    assert third.replay.num_waiting == waiting and third.counters.waiting == waiting
    third.finish()


def test_after_a_death_nothing_is_learned_from_later_weights_of_the_dead_learner(server) -> None:
    run = pick_run(server, on_policy={"max_staleness": 4}, learner={"checkpoint_every_s": 1})

    def has_fragments_after_a_checkpoint(learner: Learner) -> bool:
        is_saved = run.client.hexists(keys.state(run.id), "checkpoint")
        return is_saved and learner.counters.waiting > 0 and len(learner.replay) > 0

    trained(run, has_fragments_after_a_checkpoint)  # it dies here: no finish
    left, second = run.state.version, run.learner()
    assert second.shared.version == left + 1 and len(second.replay) == 0
    with training(second):
        play_until(run, lambda: second.shared.version >= left + 6)
    second.finish()
    assert second.counters.dropped > 0 and most_stale(run) <= 4


def test_a_learner_without_checkpoint_begins_with_its_own_weights(server) -> None:
    run = pick_run(server, learner={"checkpoint_every_s": 3600})
    trained(run, lambda learner: learner.shared.version >= 5)
    left, appended = run.state.version, run.state.appended_fragments
    second = run.learner()
    assert second.shared.version == left + 1, "another policy than the one that played"
    with training(second):
        until(lambda: second.counters.dropped == appended)
    assert second.shared.updates == 0

"""The learner on-policy, against a real server: each fragment once, no staler than the bound, nobody stalls it."""

from __future__ import annotations

import time

import pytest
from redis import Redis
from support.learners import assert_equal_arrays, pick_config, playing, restored, training, until
from support.runs import start

from ddrl import codec
from ddrl.store import keys, metrics, runs, stream, weights
from ddrl.worker.segment import Player


@pytest.fixture
def client(server) -> Redis:
    return server.client


def rows(client: Redis, run: str) -> list[dict[str, float]]:
    return metrics.read(client, run)[0]


@pytest.mark.parametrize(
    ("pace", "least", "most"),
    [
        ({"collect": "sync", "max_staleness": 0}, 0, 0),
        ({"collect": "sync"}, 0, 1),
        ({"collect": "async", "max_staleness": 2}, 0, 2),
        ({"collect": "async", "max_staleness": 4, "forced_lag": 4}, 3, 4),
    ],
)
def test_staleness_stays_within_the_bound_and_versions_count_iterations(
    client: Redis, server, pace: dict[str, object], least: int, most: int
) -> None:
    run = start(client, pick_config(on_policy=pace))
    learner = restored(client, run, server.url)
    with playing(server.url, run, num=2), training(learner):
        until(lambda: learner.shared.version >= 30)
        until(lambda: sum("staleness" in row for row in rows(client, run)) >= 3)
    learner.finish()
    seen = [row for row in rows(client, run) if "staleness" in row]
    assert max(row["max_staleness"] for row in seen) <= most
    assert seen[-1]["staleness"] >= least
    state = runs.state(client, run)
    assert learner.counters.admitted + learner.counters.dead <= state.appended_fragments
    iterations = (
        learner.shared.updates // 4
    )  # two minibatches of two epochs, a batch being 64 transitions or little more
    assert abs(weights.index(client, run).latest - iterations) <= 0.3 * iterations
    lead = 0 if pace["collect"] == "sync" else most
    assert state.appended_steps <= state.allowance + 2 * 4 * 20, "overshoot: a fragment a process"
    assert learner.shared.env_steps >= 64 * (state.version - 1 - lead)


def test_an_iteration_waits_for_the_publication_of_the_last_one(client: Redis, server) -> None:
    run = start(client, pick_config(on_policy={"max_staleness": 4}))
    learner = restored(client, run, server.url)
    with playing(server.url, run), training(learner, serves=False):
        until(lambda: learner.shared.updates > 0)
        until(lambda: runs.state(client, run).appended_steps >= 5 * 64)  # more than enough for the next one
        time.sleep(0.3)
        done = learner.shared.updates
        assert done <= 2 * 6, "one iteration: two epochs over one batch"
        learner.publisher.round()
        until(lambda: learner.shared.updates > done)


def append_as(client: Redis, run: str, player: Player, version: int) -> None:
    """Let a player append a fragment that claims another version."""
    player.load(client, weights.index(client, run).latest)
    fragment = player.collector.collect(max_steps=8)
    fields = codec.encode(type(fragment)(**{**vars(fragment), "policy_version": version}))
    stream.append(
        client, run, fields, producer=player.producer, incarnation=fragment.incarnation,
        seq=fragment.seq, num_transitions=fragment.num_transitions,
    )  # fmt: skip


def test_a_sleeper_s_fragments_are_dropped_counted_and_given_back(client: Redis, server) -> None:
    run = start(client, pick_config(on_policy={"collect": "sync"}))
    learner = restored(client, run, server.url)
    sleeper = Player(client, run)
    with training(learner):
        with playing(server.url, run):
            until(lambda: learner.shared.version >= 5)
        for _ in range(4):  # uses up the allowance of an iteration, and more
            append_as(client, run, sleeper, 0)
        before = learner.shared.version
        with playing(server.url, run):
            until(lambda: learner.shared.version >= before + 5)
    learner.finish()
    assert learner.counters.dropped == 4
    assert metrics.last(client, run)["dropped"] in (0.0, 4.0)  # the last row may be older than they are
    assert max(row.get("max_staleness", 0) for row in rows(client, run)) <= 1


def test_stale_fragments_are_learned_from_where_they_are_corrected(client: Redis, server) -> None:
    run = start(client, pick_config(on_policy={"stale": "correct"}, algorithm={"estimator": "vtrace"}))
    learner = restored(client, run, server.url)
    sleeper = Player(client, run)
    with training(learner):
        with playing(server.url, run):
            until(lambda: learner.shared.version >= 8)
        append_as(client, run, sleeper, 1)
        with playing(server.url, run):
            until(lambda: max(row.get("max_staleness", 0) for row in rows(client, run)) >= 7)
    learner.finish()
    assert learner.counters.dropped == 0


def test_a_resumed_learner_goes_on_from_its_checkpoint_and_learns_nothing_twice(
    client: Redis, server
) -> None:
    run = start(client, pick_config())
    first = restored(client, run, server.url)
    with playing(server.url, run), training(first):
        until(lambda: first.shared.version >= 10)
    first.finish()
    queued = len(first.replay)
    second = restored(client, run, server.url)
    assert second.shared.updates == first.shared.updates
    assert second.shared.version == first.shared.version, "its weights are the published ones"
    assert len(second.replay) == queued, "what waited waits again"
    assert second.counters.admitted == first.counters.admitted
    assert_equal_arrays(dict(first.algorithm.state()), dict(second.algorithm.state()))
    with playing(server.url, run), training(second):
        until(lambda: second.shared.version >= first.shared.version + 5)
    second.finish()
    appended = runs.state(client, run).appended_fragments
    unread = len(stream.read(client, run, second.counters.cursor.encode(), count=10**6))
    assert second.counters.admitted == appended - unread


def test_after_a_death_nothing_is_learned_from_what_the_dead_learner_s_later_weights_played(
    client: Redis, server
) -> None:
    run = start(client, pick_config(on_policy={"max_staleness": 4}, learner={"checkpoint_every_s": 1}))
    first = restored(client, run, server.url)
    with playing(server.url, run), training(first):
        until(lambda: client.hexists(keys.state(run), "checkpoint"))
        until(lambda: first.counters.waiting > 0 and len(first.replay) > 0)
    left = runs.state(client, run).version  # it dies here: no finish
    second = restored(client, run, server.url)
    assert second.shared.version == left + 1 and len(second.replay) == 0
    with playing(server.url, run), training(second):
        until(lambda: second.shared.version >= left + 6)
    second.finish()
    assert second.counters.dropped > 0
    assert max(row.get("max_staleness", 0) for row in rows(client, run)) <= 4


def test_a_learner_without_checkpoint_begins_with_its_own_weights(client: Redis, server) -> None:
    run = start(client, pick_config(learner={"checkpoint_every_s": 3600}))
    first = restored(client, run, server.url)
    with playing(server.url, run), training(first):
        until(lambda: first.shared.version >= 5)
    left = runs.state(client, run).version
    appended = runs.state(client, run).appended_fragments
    second = restored(client, run, server.url)
    assert second.shared.version == left + 1, "another policy than the one that played"
    with training(second):
        until(lambda: second.counters.dropped == appended)
    assert second.shared.updates == 0


def test_an_action_that_is_no_choice_of_the_run_is_refused(client: Redis, server) -> None:
    run = start(client, pick_config())
    learner = restored(client, run, server.url)
    player = Player(client, run)
    player.load(client, 0)
    fragment = player.collector.collect(max_steps=4)
    fields = codec.encode(type(fragment)(**{**vars(fragment), "action": fragment.action + 4}))
    with training(learner):
        stream.append(
            client, run, fields, producer=player.producer, incarnation=fragment.incarnation, seq=0,
            num_transitions=16,
        )  # fmt: skip
        until(lambda: learner.counters.dead == 1)


def test_random_actions_and_foreign_fragments_are_refused_one_by_one(client: Redis, server) -> None:
    run = start(client, pick_config())
    learner = restored(client, run, server.url)
    player = Player(client, run)
    player.load(client, 0)
    fragment = player.collector.collect(max_steps=4)
    assert "behavior_log_prob" in fragment.extras, "version 0 plays by itself"
    fields = codec.encode(type(fragment)(**{**vars(fragment), "extras": {}}))
    with training(learner):
        stream.append(
            client, run, fields, producer=player.producer, incarnation=fragment.incarnation, seq=0,
            num_transitions=16,
        )  # fmt: skip
        until(lambda: learner.counters.dead == 1)
        with playing(server.url, run):
            until(lambda: learner.shared.version >= 3)

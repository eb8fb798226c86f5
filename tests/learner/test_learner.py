"""The learner against a real server: the replay out of the stream, pace, resume, trimming, bad entries."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from redis import Redis
from support.learners import (
    assert_equal_arrays,
    catch_up,
    contents,
    make_learner,
    restored,
    take,
    training,
    until,
)
from support.runs import play_steps, start, target_config

from ddrl import codec
from ddrl.learner import loop
from ddrl.store import checkpoints, keys, leases, metrics, runs, stream, weights
from ddrl.types import Fragment


@pytest.fixture
def client(server) -> Redis:
    return server.client


def test_everything_appended_is_admitted_once_and_the_replay_holds_what_was_played(
    client: Redis, server
) -> None:
    run = start(client, target_config())
    play_steps(client, run, take(client, run), 1000)
    learner = restored(client, run, server.url)
    with training(learner):
        catch_up(client, run, learner)
    learner.finish()
    state, counters, batch = runs.state(client, run), learner.counters, contents(learner)
    assert counters.admitted == state.appended_fragments and counters.dead == 0
    assert len(batch["reward" if "reward" in batch else "n_step_return"]) == counters.env_steps
    assert counters.env_steps == state.appended_steps
    # Reward -(action - target)^2 with one-step returns: every item can be checked by hand.
    expected = -np.square(batch["action"][:, 0] - batch["observation"][:, 0])
    np.testing.assert_allclose(batch["n_step_return"], expected, rtol=1e-4, atol=1e-5)
    assert np.all(batch["bootstrap_discount"] == np.float32(0.5))  # the end is a truncation: it bootstraps


def test_updates_keep_the_ratio_and_the_allowance_follows(client: Redis, server) -> None:
    run = start(
        client, target_config(replay={"warmup_steps": 200, "samples_per_insert": 8, "slack_steps": 100})
    )
    play_steps(client, run, take(client, run), 600)
    steps = runs.state(client, run).appended_steps
    learner = restored(client, run, server.url)
    most = (steps - 200) * 8 // 32
    with training(learner):
        until(lambda: learner.shared.updates >= most)
        time.sleep(0.2)
        assert learner.shared.updates == most  # it waits for more play
        allowance = runs.state(client, run).allowance
        assert 200 + most * 32 / 8 + 100 - 100 / 8 - 1 <= allowance <= 200 + most * 32 / 8 + 100
    row = metrics.last(client, run)
    assert row["samples_per_insert"] <= 8 and row["env_steps"] == steps


def test_a_resumed_learner_continues_bit_equal_from_checkpoint_and_stream(client: Redis, server) -> None:
    run = start(client, target_config(stop={"return": None}))
    play_steps(client, run, take(client, run), 800)
    first = restored(client, run, server.url)
    with training(first):
        until(lambda: first.shared.updates >= 50)
    first.finish()
    second = restored(client, run, server.url)
    assert second.counters.updates == first.shared.updates and second.counters.cursor == first.counters.cursor
    assert second.counters.elapsed_s == pytest.approx(first.counters.elapsed_s, abs=1.0)
    assert_equal_arrays(contents(first), contents(second))
    assert_equal_arrays(dict(first.algorithm.state()), dict(second.algorithm.state()))
    assert second.shared.version == first.shared.version + 1  # the restored weights are published again
    second.publisher.round()
    assert metrics.last(client, run)["updates_per_s"] == 0  # rates do not count what was restored
    with pytest.raises(leases.LeaseLostError):  # at the latest when it renews
        until(lambda: first.publisher.round())
    second.finish()


def test_without_checkpoint_the_replay_comes_from_the_stream_and_without_stream_there_is_none(
    client: Redis, server
) -> None:
    run = start(client, target_config())
    play_steps(client, run, take(client, run), 500)
    learner = restored(client, run, server.url)
    with training(learner, serves=False):
        catch_up(client, run, learner)
    assert len(learner.replay) >= 500
    learner.finish()
    client.delete(keys.experience(run))
    empty = restored(client, run, server.url)
    assert empty.counters.updates == learner.shared.updates and len(empty.replay) == 0
    empty.finish()


def test_updates_go_on_while_a_backlog_is_admitted(
    client: Redis, server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "ADMIT_S", 0.0)  # one entry, then perhaps an update
    run = start(client, target_config())
    play_steps(client, run, take(client, run), 1000)
    learner = restored(client, run, server.url)
    backlog = runs.state(client, run).appended_fragments
    time.sleep(0.5)  # the backlog is decoded
    at_update: list[int] = []
    update = learner.algorithm.update

    def noted(batch: object) -> object:
        at_update.append(learner.shared.ledger.consumed)
        return update(batch)

    monkeypatch.setattr(learner.algorithm, "update", noted)
    with training(learner):
        until(lambda: learner.shared.ledger.consumed == backlog and len(at_update) > 5)
    learner.finish()
    assert at_update[0] < backlog - 5  # the warm-up is a fifth of the backlog
    assert learner.counters.admitted == backlog


def too_wide(fragment: Fragment) -> Fragment:
    """As of twice the environments."""
    names = ("observation", "action", "reward", "terminated", "truncated")
    doubled = {name: np.concatenate([getattr(fragment, name)] * 2, axis=1) for name in names}
    index = np.argwhere(doubled["truncated"]).astype(np.int32)
    finals = np.zeros((len(index), *fragment.observation.shape[2:]), np.float32)
    return replace(fragment, **doubled, final_index=index, final_observation=finals)


def of_other_spaces(fragment: Fragment) -> Fragment:
    """With observations of twice the size."""
    columns = {
        name: np.repeat(getattr(fragment, name), 2, axis=-1) for name in ("observation", "final_observation")
    }
    return replace(fragment, **columns)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (too_wide, b"those of the run are at most (20, 4, 0)"),
        (of_other_spaces, b"spaces: observation and action are ('float32', (2,), (1,))"),
    ],
)
def test_a_fragment_that_the_run_cannot_have_is_refused_even_as_the_first_one(
    client: Redis, server, change: Callable[[Fragment], Fragment], reason: bytes
) -> None:
    run = start(client, target_config())
    token = take(client, run)
    play_steps(client, run, token, 40)
    fragment = codec.decode(stream.read(client, run, b"0-0", count=1)[0].fields)
    client.delete(keys.experience(run))
    fields = codec.encode(replace(change(fragment), producer=77))
    stream.append(client, run, fields, producer=77, incarnation=1, seq=0, num_transitions=8)
    play_steps(client, run, token, 300)
    learner = restored(client, run, server.url)
    with training(learner):
        catch_up(client, run, learner)
    learner.finish()
    assert learner.counters.dead == 1 and len(learner.replay) >= 300
    ((_, row),) = client.xrange(keys.dead(run))
    assert reason in row[b"reason"]


def test_bad_entries_go_to_dead_with_the_reason_and_learning_goes_on(client: Redis, server) -> None:
    run = start(client, target_config())
    token = take(client, run)
    players = play_steps(client, run, token, 300)
    for seq, poison in enumerate((b"{}", b"\xff\xfe", b"not json")):
        stream.append(client, run, {b"h": poison}, producer=99, incarnation=1, seq=seq, num_transitions=8)
    foreign = dict(stream.read(client, run, b"0-0", count=1)[0].fields)
    foreign[b"h"] = foreign[b"h"].replace(run.encode(), b"other-0101-000000-0000")
    client.xadd(keys.experience(run), foreign)  # not by the append
    play_steps(client, run, token, 300, players=players)
    learner = restored(client, run, server.url)
    with training(learner):
        catch_up(client, run, learner)
        until(lambda: learner.shared.updates >= 20)
    learner.finish()
    dead = client.xrange(keys.dead(run))
    assert learner.counters.dead == len(dead) == 4
    assert (
        learner.counters.admitted == runs.state(client, run).appended_fragments - 3
    )  # the fourth is not counted
    assert any(b"does not belong" in fields[b"reason"] for _, fields in dead)
    again = restored(client, run, server.url)
    assert len(again.replay) == len(learner.replay)
    again.finish()


def test_a_flood_of_bad_entries_waits_until_it_is_reported_and_updates_go_on(
    client: Redis, server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "MAX_REFUSED", 100)
    run, num = start(client, target_config()), 5_000
    play_steps(client, run, take(client, run), 300)
    with client.pipeline() as pipe:
        for _ in range(num):
            pipe.xadd(keys.experience(run), {b"h": b"{}"})
        pipe.execute()
    learner = restored(client, run, server.url)
    refused = learner.shared.refused
    with training(learner, serves=False):
        until(lambda: len(refused) >= 100 and learner.shared.updates >= 20)
        waiting = len(refused)
        time.sleep(0.3)
        assert len(refused) == waiting < num
        learner.publisher.round()
        assert runs.state(client, run).dead == 100  # a part: other things are reported too
        until(lambda: learner.publisher.round() or learner.counters.dead == num)
    learner.finish()
    assert runs.state(client, run).dead == num and not refused


def test_a_learner_without_checkpoint_keeps_the_published_weights(client: Redis, server) -> None:
    run = start(client, target_config())
    token = take(client, run)
    play_steps(client, run, token, 40)
    weights.publish(client, run, token, version=1, blob=b"learned", allowance=0, updates=9)
    learner = restored(client, run, server.url)
    assert learner.shared.version == 1 and weights.index(client, run).latest == 1
    assert runs.state(client, run).allowance > 0
    learner.finish()


def test_trimming_keeps_what_replay_and_checkpoint_need(client: Redis, server) -> None:
    replay = {"capacity": 400, "warmup_steps": 100, "slack_steps": 400, "max_bytes": 10**6}
    run = start(client, target_config(replay=replay, rollout={"max_fragment_steps": 10}))
    token = take(client, run)
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    with training(learner):
        players = play_steps(client, run, token, 600)
        catch_up(client, run, learner)
        play_steps(client, run, token, 600, players=players)
        catch_up(client, run, learner)
        until(lambda: client.xlen(keys.experience(run)) < runs.state(client, run).appended_fragments)
    learner.finish()
    meta = checkpoints.meta(client, run)
    oldest = stream.read(client, run, b"0-0", count=1)[0].entry_id
    assert meta is not None and oldest.decode() <= meta["oldest"]
    again = restored(client, run, server.url)
    assert len(again.replay) == len(learner.replay)
    again.finish()


@pytest.mark.parametrize("fragment_steps", [10, 70])
def test_a_full_stream_forces_a_checkpoint_and_a_trim_and_play_goes_on(
    client: Redis, server, fragment_steps: int
) -> None:
    """The budget holds about eight of the larger fragments."""
    config = target_config(
        replay={"capacity": 100_000, "max_bytes": 65536, "samples_per_insert": 1, "slack_steps": 4000},
        learner={"checkpoint_every_s": 3600},
        rollout={"max_fragment_steps": fragment_steps, "fragment_s": 0.5},
        stop={"return": None},
    )
    run = start(client, config)
    token = take(client, run)
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    with training(learner):
        players = None
        for _ in range(12):
            players = play_steps(client, run, token, 400, players=players)
            assert runs.state(client, run).live_bytes <= 65536
        catch_up(client, run, learner)
    learner.finish()
    state = runs.state(client, run)
    assert state.appended_bytes > 2 * 65536, "the budget was used several times over"
    assert learner.counters.admitted == state.appended_fragments


def test_versions_are_published_in_time_and_pruned(client: Redis, server) -> None:
    config = target_config(
        learner={"publish_every_s": 0.02}, weights={"keep_last": 3, "keep_every": 10}, stop={"return": None}
    )
    run = start(client, config)
    token = take(client, run)
    learner = make_learner(client, run, token, server.url)
    learner.restore()
    assert weights.index(client, run).latest == 0  # version 0 has learned nothing
    with training(learner):
        players = play_steps(client, run, token, 400)
        while learner.shared.version < 25:
            players = play_steps(client, run, token, 100, players=players)
    learner.finish()
    index = weights.index(client, run)
    newest = set(sorted(index.sizes)[-4:])  # three, and the one published since the last pruning
    spaced = {version for version in range(index.latest) if version % 10 == 0}
    assert index.latest in newest and set(index.sizes) <= newest | spaced and {0, 10, 20} <= set(index.sizes)

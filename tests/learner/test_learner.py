"""The learner against a real server: admission, pace, restoring, trimming, refusals."""

from __future__ import annotations

import gc
import resource
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from support.algorithms import CPU, assert_same
from support.learners import OFF_POLICY, Run, contents, finished, resolve, training, until
from support.poison import POISON, encoded
from support.replays import changed
from support.runs import target_config

from ddrl import codec
from ddrl.learner import loop, publisher
from ddrl.learner.loop import Learner
from ddrl.store import checkpoints, connection, keys, local_checkpoints, recording, stream, weights
from ddrl.store.local_checkpoints import Snapshot
from ddrl.types import Fragment

MIB = 1024**2


def play_until(run: Run, learner: Learner, goal: Callable[[], bool]) -> None:
    """Play on, by whatever is published, while the learner learns."""
    shared = learner.shared
    for _ in range(200):
        if goal():
            return
        run.play(200)
        run.catch_up(learner)
        before = shared.updates
        until(lambda before=before: shared.updates > before or goal())
    raise AssertionError("never reached")


# --- admission and pace --------------------------------------------------------------------------------


def test_everything_appended_is_admitted_once_and_held_as_played(server) -> None:
    run = Run(server)
    run.play(1000)
    with finished(run) as learner:
        run.catch_up(learner)
    counters, batch = learner.counters, contents(learner)
    assert counters.admitted == run.state.appended_fragments and counters.dead == 0
    assert len(batch["n_step_return"]) == counters.env_steps == run.state.appended_steps
    # Reward -(action - target)^2 with one-step returns: every item can be checked by hand.
    expected = -np.square(batch["action"][:, 0] - batch["observation"][:, 0])
    np.testing.assert_allclose(batch["n_step_return"], expected, rtol=1e-4, atol=1e-5)
    assert np.all(batch["bootstrap_discount"] == np.float32(0.5))  # the end is a truncation: it bootstraps


def test_updates_go_on_while_a_backlog_is_admitted(server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "ADMIT_S", 0.0)  # one entry, then perhaps an update
    run = Run(server)
    run.play(1000)
    learner, backlog = run.learner(), run.state.appended_fragments
    time.sleep(0.5)  # the backlog is decoded
    at_update: list[int] = []
    update = learner.algorithm.update

    def noted(batch: object) -> object:
        at_update.append(learner.shared.ledger.consumed)
        return update(batch)

    monkeypatch.setattr(learner.algorithm, "update", noted)
    with training(learner):
        until(lambda: learner.shared.ledger.consumed == backlog and len(at_update) > 5)
    learner.close()
    assert at_update[0] < backlog - 5  # the warm-up is a fifth of the backlog


# --- restoring and trimming ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OFF_POLICY)
def test_a_restored_learner_continues_bit_equal(name: str, server) -> None:
    run = Run(server, OFF_POLICY[name]())
    run.play(800)
    first = run.learner()

    def has_trimmed() -> bool:
        return first.shared.updates >= 50 and len(run.entries) < run.state.appended_fragments

    with training(first):
        play_until(run, first, has_trimmed)
    first.finish()
    second, before = run.learner(), contents(first)
    assert replace(second.counters, elapsed_s=0) == replace(first.counters, elapsed_s=0)
    assert second.counters.elapsed_s == pytest.approx(first.counters.elapsed_s, abs=1.0)
    assert_same(before, contents(second))
    assert_same(first.algorithm.state(), second.algorithm.state())
    assert second.shared.version == first.shared.version + 1  # the restored weights are published again
    second.publisher.round()
    assert run.rows[-1]["updates_per_s"] == 0  # rates do not count what was restored
    with pytest.raises(connection.LeaseLostError):  # at the latest when it renews
        until(lambda: first.publisher.round())
    if "priority" in before:
        assert len(np.unique(before["priority"])) > 20
        as_played = run.learner(token=run.token, restores=False).replay
        oldest, cursor = first.counters.oldest.encode(), first.counters.cursor.encode()
        for entry in stream.read(run.client, run.id, stream.before(oldest), count=10_000, until=cursor):
            as_played.admit(as_played.pack(codec.decode(entry.fields)), entry.entry_id, version=0)
        assert (as_played.state()["priority"] != before["priority"]).mean() > 0.1  # these were drawn since
    with training(second):
        play_until(run, second, lambda: second.shared.updates >= first.shared.updates + 20)
    second.close()
    assert second.counters.dead == 0


def test_a_learner_without_checkpoint_keeps_the_published_weights(server) -> None:
    run = Run(server)
    run.play(40)
    weights.publish(run.client, run.id, 0, version=1, blob=b"learned", allowance=0, updates=9)
    learner = run.learner()
    assert learner.shared.version == run.index.latest == 1 and run.state.allowance > 0
    learner.close()


@pytest.mark.parametrize("fragment_steps", [10, 70])
def test_a_full_stream_forces_a_checkpoint_and_a_trim_and_play_goes_on(server, fragment_steps: int) -> None:
    """The budget holds about eight of the larger fragments."""
    replay = {"capacity": 100_000, "max_bytes": 65536, "samples_per_insert": 1, "slack_steps": 4000}
    rollout = {"max_fragment_steps": fragment_steps, "fragment_s": 0.5}
    late, endless = {"checkpoint_every_s": 3600}, {"return": None}
    run = Run(server, target_config(replay=replay, rollout=rollout, learner=late, stop=endless))
    with finished(run) as learner:
        while run.state.appended_bytes <= 2 * 65536:  # the budget is used several times over
            run.play(400)
            assert run.state.live_bytes <= 65536
        run.catch_up(learner)
    assert learner.counters.admitted == run.state.appended_fragments


def test_what_leaves_the_stream_is_recorded_first(
    server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """While it cannot be, nothing leaves the stream."""
    replay = {"capacity": 300, "samples_per_insert": 1, "slack_steps": 4000}
    run = Run(server, target_config(replay=replay, learner={"checkpoint_every_s": 1}, stop={"return": None}))
    (tmp_path / "000001.resp").mkdir()  # in the way

    def made() -> Learner:
        learner = run.learner(restores=False)
        learner.publisher.folder = tmp_path
        learner.restore()
        return learner

    def has_trimmed(learner: Learner) -> bool:
        run.play(100)
        run.catch_up(learner)
        return len(run.entries) < run.state.appended_fragments - 10

    def could_trim() -> bool:
        """Return whether the newest checkpoint needs no entry that was there first."""
        return run.meta.get("oldest", "0-1") > begun[0].entry_id.decode()

    run.play(100)
    begun = run.entries
    with training(first := made()):
        until(lambda: has_trimmed(first) or could_trim())
    first.close()  # killed
    second = made()
    assert len(run.entries) == run.state.appended_fragments
    (tmp_path / "000001.resp").rmdir()
    with training(second):
        until(lambda: has_trimmed(second))
    second.finish()
    recorded = list(recording.entries(tmp_path))
    assert len(recorded) == run.state.appended_fragments and recorded[-len(run.entries) :] == run.entries
    assert "until then nothing leaves the stream" in caplog.text


# --- refusals --------------------------------------------------------------------------------------------


def too_wide(fragment: Fragment) -> Fragment:
    """Return the fragment as of twice the environments."""
    columns = ("observation", "action", "reward", "terminated", "truncated")
    wider = {column: np.concatenate([getattr(fragment, column)] * 2, axis=1) for column in columns}
    ends = np.argwhere(wider["truncated"]).astype(np.int32)
    finals = np.zeros((len(ends), *fragment.observation.shape[2:]), fragment.observation.dtype)
    return replace(fragment, **wider, extras={}, final_index=ends, final_observation=finals)


@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_bad_entries_are_put_aside_with_the_reason_and_memory_stays_flat(name: str, server) -> None:
    run, source = Run(server, OFF_POLICY[name]()), Run(server, OFF_POLICY[name]())
    blob = weights.encode_weights(resolve(run.client, run.id).learner(device=CPU, seed=1).weights())
    for version in (0, 1):  # the second is played by the policy, with its columns
        for one in (run, source):
            weights.publish(one.client, one.id, 0, version=version, blob=blob, allowance=0, updates=0)
    source.play(100)
    good = codec.encode(replace(codec.decode(source.entries[-1].fields), run=run.id))
    forged = {**POISON, "width": (encoded(too_wide), "at most (16, 4, ")}
    other = partial(changed, action_value=None, memory=None, memory_index=None)
    forged["algorithm"] = encoded(other), "state_value" if name == "dqn" else "memory_index"
    del forged["decompression bomb"], forged["another dtype of actions"]  # made in memory; the dtype is right
    bad = [(words.encode(), forge(good)) for forge, words in forged.values()]
    for seq in range(3):  # the first ones come before any good one
        for producer, (_, fields) in enumerate(bad, start=10**6):
            run.append(fields, producer=producer, seq=seq)
        run.play(200)
    run.client.xadd(keys.experience(run.id), good)  # not by the append
    learner = run.learner()
    gc.collect()
    tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with training(learner):
            run.catch_up(learner)
            until(lambda: learner.shared.updates >= 5)
            until(lambda: learner.counters.dead > 3 * len(bad))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    learner.finish()
    assert peak < 32 * MIB
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 128 * MIB
    reasons = [*[words for words, _ in bad] * 3, b"no append wrote it"]
    assert len(run.dead) == len(reasons) == learner.counters.dead
    for words, reason in zip(reasons, run.dead, strict=True):
        assert words in reason and b"\n" not in reason
    assert learner.counters.admitted == run.state.appended_fragments - 3 * len(bad)
    again = run.learner()  # the refused ones are neither admitted nor counted twice
    assert_same(contents(learner), contents(again))
    assert again.counters.dead == learner.counters.dead
    again.close()


def test_refused_entries_whose_report_gets_no_reply_are_reported_once(server, monkeypatch) -> None:
    """Also if others were refused before it is repeated."""
    run, refuse, losing = Run(server), stream.refuse, iter([True])

    def report(*arguments: Any) -> None:
        refuse(*arguments)
        if next(losing, False):
            raise redis.ConnectionError("no reply")

    monkeypatch.setattr(stream, "refuse", report)
    run.play(100)
    learner = run.learner()
    refused = learner.shared.refused
    with training(learner, serves=False):
        for _ in range(2):
            run.client.xadd(keys.experience(run.id), {b"h": b"{}"})
        until(lambda: len(refused) == 2)
        with pytest.raises(redis.ConnectionError):
            learner.publisher.round()
        run.client.xadd(keys.experience(run.id), {b"h": b"{}"})
        until(lambda: len(refused) == 3)
        until(lambda: learner.publisher.round() or not refused)
    learner.finish()
    assert len(run.dead) == run.state.dead == learner.counters.dead == 3


def test_a_run_restored_from_a_server_whose_clock_was_ahead_is_learned_on(server) -> None:
    run = Run(server)
    run.play(300)
    with finished(run) as learner:
        run.catch_up(learner)
    blob, meta = checkpoints.load(run.client, run.id) or (b"", {})
    ahead = meta | {"cursor": "99999999999999-3", "oldest": "99999999999999-3"}
    snapshot = Snapshot(run.id, run.token, local_checkpoints.record(run.client, run.id), ahead, blob)
    run.client.flushall()
    assert local_checkpoints.restore(run.client, snapshot)
    learner = run.learner()
    with training(learner):
        run.play(300, anew=True)
        run.catch_up(learner)
    learner.finish()
    assert learner.counters.env_steps == run.state.appended_steps >= 600 and run.audit()


def test_a_flood_of_bad_entries_waits_until_it_is_reported_and_updates_go_on(server, monkeypatch) -> None:
    monkeypatch.setattr(loop, "MAX_REFUSED", 100)
    monkeypatch.setattr(publisher, "REFUSALS_PER_ROUND", 100)
    monkeypatch.setattr(publisher, "REFUSED_AT_ONCE", 50)
    monkeypatch.setattr(loop, "ADMIT_S", 0.001)  # too short to take them all at once
    run, num = Run(server), 2_000
    run.play(300)
    with run.client.pipeline() as pipe:
        for _ in range(num):
            pipe.xadd(keys.experience(run.id), {b"h": b"{}"})
        pipe.execute()
    learner = run.learner()
    refused = learner.shared.refused
    with training(learner, serves=False):
        until(lambda: len(refused) >= 100 and learner.shared.updates >= 20)
        waiting = len(refused)
        time.sleep(0.3)
        assert len(refused) == waiting < num
        learner.publisher.round()
        assert run.state.dead == 100  # a part: other things are reported too
        until(lambda: learner.publisher.round() or learner.counters.dead == num)
    learner.finish()
    assert run.state.dead == num and not refused

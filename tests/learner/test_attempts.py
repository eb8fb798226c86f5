"""Attempts to learn a run, in this process: what each begins with, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from support.learners import Learning, catch_up, pick_config, playing, restored, take, training, until
from support.runs import play_steps, start, target_config

from ddrl.config import ConfigError, RunConfig
from ddrl.learner import run as run_module
from ddrl.learner.dispatcher import Dispatcher
from ddrl.learner.loop import Learner
from ddrl.store import checkpoints, connection, keys, leases, ledger, local_checkpoints, runs, stream, weights

Learn = Callable[[str], Learning]


@pytest.fixture
def client(server) -> Iterator[Redis]:
    yield server.client
    server.client.config_set("maxmemory", 0)


@pytest.fixture
def learn(client: Redis, server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Learn]:
    """Starts what learns a run, and ends it."""
    monkeypatch.setattr(run_module, "RETURN_S", 0.5)
    begun: list[Learning] = []

    def learn(run: str) -> Learning:
        begun.append(Learning(client, server.url, run, tmp_path, monkeypatch))
        return begun[-1]

    yield learn
    for learning in begun:
        learning.end()


def endless(**sections: Any) -> RunConfig:
    ending = {"stop": {"return": None, "time": 3600}, "evaluation": {"every_s": 3600, "near": 0}}
    return target_config(**{**ending, **sections})


def endless_on_policy() -> RunConfig:
    return pick_config().model_copy(update={"stop": endless().stop, "evaluation": endless().evaluation})


def go_on(client: Redis, run: str, updates: int, learning: Learning) -> None:
    """Play until a learner has made so many more updates."""
    until(lambda: learning.state is not None)
    until(lambda: runs.state(client, run).updates > updates or learning.error, 60.0)
    assert learning.error is None


# --- the server loses data ---------------------------------------------------------------------------------


def empty(client: Redis) -> Callable[[], object]:
    """The server comes back empty."""
    return client.flushall


def older(client: Redis) -> Callable[[], object]:
    """The server comes back as it is now."""
    kept = {key: client.dump(key) for key in client.keys("*")}

    def restore() -> None:
        with client.pipeline() as pipe:
            pipe.flushall()
            for key, value in kept.items():
                pipe.restore(key, 0, value)
            pipe.execute()

    return restore


@pytest.mark.parametrize("lose", [empty, older])
@pytest.mark.parametrize("make_config", [endless, endless_on_policy])
def test_a_learner_restores_its_run_on_a_server_that_lost_data(
    client: Redis,
    server,
    learn: Learn,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    lose: Callable[[Redis], Callable[[], object]],
    make_config: Callable[[], RunConfig],
) -> None:
    caplog.set_level("INFO")
    run = start(client, make_config())
    learning = learn(run)
    with playing(server.url, run):
        go_on(client, run, 10, learning)
        lose_now = lose(client)
        version = runs.state(client, run).version
        until(lambda: runs.state(client, run).version > version + 3)
        before, token = runs.state(client, run), learning.token
        lose_now()
        until(lambda: learning.holds_after(token) or learning.error)
        go_on(client, run, before.updates, learning)
        until(lambda: runs.state(client, run).version > before.version)
    now, journal = runs.state(client, run), runs.journal(client, run)
    assert (now.created_s, now.first_step_s) == (before.created_s, before.first_step_s)
    assert now.status == "active" and runs.config(client, run) == make_config()
    assert [row["event"] for row in journal].count("restored") == 1
    assert "restored" in caplog.text and learning.thread.is_alive()
    learning.end()
    if lose is empty:
        audit = ledger.audit(client, run)
        assert audit.is_balanced and audit.total("consumed") > 0 and audit.total("refused") == 0
    lost = range(version + 1, before.version + 1)
    assert not {*lost} & weights.index(client, run).sizes.keys()  # no version names two weights


def test_a_lost_replay_is_warmed_up_again_before_updates_go_on(client: Redis, server, tmp_path: Path) -> None:
    run = start(client, endless(replay={"warmup_steps": 200, "samples_per_insert": 8, "slack_steps": 100}))
    token = take(client, run)
    play_steps(client, run, token, 600)
    first = restored(client, run, server.url)
    most = (runs.state(client, run).appended_steps - 200) * 8 // 32
    with training(first):
        until(lambda: first.shared.updates == most)
    first.finish()
    snapshot = snapshot_of(client, run)
    client.flushall()
    assert local_checkpoints.restore(client, snapshot)
    second = restored(client, run, server.url)
    shared, lost = second.shared, second.shared.env_steps
    assert len(second.replay) == 0 and shared.updates == most
    assert (
        lost + 200 <= runs.state(client, run).allowance <= lost + 200 + 100
    )  # for the warm-up, and the slack
    with training(second):
        token = leases_token(client, run)
        players = play_steps(client, run, token, 150)
        catch_up(client, run, second)
        assert shared.updates == most
        play_steps(client, run, token, 250, players=players)
        most = (runs.state(client, run).appended_steps - 200 - 200) * 8 // 32
        until(lambda: shared.updates == most)
    second.finish()
    third = restored(client, run, server.url)  # what was refilled once stays so
    assert third.counters.refilled == 200 and third.shared.updates == most
    third.leave()


def leases_token(client: Redis, run: str) -> int:
    return int(client.hget(keys.state(run), "fence") or 0)


def snapshot_of(client: Redis, run: str) -> local_checkpoints.Snapshot:
    """A run with its newest checkpoint."""
    found = checkpoints.load(client, run)
    assert found is not None
    record = local_checkpoints.record(client, run)
    return local_checkpoints.Snapshot(run, leases_token(client, run), record, found[1], found[0])


def test_a_run_lost_before_its_first_update_publishes_again(client: Redis, server) -> None:
    run = start(client, endless())
    restored(client, run, server.url).finish()
    snapshot = snapshot_of(client, run)
    client.flushall()
    assert local_checkpoints.restore(client, snapshot)
    learner = restored(client, run, server.url)
    index = weights.index(client, run)
    assert index.latest == learner.shared.version == 1 and set(index.sizes) == {1}
    learner.leave()


def test_a_run_that_is_lost_while_its_attempt_begins_is_restored(
    client: Redis, server, learn: Learn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(client, endless())
    restored(client, run, server.url).finish()
    snapshot = snapshot_of(client, run)
    local_checkpoints.write(tmp_path / run, snapshot)
    leases.release(client, run, snapshot.token)
    acquire = leases.acquire

    def lost_at_once(*arguments: Any, **options: Any) -> int | None:
        token = acquire(*arguments, **options)
        monkeypatch.setattr(leases, "acquire", acquire)
        client.flushall()
        return token

    monkeypatch.setattr(leases, "acquire", lost_at_once)
    learning = learn(run)
    until(lambda: learning.error is not None or learning.holds_after(snapshot.token + 1))
    assert learning.error is None


def test_a_learner_that_cannot_save_its_state_goes_on_from_the_checkpoint_before(
    client: Redis,
    learn: Learn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    run = start(client, endless(learner={"checkpoint_every_s": 3600}))
    for attempt in (1, 2):
        learning = learn(run)
        until(lambda n=attempt: caplog.text.count("starts at update") == n)
        if attempt == 1:
            learning.end()
    token = learning.token

    def fail(_: Learner) -> None:
        raise MemoryError("no memory for a copy")

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "checkpoint", fail)
        client.flushall()
        until(lambda: learning.holds_after(token) or learning.error)
    assert learning.error is None and "state cannot be saved" in caplog.text


def test_a_paused_run_is_restored_paused_and_waited_for(client: Redis, learn: Learn, tmp_path: Path) -> None:
    run = start(client, endless())
    learning = learn(run)
    until(lambda: local_checkpoints.token(tmp_path / run, run))
    runs.set_status(client, run, "paused", "by the test")
    token = learning.token
    learning.thread.join(1.0)
    client.flushall()
    until(lambda: learning.state is not None)
    assert learning.state.status == "paused"
    runs.reactivate(client, run)
    until(lambda: learning.holds_after(token))
    assert learning.error is None


# --- other ends --------------------------------------------------------------------------------------------


def test_a_run_that_the_servers_memory_cannot_hold_fails_before_it_begins(
    client: Redis, server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(connection.URL_VARIABLE, server.url)
    run = start(client, target_config())
    client.config_set("maxmemory", 550 * 1024**2)  # replay.max_bytes alone is 512 MiB
    message = "needs up to 6.. MiB of the server, but its maxmemory is 550 MiB"
    with pytest.raises(ConfigError, match=message):
        run_module.learn(client, run, tmp_path, run_module.Interrupt())
    state = runs.state(client, run)
    assert state.status == "failed" and "lower replay.max_bytes, or raise maxmemory" in state.reason
    assert not state.leased


def test_a_learner_whose_service_thread_hangs_loses_its_run(
    client: Redis, learn: Learn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "HANG_S", 1.0)
    run, freed = start(client, endless()), threading.Event()
    monkeypatch.setattr(Dispatcher, "tick", lambda _: freed.wait())
    learning = learn(run)
    try:
        until(lambda: learning.holds_after(0))
        until(lambda: not runs.state(client, run).leased)
        assert leases.acquire(client, run, host="there", folder="/tmp")
    finally:
        freed.set()
    learning.thread.join(30.0)
    assert isinstance(learning.error, leases.LeaseLostError)


def test_a_run_that_ends_while_its_stream_fills_the_server_ends(
    client: Redis, learn: Learn, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(client, endless(env={"num_envs": 1}))
    token, append, padding = take(client, run), stream.append, {b"x": bytes(10**5)}
    with monkeypatch.context() as patch:
        patch.setattr(
            stream, "append", lambda a, b, fields, **more: append(a, b, {**fields, **padding}, **more)
        )
        play_steps(client, run, token, 1_000)
    leases.release(client, run, token)
    entries = stream.read(client, run, b"0-0", count=1_000)
    learning = learn(run)
    until(lambda: (checkpoints.meta(client, run) or {}).get("cursor") == entries[-1].entry_id.decode())
    num, finish = client.xlen(keys.experience(run)), Learner.finish
    assert num == len(entries) > 40

    def finish_when_full(learner: Learner, **options: Any) -> None:
        client.config_set("maxmemory", client.info("memory")["used_memory"] - 2_000_000)
        monkeypatch.setattr(Learner, "finish", finish)
        learner.finish(**options)

    monkeypatch.setattr(Learner, "finish", finish_when_full)
    runs.set_status(client, run, "stopped", "by the test")
    learning.thread.join(30.0)
    assert learning.status == "stopped" and not runs.state(client, run).leased
    assert 0 < client.xlen(keys.experience(run)) < num  # room was made, of no more than was needed
    assert ledger.audit(client, run).is_balanced


def test_a_learner_that_waits_for_a_paused_run_waits_on_when_its_holder_dies(
    client: Redis, learn: Learn, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run = start(client, endless())
    token = take(client, run)
    client.persist(keys.lease(run))
    learning = learn(run)
    until(lambda: "waits for it" in caplog.text)
    runs.set_status(client, run, "paused", "by the test")
    leases.release(client, run, token)
    learning.thread.join(1.5)
    assert learning.thread.is_alive() and learning.error is None
    runs.reactivate(client, run)
    until(lambda: learning.holds_after(token))

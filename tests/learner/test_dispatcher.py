"""The dispatcher against a real server."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from redis import Redis
from support.runs import start, target_config
from support.store import heartbeat, note_playing, want_processes

from ddrl.learner import dispatcher as dispatcher_module
from ddrl.learner.dispatcher import Dispatcher
from ddrl.store import keys, runs, segments, workers
from ddrl.store.segments import Process

QUEUE = "ddrl.rollout"


@pytest.fixture
def client(server, monkeypatch: pytest.MonkeyPatch) -> Redis:
    """A server; dispatchers look at the workers in each tick."""
    monkeypatch.setattr(dispatcher_module, "SURVEY_S", 0.0)
    return server.client


@pytest.fixture
def run(client: Redis) -> str:
    return start(client, target_config())


def dispatcher(client: Redis, run: str) -> Dispatcher:
    """The dispatcher of a run's next learner; messages go straight into the list from which workers take them."""

    def send(queue: str, limit_s: float) -> None:
        client.lpush(keys.queue(queue), json.dumps({"limit_s": limit_s}))

    token = want_processes(client, run)
    max_crashes = runs.config(client, run).rollout.max_crashes
    return Dispatcher(client, run, token, max_crashes=max_crashes, send=send)


@pytest.mark.parametrize(("processes", "messages"), [(0, 1), (1, 1), (2, 2), (8, 2), (40, 10)])
def test_messages_wait_for_the_queues_workers(client: Redis, run: str, processes: int, messages: int) -> None:
    one = dispatcher(client, run)
    if processes:
        workers.beat(client, heartbeat("a@h", processes))
    workers.beat(client, heartbeat("b@h", 40, "ddrl.evaluate"))
    workers.beat(client, replace(heartbeat("c@h", 40), draining=True))
    assert [one.tick() for _ in range(3)] == [messages, 0, 0]
    client.rpop(keys.queue(QUEUE))  # taken, or lost
    assert one.tick() == 1


def test_messages_serve_all_runs_so_one_dispatcher_sends_for_all(client: Redis, run: str) -> None:
    workers.beat(client, heartbeat("a@h", 8))
    other = start(client, target_config(rollout={"segment_s": 600}))
    first, second = (dispatcher(client, name) for name in (run, other))
    assert [first.tick(), second.tick(), first.tick()] == [2, 0, 0]
    limit = 600 + 2 * 60  # of the run that takes longest
    assert client.lrange(keys.queue(QUEUE), 0, -1) == [b'{"limit_s": %.1f}' % limit] * 2


def test_a_run_of_higher_priority_with_steps_left_claims_processes(client: Redis, monkeypatch) -> None:
    for name in ("CLAIM_AFTER_S", "CLAIM_EVERY_S"):
        monkeypatch.setattr(dispatcher_module, name, 0.05)
    workers.beat(client, heartbeat("a@h", 2)), workers.beat(client, heartbeat("b@h", 2, "ddrl.rollout.box2d"))
    names = ("low", "low", "normal", "high")
    all_runs = [start(client, target_config(priority=name)) for name in names]
    *_, one = (dispatcher(client, run) for run in all_runs)
    for run, node in zip(all_runs, ("a@h", "b@h", "a@h"), strict=False):
        note_playing(client, run, node=node, pid=len(run))
    assert one.tick() == 2  # messages, which nobody takes
    for steps, expected in ((10**9, [None] * 4), (0, [b"1", None, b"1", None])):
        client.hset(keys.counts(all_runs[-1]), "appended_steps", steps)
        time.sleep(0.06)
        one.tick()
        assert [client.hget(keys.counts(run), "claim") for run in all_runs] == expected


def test_what_workers_write_of_the_fleet_is_bounded(client: Redis, run: str, monkeypatch) -> None:
    monkeypatch.setattr(dispatcher_module, "MAX_PROCESSES", 40)
    monkeypatch.setattr(dispatcher_module, "SURVEY_S", 0.0)
    workers.beat(client, heartbeat("a@h", 10**6)), client.sadd(keys.draining(run), "forged")
    monkeypatch.setattr(dispatcher_module, "SENT_AT_ONCE", 6)
    one = dispatcher(client, run)
    assert one.tick() == 10 and client.llen(keys.queue(QUEUE)) == 6
    client.hset(keys.counts(run), mapping={"process_ms": 10**15, "allowance_wait_ms": -5})
    one.tick()
    assert 0 < float(client.hget(keys.state(run), "mean_processes")) <= 40
    assert runs.state(client, run).allowance_wait_s == 0
    assert client.hmget(keys.state(run), "processes", "max_producers") == [b"40", b"1160"]
    assert 0 < client.ttl(keys.draining(run)) <= segments.DRAIN_S


def test_more_processes_that_play_than_there_are_are_forgotten(client: Redis, run: str, monkeypatch) -> None:
    monkeypatch.setattr(dispatcher_module, "MIN_PLAYING", 3)
    workers.beat(client, heartbeat("a@h", 2, pids=(10, 11)))
    for number in range(11):
        note_playing(client, run, node="a@h", pid=10, thread=number)
    one = dispatcher(client, run)
    one.tick()
    assert client.hlen(keys.playing(run)) == 11
    note_playing(client, run, node="a@h", pid=10, thread=11)
    dispatcher(client, run).tick()
    assert client.hlen(keys.playing(run)) == 0


def test_processes_that_have_gone_count_for_a_while_among_those_that_play(
    client: Redis, run: str, monkeypatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "MIN_PLAYING", 3)
    one, forged = dispatcher(client, run), heartbeat("b@h", 20_000)
    workers.beat(client, forged)
    one.tick()
    workers.leave(client, forged)
    workers.beat(client, heartbeat("a@h", 2, pids=(10, 11)))
    for number in range(12):
        note_playing(client, run, node="a@h", pid=10, thread=number)
    one.tick()
    assert client.hlen(keys.playing(run)) == 12
    for _ in range(100):
        one.tick()
    assert client.hlen(keys.playing(run)) == 0


def test_a_run_that_gets_fragments_is_not_paused_for_crashes(client: Redis, run: str, monkeypatch) -> None:
    monkeypatch.setattr(dispatcher_module, "SURVEY_S", 0.0)
    one = dispatcher(client, run)
    client.hset(keys.counts(run), "crashes", 10**6)
    for admitted in range(1, 4):
        one.tick(admitted)
    assert runs.status(client, run) == "active"
    one.tick(admitted)
    assert runs.status(client, run) == "paused"


def test_it_reports_how_many_processes_played(client: Redis, run: str, monkeypatch) -> None:
    workers.beat(client, heartbeat("a@h", 4))
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(dispatcher_module, "time", clock)
    one = dispatcher(client, run)
    one.tick()
    for _ in range(20):
        clock.now += 0.02
        client.hset(keys.counts(run), "process_ms", round(3e3 * clock.now))
        one.tick()
    mean = segments.active(client)[0].mean_processes
    assert mean == pytest.approx(3 * clock.now / 30, rel=0.1)  # three, but for a moment only


@pytest.mark.parametrize(("waits", "wanted"), [(0.0, 4), (0.3, 3), (0.6, 2), (0.95, 1)])
def test_it_wants_processes_until_a_quarter_of_their_time_is_waiting(
    client: Redis, run: str, monkeypatch, waits: float, wanted: int
) -> None:
    monkeypatch.setattr(dispatcher_module, "MEAN_S", 0.02)
    workers.beat(client, heartbeat("a@h", 4))
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(dispatcher_module, "time", clock)
    one = dispatcher(client, run)
    for tick in range(20):
        clock.now += 0.02
        spent_ms = 3e3 * 0.02 * tick
        waiting = {"allowance_wait_ms": round(waits * spent_ms), "room_wait_ms": 0}
        client.hset(keys.counts(run), mapping={"process_ms": round(spent_ms), **waiting})
        one.tick()
    assert segments.active(client)[0].wanted_processes == wanted
    client.delete(keys.lease(run))
    assert segments.active(client)[0].wanted_processes == 0


def test_processes_that_are_gone_are_noted_once(client: Redis, run: str) -> None:
    workers.beat(client, heartbeat("a@h", 2, pids=(10, 11)))
    processes = (("a@h", 10), ("a@h", 12), ("gone@h", 10))
    alive, *_ = (note_playing(client, run, node=node, pid=pid) for node, pid in processes)
    one = dispatcher(client, run)
    for _ in range(3):
        one.tick()
    assert set(segments.playing(client, run)) == {alive}
    assert runs.state(client, run).lost_producers == 2
    reasons = [row["reason"] for row in runs.journal(client, run)[0] if row["event"] == "lost"]
    assert sorted(reasons) == ["process 12 of a@h is gone", "worker gone@h is gone"]


def test_workers_of_the_same_name_do_not_lose_each_others_processes(client: Redis, run: str) -> None:
    one = dispatcher(client, run)
    for pid in (10, 20, 30):
        note_playing(client, run, node="a@h", pid=pid)
    for _ in range(4):
        for pid in (1, 2):  # the second one's heartbeat always comes last
            beat = replace(heartbeat("a@h", 1, pids=(10 * pid, 10 * pid + 1)), pid=pid)
            workers.beat(client, beat)
        one.tick()
    assert set(segments.playing(client, run)) == {str(Process("a@h", pid)) for pid in (10, 20)}
    assert len(workers.alive(client)) == 2
    workers.leave(client, beat)
    assert [worker.pid for worker in workers.alive(client)] == [1]


def test_many_heartbeats_of_one_name_and_many_processes_take_no_time_together(
    client: Redis, run: str
) -> None:
    """Of the thread, not of the clock: a second; each process was looked up in each heartbeat."""
    for pid in range(1_000):
        note_playing(client, run, node="a@h", pid=pid)
    fleet = [heartbeat("a@h", 1, pids=tuple(range(10**6, 10**6 + 2_000)))] * 500
    one = dispatcher(client, run)
    one._processes = 10**6
    started = time.thread_time()
    one._find_lost(fleet)
    one._find_lost(fleet)
    assert time.thread_time() - started < 3.0
    assert not segments.playing(client, run)


def test_a_run_that_only_crashes_is_paused_until_it_is_resumed(client: Redis, run: str) -> None:
    one = dispatcher(client, run)
    for _ in range(runs.config(client, run).rollout.max_crashes):
        one.tick()
        assert runs.state(client, run).status == "active"
        segments.note_crash(client, run, "host b: signal 11")
    one.tick()
    now = runs.state(client, run)
    assert now.status == "paused"
    assert now.reason.startswith("quarantined: 5 processes ended without a fragment: ")
    assert "host b: signal 11; fix" in now.reason and f"ddrl resume {run}" in now.reason
    runs.reactivate(client, run)
    one.tick()
    assert runs.state(client, run).status == "active"

"""The dispatcher against a real server."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from redis import Redis
from support.runs import start, target_config

from ddrl.learner.dispatcher import Dispatcher
from ddrl.store import keys, runs, segments, weights, workers
from ddrl.store import leases as lease

QUEUE = "ddrl.rollout"


@pytest.fixture
def client(server) -> Redis:
    return server.client


@pytest.fixture
def run(client: Redis) -> str:
    return start(client, target_config())


def dispatcher(client: Redis, run: str, token: int = 1) -> Dispatcher:
    """One whose messages look as Celery writes them."""

    def send(queue: str, priority: str) -> None:
        client.lpush(keys.queue(queue, priority), json.dumps({"headers": {"argsrepr": f"['{run}']"}}))

    return Dispatcher(client, run, token, runs.config(client, run).rollout, send=send)


def ready(client: Redis, run: str) -> None:
    """Let a run want processes: a learner, a version, an allowance."""
    token = lease.acquire(client, run, host="h", folder="f")
    assert token is not None
    weights.publish(client, run, token, version=0, blob=b"w", allowance=10**9, updates=0)


def heartbeat(node: str, processes: int, *queues: str, pids: tuple[int, ...] = ()) -> workers.Heartbeat:
    return workers.Heartbeat(node, "h", 1, processes, queues or (QUEUE,), {}, pids=pids)


def take(client: Redis, run: str, priority: str = "normal") -> None:
    """Take a message as a worker does."""
    assert client.rpop(keys.queue(QUEUE, priority))
    segments.begin(client, run)


def ticks(one: Dispatcher, num: int, pause_s: float = 0.11) -> list[int]:
    """What so many ticks send, as far apart as their looks."""
    sent = []
    for _ in range(num):
        sent.append(one.tick())
        time.sleep(pause_s)
    return sent


def test_the_dispatcher_keeps_messages_waiting_and_no_more(client: Redis, run: str) -> None:
    one = dispatcher(client, run)
    assert ticks(one, 4) == [1, 0, 0, 0]
    take(client, run)
    assert one.tick() == 1


def test_more_messages_wait_for_a_larger_fleet(client: Redis, run: str) -> None:
    workers.beat(client, heartbeat("a@h", 40))
    workers.beat(client, heartbeat("b@h", 40, "ddrl.evaluate"))  # plays nothing
    assert dispatcher(client, run).tick() == 10


def test_messages_wait_in_proportion_to_weight(client: Redis) -> None:
    workers.beat(client, heartbeat("a@h", 40))
    light, heavy = (start(client, target_config(weight=weight)) for weight in (1.0, 3.0))
    ready(client, light), ready(client, heavy)
    assert sorted([dispatcher(client, light).tick(), dispatcher(client, heavy).tick()]) in ([2, 8], [3, 7])


def test_lost_messages_are_replaced_though_others_keep_the_queue_busy(client: Redis, run: str) -> None:
    one = dispatcher(client, run)
    one.tick()
    client.delete(keys.queue(QUEUE))
    client.lpush(keys.queue(QUEUE), json.dumps({"headers": {"argsrepr": "['another']"}}))
    assert ticks(one, 2) == [0, 0]
    one._survey_at = 0.0
    assert one.tick() == 1 and client.llen(keys.queue(QUEUE)) == 2


def test_a_run_whose_allowance_is_used_up_sends_only_where_nobody_else_wants_the_fleet(client: Redis) -> None:
    satisfied, hungry = start(client, target_config()), start(client, target_config())
    ready(client, satisfied)
    client.hset(keys.state(satisfied), "appended_steps", 10**9)
    first = dispatcher(client, satisfied)
    assert first.tick() == 1
    take(client, satisfied), ready(client, hungry)
    first._survey_at = 0.0
    assert ticks(first, 3) == [0, 0, 0]
    client.hset(keys.state(satisfied), "appended_steps", 0)
    assert 1 in ticks(first, 4)


def test_a_run_ahead_of_its_share_waits_for_the_others_but_not_where_they_send_nothing(client: Redis) -> None:
    greedy, other = start(client, target_config()), start(client, target_config())
    ready(client, greedy), ready(client, other)
    workers.beat(client, heartbeat("a@h", 1))
    one, two = dispatcher(client, greedy), dispatcher(client, other)
    one.tick(), two.tick()
    while segments.waiting(client, greedy, QUEUE):  # it has played for a while
        client.rpop(keys.queue(QUEUE)), segments.begin(client, greedy)
    client.hset(keys.state(greedy), "process_ms", 3_000)
    client.hset(keys.state(other), "waiting", 1), client.lpush(keys.queue(QUEUE), f"'{other}'")
    assert ticks(one, 3) == [0, 0, 0]
    client.delete(keys.queue(QUEUE)), client.hset(keys.state(other), "waiting", 0)
    assert 1 in ticks(one, 4)


def test_a_run_that_a_machine_refuses_does_not_keep_it_busy_with_refusing(client: Redis) -> None:
    run = start(client, target_config(rollout={"segment_s": 8.0}))
    workers.beat(client, heartbeat("a@h", 1))
    one = dispatcher(client, run)

    def sent_in_vain() -> int:
        sent, one._survey_at = 0, 0.0
        for _ in range(6):
            sent += sum(ticks(one, 1))
            client.delete(keys.queue(QUEUE)), client.hset(keys.state(run), "waiting", 0)
        return sent

    segments.note_refusal(client, run, "gone", "host gone: lacks something")
    assert sent_in_vain() >= 5  # no worker of that host is there
    segments.note_refusal(client, run, "h", "host h: lacks something")
    assert sent_in_vain() <= 2


def test_a_changed_priority_sends_to_its_own_list(client: Redis, run: str) -> None:
    one = dispatcher(client, run)
    assert ticks(one, 1) == [1]
    client.hset(keys.state(run), "priority", "high")
    assert sum(ticks(one, 3)) == 1
    assert client.llen(keys.queue(QUEUE, "high")) == client.llen(keys.queue(QUEUE, "normal")) == 1


def test_a_waiting_run_of_higher_priority_claims_a_process(client: Redis) -> None:
    workers.beat(client, heartbeat("a@h", 2))
    low, high = start(client, target_config()), start(client, target_config(priority="high"))
    ready(client, low), ready(client, high)
    one = dispatcher(client, high)
    for tick in range(6):
        client.hset(keys.state(low), "process_ms", 220 * tick)  # two processes play
        one.tick()
        time.sleep(0.11)
    claim = int(client.hget(keys.state(low), "claim") or 0)
    assert 1 <= claim <= segments.waiting(client, high, QUEUE, "high") == 2
    assert not client.hget(keys.state(high), "claim")


def test_producers_whose_process_is_gone_are_noted_once(client: Redis, run: str) -> None:
    workers.beat(client, heartbeat("a@h", 2, pids=(10, 11)))
    for producer, node, pid in ((1, "a@h", 10), (2, "a@h", 12), (3, "gone@h", 10)):
        segments.playing(client, run, producer, node=node, pid=pid)
    one = dispatcher(client, run)
    for _ in range(3):
        one._survey_at = 0.0
        one.tick()
    assert set(segments.players(client, run)) == {1}
    assert runs.state(client, run).lost_producers == 2
    reasons = [row["reason"] for row in runs.journal(client, run) if row["event"] == "lost"]
    assert reasons == ["process 12 of a@h is gone", "worker gone@h is gone"]


def test_workers_of_the_same_name_do_not_lose_each_others_producers(client: Redis, run: str) -> None:
    one = dispatcher(client, run)
    for producer, pid in ((1, 10), (2, 20), (3, 30)):
        segments.playing(client, run, producer, node="a@h", pid=pid)
    for _ in range(4):
        for pid in (1, 2):  # the second one's beat always comes last
            beat = replace(heartbeat("a@h", 1, pids=(10 * pid, 10 * pid + 1)), pid=pid)
            workers.beat(client, beat)
        one._survey_at = 0.0
        one.tick()
    assert set(segments.players(client, run)) == {1, 2}
    assert len(workers.alive(client)) == 2
    workers.leave(client, beat)
    assert [worker.pid for worker in workers.alive(client)] == [1]


def test_a_run_that_ends_processes_is_quarantined_until_it_is_resumed(client: Redis, run: str) -> None:
    token = lease.acquire(client, run, host="h", folder="f")
    one = dispatcher(client, run, token or 0)
    for _ in range(runs.config(client, run).rollout.max_crashes):
        assert runs.state(client, run).status == "active"
        segments.note_crash(client, run, "host b: signal 11")
    one.tick()
    now = runs.state(client, run)
    assert now.status == "paused" and now.reason.startswith(
        "quarantined: 5 processes ended without a fragment: "
    )
    assert "host b: signal 11; mend" in now.reason and f"ddrl resume {run}" in now.reason
    runs.reactivate(client, run)
    one._survey_at = 0.0
    one.tick()
    assert runs.state(client, run).status == "active"


def test_a_dispatcher_whose_learner_was_replaced_quarantines_nothing(client: Redis, run: str) -> None:
    token = lease.acquire(client, run, host="h", folder="f")
    one = dispatcher(client, run, token or 0)
    for _ in range(runs.config(client, run).rollout.max_crashes):
        segments.note_crash(client, run, "host b: signal 11")
    assert lease.acquire(client, run, host="other", folder="f", force=True)
    with pytest.raises(lease.LeaseLostError):
        one.tick()
    assert runs.state(client, run).status == "active"

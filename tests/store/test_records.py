"""Heartbeats, metrics and log lines."""

from __future__ import annotations

import logging
import threading

import redis
from redis import Redis

from ddrl.store import connection, keys, logs, metrics, workers


def test_heartbeats_list_the_workers_that_live(client: Redis) -> None:
    first = workers.Heartbeat("a@h", "h", 1, 4, ("ddrl.rollout", "ddrl.evaluate"), {"ddrl": "0"})
    second = workers.Heartbeat("b@h", "h", 2, 2, ("ddrl.evaluate",), {})
    workers.beat(client, first), workers.beat(client, second)
    assert workers.alive(client) == [first, second]
    assert [heartbeat.num_players for heartbeat in (first, second)] == [4, 0]
    assert 0 < client.ttl(keys.worker("a@h:h:1")) <= workers.TTL_S
    workers.leave(client, first)
    assert workers.alive(client) == [second]
    client.delete(keys.worker("b@h:h:2"))  # expired
    assert workers.alive(client) == [] and not client.exists(keys.WORKERS)
    workers.beat(client, second)  # it was only late
    client.sadd(keys.WORKERS, b"\xff")
    assert workers.alive(client) == [second] and client.scard(keys.WORKERS) == 1


def test_metrics_rows_are_read_from_a_cursor(client: Redis, run: str, token: int) -> None:
    for updates in (1.0, 2.0):
        metrics.add(client, run, token, {"updates": updates})
    rows, cursor = metrics.read(client, run)
    assert [row["updates"] for row in rows] == [1.0, 2.0] and metrics.last(client, run) == {"updates": 2.0}
    assert metrics.read(client, run, cursor)[0] == []


def test_log_lines_are_stored_and_errors_of_the_server_are_ignored(
    client: Redis, run: str, monkeypatch
) -> None:
    for receiver in (client, redis.Redis(host="127.0.0.1", port=1, socket_connect_timeout=0.1)):
        monkeypatch.setattr(connection, "connect", lambda receiver=receiver: receiver)
        with logs.sending(run, "learner here"):
            logging.getLogger("ddrl").warning("%d entries refused", 3)
    rows, cursor = logs.read(client, run)
    found = [(row["source"], row["level"], row["text"]) for row in rows]
    assert found == [("learner here", "WARNING", "3 entries refused")]
    assert logs.read(client, run, cursor) == ([], cursor)


def test_a_stalled_server_does_not_delay_logging_nor_fill_the_memory(monkeypatch, capsys) -> None:
    answers, sent = threading.Event(), []
    monkeypatch.setattr(logs, "add", lambda *row: answers.wait() and sent.append(row[-1]))
    monkeypatch.setattr(connection, "connect", redis.Redis)  # which connects at its first command
    monkeypatch.setattr(logs, "MOST_WAITING", 3)
    with logs.sending("target", "learner here"):
        for number in range(100):
            logging.getLogger("ddrl").error("line %d", number)
        answers.set()
    assert 3 <= len(sent) <= 4 and sent[:3] == [f"line {number}" for number in range(3)]
    assert "Logging error" not in capsys.readouterr().err

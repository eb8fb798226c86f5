"""The rollout task, called in this process: which run it plays, and what it reports."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis
from support.worker_runs import playable

from ddrl import celery
from ddrl.store import connection, keys, runs, segments
from ddrl.worker import tasks


@pytest.fixture
def client(server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Redis]:
    """The server that the tasks of this process use."""
    monkeypatch.setenv(connection.URL_VARIABLE, server.url)
    kept = tasks.Kept(server.client, server.client)
    monkeypatch.setattr(tasks, "kept", lambda: kept)
    monkeypatch.setattr(tasks, "REFUSED_S", 0.3)
    monkeypatch.setattr(tasks, "PAUSE_S", 0.0)
    monkeypatch.setattr(celery.app.conf, "broker_url", connection.broker_url(server.url))
    forget_connections()
    yield server.client
    forget_connections()


def forget_connections() -> None:
    """Make Celery connect anew: its pools keep the address of the broker that they were made for."""
    celery.app.close()
    celery.app.__dict__.pop("amqp", None)


def rollout(*arguments: object) -> Any:
    return tasks.rollout.apply(args=arguments).get()


def test_a_rollout_plays_the_run_that_the_server_chooses_whatever_its_message_names(client: Redis) -> None:
    assert rollout() is None
    run = playable(client, rollout={"segment_s": 0.1})
    for arguments in ((), ("a-run-named-by-an-earlier-version",)):
        result = rollout(*arguments)
        assert result["run"] == run and result["steps"] > 0
        assert segments.playing(client, run) == {}
    assert runs.state(client, run).appended_steps >= result["steps"]


def test_a_run_that_a_process_cannot_play_is_left_out_for_a_while(client: Redis) -> None:
    unfit, fits = (playable(client, rollout={"segment_s": 0.05}, priority=name) for name in ("high", "low"))
    client.hset(keys.state(unfit), "versions", json.dumps({"gymnasium": "0.26.3"}))
    assert [rollout()["run"] for _ in range(3)] == [unfit, fits, fits]
    assert list(segments.refusals(client, unfit).values())[0].count("gymnasium is ") == 1
    time.sleep(0.3)
    client.hset(keys.state(unfit), "versions", "{}")
    result = rollout()
    assert result["run"] == unfit and result["steps"] > 0 and segments.refusals(client, unfit) == {}


def test_messages_wait_where_dispatchers_count_them_and_carry_a_time_limit(client: Redis) -> None:
    celery.send_rollout("elsewhere", 5.0)
    assert segments.waiting(client, "elsewhere") == 1
    (message,) = client.lrange(keys.queue("elsewhere"), 0, -1)
    headers = json.loads(message)["headers"]
    assert (headers["task"], headers["argsrepr"]) == (celery.ROLLOUT, "()")
    assert headers["timelimit"] == [5.0 + celery.LIMIT_MARGIN_S, None]

"""The rollout task, called in this process: which run it plays, and what it reports."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu.transport.redis import Channel
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError
from support.runs import stream_steps
from support.worker_runs import bad, playable

from ddrl import celery
from ddrl.store import connection, keys, runs, segments
from ddrl.worker import tasks


@pytest.fixture
def client(client: Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Redis]:
    """The server that the tasks of this process use."""
    kept = tasks.Kept(client, client)
    monkeypatch.setattr(tasks, "kept", lambda: kept)
    monkeypatch.setattr(tasks, "REFUSED_S", 1e6)
    monkeypatch.setattr(tasks, "PAUSE_S", 0.0)
    monkeypatch.setattr(celery.app.conf, "broker_url", connection.broker_url())
    forget_connections()
    yield client
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


def test_messages_whose_time_is_too_short_do_not_occupy_a_process(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "IDLE_S", 1e6)
    playable(client)
    tasks.rollout.push_request(timelimit=(0.1, None))
    assert tasks.rollout.run() is None
    tasks.rollout.pop_request()


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({}, "gymnasium is .* submitted with 0.26.3; run pip install 'gymnasium==0.26.3' there"),
        (
            {"env": {"id": "bad_envs:make", "kwargs": {"kind": "none"}}},
            "bad_envs:make: .* set DDRL_ALLOW_MODULES=bad_envs on every machine",
        ),
        (
            {"env": {"id": "ddrl/Pick-v0"}, "algorithm": {"name": "ppo", "network": "bad_envs:network"}},
            "bad_envs:network: .* set DDRL_ALLOW_MODULES=bad_envs on every machine",
        ),
        (
            {"env": {"id": "ddrl/Pick-v0"}, "algorithm": {"name": "docs.own_algorithm"}},
            "docs.own_algorithm:Policy: .* set DDRL_ALLOW_MODULES=docs on every machine",
        ),
    ],
    ids=["version", "environment", "network", "algorithm"],
)
def test_a_run_that_a_machine_cannot_play_is_refused_by_name_and_left_out_for_a_while(
    client: Redis, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], reason: str
) -> None:
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "bad_envs,docs")
    unfit = playable(client, rollout={"segment_s": 0.05}, priority="high", **sections)
    fits = playable(client, rollout={"segment_s": 0.05}, priority="low")
    if not sections:
        client.hset(keys.state(unfit), "versions", json.dumps({"gymnasium": "0.26.3"}))
    queues = [runs.state(client, run).queue for run in (unfit, fits)]
    monkeypatch.setenv(celery.QUEUES_VARIABLE, ",".join(queues))
    monkeypatch.delenv("DDRL_ALLOW_MODULES")
    assert [rollout()["run"] for _ in range(3)] == [unfit, fits, fits]
    assert re.match(
        f"host {socket.gethostname()}: {reason}", segments.refusals(client, unfit)[socket.gethostname()]
    )
    assert stream_steps(client, unfit) == runs.state(client, unfit).crashes_total == 0
    tasks.kept().refused[unfit] -= 1e6  # so much later
    client.hset(keys.state(unfit), "versions", "{}")
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "bad_envs,docs")
    result = rollout()
    assert result["run"] == unfit and result["steps"] > 0 and segments.refusals(client, unfit) == {}


def test_an_environment_that_raises_costs_a_player(
    client: Redis, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kwargs = {"marker": str(tmp_path / "marker")}  # raises once
    run = bad(client, "raise", monkeypatch, kwargs=kwargs, rollout={"segment_s": 0.1})
    assert rollout() == {"run": run, "steps": 0}
    reason = f"host {socket.gethostname()}: RuntimeError: the simulator is out of order; "
    state = runs.state(client, run)
    assert state.error.startswith(reason) and (state.crashes, state.crashes_total) == (1, 1)
    assert rollout()["steps"] > 0 and client.hlen(keys.producers(run)) == 2
    state = runs.state(client, run)
    assert (state.crashes, state.crashes_total) == (0, 1)


def test_messages_wait_where_dispatchers_count_them_and_carry_a_time_limit(client: Redis) -> None:
    celery.send_rollout("elsewhere", 5.0)
    assert segments.waiting(client, "elsewhere") == 1
    (message,) = client.lrange(keys.queue("elsewhere"), 0, -1)
    headers = json.loads(message)["headers"]
    assert (headers["task"], headers["argsrepr"]) == (celery.ROLLOUT, "()")
    assert headers["timelimit"] == [5.0 + celery.LIMIT_MARGIN_S, None]


def test_a_server_that_takes_no_message_for_lack_of_memory_says_so(client: Redis) -> None:
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(OutOfMemoryError) as refused:
            celery.send_rollout("full")
    finally:
        client.config_set("maxmemory", 0)
    assert "the server's memory is full" in str(connection.outage(refused.value))


def test_an_outage_while_a_queue_is_declared_is_reported_and_the_next_message_is_sent(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: object) -> None:
        monkeypatch.setattr(Channel, "_queue_bind", bind)
        raise RedisConnectionError("cut off")

    bind = Channel._queue_bind
    monkeypatch.setattr(Channel, "_queue_bind", cut)
    with pytest.raises(connection.UnreachableError, match="cut off"):
        celery.send_rollout("undeclared")
    celery.send_rollout("undeclared")
    assert segments.waiting(client, "undeclared") == 1


def test_a_memory_limit_that_is_no_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDRL_PROCESS_MEMORY", "lots")
    with pytest.raises(connection.StoreError, match="^DDRL_PROCESS_MEMORY=lots: .* write it like 4GiB"):
        celery.process_memory_bytes()

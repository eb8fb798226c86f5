"""Runs for tests of workers: weights, lease and allowance are there, and messages are sent by the test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from redis import Redis
from support.private_server import PrivateServer
from support.runs import initial_weights, start, target_config
from support.store import take

from ddrl import celery
from ddrl.store import connection, evaluations, keys, runs, segments, weights

HERE = str(Path(__file__).parent)
ALLOWED = {"DDRL_ALLOW_MODULES": "bad_envs", "PYTHONPATH": f"{HERE}:{Path(HERE).parents[1]}"}
"""Environment of a worker that may play `bad_envs`."""


def playable(client: Redis, **sections: dict[str, Any]) -> str:
    """A run that can be played without end, by the test's messages."""
    rollout = {"segment_s": 2, "fragment_s": 0.05, **sections.pop("rollout", {})}
    config = target_config(rollout=rollout, **sections)
    run = start(client, config)
    token, blob = take(client, run), initial_weights(config, runs.spaces(client, run))
    weights.publish(client, run, token, version=0, blob=blob, allowance=10**9, updates=0)
    return run


def bad(client: Redis, kind: str, monkeypatch: Any, **sections: dict[str, Any]) -> str:
    """A playable run of `bad_envs`."""
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "bad_envs,bad_networks")
    env = {"id": "bad_envs:make", "num_envs": 2, "kwargs": {"kind": kind}}
    env["kwargs"] |= sections.pop("kwargs", {})
    return playable(client, env=env, **sections)


def send_task(server: PrivateServer, name: str, queue: str, **options: Any) -> None:
    """Send a message to this server, as ddrl/celery.py does."""
    with celery.app.connection_for_write(connection.broker_url(server.url)) as wire:
        celery.app.send_task(name, queue=queue, connection=wire, **options)


def send(server: PrivateServer, run: str, num: int = 1, *, limit_s: float = 3600) -> None:
    """Send rollout messages to the queue of a run."""
    for _ in range(num):
        queue = runs.state(server.client, run).queue
        send_task(server, celery.ROLLOUT, queue, priority=keys.LATER, time_limit=limit_s)


@contextlib.contextmanager
def dispatching(server: PrivateServer, *chosen: str) -> Iterator[None]:
    """Keep a message of each run waiting."""
    leaving = threading.Event()

    def work() -> None:
        while not leaving.wait(0.1):
            for run in chosen:
                if not segments.waiting(server.client, runs.state(server.client, run).queue):
                    send(server, run)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    leaving.set()
    thread.join()


def open_evaluation(server: PrivateServer, run: str) -> None:
    """Open an evaluation of version 0 and send it."""
    client = server.client
    token, queue = int(client.hget(keys.state(run), "fence") or 0), runs.state(client, run).evaluation_queue

    def send(message: str) -> None:
        send_task(server, celery.EVALUATE, queue, args=[run, message], priority=keys.FIRST)

    wanted = evaluations.Evaluation(version=0, first_seed=1, num_episodes=10, purpose="watch")
    evaluations.OpenEvaluations(client, run, send=send, timeout_s=60, token=token).open([wanted])

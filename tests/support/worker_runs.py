"""Runs for tests of workers: weights, lease and allowance are there, and messages are sent by the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis import Redis
from support.learners import Run, in_threads
from support.private_server import PrivateServer
from support.runs import publish_initial, start, target_config
from support.store import take

from ddrl import celery
from ddrl.learner.dispatcher import Dispatcher
from ddrl.store import connection, evaluations, keys, runs

HERE = Path(__file__).parent
ALLOWED = {"DDRL_ALLOW_MODULES": "bad_envs", "PYTHONPATH": f"{HERE}:{HERE.parents[1]}"}
"""Environment of a worker that may play `bad_envs`."""


def playable(client: Redis, *, allowance: int = 10**9, **sections: Any) -> str:
    """Return a run that can be played, by the test's messages."""
    rollout = {"segment_s": 2, "fragment_s": 0.05, **sections.pop("rollout", {})}
    run = start(client, target_config(rollout=rollout, **sections))
    publish_initial(client, run, take(client, run), allowance=allowance)
    return run


def bad(client: Redis, kind: str, monkeypatch: Any, **sections: Any) -> str:
    """Return a playable run of `bad_envs`."""
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "bad_envs")
    kwargs = {"kind": kind, **sections.pop("kwargs", {})}
    return playable(client, env={"id": "bad_envs:make", "num_envs": 2, "kwargs": kwargs}, **sections)


def send_task(server: PrivateServer, name: str, queue: str, **options: Any) -> None:
    """Send a message to this server, as ddrl/celery.py does."""
    with celery.app.connection_for_write(connection.broker_url(server.url)) as wire:
        celery.app.send_task(name, queue=queue, connection=wire, **options)


def send(server: PrivateServer, run: str, num: int = 1, *, limit_s: float = 3600) -> None:
    """Send rollout messages to the queue of a run."""
    for _ in range(num):
        queue = runs.state(server.client, run).queue
        send_task(server, celery.ROLLOUT, queue, priority=keys.LATER, time_limit=limit_s)


@contextmanager
def dispatching(server: PrivateServer) -> Iterator[None]:
    """Dispatch for all active runs that were taken, as their learners do."""
    leaving, dispatchers = threading.Event(), dict[str, Dispatcher]()

    def send_rollout(queue: str, limit_s: float) -> None:
        send_task(server, celery.ROLLOUT, queue, priority=keys.LATER, time_limit=limit_s)

    def dispatch() -> None:
        while not leaving.wait(0.1):
            for run in runs.active_names(server.client):
                if run not in dispatchers and (token := Run(server, run=run).token):
                    max_crashes = runs.config(server.client, run).rollout.max_crashes
                    dispatchers[run] = Dispatcher(
                        server.client, run, token, max_crashes=max_crashes, send=send_rollout
                    )
                if run in dispatchers:
                    dispatchers[run].tick()

    with in_threads(dispatch, stop=leaving.set):
        yield


def open_evaluation(server: PrivateServer, run: str) -> None:
    """Open an evaluation of version 0 and send it."""
    queue, token = runs.state(server.client, run).evaluation_queue, Run(server, run=run).token

    def send_evaluation(message: str) -> None:
        send_task(server, celery.EVALUATE, queue, args=[run, message], priority=keys.FIRST)

    wanted = evaluations.Evaluation(version=0, first_seed=1, num_episodes=10, purpose="watch")
    opened = evaluations.OpenEvaluations(server.client, run, send=send_evaluation, timeout_s=60, token=token)
    opened.open([wanted])

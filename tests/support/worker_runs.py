"""Runs for tests of workers: weights, lease and allowance are there, and messages are sent by the test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from redis import Redis
from support.private_server import PrivateServer
from support.runs import start, target_tree

from ddrl import celery
from ddrl.algorithms import base
from ddrl.config import validate
from ddrl.store import connection, evaluations, keys, runs, segments, stream, weights
from ddrl.store import leases as lease

HERE = str(Path(__file__).parent)
ALLOWED = {"DDRL_ALLOW_MODULES": "bad_envs", "PYTHONPATH": f"{HERE}:{Path(HERE).parents[1]}"}
"""Environment of a worker that may play `bad_envs`."""


def playable(client: Redis, **sections: dict[str, Any]) -> str:
    """A run that can be played without end, by the test's messages."""
    rollout = {"segment_s": 2, "fragment_s": 0.05, **sections.pop("rollout", {})}
    tree = target_tree(rollout=rollout, **sections)
    if tree["algorithm"]["name"] == "ppo":
        tree |= {"algorithm": sections["algorithm"], "replay": {}, "learner": {"device": "cpu"}}
    config = validate(tree)
    run = start(client, config)
    token = lease.acquire(client, run, host="test", folder="/tmp", ttl_ms=3_600_000)
    assert token is not None
    learner = base.resolve(config, runs.spaces(client, run)).learner(device=torch.device("cpu"), seed=1)
    blob = weights.encode_weights({name: value.numpy() for name, value in learner.weights().items()})
    weights.publish(client, run, token, version=0, blob=blob, allowance=10**9, updates=0)
    stream.allow(client, run, token, 10**9, updates=0)
    return run


def bad(client: Redis, kind: str, monkeypatch: Any, **sections: dict[str, Any]) -> str:
    """A playable run of `bad_envs`."""
    monkeypatch.setenv("DDRL_ALLOW_MODULES", "bad_envs,bad_networks")
    env = {"id": "bad_envs:make", "num_envs": 2, "kwargs": {"kind": kind}}
    env["kwargs"] |= sections.pop("kwargs", {})
    return playable(client, env=env, **sections)


def send(server: PrivateServer, run: str, num: int = 1, *, limit_s: float = 3600) -> None:
    """Send messages to the queue of a run, as its dispatcher does."""
    queue = runs.state(server.client, run).queue
    with celery.app.connection_for_write(connection.broker_url(server.url)) as wire:
        for _ in range(num):
            celery.app.send_task(
                celery.ROLLOUT, queue=queue, connection=wire, priority=keys.LATER, time_limit=limit_s
            )


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
    token = int(client.hget(keys.state(run), "fence") or 0)

    def send(message: str) -> None:
        with celery.app.connection_for_write(connection.broker_url(server.url)) as wire:
            celery.app.send_task(
                celery.EVALUATE,
                args=[run, message],
                queue=runs.state(client, run).evaluation_queue,
                connection=wire,
                priority=keys.FIRST,
            )

    wanted = evaluations.Evaluation(version=0, first_seed=1, num_episodes=10, purpose="watch")
    evaluations.OpenEvaluations(client, run, send=send, timeout_s=60, token=token).open([wanted])

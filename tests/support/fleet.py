"""A fleet for tests that start no worker: heartbeats, runs that want processes, processes that play."""

from __future__ import annotations

import json

from redis import Redis

from ddrl.learner.dispatcher import Dispatcher
from ddrl.store import keys, leases, runs, weights, workers
from ddrl.store.segments import Process

QUEUE = "ddrl.rollout"


def heartbeat(node: str, processes: int, *queues: str, pids: tuple[int, ...] = ()) -> workers.Heartbeat:
    """What a worker on host "h" reports."""
    return workers.Heartbeat(node, "h", 1, processes, queues or (QUEUE,), {}, pids=pids)


def want_processes(client: Redis, run: str) -> int:
    """Give a run a learner, weights and an allowance; return the learner's token."""
    token = leases.acquire(client, run, host="h", folder="f", ttl_ms=600_000)
    assert token is not None
    weights.publish(client, run, token, version=0, blob=b"w", allowance=10**9, updates=0)
    return token


def note_playing(client: Redis, run: str, *, node: str, pid: int) -> str:
    """Note that a process plays a run, though no choice led to it; return its name."""
    name = str(Process(node, pid))
    row = {"node": node, "pid": pid, "task": f"task-{pid}", "since_ms": runs.server_ms(client)}
    client.hset(keys.playing(run), name, json.dumps(row | {"charge_ms": 0, "weight": 1}))
    return name


def dispatcher(client: Redis, run: str, token: int) -> Dispatcher:
    """A dispatcher whose messages go straight into the list from which workers take them."""

    def send(queue: str, limit_s: float) -> None:
        client.lpush(keys.queue(queue), json.dumps({"limit_s": limit_s}))

    return Dispatcher(client, run, token, runs.config(client, run).rollout, send=send)

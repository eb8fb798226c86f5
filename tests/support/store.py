"""A server without learner and workers: records like those of a lander's run, written by hand."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from redis import Redis

from ddrl.config import RunConfig, validate
from ddrl.store import keys, leases, ledger, metrics, runs, stream, weights, workers
from ddrl.store.evaluations import Evaluation, OpenEvaluations
from ddrl.store.segments import Process
from ddrl.store.stream import Appended
from ddrl.types import EnvSpec, EvaluationResult

LANDER = "LunarLanderContinuous-v3"
SPACES = EnvSpec(LANDER, (8,), "float32", "continuous", (2,), action_low=(-1.0,) * 2, action_high=(1.0,) * 2)
QUEUES = ("ddrl.rollout.box2d", "ddrl.evaluate.box2d")


def make_config(**sections: Any) -> RunConfig:
    tree = {"name": "lunar", "env": {"id": LANDER}, "algorithm": {"name": "sac"}}
    return validate(tree | {"stop": {"return": 200, "time": 900}} | sections)


def make_run(client: Redis, **sections: Any) -> str:
    """Return an active run without any history."""
    return runs.create(client, make_config(**sections), SPACES, queues=QUEUES)


def end(client: Redis, run: str, status: str = "stopped", reason: str = "enough") -> None:
    """End a run whose results nobody writes."""
    assert runs.set_status(client, run, status, reason)
    runs.complete(client, run, 0)


def ended(client: Redis, days: float, *, status: str = "stopped", num_bytes: int = 0) -> str:
    """Return a run that ended so many days ago and holds so many bytes of weights."""
    run = make_run(client)
    end(client, run, status)
    client.hset(keys.state(run), "ended_ms", runs.server_ms(client) - int(days * 86_400_000))
    client.set(keys.weights_blob(run, 0), b"x" * num_bytes)
    return run


def append(client: Redis, run: str, seq: int, *, producer: int = 1, size: int = 10, **more: Any) -> Appended:
    """Append 10 transitions of incarnation 7 in `size` bytes."""
    who = {"producer": producer, "incarnation": 7, "seq": seq, "num_transitions": 10} | more
    return stream.append(client, run, {b"h": b"x" * size}, **who)


def fold_now(client: Redis, run: str, token: int, checkpoint: Mapping[str, Sequence[int]]) -> int:
    """Fold producers as `ledger.fold` does, however lately they have appended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "QUIET_S", 0.0)
        patch.setattr(ledger, "ACTOR_QUIET_S", 0.0)
        return ledger.fold(client, run, token, checkpoint)


def take(client: Redis, run: str, **options: Any) -> int:
    """Return the run's next fencing token, whoever holds the run."""
    held = {"host": "here", "folder": "/tmp", "ttl_ms": 600_000, "force": True} | options
    token = leases.acquire(client, run, **held)
    assert token is not None
    return token


def want_processes(client: Redis, run: str) -> int:
    """Give a run a learner, weights and an allowance; return the learner's token."""
    token = take(client, run)
    weights.publish(client, run, token, version=0, blob=b"w", allowance=10**9, updates=0)
    return token


def heartbeat(
    node: str, processes: int, queue: str = "ddrl.rollout", *, pids: tuple[int, ...] = ()
) -> workers.Heartbeat:
    """Return what a worker on host "h" reports."""
    return workers.Heartbeat(node, "h", 1, processes, (queue,), {}, pids=pids)


def note_playing(client: Redis, run: str, *, node: str, pid: int, thread: int = 0) -> str:
    """Note that a process plays a run, though no choice led to it; return its name."""
    name = str(Process(node, pid, thread))
    row = {"node": node, "pid": pid, "task": f"task-{pid}", "since_ms": runs.server_ms(client)}
    client.hset(keys.playing(run), name, json.dumps(row | {"charge_ms": 0, "weight": 1}))
    return name


def events(client: Redis, run: str) -> list[str]:
    """Return what the run's journal lists, the oldest first."""
    return [row["event"] for row in runs.journal(client, run)[0]]


def add_history(client: Redis, run: str, *, folder: str = "") -> int:
    """Add 30 fragments with rising returns, figures, weights and evaluations; return the fencing token."""
    token, draw = take(client, run, folder=folder), random.Random(1)
    weights.publish(client, run, token, version=0, blob=b"w", allowance=10**6, updates=0)
    for seq in range(30):
        returns = [-200 + 13 * seq + draw.gauss(0, 40) for _ in range(4)]
        played = {"num_transitions": 1000, "episode_returns": returns, "played_ms": 0 if seq else 30_000}
        append(client, run, seq, **played)
    metrics.add(client, run, token, {"env_steps": 15_000, "updates": 3_000, "env_steps_per_s": 2_000.0})
    row = {"env_steps": 30_000, "updates": 7_600, "env_steps_per_s": 2_930.0, "updates_per_s": 310.0}
    row |= {"samples_per_insert": 31.9, "staleness": 0.8, "return_mean": 143.2, "replay_size": 30_000}
    metrics.add(client, run, token, row | {"learner_wait": 0.12, "critic_loss": 0.0123, "temperature": 0.05})
    blob = weights.encode_weights({"layer": np.zeros(3, np.float32)})
    weights.publish(client, run, token, version=31, blob=blob, allowance=10**6, updates=7_600)
    open_evaluations = OpenEvaluations(client, run, send=lambda _: None, timeout_s=60, token=token)
    wanted = {"version": 31, "first_seed": 1000, "num_episodes": 20, "env_steps": 31_024, "updates": 7_600}
    for purpose, mean in (("watch", 201.3), ("confirm", 205.0)):
        done = Evaluation(**wanted, purpose=purpose)
        returns = tuple(mean + 10.0 * math.sin(seed) for seed in range(20))
        open_evaluations.store(done, EvaluationResult(returns, (200,) * 20))
    weights.mark_best(client, run, token, 31, 205.0)
    figures = {"version": 31, "return_mean": 205.0, "return_std": 7.0, "episodes": 100}
    runs.note_evaluation(client, run, token, figures)
    return token

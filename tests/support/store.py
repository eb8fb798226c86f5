"""A run in a store without learner or worker, and appends by hand."""

from __future__ import annotations

from typing import Any

from redis import Redis

from ddrl.config import RunConfig, validate
from ddrl.store import leases, runs, stream
from ddrl.store.stream import Appended
from ddrl.types import EnvSpec

SPACES = EnvSpec("Pendulum-v1", (3,), "float32", "continuous", (1,), action_low=(-2.0,), action_high=(2.0,))


def make_config(**replay: object) -> RunConfig:
    return validate({"env": {"id": "Pendulum-v1"}, "algorithm": {"name": "sac"}, "replay": replay})


def make_run(client: Redis, **replay: object) -> str:
    return runs.create(client, make_config(**replay), SPACES)


def append(client: Redis, run: str, seq: int, *, producer: int = 1, size: int = 10, **more: Any) -> Appended:
    """Append 10 transitions of incarnation 7 in `size` bytes."""
    who = {"producer": producer, "incarnation": 7, "seq": seq, "num_transitions": 10} | more
    return stream.append(client, run, {b"h": b"x" * size}, **who)


def take(client: Redis, run: str, *, host: str = "here", ttl_ms: int = 600_000) -> int:
    """The run's next fencing token, whoever holds the run."""
    token = leases.acquire(client, run, host=host, folder="/tmp", ttl_ms=ttl_ms, force=True)
    assert token is not None
    return token

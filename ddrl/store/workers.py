"""Workers: a heartbeat each, which expires when the worker is gone."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, cast

from redis import Redis

from ddrl import keys

TTL_S = 15
BEAT_S = 3


@dataclass(frozen=True)
class Heartbeat:
    """What a worker says of itself.

    Attributes:
        node: unique name.
        host, pid: where it runs.
        processes: pool size.
        queues: what it plays and evaluates.
        versions: of ddrl and the packages that environments depend on.
    """

    node: str
    host: str
    pid: int
    processes: int
    queues: tuple[str, ...]
    versions: dict[str, str]

    @property
    def num_players(self) -> int:
        """Processes that take rollouts."""
        return self.processes if any(queue.startswith("ddrl.rollout") for queue in self.queues) else 0


def beat(client: Redis, heartbeat: Heartbeat) -> None:
    """Say that the worker lives."""
    client.set(keys.worker(heartbeat.node), json.dumps(asdict(heartbeat)), ex=TTL_S)


def leave(client: Redis, node: str) -> None:
    """Say that it goes."""
    client.delete(keys.worker(node))


def alive(client: Redis) -> list[Heartbeat]:
    """All workers heard of within TTL_S, by name."""
    names = sorted(client.scan_iter(match=keys.WORKER_PATTERN, count=1000))
    raw = cast("list[bytes | None]", client.mget(names)) if names else []
    rows: list[dict[str, Any]] = [json.loads(value) for value in raw if value]
    return [Heartbeat(**{**row, "queues": tuple(row["queues"])}) for row in rows]

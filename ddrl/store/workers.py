"""Workers: each writes a heartbeat, which expires when the worker is lost."""

from __future__ import annotations

import contextlib
import json
import socket
from dataclasses import asdict, dataclass
from typing import cast

from pydantic import TypeAdapter, ValidationError
from redis import Redis
from redis.exceptions import RedisError

from ddrl.store import bounded, keys
from ddrl.store.untrusted import Count, Name, Number

TTL_S = 6
BEAT_S = 1


@dataclass(frozen=True)
class Heartbeat:
    """The description of a worker.

    Attributes:
        node: its name; not always unique.
        host, pid: where it runs.
        processes: pool size.
        queues: whose messages it takes.
        versions: of ddrl and the packages that environments depend on.
        pids: of the pool's processes.
        cores: of the machine.
        gpus: their names.
        memory_bytes: of the machine.
        capabilities: extras and modules whose environments it can play.
        draining: it is leaving.
        started_s: when it was ready, by its own clock; only to be shown.
    """

    node: Name
    host: Name
    pid: Count
    processes: Count
    queues: tuple[Name, ...]
    versions: dict[Name, Name]
    pids: tuple[Count, ...] = ()
    cores: Count = 0
    gpus: tuple[Name, ...] = ()
    memory_bytes: Count = 0
    capabilities: tuple[Name, ...] = ()
    draining: bool = False
    started_s: Number = 0.0

    @property
    def num_players(self) -> int:
        """Processes that take rollouts."""
        return self.processes if any(queue.startswith("ddrl.rollout") for queue in self.queues) else 0


_HEARTBEAT = TypeAdapter(Heartbeat)
_LONGEST = 16 * 1024  # bytes of a heartbeat
_PAGE = 256  # heartbeats a reply
_MOST_BYTES = 8 * 1024**2  # of all that are read; those of 1,000 workers have one


def beat(client: Redis, heartbeat: Heartbeat) -> None:
    """Write the heartbeat."""
    client.set(keys.worker(_name(heartbeat)), json.dumps(asdict(heartbeat)), ex=TTL_S)
    client.sadd(keys.WORKERS, _name(heartbeat))


def is_draining(client: Redis, node: str, pid: int) -> bool:
    """Return whether the worker of that name and process, on this machine, is leaving."""
    name = keys.worker(f"{node}:{socket.gethostname()}:{pid}")
    with contextlib.suppress(ValidationError):
        return _HEARTBEAT.validate_json(cast(bytes, client.getrange(name, 0, _LONGEST))).draining
    return False


def leave(client: Redis, heartbeat: Heartbeat) -> None:
    """Remove the heartbeat."""
    client.delete(keys.worker(_name(heartbeat)))
    client.srem(keys.WORKERS, _name(heartbeat))


def _name(heartbeat: Heartbeat) -> str:
    return f"{heartbeat.node}:{heartbeat.host}:{heartbeat.pid}"


def alive(client: Redis) -> list[Heartbeat]:
    """Return the workers with a heartbeat, by name, except those of versions that describe themselves otherwise.

    A heartbeat that does not expire within TTL_S is none of a worker's.
    """
    names, prefix = sorted(bounded.members(client, keys.WORKERS)), keys.worker("").encode()
    found, gone, num_bytes = [], [], 0
    for begin in range(0, len(names), _PAGE):
        page = names[begin : begin + _PAGE]
        with client.pipeline(transaction=False) as pipe:
            for name in page:
                pipe.getrange(prefix + name, 0, _LONGEST)
                pipe.pttl(prefix + name)
            replies = pipe.execute()
        for name, value, left_ms in zip(page, replies[::2], replies[1::2], strict=True):
            if not 0 <= left_ms <= 1000 * TTL_S:
                gone.append(name)
                continue
            num_bytes += len(value)
            with contextlib.suppress(ValidationError):
                found.append(_HEARTBEAT.validate_json(value))
        if num_bytes > _MOST_BYTES:
            break
    if gone:  # lost; one that was only late adds its name again
        with contextlib.suppress(RedisError):  # the caller may not have the right
            client.srem(keys.WORKERS, *gone)
    return found

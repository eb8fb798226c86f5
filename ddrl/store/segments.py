"""Segments of play: which run a process plays next, which processes play, and what keeps them from playing.

A process that takes a rollout message asks the server for a run (`choose`), plays a segment of it, and ends the segment
(`end`). A process that is noted as playing though it is gone was lost, see `note_lost`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from pydantic import TypeAdapter
from redis import Redis
from redis.exceptions import RedisError

from ddrl.store import bounded, keys, runs
from ddrl.store.connection import call, execute
from ddrl.store.untrusted import Count, Name, number, short_text

DRAIN_S = 60  # after which a node that was leaving is forgotten
REASON_LENGTH = 500
USEFUL_SHARE = 0.75  # of its time that a process shall play; more processes would only wait
LEVELS = {"high": 0, "normal": 1, "low": 2}
"""Priorities of runs: the lower level plays first."""


@dataclass(frozen=True)
class Process:
    """A process, or a thread of a pool of threads, that plays one segment at a time.

    Attributes:
        node: of the worker.
        pid: on its machine.
        thread: of the process.
    """

    node: str
    pid: int
    thread: int = 0

    @classmethod
    def this(cls, node: str) -> Process:
        """Return the calling process and thread, of a worker."""
        return cls(node, os.getpid(), threading.get_ident())

    def __str__(self) -> str:
        return f"{self.pid}.{self.thread}@{self.node}"


@dataclass(frozen=True)
class Playing:
    """A process that plays a run.

    Attributes:
        node, pid: see `Process`.
        since_ms: server's clock.
        task: id of its Celery task.
    """

    node: Name
    pid: Count
    since_ms: Count
    task: Name = ""


_NAME, _PLAYING = TypeAdapter(Name), TypeAdapter(Playing)


@dataclass(frozen=True)
class RunLoad:
    """An active run's part of the fleet.

    Attributes:
        run: its id.
        weight, priority, queue: see `RunState`.
        process_ms: time that processes have spent on it.
        wants: more processes are of use now: it has a learner, weights, and steps left.
        virtual_ms: process time charged, divided by weight: the run with the least plays next.
        mean_processes: that played it, mean of the last half minute.
        wanted_processes: for which the fleet should have room; 0 without a learner. Those that play get more until they
            wait for their learner, or for room, a quarter of their time.
        limit_s: after which a task that plays it is ended.
    """

    run: str
    weight: float
    priority: str
    queue: str
    process_ms: int
    wants: bool
    virtual_ms: float
    mean_processes: float
    wanted_processes: int
    limit_s: float


_LOAD_FIELDS = (
    *("status", "weight", "priority", "queue", "allowance", "version", "limit_ms"),
    *("mean_processes", "useful_processes"),
)
_LOAD_COUNTS = ("process_ms", "appended_steps", "virtual_ms")


def active(client: Redis) -> list[RunLoad]:
    """Return the active runs, oldest first."""
    names = runs.open_names(client)
    with client.pipeline(transaction=False) as pipe:
        for run in names:
            pipe.hmget(keys.state(run), _LOAD_FIELDS)
            bounded.values(pipe, keys.counts(run), _LOAD_COUNTS)
            pipe.exists(keys.lease(run))
        replies = execute(pipe)
    found = []
    for run, values, counts, leased in zip(names, replies[::3], replies[1::3], replies[2::3], strict=True):
        field = dict(zip(_LOAD_FIELDS, values, strict=True))
        process_ms, steps, virtual_ms = map(number, counts)
        if field["status"] != b"active":
            continue
        useful = float(field["useful_processes"] or 0.0)
        has_steps = int(field["allowance"] or 0) > steps
        found.append(
            RunLoad(
                run=run,
                weight=float(field["weight"] or 1.0),
                priority=(field["priority"] or b"normal").decode(),
                queue=(field["queue"] or b"").decode(),
                process_ms=int(process_ms),
                wants=bool(leased) and has_steps and int(field["version"] or -1) >= 0,
                virtual_ms=virtual_ms,
                mean_processes=float(field["mean_processes"] or 0.0),
                wanted_processes=math.ceil(max(1.0, useful / USEFUL_SHARE)) if leased else 0,
                limit_s=int(field["limit_ms"] or 0) / 1e3,
            )
        )
    return found


def waiting(client: Redis, queue: str) -> int:
    """Return how many rollout messages wait in a queue."""
    return client.llen(keys.queue(queue))


def choose(
    client: Redis,
    process: Process,
    queues: Iterable[str],
    *,
    task: str = "",
    limit_s: float | None = None,
    cannot_play: Iterable[str] = (),
) -> str | None:
    """Choose the run that a process plays next, and note that it does.

    Args:
        client: connection to the server.
        process: that is free.
        queues: that its worker serves.
        task: id of its Celery task.
        limit_s: hard time limit of the task; runs that may need longer are left out.
        cannot_play: runs to leave out.

    Returns:
        The run; "" if only those that may need longer are left, None if there is none.
    """
    of_run = [key("%s") for key in (keys.state, keys.lease, keys.playing, keys.draining, keys.counts)]
    who = [str(process), process.node, process.pid, task]
    most_ms, served = 10**12 if limit_s is None else round(1e3 * limit_s), list(queues)
    args = [keys.OPEN, *of_run, *who, most_ms, len(served), *served, *cannot_play]
    reply = cast("bytes | None", call(client, "choose_run", args=args))
    return None if reply is None else reply.decode()


def end(
    client: Redis,
    run: str,
    process: Process,
    *,
    spent_ms: int = 0,
    process_ms: int = 0,
    allowance_wait_ms: int = 0,
    room_wait_ms: int = 0,
) -> None:
    """Note that a process has ended its segment; again, it changes nothing.

    Args:
        client: connection to the server.
        run: that was played.
        process: that played it.
        spent_ms: time of the process for the segment, all in all.
        process_ms, allowance_wait_ms, room_wait_ms: what no append has reported yet: of its time, and of its waits.
    """
    args = [str(process), spent_ms, process_ms, allowance_wait_ms, room_wait_ms]
    call(client, "end_segment", [keys.state(run), keys.playing(run), keys.counts(run)], args)


def playing(client: Redis, run: str) -> dict[str, Playing]:
    """Return the processes that play the run now; entries that cannot be read are deleted where the caller may.

    Earlier versions of ddrl stored node, pid and time as text; their processes are gone, see `note_lost`.
    """
    found, unreadable = {}, []
    for process, value in bounded.fields(client, keys.playing(run)).items():
        try:
            if not value.startswith(b"{"):
                row = zip(("node", "pid", "since_ms"), value.decode().rsplit(" ", 2), strict=True)
                value = json.dumps(dict(row)).encode()
            found[_NAME.validate_python(process)] = _PLAYING.validate_json(value)
        except ValueError:
            unreadable.append(process)
    if unreadable:
        with contextlib.suppress(RedisError):
            client.hdel(keys.playing(run), *unreadable)
    return found


def run_of_task(client: Redis, task: str) -> str | None:
    """Return the run that a Celery task plays, if any."""
    for run in runs.open_names(client):
        if any(one.task == task for one in playing(client, run).values()):
            return run
    return None


def note_lost(client: Redis, run: str, processes: Sequence[str], reason: str) -> int:
    """Note processes that are gone without having ended their segments; return how many of them were playing."""
    script_keys = [keys.counts(run), keys.playing(run), keys.journal(run)]
    args = [reason[:REASON_LENGTH], runs.JOURNAL_LENGTH, *processes]
    return cast(int, call(client, "note_lost", script_keys, args))


def note_crash(client: Redis, run: str, reason: str, *, report_id: str = "") -> int:
    """Note that a process could not play the run or ended meanwhile; return such crashes since the last fragment.

    Args:
        client: connection to the server.
        run: its id.
        reason: for the journal.
        report_id: 16 random characters, by which a report that is sent again counts once; by default new ones.
    """
    script_keys = [keys.state(run), keys.journal(run), keys.counts(run)]
    args = [reason[:REASON_LENGTH], runs.JOURNAL_LENGTH, report_id or secrets.token_hex(8)]
    return cast(int, call(client, "note_crash", script_keys, args))


def drain(client: Redis, node: str) -> None:
    """Let the segments of a node end at their next append; to be repeated while it leaves, as runs may begin."""
    with client.pipeline(transaction=False) as pipe:
        for run in runs.active_names(client):
            pipe.sadd(keys.draining(run), node)
            pipe.expire(keys.draining(run), DRAIN_S)
        pipe.execute()


def stay(client: Redis, node: str) -> None:
    """Forget that a node was leaving: another worker has started under the same name."""
    for run in runs.active_names(client):
        client.srem(keys.draining(run), node)


def note_refusal(client: Redis, run: str, host: str, reason: str) -> None:
    """Note why a machine does not play the run."""
    script_keys = [keys.state(run), keys.refusals(run), keys.journal(run)]
    call(client, "note_refusal", script_keys, [host, reason[:REASON_LENGTH], runs.JOURNAL_LENGTH])


def withdraw_refusal(client: Redis, run: str, host: str) -> None:
    """Forget that a machine refused the run: it plays it now."""
    client.hdel(keys.refusals(run), host)


def refusals(client: Redis, run: str) -> dict[str, str]:
    """Return, by host, why it does not play the run."""
    found = bounded.fields(client, keys.refusals(run))
    return {short_text(host): short_text(why) for host, why in found.items()}

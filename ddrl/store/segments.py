"""Segments of play: messages that wait, producers that play, machines that leave, processes that end without a word.

A rollout message may be lost or come twice, so the count of those waiting is only a guide, which the run's dispatcher
sets right now and then. A producer is `playing` from the beginning of a segment to its end; one that is still there
when its process is gone ended without a word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from redis import Redis

from ddrl.store import keys, runs
from ddrl.store.run_state import Rival, ask_rivals, rivals

DRAIN_S = 60  # after which a node that was leaving is forgotten
REASON_LENGTH = 500


@dataclass(frozen=True)
class Playing:
    """Who plays for a producer.

    Attributes:
        node: of the worker.
        pid: of the process on its machine.
        since_s: server's clock.
    """

    node: str
    pid: int
    since_s: float


_SENT = "if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HINCRBY', KEYS[1], 'waiting', ARGV[1]) end"


@dataclass(frozen=True)
class Standing:
    """What a dispatcher tells of its run.

    Attributes:
        run: its id.
        ahead_ms, recent: see `Rival`.
    """

    run: str
    ahead_ms: int
    recent: float


_TAKEN = """
-- KEYS: state. One message less, never below nought; nothing of a run gone.
if redis.call('EXISTS', KEYS[1]) == 0 then return end
redis.call('HINCRBY', KEYS[1], 'begun', 1)
if tonumber(redis.call('HGET', KEYS[1], 'waiting') or 0) > 0 then redis.call('HINCRBY', KEYS[1], 'waiting', -1) end
"""

_RECOUNT = """
-- KEYS: state, list of a queue. ARGV: the run as Celery writes arguments into a message.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local num = 0
for _, message in ipairs(redis.call('LRANGE', KEYS[2], 0, -1)) do
  if string.find(message, ARGV[1], 1, true) then num = num + 1 end
end
redis.call('HSET', KEYS[1], 'waiting', num)
return num
"""

_TELL = """
-- KEYS: state. ARGV: ms ahead, recent share. Nothing of a run gone.
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('HSET', KEYS[1], 'ahead_ms', ARGV[1], 'recent', ARGV[2])
end
"""

_PLAYING = """
-- KEYS: playing, state. ARGV: producer, node, pid. Nothing of a run gone.
if redis.call('EXISTS', KEYS[2]) == 0 then return end
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. now)
"""

_CRASHED = """
-- KEYS: state, journal. ARGV: reason, cap of the journal. Crashes since the last fragment; nothing of a run gone.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'error', ARGV[1])
redis.call('HINCRBY', KEYS[1], 'crashes_total', 1)
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'event', 'crashed', 'reason', ARGV[1])
return redis.call('HINCRBY', KEYS[1], 'crashes', 1)
"""

_LOST = """
-- KEYS: playing, state, journal. ARGV: cap of the journal, reason, producers...
local num = 0
for i = 3, #ARGV do num = num + redis.call('HDEL', KEYS[1], ARGV[i]) end
if num > 0 then
  redis.call('HINCRBY', KEYS[2], 'lost_producers', num)
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[1], '*', 'event', 'lost', 'reason', ARGV[2], 'producers', num)
end
return num
"""

_REFUSED = """
-- KEYS: refusals, journal, state. ARGV: host, reason, cap of the journal. The journal hears of it once.
if redis.call('EXISTS', KEYS[3]) == 0 then return end
local before = redis.call('HGET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
if before ~= ARGV[2] then
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'event', 'refused', 'reason', ARGV[2])
end
"""


def sent(client: Redis, run: str, num: int) -> None:
    """Note messages, before they are sent."""
    client.eval(_SENT, 1, keys.state(run), num)


def begin(client: Redis, run: str) -> None:
    """Note that a worker took a message."""
    client.eval(_TAKEN, 1, keys.state(run))


def waiting(client: Redis, run: str, queue: str, priority: str = "normal") -> int:
    """Messages of the run that wait in `queue`."""
    with client.pipeline(transaction=False) as pipe:
        pipe.llen(keys.queue(queue, priority))
        pipe.hget(keys.state(run), "waiting")
        length, count = pipe.execute()
    if length == 0 and int(count or 0):
        client.hset(keys.state(run), "waiting", 0)
        return 0
    return int(count or 0)


def recount(client: Redis, run: str, queue: str, priority: str = "normal") -> int:
    """Set the count right by the messages that do wait in a queue; messages under way to a task are missed.

    Only the run's one sender may call it, between two messages.
    """
    return cast(int, client.eval(_RECOUNT, 2, keys.state(run), keys.queue(queue, priority), f"'{run}'"))


def look(
    client: Redis, among: Sequence[str], queue: str, priority: str, told: Standing
) -> tuple[list[Rival], int]:
    """What a dispatcher must know, in one round trip.

    Args:
        client: connection to the server.
        among: runs that may be active.
        queue, priority: of the dispatcher's run.
        told: what others may know of that run.

    Returns:
        The active ones among the runs, and how many messages of whatever run wait in the queue.
    """
    with client.pipeline(transaction=False) as pipe:
        pipe.eval(_TELL, 1, keys.state(told.run), told.ahead_ms, f"{told.recent:.4f}")
        pipe.llen(keys.queue(queue, priority))
        ask_rivals(pipe, among)
        _, length, *replies = pipe.execute()
    return rivals(among, replies), length


def playing(client: Redis, run: str, producer: int, *, node: str, pid: int) -> None:
    """Note that a producer plays from now on."""
    client.eval(_PLAYING, 2, keys.playing(run), keys.state(run), producer, node, pid)


def end(
    client: Redis,
    run: str,
    producer: int,
    *,
    process_ms: int = 0,
    allowance_wait_ms: int = 0,
    room_wait_ms: int = 0,
) -> None:
    """Note that it does not any more, and the time of the process that no append has told."""
    told = {"process_ms": process_ms, "allowance_wait_ms": allowance_wait_ms, "room_wait_ms": room_wait_ms}
    with client.pipeline(transaction=False) as pipe:
        pipe.hdel(keys.playing(run), str(producer))
        pipe.exists(keys.state(run))
        _, is_there = pipe.execute()
    with client.pipeline(transaction=False) as pipe:
        for name, value in told.items():
            if value and is_there:
                pipe.hincrby(keys.state(run), name, value)
        pipe.execute()


def players(client: Redis, run: str) -> dict[int, Playing]:
    """Who plays the run now, by producer; what cannot be read, no worker of this version wrote."""
    raw = cast("dict[bytes, bytes]", client.hgetall(keys.playing(run)))
    found = {}
    for producer, value in raw.items():
        with contextlib.suppress(ValueError):
            node, pid, since_ms = value.decode().rsplit(" ", 2)
            found[int(producer)] = Playing(node, int(pid), int(since_ms) / 1e3)
    return found


def note_crash(client: Redis, run: str, reason: str) -> int:
    """Note that a process could not play the run, or ended in playing it; such crashes since the last fragment."""
    script_keys = [keys.state(run), keys.journal(run)]
    return cast(int, client.eval(_CRASHED, 2, *script_keys, reason[:REASON_LENGTH], runs.JOURNAL_LENGTH))


def lost(client: Redis, run: str, producers: Sequence[int], reason: str) -> int:
    """Note producers that ended without a word; how many of them were still thought to play."""
    script_keys = [keys.playing(run), keys.state(run), keys.journal(run)]
    return cast(
        int, client.eval(_LOST, 3, *script_keys, runs.JOURNAL_LENGTH, reason[:REASON_LENGTH], *producers)
    )


def drain(client: Redis, node: str) -> None:
    """Have the segments of a node end at their next append, whatever they play; to be repeated while it leaves."""
    with client.pipeline(transaction=False) as pipe:
        for run in runs.active_names(client):
            pipe.sadd(keys.draining(run), node)
            pipe.expire(keys.draining(run), DRAIN_S)
        pipe.execute()


def stay(client: Redis, node: str) -> None:
    """Forget that a node of this name was leaving: one that began again under the same name plays on."""
    with client.pipeline(transaction=False) as pipe:
        for run in runs.active_names(client):
            pipe.srem(keys.draining(run), node)
        pipe.execute()


def note_refusal(client: Redis, run: str, host: str, reason: str) -> None:
    """Note why a machine does not play the run."""
    script_keys = [keys.refusals(run), keys.journal(run), keys.state(run)]
    client.eval(_REFUSED, 3, *script_keys, host, reason[:REASON_LENGTH], runs.JOURNAL_LENGTH)


def withdraw_refusal(client: Redis, run: str, host: str) -> None:
    """A machine that refused the run plays it now."""
    client.hdel(keys.refusals(run), host)


def refusals(client: Redis, run: str) -> dict[str, str]:
    """Host -> why it does not play the run."""
    raw = cast("dict[bytes, bytes]", client.hgetall(keys.refusals(run)))
    return {host.decode(): reason.decode() for host, reason in raw.items()}

"""Rollout messages: how many of a run wait in its queue.

The count goes up when messages are sent and down when one is taken. A message may be lost or come twice,
so the count is only a guide: it is set right whenever the queue is seen empty.
"""

from __future__ import annotations

from redis import Redis

from ddrl import keys

_TAKEN = """
-- KEYS: state. One message less, never below nought.
if tonumber(redis.call('HGET', KEYS[1], 'waiting') or 0) > 0 then
  return redis.call('HINCRBY', KEYS[1], 'waiting', -1)
end
return 0
"""


def sent(client: Redis, run: str, num: int) -> None:
    """Note messages, before they are sent."""
    client.hincrby(keys.state(run), "waiting", num)


def taken(client: Redis, run: str) -> None:
    """Note that a worker took one."""
    client.eval(_TAKEN, 1, keys.state(run))


def waiting(client: Redis, run: str, queue: str) -> int:
    """Messages of the run that wait in `queue`."""
    with client.pipeline(transaction=False) as pipe:
        pipe.llen(keys.queue(queue))
        pipe.hget(keys.state(run), "waiting")
        length, count = pipe.execute()
    if length == 0 and int(count or 0):
        client.hset(keys.state(run), "waiting", 0)
        return 0
    return int(count or 0)

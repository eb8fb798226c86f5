"""Deleting a run: at once for all who look, and its keys one by one after that."""

from __future__ import annotations

from typing import cast

from redis import Redis

from ddrl.store import keys, runs
from ddrl.store.connection import StoreError

DELETED_MS = 30 * 86_400_000  # for which a deleted run is known as such

_FORGET = """
-- KEYS: state, lease, runs, those that have not ended, deleted ones. ARGV: run, ms for which it is known as deleted,
-- statuses that may be deleted...
-- 1, or 0 where it may not be deleted, as somebody has resumed it meanwhile, say. Known as deleted, no learner brings
-- it back.
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
local status, may = redis.call('HGET', KEYS[1], 'status'), false
for i = 3, #ARGV do may = may or status == ARGV[i] end
if not may then return 0 end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[5], 0, now_ms - tonumber(ARGV[2]))
redis.call('ZADD', KEYS[5], now_ms, ARGV[1])
return 1
"""


def delete(client: Redis, run: str) -> int:
    """Remove an ended run with all its keys; the number of keys removed.

    Raises:
        StoreError: the run has not ended, or its learner is still at work.
        UnknownRunError: there is no such run.
    """
    now = runs.state(client, run)
    if not now.ended:
        raise StoreError(f"run {run}: is {now.status}; stop it first with `ddrl stop {run}`")
    if now.leased:
        raise StoreError(f"run {run}: its learner on {now.host} still writes its results; try again soon")
    script_keys = [keys.state(run), keys.lease(run), keys.RUNS, keys.OPEN, keys.DELETED]
    if not cast(int, client.eval(_FORGET, 5, *script_keys, run, DELETED_MS, *runs.ENDED)):
        raise StoreError(f"run {run}: goes on again; stop it first with `ddrl stop {run}`")
    removed = 1
    for key in client.scan_iter(match=keys.run_pattern(run), count=1000):
        removed += client.unlink(key)
    return removed

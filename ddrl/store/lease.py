"""One writer a run: a lease that expires, and a fencing token that the writer's changes are checked against.

Expiry permits another learner to take over; it does not revoke. So a holder whose lease lapsed while the
server was frozen goes on if nobody took it, and one that was replaced finds out at its next write.
"""

from __future__ import annotations

from typing import Any, cast

from redis import Redis
from redis.exceptions import ResponseError

from ddrl import keys
from ddrl.store.connection import StoreError

TTL_MS = 8_000

# Prepended to every script of the learner: KEYS[1] is the state hash, ARGV[1] the caller's token.
FENCE = """
if redis.call('HGET', KEYS[1], 'fence') ~= ARGV[1] then
  return redis.error_reply('FENCED another learner took over')
end
"""

_ACQUIRE = """
-- KEYS: state hash, lease string. ARGV: time to live in ms, host, folder. Returns the token, or 0 if held.
if redis.call('EXISTS', KEYS[2]) == 1 or redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local token = redis.call('HINCRBY', KEYS[1], 'fence', 1)
redis.call('HSET', KEYS[1], 'host', ARGV[2], 'folder', ARGV[3], 'reason', '')
redis.call('SET', KEYS[2], token, 'PX', ARGV[1])
return token
"""

_RENEW = FENCE + "redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2]) return 1"

_RELEASE = "if redis.call('GET', KEYS[2]) == ARGV[1] then return redis.call('DEL', KEYS[2]) end return 0"


class LeaseLostError(StoreError):
    """Another learner took the run over; this one must write nothing more."""


def acquire(client: Redis, run: str, *, host: str, folder: str, ttl_ms: int = TTL_MS) -> int | None:
    """Take the run if nobody holds it: the fencing token, or None."""
    reply = client.eval(_ACQUIRE, 2, keys.state(run), keys.lease(run), ttl_ms, host, folder)
    return cast(int, reply) or None


def renew(client: Redis, run: str, token: int, *, ttl_ms: int = TTL_MS) -> None:
    """Hold on for another `ttl_ms`.

    Raises:
        LeaseLostError: another learner took over.
    """
    fenced(client, _RENEW, [keys.state(run), keys.lease(run)], token, ttl_ms)


def release(client: Redis, run: str, token: int) -> None:
    """Let go at once, so that the next learner need not wait for the expiry."""
    client.eval(_RELEASE, 2, keys.state(run), keys.lease(run), token)


def fenced(client: Redis, script: str, script_keys: list[str], token: int, *args: Any) -> Any:
    """Run a script that begins with FENCE.

    Raises:
        LeaseLostError: the token is not the newest.
    """
    try:
        return client.eval(script, len(script_keys), *script_keys, token, *args)
    except ResponseError as error:
        if "FENCED" in str(error):
            raise LeaseLostError("another learner took this run over; this one has stopped writing") from None
        raise

"""Published weights: one key a version, the pointer moved in the same call.

The hash `weights` holds `latest`, `best`, `best_return` and a field per stored version with its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from redis import Redis

from ddrl.store import keys
from ddrl.store.leases import FENCE, fenced


@dataclass(frozen=True)
class WeightsIndex:
    """Which versions there are: -1 where there is none yet; `sizes` in bytes by version."""

    latest: int
    best: int
    best_return: float
    sizes: dict[int, int]


_PUBLISH = (
    FENCE
    + """
-- KEYS: state, weights, allowance, blob of the version, blobs to drop... ARGV: token, version, bytes, blob,
-- allowance, updates, players, then the versions to drop in the order of their keys.
redis.call('SET', KEYS[4], ARGV[4])
redis.call('HSET', KEYS[2], 'latest', ARGV[2], ARGV[2], ARGV[3])
for i = 5, #KEYS do
  redis.call('DEL', KEYS[i])
  redis.call('HDEL', KEYS[2], ARGV[i + 3])
end
local id = redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'allowance', ARGV[5], 'version', ARGV[2])
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'allowance', ARGV[5], 'allowance_id', id, 'updates', ARGV[6],
  'players', ARGV[7])
return 1
"""
)


def publish(
    client: Redis,
    run: str,
    token: int,
    *,
    version: int,
    blob: bytes,
    allowance: int,
    updates: int,
    players: int = 1,
    drop: tuple[int, ...] = (),
) -> None:
    """Store a version, move the pointer, raise the allowance and drop old versions, all or nothing.

    Raises:
        LeaseLostError: another learner took over.
    """
    script_keys = [keys.state(run), keys.weights(run), keys.allowance(run), keys.weights_blob(run, version)]
    script_keys += [keys.weights_blob(run, old) for old in drop]
    fenced(client, _PUBLISH, script_keys, token, version, len(blob), blob, allowance, updates, players, *drop)


_MARK_BEST = FENCE + "redis.call('HSET', KEYS[2], 'best', ARGV[2], 'best_return', ARGV[3]) return 1"


def mark_best(client: Redis, run: str, token: int, version: int, return_mean: float) -> None:
    """Note the best evaluated version.

    Raises:
        LeaseLostError: another learner took over.
    """
    fenced(client, _MARK_BEST, [keys.state(run), keys.weights(run)], token, version, return_mean)


def index(client: Redis, run: str) -> WeightsIndex:
    """Which versions there are."""
    raw = cast("dict[bytes, bytes]", client.hgetall(keys.weights(run)))
    sizes = {int(name): int(value) for name, value in raw.items() if name.isdigit()}
    return WeightsIndex(
        latest=int(raw.get(b"latest", -1)),
        best=int(raw.get(b"best", -1)),
        best_return=float(raw.get(b"best_return", "-inf")),
        sizes=sizes,
    )


def get(client: Redis, run: str, version: int) -> bytes | None:
    """Safetensors bytes of a version, or None when it was dropped meanwhile."""
    return cast("bytes | None", client.get(keys.weights_blob(run, version)))


def superseded(
    stored: WeightsIndex, *, keep_last: int, keep_every: int, max_bytes: int, pinned: frozenset[int]
) -> tuple[int, ...]:
    """Versions to drop: neither among the newest, nor every so-many-th within the cap, nor best, nor pinned.

    Args:
        keep_last: newest versions that stay.
        keep_every: versions divisible by this stay, the oldest of them going first beyond `max_bytes`.
        pinned: versions with an open evaluation.
    """
    newest = sorted(stored.sizes, reverse=True)
    spared = {*newest[:keep_last], stored.best, *pinned}
    drop, budget = [], max_bytes
    for version in newest[keep_last:]:
        if version in spared:
            continue
        budget -= stored.sizes[version] if version % keep_every == 0 else 0
        if version % keep_every or budget < 0:
            drop.append(version)
    return tuple(drop)

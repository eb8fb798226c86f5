"""Published weights: one key a version, the pointer moved in the same call.

The hash `weights` holds `latest`, `best`, `best_return` and a field per stored version with its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from redis import Redis

from ddrl.store import keys
from ddrl.store.leases import fenced


@dataclass(frozen=True)
class WeightsIndex:
    """Which versions there are: -1 where there is none yet; `sizes` in bytes by version."""

    latest: int
    best: int
    best_return: float
    sizes: dict[int, int]


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
    args = (version, len(blob), blob, allowance, updates, players, *drop)
    fenced(client, "publish", script_keys, token, *args)


def mark_best(client: Redis, run: str, token: int, version: int, return_mean: float) -> None:
    """Note the best evaluated version.

    Raises:
        LeaseLostError: another learner took over.
    """
    script_keys = [keys.state(run), keys.weights(run)]
    fenced(client, "set_fields", script_keys, token, "best", version, "best_return", return_mean)


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

"""The server's memory: what the active runs may need at most, against its limit.

Each learner states its run's need before it starts, so that a run is refused then, and not hours later.
"""

from __future__ import annotations

from typing import cast

from redis import Redis

from ddrl.config import ConfigError, RunConfig
from ddrl.store import connection, keys, runs
from ddrl.store.connection import call

OTHER_BYTES = 80 * 1024**2  # figures (45 MiB at their cap), logs, journal, episodes and the like, of one run
EXTRA_VERSIONS = 3  # kept besides the newest: the best one, the one being evaluated, the one being published


def needed_bytes(config: RunConfig, *, checkpoint_bytes: int, weights_bytes: int) -> int:
    """Return the most bytes that a run keeps in the server.

    Args:
        config: the run's.
        checkpoint_bytes: of one; two are there while it is replaced.
        weights_bytes: of one version.
    """
    kept = (config.weights.keep_last + EXTRA_VERSIONS) * weights_bytes + int(config.weights.max_bytes)
    return int(config.replay.max_bytes) + 2 * checkpoint_bytes + kept + OTHER_BYTES


def check(client: Redis, run: str, token: int, needed: int) -> None:
    """State the need of a run, and refuse it if the needs of all active runs exceed the server's limit.

    A run whose learner has not stated its need counts with the budget of its stream.

    Raises:
        ConfigError: they exceed it.
        LeaseLostError: another learner took over.
    """
    call(client, "set_fields", [keys.state(run)] * 2, [token, "needed_bytes", needed])
    limit = connection.maxmemory(client)
    if not limit:
        return
    others = [name for name in runs.active_names(client) if name != run]
    with client.pipeline(transaction=False) as pipe:
        for name in others:
            pipe.hmget(keys.state(name), ["needed_bytes", "max_bytes"])
        stated = cast("list[list[bytes | None]]", pipe.execute())
    taken = sum(int(need or max_bytes or 0) for need, max_bytes in stated)
    if needed + taken > limit:
        plural = "s" if len(others) > 1 else ""
        beside = f", and {len(others)} other active run{plural} {taken >> 20} MiB" if others else ""
        raise ConfigError(
            f"run {run}: needs up to {needed >> 20} MiB of the server{beside}, but its maxmemory is {limit >> 20} MiB;"
            " lower replay.max_bytes, or raise maxmemory, and continue with `ddrl resume`"
        )

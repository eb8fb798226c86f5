"""One writer a run: a lease that expires, and a fencing token that each write of the learner is checked against.

After the expiry another learner may take over; until one does, the holder goes on. A learner that was replaced gets
LeaseLostError at its next write.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from redis import Redis

from ddrl.store import connection, keys
from ddrl.store.connection import StoreError, call

log = logging.getLogger(__name__)

TTL_MS = 3_000


def acquire(
    client: Redis,
    run: str,
    *,
    host: str,
    folder: str,
    ttl_ms: int = TTL_MS,
    force: bool = False,
    after: int = 0,
) -> int | None:
    """Take the lease of a run if it is free; return the fencing token, or None.

    Args:
        force: take it even if another learner holds it, which then gets LeaseLostError.
        after: token of a local checkpoint; the new token is larger, even if the server came back older.
    """
    script_keys = [keys.state(run), keys.lease(run), keys.counts(run)]
    reply = call(client, "acquire", script_keys, [ttl_ms, host, folder, int(force), after, *keys.COUNTS])
    return cast(int, reply) or None


def renew(client: Redis, run: str, token: int, *, ttl_ms: int = TTL_MS) -> None:
    """Extend the lease by `ttl_ms`.

    Raises:
        LeaseLostError: another learner took over.
    """
    call(client, "renew", [keys.state(run), keys.lease(run)], [token, ttl_ms])


def release(client: Redis, run: str, token: int) -> None:
    """Release the lease, so that the next learner need not wait for the expiry."""
    call(client, "release", [keys.lease(run)], [token])


@contextlib.contextmanager
def kept(run: str, token: int, *, is_alive: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Renew the lease from a thread of its own while the context lasts.

    Args:
        run: its id.
        token: fencing token.
        is_alive: returns whether the learner makes progress; while it does not, the lease may expire.
    """
    stop = threading.Event()

    def keep() -> None:
        client, was_alive = connection.connect(), True
        while not stop.wait(TTL_MS / 4e3):
            if is_alive():
                was_alive = True
                with contextlib.suppress(StoreError, *connection.OUTAGES):
                    renew(client, run, token)
            elif was_alive:
                was_alive = False
                log.error("%s: this learner hangs; another one may take the run over", run)
        client.close()

    keeper = threading.Thread(target=keep, name="lease", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        stop.set()
        keeper.join(1.0)  # longer where the server does not answer


def free(client: Redis, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return those of some runs whose lease is free, each with the host that asks for it, or ""."""
    with client.pipeline(transaction=False) as pipe:
        for run in names:
            pipe.exists(keys.lease(run))
            pipe.hget(keys.state(run), "handover")
        replies = pipe.execute()
    found = zip(names, replies[::2], replies[1::2], strict=True)
    return [(run, (host or b"").decode()) for run, held, host in found if not held]

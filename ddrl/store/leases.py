"""One writer a run: a lease that expires, and a fencing token that the writer's changes are checked against.

Expiry permits another learner to take over; it does not revoke. So a holder whose lease lapsed while the
server was frozen goes on if nobody took it, and one that was replaced finds out at its next write.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from redis import Redis
from redis.exceptions import ResponseError

from ddrl.store import connection, keys
from ddrl.store.connection import StoreError, call

log = logging.getLogger(__name__)

TTL_MS = 3_000


class LeaseLostError(StoreError):
    """Another learner took the run over; this one must write nothing more."""


class RunGoneError(StoreError):
    """The server does not know the run any more: it came back empty, is another one, or the run was deleted."""


def acquire(
    client: Redis, run: str, *, host: str, folder: str, ttl_ms: int = TTL_MS, force: bool = False
) -> int | None:
    """Take the run if nobody holds it: the fencing token, or None.

    Args:
        force: take it from its holder, who finds out at its next write.
    """
    script_keys = [keys.state(run), keys.lease(run)]
    reply = call(client, "acquire", script_keys, [ttl_ms, host, folder, int(force)])
    return cast(int, reply) or None


def renew(client: Redis, run: str, token: int, *, ttl_ms: int = TTL_MS) -> None:
    """Hold on for another `ttl_ms`.

    Raises:
        LeaseLostError: another learner took over.
    """
    fenced(client, "renew", [keys.state(run), keys.lease(run)], token, ttl_ms)


def release(client: Redis, run: str, token: int) -> None:
    """Let go at once, so that the next learner need not wait for the expiry."""
    call(client, "release", [keys.lease(run)], [token])


@contextlib.contextmanager
def kept(run: str, token: int, *, is_alive: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Hold on to a run while the context lasts, from a thread of its own, whatever else takes long.

    Whoever was replaced hears of it at his own next write.

    Args:
        run: its id.
        token: fencing token.
        is_alive: whether the holder still does anything; while it does not, the lease is left to expire.
    """
    left = threading.Event()

    def keep() -> None:
        client, was_alive = connection.connect(), True
        while not left.wait(TTL_MS / 4e3):
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
        left.set()
        keeper.join(1.0)  # longer where the server does not answer


@dataclass(frozen=True)
class Word:
    """What a run's holder must hear of.

    Attributes:
        status: None where the run is gone.
        config_version: of its settings.
        asker: who wants the run.
        version: latest of the weights, as the server knows; -1: none.
        fragments: appended, as the server knows.
    """

    status: str | None
    config_version: int
    asker: str
    version: int
    fragments: int


def word(client: Redis, run: str) -> Word:
    """What the server says of a run now; workers write the same hash, so no number there is taken on trust."""
    names = ["status", "config_version", "handover", "version", "appended_fragments"]
    raw = cast("list[bytes | None]", client.hmget(keys.state(run), names))
    status, config, asker, version, fragments = (
        None if value is None else value.decode(errors="replace") for value in raw
    )

    def number(text: str | None, default: int) -> int:
        return int(text) if text and text.isascii() and text.isdigit() and len(text) < 20 else default

    return Word(status, number(config, 0), asker or "", number(version, -1), number(fragments, 0))


def free(client: Redis, names: Sequence[str]) -> list[tuple[str, str]]:
    """Those of some runs that nobody holds, and who asks for them, if anybody does."""
    with client.pipeline(transaction=False) as pipe:
        for run in names:
            pipe.exists(keys.lease(run))
            pipe.hget(keys.state(run), "handover")
        replies = pipe.execute()
    found = zip(names, replies[::2], replies[1::2], strict=True)
    return [(run, (host or b"").decode()) for run, held, host in found if not held]


def fenced(client: Redis, name: str, script_keys: list[str], token: int, *args: Any) -> Any:
    """Run the fenced script scripts/<name>.lua as the holder of `token`.

    Raises:
        LeaseLostError: the token is not the newest.
        RunGoneError: the run is not there, or is as it was before the token was given.
    """
    try:
        return call(client, name, script_keys, [token, *args])
    except ResponseError as error:
        if "FENCED" in str(error):
            raise LeaseLostError("another learner took this run over; this one has stopped writing") from None
        if "GONE" in str(error):
            raise RunGoneError(
                f"{script_keys[0]}: is gone from the server, or older; was it restarted without its data?"
            ) from None
        raise

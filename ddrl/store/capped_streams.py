"""Helpers for capped streams: append to a run's logs and journal, read any of them."""

from __future__ import annotations

from typing import Any, cast

from redis import Redis

from ddrl.store import bounded, keys
from ddrl.store.connection import call
from ddrl.store.untrusted import text

DAY_MS = 86_400_000


def latest(client: Redis) -> bytes:
    """Return an id that the server's clock does not give before tomorrow; a worker may write entries with any id."""
    seconds, _ = client.time()
    return b"%d-0" % (1000 * seconds + DAY_MS)


def day_after(entry_id: bytes) -> bytes:
    """Return the id a day after an entry's, which may be ahead of the clock: new entries come after it."""
    return b"%d-0" % (int(entry_id.split(b"-")[0]) + DAY_MS)


def is_exhausted(client: Redis, key: str) -> bool:
    """Return whether a stream takes no entry before tomorrow, for a worker has written one with a late id."""
    if not client.exists(key):
        return False
    last = cast("dict[str, bytes]", client.xinfo_stream(key))["last-generated-id"]
    return int(last.split(b"-")[0]) > int(latest(client).split(b"-")[0])


def add(client: Redis, run: str, key: str, *, length: int, **fields: Any) -> None:
    """Append an entry to a stream of a run, and trim it to about `length`; do nothing if the run is gone."""
    call(client, "add_line", [keys.state(run), key], [length, fields])


def read(client: Redis, key: str, after: bytes = b"0-0", *needed: str) -> tuple[list[dict[str, Any]], bytes]:
    """Return the entries after an id, oldest first, and the last id: `after` if there is nothing new.

    Each entry has `time_s` (server's clock) and its fields as text. Entries without the `needed` fields are left out.
    """
    raw, last = bounded.newest(client, key, after, latest(client))
    rows = []
    for entry_id, fields in raw:
        texts = {text(name): text(value) for name, value in fields.items()}
        texts.pop("time_s", None)
        if texts.keys() >= {*needed}:
            rows.append({"time_s": int(entry_id.split(b"-")[0]) / 1e3, **texts})
    return rows, last

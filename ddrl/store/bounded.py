"""Read keys that a worker may fill, and no more of them than fits in memory.

What ddrl itself writes is far below the bounds. Of a key beyond them only a part is read, as if the rest were missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from redis import Redis
from redis.client import Pipeline

from ddrl.store.connection import call

MOST = 50_000  # members of a hash or set
MOST_PARTS = 300_000  # ids, fields and values of a stream's entries
MOST_BYTES = 32 * 1024**2
PAGE = 10_000  # keys that a request for names looks at
LONGEST = 16 * 1024  # bytes of a member, a value
LONGEST_ENTRY = 512 * 1024  # of a stream: the result of 10,000 episodes has half of it

Entry = tuple[bytes, dict[bytes, bytes]]


def values(client: Redis | Pipeline, key: str, names: Iterable[str | bytes]) -> list[bytes | None]:
    """Return the values of these fields of a hash; None for one that is missing or too long.

    In a pipeline the reply is that list.
    """
    return cast("list[bytes | None]", call(client, "read_fields", [key], [LONGEST, *names]))


def members(client: Redis, key: str) -> list[bytes]:
    """Return the members of a set."""
    return cast("list[bytes]", call(client, "read_all", [key], ["SSCAN", MOST, MOST_BYTES, LONGEST]))


def fields(client: Redis, key: str) -> dict[bytes, bytes]:
    """Return the fields of a hash."""
    return paired(ask_fields(client, key))


def ask_fields(client: Redis | Pipeline, key: str) -> Any:
    """Ask for the fields of a hash in a pipeline, where the reply is for `paired`."""
    return call(client, "read_all", [key], ["HSCAN", MOST, MOST_BYTES, LONGEST])


def paired(reply: Sequence[bytes]) -> dict[bytes, bytes]:
    """Return fields and values that follow each other as a mapping."""
    return dict(zip(reply[::2], reply[1::2], strict=True))


def newest(client: Redis, key: str, after: bytes, until: bytes) -> tuple[list[Entry], bytes]:
    """Return the newest entries of a stream after one id and up to another, oldest first, and the last id there.

    The last id is `after` if there is nothing new.
    """
    last, entries = call(client, "read_newest", [key], [after, until, MOST_PARTS, MOST_BYTES, LONGEST_ENTRY])
    return [(entry_id, paired(parts)) for entry_id, parts in reversed(entries)], last or after


def names(client: Redis, pattern: str) -> Iterator[bytes]:
    """Yield the names of the keys that match a pattern, as SCAN does; those with longer names than ddrl's are deleted.

    Args:
        client: of a user that may scan.
        pattern: as of SCAN.
    """
    cursor, found = b"0", list[bytes]()
    while True:
        cursor, found = cast(Any, call(client, "scan_names", args=[cursor, pattern, PAGE]))
        yield from found
        if cursor == b"0":
            return

"""The learner's metrics: one JSON row an entry, capped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from redis import Redis

from ddrl.store import capped_streams, keys
from ddrl.store.connection import call

LENGTH = 20_000


def add(client: Redis, run: str, token: int, row: Mapping[str, float]) -> None:
    """Append a row.

    Raises:
        LeaseLostError: another learner took over.
    """
    call(client, "add_metrics", [keys.state(run), keys.metrics(run)], [token, LENGTH, json.dumps(row)])


def read(client: Redis, run: str, after: bytes = b"0-0") -> tuple[list[dict[str, Any]], bytes]:
    """Return the rows after an entry, oldest first, each with `time_s` (server's clock), and the last entry's id."""
    rows, last_id = capped_streams.read(client, keys.metrics(run), after)
    return [{"time_s": row["time_s"], **json.loads(row["row"])} for row in rows], last_id


def last(client: Redis, run: str) -> dict[str, Any]:
    """Return the newest row, or an empty one."""
    raw = cast("list[Any]", client.xrevrange(keys.metrics(run), count=1))
    return json.loads(raw[0][1][b"row"]) if raw else {}

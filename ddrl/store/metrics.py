"""The learner's figures: one JSON row an entry, capped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from redis import Redis

from ddrl.store import keys
from ddrl.store.leases import fenced

LENGTH = 50_000


def add(client: Redis, run: str, token: int, row: Mapping[str, float]) -> None:
    """Append a row.

    Raises:
        LeaseLostError: another learner took over.
    """
    fenced(client, "add_metrics", [keys.state(run), keys.metrics(run)], token, LENGTH, json.dumps(row))


def read(client: Redis, run: str, after: bytes = b"0-0") -> tuple[list[dict[str, Any]], bytes]:
    """Rows after an entry, oldest first, each with `time_s` (server's clock); and the last entry's id."""
    raw = cast("list[Any]", client.xrange(keys.metrics(run), min=b"(" + after))
    rows = [
        {"time_s": int(entry_id.split(b"-")[0]) / 1e3, **json.loads(fields[b"row"])}
        for entry_id, fields in raw
    ]
    return rows, raw[-1][0] if raw else after


def last(client: Redis, run: str) -> dict[str, Any]:
    """The newest row, or an empty one."""
    raw = cast("list[Any]", client.xrevrange(keys.metrics(run), count=1))
    return json.loads(raw[0][1][b"row"]) if raw else {}

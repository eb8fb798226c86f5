"""The learner's metrics: one JSON row an entry, capped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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


def at(client: Redis, names: Sequence[str], times: Sequence[Sequence[float]]) -> list[list[dict[str, Any]]]:
    """Return, for each run, its newest row at each of some times (server's clock, seconds), in one request."""
    with client.pipeline(transaction=False) as pipe:
        for run, moments in zip(names, times, strict=True):
            for moment in moments:
                pipe.xrevrange(keys.metrics(run), max=f"{int(1e3 * moment)}-{2**64 - 1}", count=1)
        found = iter(pipe.execute())
    entries = [[entry for _ in moments for entry in next(found)] for moments in times]
    return [[json.loads(fields[b"row"]) for _, fields in some] for some in entries]

"""A run's history from its beginning, thinned: what the capped streams of metrics and episodes hold no more.

A row is kept where the run is GROWTH further than at the row kept before it. So the rows are as close as anyone can see
in a curve of the whole run, and their number, a few thousand, grows with the logarithm of its length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from redis import Redis

from ddrl.store import keys
from ddrl.store.connection import call

Row = dict[str, Any]

GROWTH = 1.002
LENGTH = 30_000  # rows of both tables; more than any run has
TABLES = ("metrics", "episodes")
BATCH = 500  # rows added at once


class History:
    """Adds rows to a run's history.

    Args:
        client: connection to the server.
        run: its id.
        token: of the learner, who alone writes it.
    """

    def __init__(self, client: Redis, run: str, token: int) -> None:
        self._held = client, run, token
        self._seen_s, self._reached = dict.fromkeys(TABLES, -1.0), dict.fromkeys(TABLES, -1.0)
        for name, rows in read(client, run).items():
            for row in rows[-1:]:
                self._seen_s[name], self._reached[name] = row["time_s"], _progress(row)

    def add(self, tables: Mapping[str, Sequence[Row]]) -> None:
        """Keep some of the rows of TABLES, oldest first; those seen before are left out.

        Raises:
            LeaseLostError: another learner took over.
        """
        client, run, token = self._held
        kept = [(name, row) for name in TABLES for row in tables[name] if self._is_kept(name, row)]
        for begin in range(0, len(kept), BATCH):
            texts = [text for name, row in kept[begin : begin + BATCH] for text in (name, json.dumps(row))]
            call(client, "add_history", [keys.state(run), keys.history(run)], [token, LENGTH, *texts])

    def _is_kept(self, name: str, row: Row) -> bool:
        reached, progress = self._reached[name], _progress(row)
        if row["time_s"] <= self._seen_s[name]:
            return False
        self._seen_s[name] = row["time_s"]
        # Less than before: after a return to an older checkpoint.
        is_further = progress > GROWTH * reached or progress < reached
        if is_further:
            self._reached[name] = progress
        return is_further


def _progress(row: Row) -> float:
    """Return what grows from row to row while a run plays or learns."""
    return float(row["env_steps"] + row.get("updates", 0))


def read(client: Redis, run: str) -> dict[str, list[Row]]:
    """Return the rows of TABLES, oldest first."""
    found: dict[str, list[Row]] = {name: [] for name in TABLES}
    for _, fields in cast("list[Any]", client.xrange(keys.history(run))):
        found[fields[b"table"].decode()].append(json.loads(fields[b"row"]))
    return found

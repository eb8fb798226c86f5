"""The learner's rows of the ledger (`ddrl.store.ledger`).

A collector numbers its fragments from 0. A number seen before is a duplicate, and a gap in the numbers means that
fragments left the stream unread.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import astuple, replace

from ddrl.replay.reader import Decoded
from ddrl.store.checkpoints import Counters
from ddrl.store.ledger import ENDED, MAX_PRODUCERS, UNKNOWN, Row, sum_rows

MAX_MISSING = 2**32  # in one gap: a worker may write any number


class LedgerRows:
    """Rows by producer, and the last entry that they include.

    Training thread: `count`. Service thread: `changes`, `put_back`, `fold`. The row of UNKNOWN counts duplicates, and
    entries that no append wrote.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # keeps rows and cursor consistent for readers
        self._rows: dict[int, Row] = {}
        self._changed: dict[int, Row] = {}
        self.cursor = b"0-0"
        """The last entry taken from the stream."""
        self.consumed = self.refused = 0
        self.fragments = 0
        """Appended in all, as far as the stream was read."""

    @property
    def rows(self) -> dict[int, Row]:
        """A copy of the rows by producer."""
        with self._lock:
            return dict(self._rows)

    def objection(self, entry: Decoded) -> str:
        """Return why the entry is not a new fragment; "" if it is new."""
        if min(entry.producer, entry.incarnation, entry.seq) < 0:
            return "no append wrote it"
        newest = self._newest(entry)
        if entry.seq <= newest:
            return f"producer {entry.producer}: fragment {entry.seq} is repeated, its newest is {newest}"
        if entry.producer not in self._rows and len(self._rows) > MAX_PRODUCERS:
            return f"there are more than {MAX_PRODUCERS} producers"
        return ""

    def count(self, entry: Decoded, *, consumed: bool) -> str:
        """Count an entry; call it in the order of the stream.

        Args:
            entry: as read.
            consumed: admitted, not refused.

        Returns:
            A warning if fragments before it are missing, else "".
        """
        is_fragment = not self.objection(entry)
        missing = min(entry.seq - self._newest(entry) - 1, MAX_MISSING) if is_fragment else 0
        producer = entry.producer if is_fragment else UNKNOWN
        with self._lock:
            row = sum_rows(self._rows.get(producer, Row()), Row(int(consumed), int(not consumed), missing))
            if is_fragment:
                row = replace(row, incarnation=entry.incarnation, last_seq=entry.seq)
            self._rows[producer] = self._changed[producer] = row
            self.cursor = entry.entry_id
        self.consumed += consumed
        self.refused += not consumed
        self.fragments += (1 + missing) * is_fragment
        if not missing:
            return ""
        which = f"{missing} fragment{'s' * (missing > 1)} of producer {producer} before number {entry.seq}"
        return f"{which} left the stream unread"

    def changes(self) -> tuple[dict[int, Row], bytes]:
        """Return the rows that changed since the last call, and the last entry that they include."""
        with self._lock:
            changed, self._changed = self._changed, {}
            return changed, self.cursor

    def put_back(self, changed: Mapping[int, Row]) -> None:
        """Queue `changes` again after a failed write; newer rows win."""
        with self._lock:
            self._changed = {**changed, **self._changed}

    def fold(self, folded: Collection[int]) -> None:
        """Add the rows of these producers to the row ENDED."""
        with self._lock:
            for producer in folded:
                row = sum_rows(self._rows.get(ENDED, Row()), self._rows.pop(producer))
                self._rows[ENDED] = self._changed[ENDED] = row
                self._changed.pop(producer, None)

    def state(self) -> dict[str, tuple[int, ...]]:
        """Return the field `ledger` of a checkpoint's `Counters`."""
        return {str(producer): astuple(row) for producer, row in self.rows.items()}

    def load(self, counters: Counters) -> None:
        """Continue from a checkpoint."""
        self.cursor = counters.cursor.encode()
        self.consumed, self.refused = counters.admitted, counters.dead
        self.fragments = max(counters.fragments, 0)
        self._rows = {int(producer): Row(*row) for producer, row in counters.ledger.items()}

    def _newest(self, entry: Decoded) -> int:
        """Return the number of the producer's newest fragment; -1 if none was read from this incarnation.

        One beyond what the appends have noted is a worker's, who counted as one of them for a moment.
        """
        row = self._rows.get(entry.producer, Row())
        if row.incarnation != entry.incarnation:
            return -1
        return row.last_seq if row.last_seq <= entry.newest_seq else entry.seq - 1

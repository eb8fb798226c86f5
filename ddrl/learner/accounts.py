"""What the learner did with each producer's fragments, as it goes: the learner's side of `ddrl.store.ledger`.

The append numbers a producer's fragments, and counts those of all. So a repetition is known by its number, what no
append wrote by both, and a gap in the count says that fragments went from the stream before they were read; whose they
were, the producers' next numbers tell.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import Any

from ddrl.replay.reader import Staged
from ddrl.store import stream
from ddrl.store.checkpoints import Counters
from ddrl.store.ledger import RETIRED, STRANGER, Row


class Accounts:
    """Rows of the ledger. The training thread writes, the service thread takes what has changed, and retires rows.

    The row of STRANGER holds entries that no append wrote, and as `unread` those fragments that are gone and whose
    producer has not been heard of since.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # rows and cursor are told as of one moment
        self._rows: dict[int, Row] = {}
        self._changed: dict[int, Row] = {}
        self._fragments = 0  # count of the stream at the cursor; -1: not known
        self._strange: list[bytes] = []  # entries held that are no fragments
        self._retired = -1  # the last producer that may have gone into the row of RETIRED
        self.cursor = b"0-0"
        """The last entry taken from the stream."""
        self.consumed = self.refused = 0

    @property
    def rows(self) -> dict[int, Row]:
        """All rows by producer."""
        with self._lock:
            return dict(self._rows)

    def objection(self, staged: Staged) -> str:
        """Why an entry is no fragment that was acknowledged; empty where it is one."""
        if staged.producer == STRANGER:
            return "no append wrote it"
        newest = self._newest(staged)
        if staged.seq <= newest:
            return f"producer {staged.producer}: fragment {staged.seq} is repeated, its newest is {newest}"
        is_known = staged.producer in self._rows or staged.producer > self._retired
        if not self._is_counted(staged) and (staged.seq != newest + 1 or not is_known):
            return "no append wrote it: its counts are old"
        return ""

    def take(self, staged: Staged, *, consumed: bool) -> str:
        """Note an entry, read after all before it; one sentence where fragments before it are gone, unread."""
        before, is_counted = self.cursor, self._is_counted(staged)
        gone = staged.cumulative_fragments - self._fragments - 1 if is_counted and self._fragments >= 0 else 0
        objection = self.objection(staged)
        with self._lock:
            if gone:
                self._add(STRANGER, unread=gone)
            if objection:
                self._strange.append(staged.entry_id)
            else:
                self._claim(staged)
            # A repetition that the append has counted is its producer's, any other entry to object to a stranger's.
            producer = staged.producer if is_counted or not objection else STRANGER
            self._add(producer, consumed=int(consumed), refused=int(not consumed))
            self.cursor = staged.entry_id
        if is_counted:
            self._fragments = staged.cumulative_fragments
        self.consumed += consumed
        self.refused += not consumed
        if not gone:
            return ""
        between = f"between {before.decode()} and {staged.entry_id.decode()}"
        return f"{gone} fragment{'s' * (gone > 1)} {between} went from the stream unread"

    def changes(self) -> tuple[dict[int, Row], bytes]:
        """The rows that changed since the last call, and the cursor that goes with them."""
        with self._lock:
            changed, self._changed = self._changed, {}
            return changed, self.cursor

    def put_back(self, changed: Mapping[int, Row]) -> None:
        """`changes` could not be told; later ones count."""
        with self._lock:
            self._changed = {**changed, **self._changed}

    @property
    def fragments(self) -> int:
        """Count of the stream at the cursor; -1: not known."""
        return self._fragments

    def rewind(self, appended: int) -> None:
        """Believe no count beforehand where the server has appended fewer than were read: it came back older."""
        if appended < self._fragments:
            self._fragments = -1

    def retire(self, last: int, known: Collection[int]) -> None:
        """One row stands for those up to producer `last` that are not `known`, as `ledger.retired` tells them."""
        with self._lock:
            self._retired = last
            for producer in [p for p in self._rows if 0 <= p <= last and p not in known]:
                row = self._rows.pop(producer)
                self._changed.pop(producer, None)
                self._add(RETIRED, consumed=row.consumed, refused=row.refused, unread=row.unread)

    def state(self, oldest: bytes) -> dict[str, Any]:
        """Fields of a checkpoint's `Counters`; of strange entries, those from entry `oldest` on."""
        first = stream.order(oldest)
        self._strange = [entry_id for entry_id in self._strange if stream.order(entry_id) >= first]
        return {
            "fragments": self._fragments,
            "ledger": {
                str(producer): (row.consumed, row.refused, row.unread, row.incarnation, row.last_seq)
                for producer, row in self.rows.items()
            },
            "strange": [entry_id.decode() for entry_id in self._strange],
        }

    def load_state(self, counters: Counters) -> None:
        """Go on from a checkpoint."""
        self.cursor = counters.cursor.encode()
        self.consumed, self.refused = counters.admitted, counters.dead
        self._rows = {int(producer): Row(*row) for producer, row in counters.ledger.items()}
        self._fragments = counters.fragments
        self._strange = [entry_id.encode() for entry_id in counters.strange]

    def _is_counted(self, staged: Staged) -> bool:
        """Whether the stream's count has grown with it."""
        return staged.producer != STRANGER and staged.cumulative_fragments > max(self._fragments, 0)

    def _newest(self, staged: Staged) -> int:
        """The number of its producer's newest fragment; -1 where there is none of its incarnation."""
        row = self._rows.get(staged.producer)
        return row.last_seq if row is not None and row.incarnation == staged.incarnation else -1

    def _claim(self, staged: Staged) -> None:
        """Move on to a producer's fragment; of those gone, its own are the ones that it appended in between."""
        row, stranger = self._rows.get(staged.producer, Row()), self._rows.get(STRANGER, Row())
        own = min(staged.seq - self._newest(staged) - 1, stranger.unread)
        if own > 0:
            self._add(STRANGER, unread=-own)
        self._write(
            staged.producer,
            Row(row.consumed, row.refused, row.unread + max(own, 0), staged.incarnation, staged.seq),
        )

    def _add(self, producer: int, *, consumed: int = 0, refused: int = 0, unread: int = 0) -> None:
        row = self._rows.get(producer, Row())
        self._write(
            producer,
            Row(
                row.consumed + consumed,
                row.refused + refused,
                row.unread + unread,
                row.incarnation,
                row.last_seq,
            ),
        )

    def _write(self, producer: int, row: Row) -> None:
        self._rows[producer] = self._changed[producer] = row

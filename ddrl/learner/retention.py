"""What of the experience stream must stay: for the view, for the newest checkpoint, within the byte budget.

The append refuses fragments at `replay.max_bytes`, so the learner makes room before that: near the budget it
drops the oldest entries even where the view still holds them. So it does where others fill the server. Entries after
the newest checkpoint's cursor stay in any case, for no other place has them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from ddrl.store import stream
from ddrl.store.checkpoints import Counters

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)

HIGH, LOW = 0.85, 0.7  # of the budget: where making room begins and ends
SHED_KEEPS = 0.9  # of the stream's bytes, each time that a full server loses a part
SHED_S = 1.0  # between two of these times


class Retention:
    """Trims one run's stream. The training thread calls `admitted`, the service thread the rest.

    Args:
        client: connection of the service thread.
        run: whose stream.
        token: fencing token.
        max_bytes: the stream's budget.
    """

    def __init__(self, client: Redis, run: str, token: int, *, max_bytes: int) -> None:
        self._client, self._run, self._token, self.max_bytes = client, run, token, max_bytes
        self.checkpoint: Counters | None = None
        """Of the newest checkpoint in the server; without one nothing is dropped."""
        self.told = b"0-0"
        """The last entry that the server's ledger covers: none is dropped before it is accounted for."""
        self._entries: deque[tuple[bytes, int]] = deque()  # (id, cumulative bytes), oldest first
        self._total = 0  # bytes appended up to the newest entry here
        self._trimmed = 0  # of these, bytes dropped
        self._largest = 0  # entry so far, bytes
        self._shed_at = 0.0

    def admitted(self, entry_id: bytes, cumulative_bytes: int | None, num_bytes: int) -> None:
        """Note an entry that the learner has taken from the stream, of `num_bytes`; None: it was refused."""
        if cumulative_bytes is None:
            cumulative_bytes = self._total + num_bytes if self._total else 0
        elif not self._total:
            self._trimmed = cumulative_bytes - num_bytes
        self._entries.append((entry_id, cumulative_bytes))
        self._total = cumulative_bytes
        self._largest = max(self._largest, num_bytes)

    @property
    def is_near_budget(self) -> bool:
        """Whether room must be made: before the next two entries may find none."""
        live = self._total - self._trimmed
        return live > HIGH * self.max_bytes or live + 2 * self._largest > self.max_bytes

    def trim(self, view_oldest: bytes) -> None:
        """Drop what neither the view nor the view of the newest checkpoint holds.

        Raises:
            LeaseLostError: another learner took over.
        """
        if self.checkpoint is not None:
            self._drop_before(min(view_oldest, self.checkpoint.oldest.encode(), key=stream.order))

    def make_room(self) -> None:
        """Drop the oldest entries down to LOW of the budget, as far as the newest checkpoint makes them dispensable.

        Raises:
            LeaseLostError: another learner took over.
        """
        self._keep(int(LOW * self.max_bytes))

    def shed(self, *, at_once: bool = False) -> bool:
        """For a full server drop a part of what only a rebuilt view would need, now and then; whether there was any.

        Args:
            at_once: also where the last time was just now.

        Raises:
            LeaseLostError: another learner took over.
        """
        if time.monotonic() < self._shed_at and not at_once:
            return False
        before, self._shed_at = self._shed_at, time.monotonic() + SHED_S
        num_bytes = self._keep(int(SHED_KEEPS * (self._total - self._trimmed)))
        if num_bytes:
            level = logging.INFO if self._shed_at < before + 10 * SHED_S else logging.WARNING
            log.log(level, "the server is full: %d bytes of the oldest replay are dropped", num_bytes)
        return num_bytes > 0

    def _keep(self, num_bytes: int) -> int:
        """Drop the oldest entries but for the newest `num_bytes` and those after the checkpoint; the bytes dropped."""
        if self.checkpoint is None:
            return 0
        before, cut, cursor = self._trimmed, self._total - num_bytes, self.checkpoint.cursor.encode()
        kept = (entry_id for entry_id, cumulative_bytes in list(self._entries)[1:] if cumulative_bytes > cut)
        self._drop_before(min(next(kept, cursor), cursor, key=stream.order))
        return self._trimmed - before

    def _drop_before(self, first_kept: bytes) -> None:
        first_kept = min(first_kept, stream.following(self.told), key=stream.order)
        if not self._entries or stream.order(first_kept) <= stream.order(self._entries[0][0]):
            return
        stream.trim(self._client, self._run, self._token, first_kept)
        while self._entries and stream.order(self._entries[0][0]) < stream.order(first_kept):
            self._trimmed = self._entries.popleft()[1]

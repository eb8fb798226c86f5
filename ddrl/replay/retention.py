"""What of the experience stream must stay: for the view, for the newest checkpoint, within the byte budget.

The append refuses fragments at `replay.max_bytes`, so the learner makes room before that: near the budget it
drops the oldest entries even where the view still holds them. Entries after the newest checkpoint's cursor stay
in any case, for no other place has them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ddrl.store import stream

if TYPE_CHECKING:
    from redis import Redis

HIGH, LOW = 0.85, 0.7  # of the budget: where making room begins and ends


class Retention:
    """Trims one run's stream. The training thread calls `admitted`, the service thread the rest.

    Args:
        client: connection of the service thread.
        run: whose stream.
        token: fencing token.
        max_bytes: the stream's budget.
    """

    def __init__(self, client: Redis, run: str, token: int, *, max_bytes: int) -> None:
        self._client, self._run, self._token, self._max_bytes = client, run, token, max_bytes
        self._entries: deque[tuple[bytes, int]] = deque()  # (id, cumulative bytes), oldest first
        self._total = 0  # bytes appended up to the newest entry here
        self._trimmed = 0  # of these, bytes dropped
        self._largest = 0  # entry so far, bytes

    def admitted(self, entry_id: bytes, cumulative_bytes: int, num_bytes: int) -> None:
        """Note an entry that the learner has taken from the stream, of `num_bytes`."""
        if not self._total:
            self._trimmed = cumulative_bytes - num_bytes
        self._entries.append((entry_id, cumulative_bytes))
        self._total = cumulative_bytes
        self._largest = max(self._largest, num_bytes)

    @property
    def is_near_budget(self) -> bool:
        """Whether room must be made: before the next two entries may find none."""
        live = self._total - self._trimmed
        return live > HIGH * self._max_bytes or live + 2 * self._largest > self._max_bytes

    def trim(self, *, view_oldest: bytes, checkpoint_oldest: bytes) -> None:
        """Drop what neither the view nor the view of the newest checkpoint holds.

        Raises:
            LeaseLostError: another learner took over.
        """
        self._drop_before(min(view_oldest, checkpoint_oldest, key=stream.order))

    def make_room(self, *, checkpoint_cursor: bytes) -> None:
        """Drop the oldest entries down to LOW of the budget, but none after the newest checkpoint's cursor.

        Raises:
            LeaseLostError: another learner took over.
        """
        cut = self._total - int(LOW * self._max_bytes)
        kept = (entry_id for entry_id, cumulative_bytes in list(self._entries)[1:] if cumulative_bytes > cut)
        self._drop_before(min(next(kept, checkpoint_cursor), checkpoint_cursor, key=stream.order))

    def _drop_before(self, first_kept: bytes) -> None:
        if not self._entries or stream.order(first_kept) <= stream.order(self._entries[0][0]):
            return
        stream.trim(self._client, self._run, self._token, first_kept)
        while self._entries and stream.order(self._entries[0][0]) < stream.order(first_kept):
            self._trimmed = self._entries.popleft()[1]

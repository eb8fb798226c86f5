"""Reads the experience stream ahead of the learner: entries to fragments, in a thread of its own.

Decompression releases the GIL; what remains in Python is a few calls an entry. The feed stages, the training
thread admits, so that the view needs no lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ddrl import codec
from ddrl.store import connection, stream
from ddrl.types import EnvSpec, Fragment

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)

BLOCK_MS = 1_000
COUNT_S = 5.0  # between two looks at the size of entries
MAX_STAGED_BYTES = 256 * 1024**2  # of compressed entries; beyond it the feed waits for the learner


@dataclass(frozen=True)
class Staged:
    """An entry read: its fragment, or the reason why it cannot be used.

    Attributes:
        entry_id: in the stream.
        cumulative_fragments, cumulative_steps, cumulative_bytes: counts of the stream up to and with it.
        num_bytes: of the entry.
        reason, head: of a refused entry, why, and the beginning of its header.
    """

    entry_id: bytes
    cumulative_fragments: int
    cumulative_steps: int
    cumulative_bytes: int
    num_bytes: int
    fragment: Fragment | None
    reason: str = ""
    head: bytes = b""


def stage(entry: stream.Entry, run: str, spaces: EnvSpec) -> Staged:
    """Decode an entry; a bad one, or one that is not of this run and its spaces, becomes a reason."""
    fragment, reason, head = None, "", b""
    try:
        fragment = codec.decode(entry.fields)
        if fragment.run != run:
            raise codec.CodecError(f"run: {fragment.run!r} does not belong into the stream of {run!r}")
        observed, acted = fragment.observation, fragment.action
        found = (str(observed.dtype), observed.shape[2:], acted.shape[2:])
        known = (spaces.observation_dtype, spaces.observation_shape, spaces.action_shape)
        if found != known:
            raise codec.CodecError(f"spaces: observation and action are {found}, those of the run {known}")
        if (acted.dtype == np.float32) != (spaces.action_kind == "continuous"):
            raise codec.CodecError(f"action: {acted.dtype}, but actions of the run are {spaces.action_kind}")
        if spaces.action_sizes and not ((acted >= 0) & (acted < spaces.action_sizes)).all():
            raise codec.CodecError(f"action: outside the choices of the run, {spaces.action_sizes}")
    except codec.CodecError as error:
        fragment, reason, head = None, str(error), entry.fields.get(b"h", b"")[:1024]
    return Staged(
        entry.entry_id,
        cumulative_fragments=_count(entry, b"f"),
        cumulative_steps=_count(entry, b"n"),
        cumulative_bytes=_count(entry, b"b"),
        num_bytes=_count(entry, b"s"),
        fragment=fragment,
        reason=reason,
        head=head,
    )


def _count(entry: stream.Entry, name: bytes) -> int:
    """A counter of the append; 0 where an entry was not written by it."""
    value = entry.fields.get(name, b"0")
    return int(value) if value.isdigit() and len(value) < 20 else 0


class Feed:
    """Entries after a cursor, decoded in the background.

    Args:
        client: connection for blocking reads, used by the feed alone.
        run: whose stream.
        spaces: of its environment.
        cursor: the last entry already admitted.
    """

    def __init__(self, client: Redis, run: str, spaces: EnvSpec, cursor: bytes) -> None:
        self._client = client
        self._run = run
        self._spaces = spaces
        self._cursor = cursor
        self._staged: deque[Staged] = deque()
        self._taken_bytes = 0
        self._staged_bytes = 0
        self._count, self._count_at = 1, 0.0  # entries a reply, and when to find out anew
        self._arrived = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._read, name="feed", daemon=True)
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begin reading."""
        self._thread.start()

    def stop(self) -> None:
        """End within one blocking read."""
        self._stopping.set()
        self._thread.join(timeout=2 * BLOCK_MS / 1e3)

    def take(self) -> list[Staged]:
        """All that is staged now, in the order of the stream.

        Raises:
            BaseException: what ended the feed, once everything before it was taken.
        """
        if not self._staged and self.error is not None:
            raise self.error
        batch = []
        while self._staged:
            staged = self._staged.popleft()
            self._taken_bytes += staged.num_bytes
            batch.append(staged)
        return batch

    @property
    def ready(self) -> bool:
        """Something is staged, or the feed has failed."""
        return bool(self._staged) or self.error is not None

    def wait(self, timeout_s: float) -> None:
        """Sleep until something is staged or `wake` is called; returns at once if that was since the last wait."""
        self._arrived.wait(timeout_s)
        self._arrived.clear()

    def wake(self) -> None:
        """End a `wait`."""
        self._arrived.set()

    def _read(self) -> None:
        try:
            while not self._stopping.is_set():
                self._read_once()
        except BaseException as error:  # told to the training thread by `take`
            self.error = error
            self._arrived.set()

    def _read_once(self) -> None:
        if self._staged_bytes - self._taken_bytes > MAX_STAGED_BYTES:
            time.sleep(0.01)
            return
        try:
            if time.monotonic() >= self._count_at:
                self._count = stream.read_count(self._client, self._run)
                self._count_at = time.monotonic() + COUNT_S
            entries = stream.read(self._client, self._run, self._cursor, count=self._count, block_ms=BLOCK_MS)
        except connection.UNREACHABLE as error:
            log.warning("the server does not answer (%s); waiting for it", error)
            self._stopping.wait(1.0)
            return
        for entry in entries:
            staged = stage(entry, self._run, self._spaces)
            self._cursor = entry.entry_id
            self._staged_bytes += staged.num_bytes
            self._staged.append(staged)
            self._arrived.set()

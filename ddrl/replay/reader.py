"""Reads the experience stream ahead of the learner: entries to fragments, in a thread of its own.

Decompression and compression release the GIL; what remains in Python is a few calls an entry. The feed stages, the
training thread admits, so that the view needs no lock.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl import codec
from ddrl.store import connection, stream
from ddrl.types import EnvSpec, Fragment

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)

BLOCK_MS = 1_000
RETRY_S = 0.5  # of a server that cannot serve for the time being
COUNT_S = 5.0  # between two looks at the size of entries
MAX_STAGED_BYTES = 256 * 1024**2  # of decoded fragments; beyond it the feed waits for the learner
_ENTRY_BYTES = 2 * 1024  # of anything staged, be it refused
_EXTRA_BYTES = 4 * 1024  # of a step: what algorithms may add to it, such as values


@dataclass(frozen=True)
class Bounds:
    """What no fragment of a run exceeds.

    Attributes:
        num_steps: T.
        num_envs: N.
        context: C.
        memory_size: H, numbers of a recurrent state.
    """

    num_steps: int
    num_envs: int
    context: int
    memory_size: int = 0

    def num_bytes(self, spaces: EnvSpec) -> int:
        """Of all columns, uncompressed, generously: with a final observation and a recurrent state for each step."""
        observation = math.prod(spaces.observation_shape) * np.dtype(spaces.observation_dtype).itemsize
        step = 2 * observation + 8 * math.prod(spaces.action_shape) + 2 * self.memory_size + _EXTRA_BYTES
        return min(codec.MAX_BYTES, (self.context + self.num_steps + 1) * self.num_envs * step)

    def check(self, fragment: Fragment) -> None:
        """Raise CodecError where the fragment is larger."""
        found = (fragment.num_steps, fragment.num_envs, fragment.context)
        most = (self.num_steps, self.num_envs, self.context)
        if any(one > bound for one, bound in zip(found, most, strict=True)):
            raise codec.CodecError(f"T, N, C: {found}, those of the run are at most {most}")


@dataclass(frozen=True)
class Staged:
    """An entry read: its fragment, or the reason why it cannot be used.

    Attributes:
        entry_id: in the stream.
        cumulative_fragments, cumulative_steps, cumulative_bytes: counts of the stream up to and with it.
        num_bytes: of the entry.
        producer, incarnation, seq: who appended it, and its number; -1 where no append wrote it.
        held_bytes: of memory while it is staged.
        fragment: as decoded.
        prepared: what `prepare` made of it.
        reason, head: of a refused entry, why, and the beginning of its header.
    """

    entry_id: bytes
    cumulative_fragments: int
    cumulative_steps: int
    cumulative_bytes: int
    num_bytes: int
    producer: int
    incarnation: int
    seq: int
    held_bytes: int
    fragment: Fragment | None
    prepared: Any = None
    reason: str = ""
    head: bytes = b""


def stage(
    entry: stream.Entry,
    run: str,
    spaces: EnvSpec,
    *,
    bounds: Bounds | None = None,
    prepare: Callable[[Fragment], Any] | None = None,
) -> Staged:
    """Decode an entry; a bad one, or one that is not of this run, its spaces and bounds, becomes a reason.

    Args:
        entry: of the stream.
        run: whose it must be.
        spaces: of the run's environment.
        bounds: of its fragments; None: the codec's alone.
        prepare: does what admission needs and other threads may do; a ValueError becomes the reason.
    """
    fragment, prepared, reason, head = None, None, "", b""
    try:
        max_bytes = codec.MAX_BYTES if bounds is None else bounds.num_bytes(spaces)
        fragment = codec.decode(entry.fields, max_bytes=max_bytes)
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
        if bounds is not None:
            bounds.check(fragment)
        if prepare is not None:
            prepared = prepare(fragment)
    except ValueError as error:  # CodecError is one
        fragment, reason, head = None, str(error), entry.fields.get(b"h", b"")[:1024]
    return Staged(
        entry.entry_id,
        cumulative_fragments=entry.count(b"f"),
        cumulative_steps=entry.count(b"n"),
        cumulative_bytes=entry.count(b"b"),
        num_bytes=entry.num_bytes,
        producer=entry.producer,
        incarnation=entry.count(b"i", -1),
        seq=entry.count(b"q", -1),
        held_bytes=_ENTRY_BYTES + (_num_bytes(fragment) if fragment is not None else 0),
        fragment=fragment,
        prepared=prepared,
        reason=reason,
        head=head,
    )


def _num_bytes(fragment: Fragment) -> int:
    """Of its arrays."""
    columns = [*vars(fragment).values(), *fragment.extras.values()]
    return sum(column.nbytes for column in columns if isinstance(column, np.ndarray))


def stored(
    client: Redis, run: str, first: bytes, last: bytes, stage: Callable[[stream.Entry], Staged]
) -> Iterator[Staged]:
    """The entries from `first` to `last` that are still in the stream, staged one by one."""
    after = stream.before(first)
    count = stream.read_count(client, run)
    while entries := stream.read(client, run, after, count=count, until=last):
        yield from map(stage, entries)
        after = entries[-1].entry_id
        count = stream.read_count(client, run)


class Feed:
    """Entries after a cursor, staged in the background.

    Args:
        client: connection for blocking reads, used by the feed alone.
        run: whose stream.
        cursor: the last entry already admitted.
        stage: makes of an entry what is staged, in the feed's thread.
    """

    def __init__(
        self, client: Redis, run: str, cursor: bytes, stage: Callable[[stream.Entry], Staged]
    ) -> None:
        self._client = client
        self._run = run
        self._cursor = cursor
        self._stage = stage
        self._staged: deque[Staged] = deque()
        self._taken_bytes = 0
        self._staged_bytes = 0
        self._count, self._count_at = 1, 0.0  # entries a reply, and when to find out anew
        self._arrived = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._read, name="feed", daemon=True)
        self.error: BaseException | None = None
        self.waited_s = 0.0
        """Time that went by in `wait`."""

    def start(self) -> None:
        """Begin reading."""
        self._thread.start()

    def stop(self) -> None:
        """End within one blocking read."""
        self._stopping.set()
        self._thread.join(timeout=2 * BLOCK_MS / 1e3)

    def take(self, for_s: float) -> Iterator[Staged]:
        """What is staged, in the order of the stream; after `for_s` no more, but one at least.

        Raises:
            BaseException: what ended the feed, once everything before it was taken.
        """
        until = time.monotonic() + for_s
        error = self.error  # looked at first: whatever was staged before it is then seen below
        if error is not None and not self._staged:
            raise error
        while self._staged:
            staged = self._staged.popleft()
            yield staged
            self._taken_bytes += staged.held_bytes
            if time.monotonic() >= until:
                return

    @property
    def ready(self) -> bool:
        """Something is staged, or the feed has failed."""
        return bool(self._staged) or self.error is not None

    def wait(self, timeout_s: float) -> None:
        """Sleep until something is staged or `wake` is called; returns at once if that was since the last wait."""
        started = time.monotonic()
        self._arrived.wait(timeout_s)
        self._arrived.clear()
        self.waited_s += time.monotonic() - started

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
        try:
            if time.monotonic() >= self._count_at:
                self._count = stream.read_count(self._client, self._run)
                self._count_at = time.monotonic() + COUNT_S
            entries = stream.follow(
                self._client, self._run, self._cursor, count=self._count, block_ms=BLOCK_MS
            )
        except connection.OUTAGES as error:
            if connection.outage(error) is None:
                raise
            self._stopping.wait(RETRY_S)  # the service thread says so
            return
        for entry in entries:
            while self._staged_bytes - self._taken_bytes > MAX_STAGED_BYTES:
                if self._stopping.wait(0.01):
                    return
            staged = self._stage(entry)
            self._cursor = entry.entry_id
            self._staged_bytes += staged.held_bytes
            self._staged.append(staged)
            self._arrived.set()

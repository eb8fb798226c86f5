"""The reader of the experience stream: decodes entries ahead of the learner, in a thread of its own.

Decompression and compression release the GIL; what remains in Python is a few calls an entry. The reader decodes and
packs, the training thread admits, so that the replay needs no lock.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ddrl import codec
from ddrl.store import capped_streams, connection, ledger, stream
from ddrl.store.connection import Redis
from ddrl.store.quarantine import Rules
from ddrl.types import EnvSpec, Fragment, Played

BLOCK_MS = 1_000
MOST_EPISODES = 20  # the newest of a fragment, whose returns are counted
LATEST_S = 5.0  # between two looks for entries with later ids
MAX_DECODED_BYTES = 256 * 1024**2  # of decoded fragments; beyond it the reader waits for the learner
_ENTRY_BYTES = 6 * 1024  # of anything decoded, even if refused
_EXTRA_BYTES = 4 * 1024  # of a step: columns that algorithms may add, such as values


@dataclass(frozen=True)
class FragmentLimits:
    """The largest fragment of a run.

    Attributes:
        num_steps: T.
        num_envs: N.
        context: C.
        state_size: H, numbers of a recurrent state.
        stride: T is a multiple of it.
        num_metrics: M, names of `env.metrics`.
        largest, until: the largest value in the entries up to that id; see `runs.go_back`.
    """

    num_steps: int
    num_envs: int
    context: int
    state_size: int = 0
    stride: int = 1
    num_metrics: int = 0
    largest: float = math.inf
    until: bytes = b"0-0"

    def step_bytes(self, spaces: EnvSpec) -> int:
        """Return a generous bound on all columns of a step, with a final observation and a recurrent state."""
        observation = math.prod(spaces.observation_shape) * np.dtype(spaces.observation_dtype).itemsize
        return 2 * observation + 8 * math.prod(spaces.action_shape) + 2 * self.state_size + _EXTRA_BYTES

    def num_bytes(self, spaces: EnvSpec) -> int:
        """Return a generous bound on all columns of a fragment, uncompressed."""
        num_steps = (self.context + self.num_steps + 1) * self.num_envs
        return min(codec.MAX_BYTES, num_steps * self.step_bytes(spaces))


@dataclass(frozen=True)
class Decoded:
    """An entry that was read: its fragment, or the reason why it cannot be used.

    Attributes:
        entry_id: in the stream.
        num_bytes: of the entry.
        producer, incarnation, seq: its sender and its number; -1 where no append wrote it.
        memory_bytes: while it waits for the learner.
        rank: which decodes it, of several that learn together.
        fragment: as decoded.
        played: what is counted of it.
        packed: what `pack` made of it.
        reason, head: of a refused entry, why, and the beginning of its header.
        counted, newest_seq: see `stream.Entry`.
    left_out: by a rule of quarantine: it counts, and is not learned from.
    """

    entry_id: bytes
    num_bytes: int
    producer: int
    incarnation: int
    seq: int
    memory_bytes: int
    rank: int = 0
    fragment: Fragment | None = None
    played: Played | None = None
    packed: Any = None
    reason: str = ""
    head: bytes = b""
    counted: tuple[int, ...] = ()
    newest_seq: int = stream.MOST_SEQ
    left_out: bool = False


def decode(
    entry: stream.Entry,
    run: str,
    spaces: EnvSpec,
    *,
    limits: FragmentLimits,
    pack: Callable[[Fragment], Any],
    rules: Rules = (),
    ranks: tuple[int, int] = (0, 1),
    counts_all: bool = False,
) -> Decoded:
    """Decode an entry; a bad one, or one outside the run's spaces and limits, gets a reason instead of a fragment.

    Of several ranks each decodes every N-th fragment, so that all hold as much, however many collectors there are.

    Args:
        entry: of the stream.
        run: whose it must be.
        spaces: of the run's environment.
        limits: of its fragments.
        pack: prepares admission as far as any thread can, and returns what has `num_bytes`; a ValueError becomes the
            reason.
        rules: of quarantine.
        ranks: this one and the number of those that learn together; another rank's entry is not decoded.
        counts_all: it is decoded, to be counted.
    """
    rank, num_ranks = ranks
    read = Decoded(
        entry.entry_id,
        num_bytes=entry.num_bytes,
        producer=entry.producer,
        incarnation=entry.count(b"i", -1),
        seq=entry.count(b"q", -1),
        memory_bytes=_ENTRY_BYTES,
        counted=entry.counted if entry.producer >= 0 else (),
        newest_seq=entry.newest_seq,
        rank=entry.count(stream.APPENDED[0]) % num_ranks,
    )
    if read.rank != rank and not counts_all:
        return read
    try:
        sizes = {"max_bytes": limits.num_bytes(spaces), "step_bytes": limits.step_bytes(spaces)}
        fragment = codec.decode(entry.fields, **sizes)
        if entry.producer >= 0:  # its header may say anything
            fragment = replace(fragment, producer=read.producer, incarnation=read.incarnation, seq=read.seq)
        _check(fragment, run, spaces, limits)
        if stream.order(entry.entry_id) <= stream.order(limits.until):
            size, name = largest_value(fragment, spaces)
            if size > limits.largest:
                raise codec.CodecError(f"{name}: {size:.3g} is too large to learn from")
        where, version = (entry.entry_id, fragment.host, read.producer), fragment.policy_version
        left_out = any(rule.covers(*where, version) for rule in rules)
        packed: Any = None if left_out else pack(fragment)
    except ValueError as error:  # CodecError is one
        return replace(read, reason=str(error), head=entry.fields.get(b"h", b"")[:1024])
    of_fragment = read.producer, fragment.policy_version, fragment.num_transitions
    episode_metrics = fragment.extras.get("episode_metrics", np.empty((0, 0)))
    episodes = (values[-MOST_EPISODES:].tolist() for values in (fragment.episode_return, episode_metrics))
    played = Played(read.rank, *of_fragment, *episodes)
    if read.rank != rank or left_out:
        return replace(read, played=played, left_out=left_out)
    memory_bytes = _ENTRY_BYTES + max(fragment.num_bytes, packed.num_bytes)
    return replace(read, memory_bytes=memory_bytes, fragment=fragment, played=played, packed=packed)


def largest_value(fragment: Fragment, spaces: EnvSpec) -> tuple[float, str]:
    """Return the value that is furthest from 0 among those that are learned from, without its sign, and its column."""
    columns = {name: spaces.numbers(getattr(fragment, name)) for name in ("observation", "final_observation")}
    columns |= {"reward": fragment.reward}
    others = ("episode_metrics", "reset_index", "reset_seed")
    columns |= {name: x for name, x in fragment.extras.items() if name not in others}
    ends = {name: (float(x.min(initial=0)), float(x.max(initial=0))) for name, x in columns.items()}
    return max((max(-low, high), name) for name, (low, high) in ends.items())


def _check(fragment: Fragment, run: str, spaces: EnvSpec, limits: FragmentLimits) -> None:
    """Refuse a fragment of another run, of other spaces or above the limits; CodecError."""
    if fragment.run != run:
        raise codec.CodecError(f"run: {fragment.run!r} does not belong into the stream of {run!r}")
    observed, acted = fragment.observation, fragment.action
    found = (str(observed.dtype), observed.shape[2:], acted.shape[2:])
    known = (spaces.observation_dtype, spaces.observation_shape, spaces.action_shape)
    if found != known:
        raise codec.CodecError(f"spaces: observation and action are {found}, those of the run {known}")
    if (acted.dtype == np.float32) != (spaces.action_kind == "continuous"):
        raise codec.CodecError(f"action: {acted.dtype}, but actions of the run are {spaces.action_kind}")
    if spaces.action_kind == "continuous":
        low, high = np.reshape([spaces.action_low, spaces.action_high], (2, *spaces.action_shape))
        slack = 1e-3 * (high - low)  # for rounding
        if not ((acted >= low - slack) & (acted <= high + slack)).all():
            raise codec.CodecError(
                f"action: outside the bounds of the run, {spaces.action_low} to {spaces.action_high}"
            )
    actions = [acted, fragment.extras["raw_action"]] if "raw_action" in fragment.extras else [acted]
    if spaces.action_sizes and not all(((x >= 0) & (x < spaces.action_sizes)).all() for x in actions):
        raise codec.CodecError(f"action: outside the choices of the run, {spaces.action_sizes}")
    for seen in (observed, fragment.final_observation) if spaces.image_shapes else ():
        if not np.isfinite(spaces.numbers(seen)).all():
            raise codec.CodecError("observation: a number beside its images is not finite")
    if spaces.has_mask:
        for mask in (seen[..., -spaces.num_masked :] for seen in (observed, fragment.final_observation)):
            parts = np.split(mask, np.cumsum(spaces.action_sizes)[:-1], axis=-1)
            if not (((mask == 0) | (mask == 1)).all() and all(part.any(axis=-1).all() for part in parts)):
                raise codec.CodecError("observation: a mask that is none, or allows nothing")
    num_metrics = limits.num_metrics
    if "episode_metrics" in fragment.extras:  # which an actor of another kind may lack
        num_metrics = fragment.extras["episode_metrics"].shape[1]
    if num_metrics != limits.num_metrics:
        raise codec.CodecError(f"episode_metrics: {num_metrics}, the run names {limits.num_metrics}")
    size = (fragment.num_steps, fragment.num_envs, fragment.context)
    most = (limits.num_steps, limits.num_envs, limits.context)
    if any(one > bound for one, bound in zip(size, most, strict=True)):
        raise codec.CodecError(f"T, N, C: {size}, those of the run are at most {most}")
    if fragment.num_steps % limits.stride:
        raise codec.CodecError(f"T: {fragment.num_steps}, those of the run are multiples of {limits.stride}")


def decode_range(
    client: Redis, run: str, first: bytes, last: bytes, decode: Callable[[stream.Entry], Decoded]
) -> Iterator[Decoded]:
    """Yield the entries from `first` to `last` that are still in the stream, decoded one by one."""
    for entries in stream.pages(client, run, stream.before(first), last):
        yield from map(decode, entries)


class Reader:
    """The entries after a cursor, decoded in the background.

    Args:
        client: connection for blocking reads, used by the reader alone.
        run: whose stream.
        cursor: the last entry already admitted.
        decode: called with each entry in the reader's thread.
        drop_next: called with the cursor where the next entry cannot be read; deletes it if it is too long.
        lower_ids: called now and then, and where an entry's id is too late, with the cursor and the latest id by the
            clock; gives other ids to later entries that are also more than a day after the cursor.
        report: of a leader, called with an entry; returns the fields that another rank has decoded, or None as long as
            that has not read it, and the entry waits.
        keeps_folded: of a shadow; see `ledger.checked`.
    """

    def __init__(
        self,
        client: Redis,
        run: str,
        cursor: bytes,
        decode: Callable[[stream.Entry], Decoded],
        *,
        drop_next: Callable[[bytes], object] = lambda cursor: None,
        lower_ids: Callable[[bytes, bytes], object] = lambda cursor, latest: None,
        report: Callable[[Decoded], dict[str, Any] | None] = lambda entry: {},
        keeps_folded: bool = False,
    ) -> None:
        self._client, self._run, self._cursor, self._decode = client, run, cursor, decode
        self._drop_next, self._report, self._keeps_folded = drop_next, report, keeps_folded
        self._lower_ids, self._latest = lower_ids, b"0-0"
        self._decoded: deque[Decoded] = deque()
        self._decoded_bytes = self._taken_bytes = 0  # in all
        self._count, self._latest_at = 1, 0.0  # entries to read, and when to ask for the latest id
        self._arrived = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name="reader", daemon=True)
        self.error: BaseException | None = None
        self.waited_s = 0.0
        """Time spent in `wait`."""

    def start(self) -> None:
        """Begin reading."""
        self._thread.start()

    def stop(self) -> None:
        """Stop within one blocking read."""
        self._stopping.set()
        self._thread.join(timeout=2 * BLOCK_MS / 1e3)
        self.error = None  # whose traceback refers to this reader, and so to the replay

    def take(self, for_s: float) -> Iterator[Decoded]:
        """Yield decoded entries in the order of the stream; after `for_s` no more, but at least one if there is any.

        Raises:
            BaseException: the error that ended the reader, once everything before it was taken.
        """
        until = time.monotonic() + for_s
        error = self.error  # read first: whatever was decoded before it is then seen below
        if error is not None and not self._decoded:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        while self._decoded and (report := self._report(self._decoded[0])) is not None:
            decoded = self._decoded.popleft()
            try:
                yield replace(decoded, **report) if report else decoded
            finally:
                self._taken_bytes += decoded.memory_bytes
            if time.monotonic() >= until:
                return

    @property
    def ready(self) -> bool:
        """True if an entry is decoded, here or by its rank, or the reader has failed."""
        return self._report(self._decoded[0]) is not None if self._decoded else self.error is not None

    def wait(self, timeout_s: float) -> None:
        """Sleep until an entry is decoded or `wake` is called; return at once if that was since the last wait."""
        started = time.monotonic()
        self._arrived.wait(timeout_s)
        self._arrived.clear()
        self.waited_s += time.monotonic() - started

    def wake(self) -> None:
        """End a `wait`."""
        self._arrived.set()

    def _read(self) -> list[stream.Entry]:
        try:
            found = stream.follow(self._client, self._run, self._cursor, count=self._count, block_ms=BLOCK_MS)
        except stream.UNREADABLE as error:  # a worker's junk is too large, or the server has an outage
            is_single, self._count = self._count == 1, 1
            if is_single:
                self._drop_next(self._cursor)
            if not isinstance(error, connection.ReplyTooLongError):
                raise
            self._stopping.wait(0.01)
            return []
        self._count = stream.next_count(found, self._count)
        return ledger.checked(self._client, self._run, found, keeps_folded=self._keeps_folded)

    def _run_thread(self) -> None:
        # The learner's service thread meets each outage, too, and logs it.
        retry = partial(connection.retry, stop=self._stopping, is_logged=False)
        identify = partial(retry, partial(connection.server_id, self._client))
        server, newest = "", -1  # id of the server that counted the newest fragment, and its number
        try:
            while not self._stopping.is_set():
                if time.monotonic() >= self._latest_at:
                    latest = retry(partial(capped_streams.latest, self._client))
                    retry(partial(self._lower_ids, self._cursor, latest))
                    self._latest = max(latest, capped_streams.day_after(self._cursor), key=stream.order)
                    reached = identify()  # what is read from now on is of this server, or of a later one
                    self._latest_at = time.monotonic() + LATEST_S
                found, now = retry(self._read), ""
                for entry in found:
                    if stream.order(entry.entry_id) > stream.order(self._latest):
                        self._latest_at = 0.0
                        break
                    while self._decoded_bytes - self._taken_bytes > MAX_DECODED_BYTES:
                        if self._stopping.wait(0.01):
                            return
                    if entry.producer >= 0:  # an append wrote it
                        before, newest = newest, entry.count(b"f")
                        if newest > before:
                            server = reached  # it lost nothing
                        else:  # or a worker wrote the count
                            now = now or identify()
                    if now not in ("", server):
                        lost = f"fragment {newest} came after {before}"
                        raise connection.RunGoneError(f"run {self._run}: the server came back older, {lost}")
                    decoded = self._decode(entry)
                    self._cursor = entry.entry_id
                    self._decoded_bytes += decoded.memory_bytes
                    self._decoded.append(decoded)
                    self._arrived.set()
        except BaseException as error:  # raised in the training thread by `take`
            if not (self._stopping.is_set() and connection.outage(error)):
                self.error = error
            self._arrived.set()

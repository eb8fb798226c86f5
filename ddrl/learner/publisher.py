"""The publisher: writes to the server what the training thread has finished, from the service thread.

It writes weights, the allowance of steps, checkpoints, the ledger, refusals and metrics, and trims the stream. The
training thread leaves finished copies in `Shared`. Every write is fenced, so a learner that was replaced writes
nothing. What cannot be written during an outage is written later; when the server's memory is full, the writes that
free memory come first. Python code in this thread slows updates down through the GIL, so rounds should take no more
than a few milliseconds a second.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddrl.config import RunConfig
from ddrl.learner.core import Core
from ddrl.learner.league import League
from ddrl.learner.ledger_rows import LedgerRows
from ddrl.onnx import Template
from ddrl.replay.reader import Decoded, Reader
from ddrl.store import checkpoints, connection, leases, ledger, metrics, runs, stream, weights, workers
from ddrl.store.checkpoints import Counters
from ddrl.store.connection import Redis, StoreError
from ddrl.store.evaluations import INFO
from ddrl.store.recording import Recording

log = logging.getLogger(__name__)

RENEW_S = 0.75  # a quarter of the lease
SLOW_S = 1.0  # a round that takes longer than this, and than its writes at
BYTES_PER_S = 20e6  # this pace, has waited for the server
GAPS_PER_ROUND, REFUSALS_PER_ROUND, REFUSED_AT_ONCE = 100, 10_000, 500
FOLD_EVERY_S = 60.0
WAKES_PER_S = 2_000  # collectors that a raised allowance wakes, at most
CHECKPOINT_BYTES_PER_S = 1e6  # average load of checkpoints on the server, at most
RATES_S = 10.0  # over which rates are measured
RECORD_AGAIN_S = 1.0  # after a recording could not be written
RETURNS_LENGTH = 20  # training episodes whose mean is a metric
HIGH = 0.85  # share of `replay.max_bytes` at which making room begins
LEAST_HIGH = 0.5  # the same where entries are large
ROOM = 0.15  # share of it that is made
SHED_KEEPS = 0.9  # share of the stream that a full server keeps each time
SHED_S = 1.0  # between two of these times
MOST_OVERSHOOT = 16_384  # steps beyond the allowance that count; for each process as many more as
FIRST_STEPS = 50  # its first fragment has in each environment, or a stride of sequences
STUCK_S = 5.0  # after which fragments are dropped that wait for others, for which the stream has no room

Tensors = Mapping[str, torch.Tensor]
OnCheckpoint = Callable[[bytes, Mapping[str, Any]], object]
"""Called with each checkpoint that the server has stored: safetensors bytes and meta."""


class Shared:
    """State that a learner's two threads share. Each field has one writer, which replaces it as a whole.

    Written by the training thread:
        updates: of the algorithm.
        env_steps: transitions admitted.
        counted: how much was taken from the stream.
        refilled: steps played again after the stream was lost; the rate limiter leaves them out.
        oldest: first entry of the stream that the replay holds.
        entries: (entry_id, bytes taken up to and with it) of each entry taken; the publisher removes those it trims.
        taken_bytes, largest_bytes: of the entries taken so far; of the largest since room was made.
        ledger: its rows.
        refused: (entry_id, head, reason, an append wrote it) to report; gaps: warnings of fragments that left the
            stream unread, to report. The publisher removes both.
        returns, episode_metrics: of the newest training episodes.
        league: of a game of two players; None: it is none.
        metrics: of the newest update.
        weights: (updates, parameters) to publish. checkpoint: (counters, tensors) to store. The publisher clears both.

    Written by the service thread:
        version: latest published; -1 before the first.
        wants_checkpoint: set to have a checkpoint taken.
        drops_waiting: fragments that wait are to be dropped; the training thread resets it.

    wake: set by the training thread to wake the service thread.
    """

    def __init__(self) -> None:
        self.updates = self.env_steps = self.refilled = 0
        self.oldest = b"0-1"
        self.entries: deque[tuple[bytes, int]] = deque()
        self.taken_bytes = self.largest_bytes = 0
        self.ledger = LedgerRows()
        self.refused: deque[stream.Refusal] = deque()
        self.counted = stream.Counted(b"0-0", 0, 0, 0)
        self.gaps: deque[str] = deque()
        self.returns: deque[float] = deque(maxlen=RETURNS_LENGTH)
        self.episode_metrics: deque[np.ndarray] = deque(maxlen=RETURNS_LENGTH)  # [M] each
        self.league: League | None = None
        self.metrics: Tensors = {}
        self.weights: tuple[int, Tensors] | None = None
        self.checkpoint: tuple[Counters, Tensors] | None = None
        self.version = -1
        self.wants_checkpoint, self.wake, self.drops_waiting = threading.Event(), threading.Event(), False
        self._started = time.monotonic()

    def add_entry(self, entry: Decoded) -> None:
        """Add the bytes of an entry that was taken from the stream."""
        self.taken_bytes += entry.num_bytes
        self.largest_bytes = max(self.largest_bytes, entry.num_bytes)
        self.entries.append((entry.entry_id, self.taken_bytes))

    def count(self, by_append: tuple[int, ...] = ()) -> None:
        """Set `counted` after an entry; `by_append`: what its append counted."""
        ledger = self.ledger
        taken = ledger.cursor, ledger.fragments, self.env_steps, self.taken_bytes
        self.counted = stream.Counted(*taken, by_append)

    @property
    def pace(self) -> dict[str, int]:
        """Steps and updates that the rate limiter counts."""
        return {"num_steps": self.env_steps - self.refilled, "num_updates": self.updates}

    @property
    def elapsed_s(self) -> float:
        """Time of learning, with that of the run's earlier learners up to their last checkpoint."""
        return time.monotonic() - self._started

    def add_elapsed(self, seconds: float) -> None:
        """Count more time as learning; less if negative, as for a pause."""
        self._started -= seconds


class Publisher:
    """Writes one learner's results to the server.

    Args:
        client: connection of the service thread.
        token: fencing token of the lease.
        core: of the run; its replay gives the allowance and metrics.
        shared: the state that the training thread shares with this one.
        on_checkpoint: called with each checkpoint that the server has stored.
    """

    def __init__(
        self, client: Redis, token: int, core: Core, shared: Shared, on_checkpoint: OnCheckpoint
    ) -> None:
        self._client, self._run, self._config = client, core.run, core.config
        self._source, sequences = core.source, core.resolved.sequences
        self._first_steps = max(FIRST_STEPS, sequences.stride if sequences else 1)
        self._unlisted: list[int] = []  # of a shadow: producers that its source had folded
        self._unlisted_ms = 0  # at this time of the server
        self._held = client, core.run, token  # of every write
        self._replay, self._shared, self._on_checkpoint = core.replay, shared, on_checkpoint
        self.pinned: frozenset[int] = frozenset()
        """Versions that open evaluations need."""
        self.goes_back_from: int | None = None
        """Revision of the run at which its learner has loaded weights to go back to; None if it has not."""
        self.template: Template | None = None
        """Makes the policy's ONNX files; None: none are published."""
        self.num_processes = 0
        """Most processes that may play at once, as far as they are known."""
        self.folder: Path | None = None
        """Folder of a recording, made before entries leave the stream; None: they leave unrecorded."""
        self._recording: Recording | None = None
        self._reader: Reader | None = None  # set by `begin`
        self._checkpoint: Counters | None = None  # the newest on the server; without one nothing is trimmed
        self._trimmed_bytes = 0  # of `Shared.taken_bytes`
        # The last entry that the server's ledger includes; later ones are not trimmed.
        self._ledger_cursor = b"0-0"
        self._published_updates, self._allowed = 0, -1
        # The largest allowance that an earlier learner gave, and the processes that it has counted last.
        self._allowed_before = self._num_processes_before = 0
        # A version that may have been read, though a failover lost it: it is not given to other weights.
        self._unconfirmed = -1
        now = time.monotonic()
        self._checkpoint_at = now + self._config.learner.checkpoint_every_s
        self._fold_at = now + FOLD_EVERY_S
        self._renew_at = self._metrics_at = now
        self._allow_at = self._shed_at = self._outage_at = 0.0
        self._stuck_at = math.inf
        self._record_at, self._is_unrecorded, self._num_unrecorded = 0.0, False, 0
        self._refusing: list[stream.Refusal] = []  # sent, until there is a reply: the same are sent again
        self._missing: set[str] = set()  # of `env.metrics`, which the journal names
        self._waited_s, self._written_bytes = 0.0, 0  # for the server; of weights and checkpoints
        self._totals_before = deque([self._totals()])  # of each row within RATES_S

    # --- begin and end ---------------------------------------------------------------------------------

    def load(self) -> tuple[Tensors, Counters] | None:
        """Return the newest checkpoint, or None; remove parts of one that a dead learner did not finish."""
        leases.renew(*self._held)
        checkpoints.sweep(*self._held)
        self._ledger_cursor = ledger.read(self._client, self._run)[1]
        if (found := checkpoints.load(self._client, self._run)) is None:
            return None
        self._checkpoint = Counters.decode(found[1])
        return decode_tensors(found[0]), self._checkpoint

    def note(self, event: str, reason: str) -> None:
        """Add a line to the run's journal."""
        leases.renew(*self._held)  # the journal itself is not fenced
        runs.note(self._client, self._run, event, reason)

    def begin(self, reader: Reader, version: int, parameters: Tensors | None) -> None:
        """Write the state that the learner begins with.

        Args:
            reader: woken by each publication.
            version: of the learner's weights.
            parameters: to publish as `version`; None: that version is published.
        """
        shared = self._shared
        self._allowed_before = stream.most_allowed(self._client, self._run)
        self._num_processes_before = runs.num_processes(self._client, self._run)
        self._fold_rows()
        rows, cursor = shared.ledger.rows, shared.ledger.cursor
        shared.ledger.changes()
        self._freeing(lambda: ledger.replace(*self._held, rows, cursor))
        self._ledger_cursor = cursor
        # Entries that only the former learner's replay held.
        if self._checkpoint is not None and self._records():
            stream.trim(*self._held, self._checkpoint.oldest.encode())
        self._published_updates = shared.updates
        if parameters is None:
            shared.version = version
            self._freeing(self._raise_allowance)
        else:
            shared.version = version - 1
            self._freeing(lambda: self._publish((shared.updates, parameters)))
        self._totals_before = deque([self._totals()])  # rates are this learner's own
        self._reader = reader

    def finish(self, checkpoint: tuple[Counters, Tensors] | None, parameters: Tensors | None) -> None:
        """Write everything that is left; may be called again after an outage.

        Args:
            checkpoint: the last one; None: store none.
            parameters: published if they are newer than the latest version; None: publish nothing.
        """

        def write() -> None:
            leases.renew(*self._held)
            self._store_ledger()
            while self._shared.gaps or self._shared.refused:
                self._report_entries()
            if parameters is not None and self._shared.updates > self._published_updates:
                self._publish((self._shared.updates, parameters))
            self._records()
            if checkpoint is not None:
                counters, state = checkpoint
                self._save(replace(counters, version=self._shared.version), state)

        self._freeing(write)

    def apply(self, config: RunConfig) -> None:
        """Apply changed settings; bring timers forward if the new intervals are shorter."""
        self._config = config
        now = time.monotonic()
        self._checkpoint_at = min(self._checkpoint_at, now + config.learner.checkpoint_every_s)
        self._metrics_at = min(self._metrics_at, now + config.learner.metrics_every_s)

    # --- a round -----------------------------------------------------------------------------------------

    def round(self) -> None:
        """Write what is due; call it about twenty times a second, and again after an outage.

        Raises:
            LeaseLostError: another learner took over.
            RunGoneError: the server came back without the run, or older.
            redis.exceptions.RedisError: the server has an outage.
        """
        started, bytes_before = time.monotonic(), self._written_bytes
        try:
            is_due = started >= self._renew_at
            if is_due:
                leases.renew(*self._held)
                now = time.monotonic()
                if now - self._renew_at > workers.TTL_S / 2:  # heartbeats may have expired
                    self._fold_at = now + FOLD_EVERY_S
                self._renew_at = now + RENEW_S
                self._store_ledger()
                self._fold()
                counted, trimmed = self._shared.counted, self._trimmed_bytes
                stream.correct_counts(*self._held, counted, trimmed, most_steps=self.most_steps)
            self._trim(is_due=is_due)
            self._report_entries()
            if self._shared.weights is not None:
                self._publish(self._shared.weights)
            else:
                self._raise_allowance()
            self._store_checkpoint()
            self._report_metrics()
        except connection.OUTAGES as error:
            self._outage_at = self._outage_at or started
            now = time.monotonic()
            if not connection.is_full(error):  # folding frees memory
                self._fold_at = now + FOLD_EVERY_S  # heartbeats have expired, and are back by then
            elif now >= max(self._outage_at + SLOW_S, self._shed_at):
                self._shed()
            raise
        now = time.monotonic()
        slow_s = now - started - (self._written_bytes - bytes_before) / BYTES_PER_S
        if self._outage_at:
            self._waited_s += now - self._outage_at
        elif slow_s > SLOW_S:
            self._waited_s += slow_s
            log.warning("the server took %.1f s to answer", slow_s)
        self._outage_at = 0.0

    def _store_ledger(self) -> None:
        """Store the rows that have changed."""
        changed, cursor = self._shared.ledger.changes()
        if not changed:
            return
        try:
            ledger.put(*self._held, changed, cursor)
        except BaseException:
            self._shared.ledger.put_back(changed)
            raise
        self._ledger_cursor = cursor

    def _fold(self) -> None:
        """Now and then fold the rows of ended producers into one."""
        if time.monotonic() >= self._fold_at and self._checkpoint is not None:
            # A shadow has no records: only rows that it has folded itself go.
            is_shadow, rows = self._source != self._run, self._shared.ledger
            num_folded = ledger.fold(*self._held, rows.state() if is_shadow else self._checkpoint.ledger)
            self._fold_rows()
            is_crowded = num_folded >= ledger.MIN_PRODUCERS  # more than one reading shows, perhaps
            self._fold_at = time.monotonic() + (0.0 if is_crowded else FOLD_EVERY_S)

    def _fold_rows(self) -> None:
        """Fold the rows of producers that were folded. A shadow first reads all that these had appended until then."""
        rows = self._shared.ledger
        if is_shadow := self._source != self._run:
            if stream.order(rows.cursor)[0] <= self._unlisted_ms:
                return
            rows.fold(self._unlisted)
        producers = [producer for producer in rows.rows if producer >= 0]
        found = ledger.unlisted(self._client, self._source, producers)
        if is_shadow:
            self._unlisted, self._unlisted_ms = found, runs.server_ms(self._client)
        else:
            rows.fold(found)

    def _report_entries(self) -> None:
        """Report some lost fragments in the journal, and store some refused entries in `dead`."""
        gaps, refused = self._shared.gaps, self._shared.refused
        for _ in range(min(len(gaps), GAPS_PER_ROUND)):
            self.note("lost fragments", gaps[0])
            gaps.popleft()
        for _ in range(REFUSALS_PER_ROUND // REFUSED_AT_ONCE):
            self._refusing = self._refusing or list(itertools.islice(refused, REFUSED_AT_ONCE))
            if self._refusing:
                stream.refuse(*self._held, self._refusing)
            for _ in self._refusing:
                refused.popleft()
            self._refusing = []

    def _report_metrics(self) -> None:
        now, before = time.monotonic(), self._totals_before
        if now >= self._metrics_at:
            totals = self._totals()
            metrics.add(*self._held, self._row(totals))
            before.append(totals)
            while len(before) > 1 and totals["time"] - before[0]["time"] > RATES_S:
                before.popleft()
            self._metrics_at = now + self._config.learner.metrics_every_s

    def _totals(self) -> dict[str, float]:
        """Return the totals whose growth a row of metrics shows."""
        return {
            "time": time.monotonic(),
            "updates": self._shared.updates,
            "env_steps": self._shared.env_steps,
            "idle_s": self._reader.waited_s if self._reader is not None else 0.0,
            "server_wait_s": self._waited_s,
        }

    def _row(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics; an iteration may take seconds, so rates are those of several rows."""
        shared, before = self._shared, self._totals_before
        grown = {name: total - before[0][name] for name, total in totals.items()}
        elapsed_s = max(grown["time"], 1e-9)
        row = {
            "elapsed_s": shared.elapsed_s,
            "env_steps": totals["env_steps"],
            "updates": totals["updates"],
            "env_steps_per_s": grown["env_steps"] / elapsed_s,
            "updates_per_s": grown["updates"] / elapsed_s,
            **self._replay.figures(**shared.pace),
            "admitted": shared.ledger.consumed,
            "dead": shared.ledger.refused,
            "version": shared.version,
            "learner_wait": min(1.0, grown["idle_s"] / elapsed_s),
            "server_wait_s": totals["server_wait_s"] - before[-1]["server_wait_s"],
        }
        if shared.returns:
            row["return_mean"] = float(np.mean(list(shared.returns)))
        row |= self._episode_metrics() | ({"elo": shared.league.rating} if shared.league else {})
        return row | {name: float(value) for name, value in shared.metrics.items()}

    def _episode_metrics(self) -> dict[str, float]:
        """Return the means of `env.metrics` over the newest training episodes; say once which never appears."""
        found, rows = {}, np.array([*self._shared.episode_metrics])  # [E, M]
        for name, values in zip(self._config.env.metrics if len(rows) else (), rows.T, strict=True):
            if len(there := values[np.isfinite(values)]):
                found[INFO + name] = float(there.mean())
            elif len(values) == RETURNS_LENGTH and name not in self._missing:
                self._missing.add(name)
                self.note(
                    "no metric", f"no info has a number {name} at the end of an episode; see env.metrics"
                )
        return found

    # --- weights and allowance ---------------------------------------------------------------------------

    def _publish(self, finished: tuple[int, Tensors]) -> None:
        """Store the next version of the weights, raise the allowance and drop old versions, all or nothing.

        Args:
            finished: updates and parameters, as in `Shared.weights`.
        """
        shared = self._shared
        updates, parameters = finished
        index = weights.index(self._client, self._run)
        if self._reader is not None and index.latest < shared.version:
            raise connection.RunGoneError(
                f"run {self._run}: the server came back empty or older, at version {index.latest}"
            )
        blob = weights.encode_weights(parameters)
        version = max(index.latest, shared.version, self._unconfirmed) + 1
        allowance = self.allowance(version)
        kept = self._config.weights.model_dump(exclude={"onnx"})
        drop = weights.superseded(index, **kept, pinned=self.pinned)
        file = self.template.filled(version, parameters) if self.template is not None else b""
        try:
            weights.publish(
                *self._held,
                version=version,
                blob=blob,
                allowance=allowance,
                players=self._replay.num_collectors,
                updates=updates,
                onnx=file,
                drop=drop,
                durability=self._config.durability,
            )
        except connection.UNREACHABLE:
            self._unconfirmed = version
            raise
        self._written_bytes += len(blob) + len(file)
        shared.version, self._allowed, self._published_updates = version, allowance, updates
        if shared.weights is finished:  # the training thread may have finished others meanwhile
            shared.weights = None
        if self._reader is not None:
            self._reader.wake()
        if shared.league is not None:
            weights.rate(*self._held, shared.league.publish(version, index.sizes.keys() - {*drop}))

    def _raise_allowance(self) -> None:
        """Allow collectors more steps, if there are enough to be worth a call."""
        allowance, now = self.allowance(self._shared.version), time.monotonic()
        if allowance >= self._allowed + self._replay.budget_increment and now >= self._allow_at:
            players, updates = self._replay.num_collectors, self._shared.updates
            self._allow_at = now + players / WAKES_PER_S
            stream.allow(*self._held, allowance, players=players, updates=updates)
            self._allowed = allowance

    @property
    def most_steps(self) -> int:
        """Env steps up to which fragments count: processes append little more than they were allowed."""
        num_envs = self._config.env.num_envs * max(self.num_processes, self._num_processes_before)
        allowed = max(self._allowed, self._allowed_before) + self._config.replay.slack_steps
        return allowed + MOST_OVERSHOOT + self._first_steps * num_envs

    def allowance(self, version: int) -> int:
        """Return the environment steps that may be appended in all once `version` is published."""
        shared = self._shared
        return shared.refilled + self._replay.step_budget(**shared.pace, version=version)

    # --- checkpoints and the stream ----------------------------------------------------------------------

    def _store_checkpoint(self) -> None:
        """Store the checkpoint that was taken, or have one taken when it is due."""
        if (taken := self._shared.checkpoint) is not None:
            self._save(*taken)
            if self._shared.checkpoint is taken:  # the training thread may have taken another meanwhile
                self._shared.checkpoint = None
        elif time.monotonic() >= self._checkpoint_at:
            self._checkpoint_at = time.monotonic() + self._config.learner.checkpoint_every_s
            self._shared.wants_checkpoint.set()

    def _save(self, counters: Counters, state: Tensors) -> None:
        blob, meta = weights.encode_weights(state), dict(vars(counters))
        checkpoints.save(*self._held, blob, meta)
        self._written_bytes += len(blob)
        self._checkpoint = counters
        if self.goes_back_from is not None:
            runs.end_rollback(*self._held, self.goes_back_from)
            self.goes_back_from = None
        every_s = max(self._config.learner.checkpoint_every_s, len(blob) / CHECKPOINT_BYTES_PER_S)
        self._checkpoint_at = time.monotonic() + every_s
        self._on_checkpoint(blob, meta)

    def _trim(self, *, is_due: bool) -> None:
        """Trim entries that neither the replay nor the newest checkpoint needs; make room near the byte budget.

        The append refuses fragments beyond `replay.max_bytes`. Before that the oldest entries go even if the replay
        still holds them; entries after the newest checkpoint stay in any case, for no other place has them.
        """
        shared, checkpoint = self._shared, self._checkpoint
        max_bytes = int(self._config.replay.max_bytes)
        if is_due and checkpoint is not None:
            self._trim_before(min(shared.oldest, checkpoint.oldest.encode(), key=stream.order))
        is_stuck = False
        high = max(LEAST_HIGH * max_bytes, min(HIGH * max_bytes, max_bytes - 2 * shared.largest_bytes))
        if self._stream_bytes > high:
            if checkpoint is None or checkpoint.cursor != shared.ledger.cursor.decode():
                shared.wants_checkpoint.set()
            self._store_ledger()
            freed = self._trim_to(int(high - ROOM * max_bytes))
            if freed:
                shared.largest_bytes = 0
            # Junk of a worker may fill the stream behind fragments that wait for others, which find no room then.
            is_stuck = not freed and not self._is_unrecorded
            is_stuck = is_stuck and self._replay.num_waiting > 0 and self._replay.has_room()
        now = time.monotonic()
        self._stuck_at = min(self._stuck_at, now + STUCK_S) if is_stuck else math.inf
        shared.drops_waiting = now >= self._stuck_at

    def _freeing(self, write: Callable[[], object]) -> None:
        """Write; while the server's memory is full, trim the oldest entries and try again."""
        while True:
            try:
                write()
                return
            except connection.OUTAGES as error:
                if not (connection.is_full(error) and self._shed()):
                    raise

    def _shed(self) -> bool:
        """Trim a part of the stream that only a rebuilt replay would need; return whether there was any."""
        num_bytes = self._trim_to(int(SHED_KEEPS * self._stream_bytes))
        if num_bytes:
            level = logging.INFO if time.monotonic() < self._shed_at + 10 * SHED_S else logging.WARNING
            log.log(level, "the server is full: trimmed %d bytes of the oldest experience", num_bytes)
        self._shed_at = time.monotonic() + SHED_S
        return num_bytes > 0

    def _trim_to(self, num_bytes: int) -> int:
        """Trim all but the newest `num_bytes` at most and what the newest checkpoint needs; return the bytes trimmed.

        It needs the entries after it and, on-policy, those that waited in it: nothing was learned from them yet.
        """
        checkpoint = self._checkpoint
        if checkpoint is None or not self._shared.entries:
            return 0
        before, needed = self._stream_bytes, checkpoint.oldest if checkpoint.waiting else checkpoint.cursor
        cut = self._shared.taken_bytes - num_bytes
        entries = itertools.pairwise(list(self._shared.entries))
        kept = (entry_id for (_, bytes_before), (entry_id, _) in entries if bytes_before >= cut)
        self._trim_before(min(next(kept, needed.encode()), needed.encode(), key=stream.order))
        return before - self._stream_bytes

    def _trim_before(self, first_kept: bytes) -> None:
        entries = self._shared.entries
        first_kept = min(first_kept, stream.following(self._ledger_cursor), key=stream.order)
        if not entries or stream.order(first_kept) <= stream.order(entries[0][0]) or not self._records():
            return
        stream.trim(*self._held, first_kept)
        while entries and stream.order(entries[0][0]) < stream.order(first_kept):
            self._trimmed_bytes = entries.popleft()[1]

    def _records(self) -> bool:
        """Record what the stream has; return whether that succeeded. Until it does nothing is trimmed."""
        now, folder = time.monotonic(), self.folder
        if folder is None or now < self._record_at:
            return folder is None
        try:
            self._recording = self._recording or Recording(self._client, self._run, folder)
            self._recording.catch_up()
        except (StoreError, connection.ReplyTooLongError) as error:
            if not self._is_unrecorded:
                log.warning("%s; until then nothing leaves the stream", error)
            self._record_at, self._is_unrecorded = now + RECORD_AGAIN_S, True
            return False
        self._is_unrecorded = False
        if (missed := self._recording.num_missed) > self._num_unrecorded:
            self.note("not recorded", f"{missed:,} fragments left the stream before {folder} had them")
            self._num_unrecorded = missed
        return True

    def close(self) -> None:
        """Let another process record."""
        if self._recording is not None:
            self._recording.close()
            self._recording = None

    @property
    def _stream_bytes(self) -> int:
        """Bytes of the entries that were taken and not trimmed."""
        return self._shared.taken_bytes - self._trimmed_bytes


def decode_tensors(blob: bytes) -> Tensors:
    """Return the tensors of a safetensors blob."""
    return {name: torch.from_numpy(array) for name, array in weights.decode_weights(blob).items()}

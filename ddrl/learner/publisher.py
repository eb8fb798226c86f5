"""What a learner has its server know: versions, allowance, checkpoints, ledger, figures, trims; in a thread of its own.

The training thread waits for no server. It lays finished copies on the `Board`, and the service thread takes them from
there. Every write is fenced, and after a pause the first call renews the lease: a learner that stalled and was replaced
meanwhile writes nothing. Where the server cannot serve for a while, what was to be written stays, and is written later;
where its memory is full, what frees memory goes first. Background Python steals updates through the GIL, so a round
takes a few milliseconds a second.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ddrl.config import RunConfig
from ddrl.learner.accounts import Accounts
from ddrl.learner.board import Board, Tensors
from ddrl.learner.retention import Retention
from ddrl.replay.fifo import Fifo
from ddrl.replay.reader import Reader
from ddrl.replay.replay import Replay
from ddrl.store import checkpoints, connection, ledger, metrics, runs, stream, weights
from ddrl.store import leases as lease
from ddrl.store.checkpoints import Counters

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)

RENEW_S = 0.75  # a quarter of the lease
SLOW_S = 1.0  # a round that takes longer than this,
BYTES_PER_S = 20e6  # and than its writes at this pace, has waited for the server
MOST_TOLD = 100  # refusals in a round
FOLD_EVERY_S = 60.0
WAKES_PER_S = 2_000  # players that each raise of the allowance wakes, at most
CHECKPOINT_BYTES_PER_S = 1e6  # what checkpoints may cost the server on average


class Service:
    """The service thread's half of a learner.

    Args:
        client: connection of the service thread.
        run: its id.
        token: fencing token of the lease.
        config: the run's.
        experience: of the training thread; read for its step budget and figures.
        accounts: the ledger as it goes.
        board: shared with the training thread.
    """

    def __init__(
        self,
        client: Redis,
        run: str,
        token: int,
        config: RunConfig,
        *,
        experience: Replay | Fifo,
        accounts: Accounts,
        board: Board,
    ) -> None:
        self._client, self._run, self._token, self._config = client, run, token, config
        self._experience, self._accounts, self._board = experience, accounts, board
        self.retention = Retention(client, run, token, max_bytes=int(config.replay.max_bytes))
        self.pinned: frozenset[int] = frozenset()
        """Versions that must not be dropped."""
        self.copy_to: Callable[[bytes, Mapping[str, Any]], object] | None = None
        """Gets the tensors and the meta of each checkpoint that the server has taken."""
        self.feed: Reader | None = None
        self.fallen_to: int | None = None
        """The latest version that the server knew when it came back older than what it had been told."""
        self.published_updates = 0
        self._allowed = -1
        self._allow_at = 0.0
        now = time.monotonic()
        self._checkpoint_at = now + config.learner.checkpoint_every_s
        self._renew_at = self._metrics_at = now
        self._fold_at = now + FOLD_EVERY_S
        self._hindered_at = 0.0  # since when the server cannot serve
        self._is_full = self.has_latest = False
        self._waited_s = 0.0
        self._written_bytes = 0  # large writes
        self._last_row = (now, 0, 0, 0.0, 0.0)

    # --- the beginning and the end ---------------------------------------------------------------------

    def load(self) -> tuple[tuple[dict[str, torch.Tensor], Counters] | None, int]:
        """The newest checkpoint, if any, and the latest version; `has_latest` says whether the server still has it."""
        self.renew()
        checkpoints.sweep(self._client, self._run, self._token)
        found = checkpoints.load(self._client, self._run, between=self.renew)
        stored = weights.index(self._client, self._run)
        latest, self.has_latest = stored.latest, stored.latest in stored.sizes
        self.retention.told = ledger.read(self._client, self._run)[1]
        if found is None:
            return None, latest
        blob, meta = found
        self.retention.checkpoint = counters = Counters.decode(meta)
        return (_decoded(blob), counters), latest

    def initial(self) -> tuple[str, dict[str, torch.Tensor]] | None:
        """Where the weights to begin with come from, and they; None where the run begins afresh."""
        blob = runs.initial(self._client, self._run)
        return None if blob is None else (runs.state(self._client, self._run).warm, _decoded(blob))

    def note(self, event: str, reason: str) -> None:
        """Add to the run's journal, as the learner that holds it."""
        lease.renew(self._client, self._run, self._token)  # the journal takes a line from anybody
        runs.note(self._client, self._run, event, reason)

    def begin(self, feed: Reader, version: int, parameters: Tensors | None) -> None:
        """Tell the server where the learner stands; `parameters` are published, else `version` is as it was."""
        self._accounts.fold(*ledger.folded(self._client, self._run))
        self._accounts.rewind(runs.state(self._client, self._run).appended_fragments)
        rows, cursor = self._accounts.rows, self._accounts.cursor
        self._accounts.changes()
        self.published_updates = self._board.updates
        self._insistently(lambda: ledger.replace(self._client, self._run, self._token, rows, cursor))
        self.retention.told = cursor
        if self.retention.checkpoint is not None:  # what only the former learner's view held
            stream.trim(self._client, self._run, self._token, self.retention.checkpoint.oldest.encode())
        if parameters is None:
            self._board.version = version
            self._insistently(self._raise_allowance)
        else:
            self._board.version = version - 1
            self._insistently(lambda: self._publish(self._board.updates, parameters))
        self._last_row = self._totals(time.monotonic())  # rates are this learner's own
        self.feed = feed

    def finish(self, counters: Counters | None, state: Tensors, parameters: Tensors) -> None:
        """Tell the server everything, and store a checkpoint unless `counters` is None; may be called again.

        Raises:
            LeaseLostError: another learner took over.
        """
        self.renew()
        self._tell_ledger()
        while self._board.gone or self._board.refused:
            self._tell_refused()
        if self._board.updates > self.published_updates:
            self._publish(self._board.updates, parameters)
        if counters is not None:
            self._save(replace(counters, version=self._board.version), state)

    def adopt(self, config: RunConfig) -> None:
        """Go by other live settings from now on; what is due later than they say is due as they say."""
        self._config = config
        self.retention.max_bytes = int(config.replay.max_bytes)
        now = time.monotonic()
        self._checkpoint_at = min(self._checkpoint_at, now + config.learner.checkpoint_every_s)
        self._metrics_at = min(self._metrics_at, now + config.learner.metrics_every_s)

    # --- a round -----------------------------------------------------------------------------------------

    def serve(self) -> None:
        """One round of what the server must be told; what it cannot take now stays, and is told in a later one.

        Raises:
            LeaseLostError: another learner took over.
            redis.exceptions.RedisError: the server cannot serve; call again if `connection.outage` says so.
        """
        with self._noticing():
            renewed = self.renew()
            if renewed:
                self._tell_ledger()
                self._fold()
            self._make_room(may_trim=renewed)
            self._tell_refused()
            self._publish_or_allow()
            self._store()
            self._tell_figures()

    def renew(self) -> bool:
        """Keep the lease, where it is time to."""
        is_due = time.monotonic() >= self._renew_at
        if is_due:
            lease.renew(self._client, self._run, self._token)
            self._renew_at = time.monotonic() + RENEW_S
        return is_due

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        """Count what is waited for a server that cannot serve."""
        started, before = time.monotonic(), self._written_bytes
        try:
            yield
        except connection.OUTAGES as error:
            if connection.outage(error) is not None:
                self._hindered_at = self._hindered_at or started
                self._is_full = connection.is_full(error)
            raise
        now = time.monotonic()
        slow = now - started - (self._written_bytes - before) / BYTES_PER_S
        if self._hindered_at:
            self._waited_s += now - self._hindered_at
        elif slow > SLOW_S:
            self._waited_s += slow
            log.warning("the server took %.1f s to answer", slow)
        self._hindered_at, self._is_full = 0.0, False

    def _make_room(self, *, may_trim: bool) -> None:
        """Drop what nothing needs; near the budget, have a checkpoint taken, and drop what it makes dispensable."""
        counters, retention = self._board.counters, self.retention
        if may_trim:
            retention.trim(counters.oldest.encode())
        if retention.is_near_budget:
            if retention.checkpoint is None or retention.checkpoint.cursor != counters.cursor:
                self._board.wants_state.set()
            self._tell_ledger()
            retention.make_room()
        if self._is_full and time.monotonic() - self._hindered_at > SLOW_S:
            retention.shed()

    def _insistently(self, write: Callable[[], object]) -> None:
        """Write at the beginning, when nobody else frees the memory of a full server."""
        while True:
            try:
                self.renew()
                write()
                return
            except connection.OUTAGES as error:
                if not connection.is_full(error) or not self.retention.shed(at_once=True):
                    raise

    # --- what is told ----------------------------------------------------------------------------------------

    def _tell_ledger(self) -> None:
        """What has become of fragments since it was told last."""
        changed, cursor = self._accounts.changes()
        if not changed:
            return
        try:
            ledger.put(self._client, self._run, self._token, changed, cursor)
        except BaseException:
            self._accounts.put_back(changed)
            raise
        self.retention.told = cursor

    def _fold(self) -> None:
        """Every few minutes, one account for the producers that have been silent for long."""
        checkpoint = self.retention.checkpoint
        if time.monotonic() >= self._fold_at and checkpoint is not None:
            self._fold_at = time.monotonic() + FOLD_EVERY_S
            ledger.fold(self._client, self._run, self._token, checkpoint.ledger)
            self._accounts.fold(*ledger.folded(self._client, self._run))

    def _tell_refused(self) -> None:
        while self._board.gone:
            self.note("lost", self._board.gone[0])
            self._board.gone.popleft()
        refused = self._board.refused
        for _ in range(min(len(refused), MOST_TOLD)):  # the rest in the next round: a flood may come
            stream.refuse(self._client, self._run, self._token, *refused[0])
            refused.popleft()

    def _publish_or_allow(self) -> None:
        published = self._board.weights
        if published is None:
            self._raise_allowance()
            return
        self._publish(*published)
        if self._board.weights is published:  # the next one may have come meanwhile
            self._board.weights = None
        if self.feed is not None:
            self.feed.wake()

    def _publish(self, updates: int, parameters: Tensors) -> None:
        """Store the next version of the weights; versions never go back, though the server may."""
        stored = weights.index(self._client, self._run)
        policy = self._config.weights
        drop = weights.superseded(
            stored,
            keep_last=policy.keep_last,
            keep_every=policy.keep_every,
            max_bytes=int(policy.max_bytes),
            pinned=self.pinned,
        )
        if self.feed is not None and stored.latest < self._board.version:
            self.fallen_to = stored.latest
        version, blob = max(stored.latest, self._board.version) + 1, _encoded(parameters)
        allowance = self._allowance(version)
        weights.publish(
            self._client,
            self._run,
            self._token,
            version=version,
            blob=blob,
            allowance=allowance,
            players=self._experience.num_collectors,
            updates=self._board.updates,
            drop=drop,
        )
        self._written_bytes += len(blob)
        self._board.version, self._allowed, self.published_updates = version, allowance, updates

    def _raise_allowance(self) -> None:
        """Tell collectors of more room, in steps worth a call."""
        allowance = self._allowance(self._board.version)
        now = time.monotonic()
        if allowance >= self._allowed + self._experience.budget_increment and now >= self._allow_at:
            players, updates = self._experience.num_collectors, self._board.updates
            self._allow_at = now + players / WAKES_PER_S
            stream.allow(self._client, self._run, self._token, allowance, players=players, updates=updates)
            self._allowed = allowance

    def _allowance(self, version: int) -> int:
        """Environment steps that may have been appended in all once `version` is published."""
        board = self._board
        return board.refilled + self._experience.step_budget(
            num_steps=board.paced_steps, num_updates=board.updates, version=version
        )

    def _store(self) -> None:
        """Store a checkpoint that was taken, or have one taken when it is time."""
        taken = self._board.state
        if taken is not None:
            self._save(*taken)
            if self._board.state is taken:  # another may have been taken meanwhile
                self._board.state = None
        elif time.monotonic() >= self._checkpoint_at:
            self._checkpoint_at = time.monotonic() + self._config.learner.checkpoint_every_s
            self._board.wants_state.set()

    def _save(self, counters: Counters, state: Tensors) -> None:
        self.renew()
        blob, meta = _encoded(state), dict(vars(counters))
        checkpoints.save(self._client, self._run, self._token, blob, meta, between=self.renew)
        self._written_bytes += len(blob)
        self.retention.checkpoint = counters
        every = max(self._config.learner.checkpoint_every_s, len(blob) / CHECKPOINT_BYTES_PER_S)
        self._checkpoint_at = time.monotonic() + every
        if self.copy_to is not None:
            self.copy_to(blob, meta)

    def _tell_figures(self) -> None:
        now = time.monotonic()
        if now < self._metrics_at:
            return
        metrics.add(self._client, self._run, self._token, self._row(now))
        self._last_row = self._totals(now)
        self._metrics_at = now + self._config.learner.metrics_every_s

    def _totals(self, now: float) -> tuple[float, int, int, float, float]:
        """What rows tell the growth of: time, updates, steps, seconds waited for fragments and for the server."""
        idle = self.feed.waited_s if self.feed is not None else 0.0
        return now, self._board.updates, self._board.steps, idle, self._waited_s

    def _row(self, now: float) -> dict[str, float]:
        """Figures since the last row."""
        board, accounts = self._board, self._accounts
        then, updates_then, steps_then, idle_then, waited_then = self._last_row
        _, updates, steps, idle, waited = self._totals(now)
        elapsed = max(now - then, 1e-9)
        row = {
            "elapsed_s": board.elapsed_s,
            "env_steps": steps,
            "updates": updates,
            "env_steps_per_s": (steps - steps_then) / elapsed,
            "updates_per_s": (updates - updates_then) / elapsed,
            **self._experience.figures(num_steps=board.paced_steps, num_updates=updates),
            "admitted": accounts.consumed,
            "dead": accounts.refused,
            "version": board.version,
            "learner_wait": min(1.0, (idle - idle_then) / elapsed),
            "server_wait_s": waited - waited_then,
        }
        if board.returns:
            row["return_mean"] = float(np.mean(list(board.returns)))
        return row | {name: float(value) for name, value in dict(board.figures).items()}


def _decoded(blob: bytes) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in weights.decode_weights(blob).items()}


def _encoded(arrays: Tensors) -> bytes:
    return weights.encode_weights({name: tensor.numpy() for name, tensor in arrays.items()})

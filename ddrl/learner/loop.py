"""The learner's training loop: admit fragments, draw a batch, update.

The training thread owns the algorithm and the replay. It leaves its results in `Shared`, and the publisher writes them
to the server from the service thread. Off-policy it never waits for the server: experience is sampled from the replay,
and weights are published now and then. On-policy each fragment is learned from once, and an iteration begins when the
weights of the one before are published, so that versions count iterations.

In lockstep (`learner.lockstep`) a round admits one fragment and makes all updates that the rate limiter allows then.
Checkpoints fall between rounds, so a given stream, config and seed always give the same result, even if learners die.

Whatever leaves this thread, weights and checkpoints, is finite: see NotFiniteError.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ddrl.algorithms import base
from ddrl.config import OPPONENT, RunConfig
from ddrl.learner.core import Core
from ddrl.learner.group import Leading
from ddrl.learner.league import League
from ddrl.learner.publisher import OnCheckpoint, Publisher, Shared, Tensors, decode_tensors
from ddrl.onnx import Template
from ddrl.policy import LoadedPolicy
from ddrl.replay.experience import warmup_steps
from ddrl.replay.reader import Reader, decode_range, largest_value
from ddrl.store import runs, stream, weights
from ddrl.store.checkpoints import REPLAY, Counters
from ddrl.store.connection import Redis, bound_replies

log = logging.getLogger(__name__)

ADMIT_S = 0.05  # longest time to admit fragments between two updates, so that updates go on during a backlog
WAIT_S = 0.05  # longest wait for fragments before the loop checks for other work
MEET_S = 0.005  # the same of several ranks, which meet in between
HUGE, LEAST_HUGE = 1e18, 1e6  # the square of a larger value than the first is not finite in float32
OUTLIER = 1e4  # times the median of the fragments' largest values
LOG_S = 1.0  # between two lines of log about refused entries
MAX_REFUSED = 10_000  # refusals waiting to be reported; at this number the loop stops admitting


class NotFiniteError(ValueError):
    """Weights or state of the algorithm are no longer finite; they are neither published nor saved."""


class Learner:
    """One run's training.

    Args:
        client: connection of the service thread.
        token: fencing token of the lease.
        core: the run's algorithm and replay; of several ranks this one leads.
        on_checkpoint: called with each checkpoint that the server has stored.
    """

    def __init__(
        self, client: Redis, token: int, core: Core, *, on_checkpoint: OnCheckpoint = lambda blob, meta: None
    ) -> None:
        self._client, self._run, self._config = client, core.run, core.config
        self._ranks, self._on_policy, self.core = core.ranks, core.resolved.on_policy, core
        bound_replies(core.client, core.longest)
        self.algorithm, self.replay = core.algorithm, core.replay
        self.leading = Leading(core)
        self._reader: Reader | None = None
        """Set by `restore`."""
        self.shared = Shared()
        self.publisher = Publisher(client, token, core, self.shared, on_checkpoint)
        self.stopping = threading.Event()
        self._publish_at = time.monotonic() + self._config.learner.publish_every_s
        self._published_updates = 0  # of the weights that were last left for the publisher
        self._changed: deque[tuple[RunConfig, Any]] = deque()
        """Config and options of the algorithm, queued by `apply`."""
        self._left_out: deque[bytes] = deque()
        """Entries in quarantine that are kept for the day when their rule is lifted, oldest first."""
        self._num_rounds = 0
        self._num_unlogged, self._log_at = 0, 0.0  # refusals, and when the next one is logged
        self._mends: dict[str, Any] = {
            "drop_next": partial(stream.drop_next, core.client, core.run, token, core.longest),
            "lower_ids": partial(stream.lower_ids, core.client, core.run, token),
            "report": self.leading.report,
            "keeps_folded": core.source != core.run,
        }

    # --- begin and end -------------------------------------------------------------------------------

    def restore(self) -> None:
        """Load the newest checkpoint, before the first update the initial weights; rebuild the replay; publish; read.

        Raises:
            LeaseLostError: another learner took over.
            OnnxError: its policy cannot be published as ONNX.
            redis.exceptions.RedisError: the server has an outage; create a new `Learner` to try again.
        """
        shared, index = self.shared, weights.index(self._client, self._run)
        if self.core.resolved.spec.is_two_player:
            shared.league = League(index.standings, self._config.env.metrics.index(OPPONENT))
        if self._config.weights.onnx:
            resolved = self.core.resolved
            acting = LoadedPolicy(resolved.policy(), self._config, resolved.spec, self._run, 0)
            self.publisher.template = Template(acting, self._weights())
        checkpoint, latest = self.publisher.load(), index.latest
        state, counters = checkpoint or ({}, Counters())
        earlier, revision = runs.rollback(self._client, self._run)  # weights to go back to
        # On-policy, the weights of the checkpoint keep their version if they are the published ones.
        is_published = self._on_policy and checkpoint is not None and counters.version == latest >= 0
        is_published = is_published and earlier is None
        version = latest if is_published else max(latest, counters.version) + 1
        self.replay.first_version = 0 if is_published else version
        source = runs.state(self._client, self._run).warm
        if checkpoint is not None:
            self._load(state, counters, version)
        if earlier is not None:
            self.algorithm.load_initial_weights(decode_tensors(earlier))
            self.publisher.goes_back_from = revision
            shared.wants_checkpoint.set()
        elif not shared.updates and (initial := runs.initial(self._client, self._run)) is not None:
            fresh = self.algorithm.load_initial_weights(decode_tensors(initial))
            if checkpoint is None:
                self.publisher.note("warm start", f"begins with {source}; {fresh}")
        shared.oldest = self._oldest()
        shared.count()
        # Off-policy, weights that an earlier learner published play better than untrained ones. On-policy, they are
        # another policy, whose data cannot be used.
        if not self._on_policy and not shared.updates and latest in index.sizes and earlier is None:
            is_published, version = True, latest
        reader = Reader(
            self.core.client, self.core.source, shared.ledger.cursor, self.core.decode, **self._mends
        )
        self.publisher.begin(reader, version, None if is_published else self._weights())
        self._published_updates = shared.updates
        reader.start()
        self._reader = reader
        where = shared.updates, shared.env_steps, len(self.replay)
        log.info("starts at update %d, env step %d, holding %d transitions", *where)

    def _load(self, state: Tensors, counters: Counters, version: int) -> None:
        """Load a checkpoint; admit the fragments that its replay held as if `version` were published."""
        shared = self.shared
        if self._ranks.size > 1 and REPLAY + "entry" in state:
            self.leading.states = [{name: state[name] for name in state if name.startswith(REPLAY)}]
        for entry in self.core.load(state, counters, version):
            shared.add_entry(entry)
            self._left_out += [entry.entry_id] if entry.left_out and not self._on_policy else []
        shared.updates, shared.env_steps = counters.updates, counters.env_steps
        shared.add_elapsed(counters.elapsed_s)
        shared.ledger.load(counters)
        # Fragments that waited then and have left the stream count as dropped.
        self.replay.num_dropped = counters.dropped + counters.waiting - self.replay.num_waiting
        # After a loss of experience in the stream the replay warms up again before the next update.
        needed = warmup_steps(self._config.replay, self.core.resolved.config)
        missing = min(needed, counters.held) - self._num_held
        if missing > 0:
            log.warning(
                "the stream has lost experience of the checkpoint; updates go on after %d more steps", missing
            )
            # Steps for which updates were still due are lost with the others: else they might fill the allowance.
            pace = {"num_steps": 0, "num_updates": shared.updates, "version": version}
            learned = self.replay.step_budget(**pace) - self._config.replay.slack_steps
            shared.refilled = missing + max(0, shared.env_steps - counters.refilled - learned)
        shared.refilled += counters.refilled

    def close(self) -> None:
        """Stop the reader and the replay's threads; call it when `train` has returned."""
        if self._reader is not None:
            self._reader.stop()
        self.replay.close()
        self.publisher.close()

    def finish(self, *, saves: bool = True) -> None:
        """Close, publish what is left, and store a checkpoint; may be called again after an outage.

        Args:
            saves: store the checkpoint.

        Raises:
            LeaseLostError: another learner took over.
            redis.exceptions.RedisError: the server has an outage.
        """
        self.close()
        checkpoint, parameters = None, None
        try:
            parameters = self._weights()
            checkpoint = self.checkpoint() if saves else None
        except NotFiniteError as error:
            log.error("%s; the checkpoint before stays", error)
        self.publisher.finish(checkpoint, parameters)

    # --- the training thread -------------------------------------------------------------------------

    def train(self) -> None:
        """Learn until `stopping` is set.

        Raises:
            NotFiniteError: an update was too large.
            RunGoneError: the server came back older.
            BaseException: the error that stopped the reader.
        """
        reader, is_lockstep = self._reader, self._config.learner.lockstep
        assert reader is not None, "restore() comes first"
        try:
            while not self.stopping.is_set():
                self._num_rounds += 1
                is_admitted = self._admit(reader)
                if is_lockstep and is_admitted:
                    self._tell()
                is_updated = (is_admitted or not is_lockstep) and self._update()
                if is_lockstep and is_updated:
                    while self._update():
                        pass
                    self._tell()  # so that the other ranks pause too, before they admit
                self._handle_requests()
                if not (is_admitted or is_updated):
                    self._publish()
                    self._tell()
                    reader.wait(WAIT_S if self._ranks.size == 1 else MEET_S)
            self._tell(saves=True, ends=True)
        except ValueError:  # such as of a priority that is not a number
            _check_finite(self.algorithm.state(), self.algorithm.num_updates)
            raise

    def _admit(self, reader: Reader) -> bool:
        """Admit what has been read, for ADMIT_S or, in lockstep, one fragment; return whether any entry was taken.

        None is taken at MAX_REFUSED refusals that are not reported yet, or while the replay has no room.
        """
        shared, ledger = self.shared, self.shared.ledger
        if not (reader.ready and self.replay.has_room()) or len(shared.refused) >= MAX_REFUSED:
            return False
        gaps = []
        for entry in reader.take(0.0 if self._config.learner.lockstep else ADMIT_S):
            objection = ledger.objection(entry)
            reason = entry.reason or objection
            if not reason and self.core.admit(entry, version=shared.version):
                self.leading.admit(entry)
            gap = ledger.count(entry, consumed=not reason)
            gaps += [gap] if gap else []
            if not objection:  # else it is deleted
                shared.add_entry(entry)
            self._left_out += [entry.entry_id] if entry.left_out and not self._on_policy else []
            if reason:
                self._warn(f"entry {entry.entry_id.decode()} refused: {reason}")
                shared.refused.append(stream.Refusal(entry.entry_id, entry.head, reason, not objection))
            if entry.played is not None and not reason:
                num_steps = entry.played.num_transitions
                # Play waits until all that are counted were allowed; a shadow allows none.
                if not self._on_policy and self.core.source == self._run:
                    num_steps = min(num_steps, max(self.publisher.most_steps - shared.env_steps, 0))
                shared.env_steps += num_steps
                shared.returns.extend(entry.played.episode_return)
                shared.episode_metrics.extend(map(np.array, entry.played.episode_metrics))
                if shared.league is not None:
                    shared.league.count(entry.played)
            shared.count(() if objection else entry.counted)
            if not self.replay.has_room():
                break
        if gaps:
            shared.gaps.append(gaps[0] + (f", and so on, {len(gaps)} times" if len(gaps) > 1 else ""))
            self._warn(shared.gaps[-1])
        shared.oldest = self._oldest()
        return True

    def _warn(self, text: str) -> None:
        """Log what is wrong with an entry, unless one was within LOG_S: a worker may write a flood of them."""
        self._num_unlogged += 1
        if (now := time.monotonic()) >= self._log_at:
            others = self._num_unlogged - 1
            more = f", and {others:,} others since the last line" if others else ""
            log.warning("%s%s", text, more)
            self._num_unlogged, self._log_at = 0, now + LOG_S

    def _update(self) -> bool:
        """Draw a batch and learn from it; return False while fragments or, on-policy, the publication are missing."""
        shared = self.shared
        if self._on_policy and shared.weights is not None:
            return False
        if (batch := self.replay.draw(**shared.pace, version=shared.version)) is None:
            if shared.drops_waiting:
                shared.drops_waiting = False
                self.replay.drop_waiting()
                self._tell(drops=True)
                shared.wants_checkpoint.set()
            return False
        self._tell(chosen=self.replay.chosen)
        shared.metrics, shared.updates = self.core.learn(batch), self.algorithm.num_updates
        self._publish()
        return True

    def _tell(self, **orders: Any) -> None:
        """Give the ranks that follow, if any, their orders; see `Leading.tell`."""
        if self._ranks.size > 1:
            self.leading.tell(self.shared.ledger.cursor, version=self.shared.version, **orders)
            self.shared.oldest = self._oldest()

    def _publish(self) -> None:
        """Leave new weights for the publisher: on-policy at once, else publish_every_s after the last ones."""
        shared, now = self.shared, time.monotonic()
        if shared.updates > self._published_updates and (self._on_policy or now >= self._publish_at):
            self._publish_at = now + self._config.learner.publish_every_s
            self._published_updates = shared.updates
            shared.weights = shared.updates, self._weights()
            if self._on_policy:
                shared.wake.set()

    def _handle_requests(self) -> None:
        """Apply changed options, and take a checkpoint if the service thread wants one."""
        while self._changed:
            self._config, options = self._changed.popleft()
            # A shorter interval takes effect at once.
            self._publish_at = min(self._publish_at, time.monotonic() + self._config.learner.publish_every_s)
            try:
                self.core.apply_options(options)
                self._tell(options=self._config.model_dump(mode="json", by_alias=True))
            except ValueError as error:
                log.warning("%s", error)
        if self.shared.wants_checkpoint.is_set():
            self.shared.wants_checkpoint.clear()
            self._tell(saves=True)
            self.shared.checkpoint = self.checkpoint()

    def _oldest(self) -> bytes:
        """Return the first entry that the replay holds, or would hold if no rule left it out."""
        oldest = self.leading.oldest(self.replay.oldest_entry_id)
        while self._left_out and stream.order(self._left_out[0]) <= stream.order(self.replay.evicted):
            self._left_out.popleft()
        kept = [oldest or stream.following(self.shared.ledger.cursor), *itertools.islice(self._left_out, 1)]
        return min(kept, key=stream.order)

    @property
    def _num_held(self) -> int:
        """Transitions in the replays of all ranks, which hold about as much each."""
        return len(self.replay) * self._ranks.size

    # --- for others ----------------------------------------------------------------------------------

    def apply(self, config: RunConfig) -> None:
        """Apply changed settings: the publisher's at once, those of algorithm and replay before the next update.

        Raises:
            ConfigError: unknown options or invalid values.
        """
        resolved = base.resolve(config, self.core.resolved.spec)
        self.publisher.apply(config)
        self._changed.append((config, resolved.config))

    def checkpoint(self) -> tuple[Counters, Tensors]:
        """Return the state that continuing needs, as CPU copies.

        Call it from the training thread, or after it ended.

        Raises:
            NotFiniteError: it is not finite.
        """
        state = _check_finite(self.algorithm.state(), self.algorithm.num_updates)
        return self.counters, dict(state) | self.leading.replay_state()

    def find_huge(self, *, is_again: bool) -> tuple[float, str]:
        """Look for values that are `too_large` among those that were read; decodes the whole stream.

        Args:
            is_again: it was of no avail, as forged fragments may be the most: those above LEAST_HUGE are too large.

        Returns:
            The limit; and the value that is furthest from 0 and its entry, as a clause.
        """
        found: list[tuple[float, str, bytes, int]] = []  # of each fragment
        decode_each, last = partial(self.core.decode, ranks=(0, 1)), self.shared.ledger.cursor
        for entry in decode_range(self.core.client, self.core.source, b"0-1", last, decode_each):
            if entry.fragment is not None:
                size, name = largest_value(entry.fragment, self.core.resolved.spec)
                found.append((size, name, entry.entry_id, entry.producer))
        if not found:
            return HUGE, "no experience is in the stream"
        size, name, entry_id, producer = max(found)
        where = f"entry {entry_id.decode()} of producer {producer}"
        limit = LEAST_HUGE if is_again else too_large([size for size, *_ in found])
        return limit, f"the largest value of the stream is {size:.3g}, in {name} of {where}"

    @property
    def progress(self) -> tuple[int, int]:
        """Numbers that change while the training thread does not hang: its rounds, and the optimizer's steps."""
        return self._num_rounds, self.algorithm.num_updates

    @property
    def counters(self) -> Counters:
        """The learner's position in its run."""
        shared = self.shared
        return Counters(
            updates=shared.updates,
            env_steps=shared.env_steps,
            admitted=shared.ledger.consumed,
            dead=shared.ledger.refused,
            elapsed_s=shared.elapsed_s,
            cursor=shared.ledger.cursor.decode(),
            oldest=self._oldest().decode(),
            dropped=self.replay.num_dropped,
            waiting=self.replay.num_waiting,
            held=0 if self._on_policy else self._num_held,
            refilled=shared.refilled,
            fragments=shared.ledger.fragments,
            ledger=shared.ledger.state(),
        )

    def _weights(self) -> Tensors:
        """Return the algorithm's weights; NotFiniteError if they are not finite."""
        return _check_finite(self.algorithm.weights(), self.algorithm.num_updates)


def too_large(sizes: Sequence[float]) -> float:
    """Return what is too large to learn from: OUTLIER medians of the fragments' largest values, but HUGE at most.

    No value below LEAST_HUGE is.
    """
    return min(HUGE, max(LEAST_HUGE, OUTLIER * statistics.median(sizes)))


def _check_finite(tensors: Mapping[str, torch.Tensor], updates: int) -> Tensors:
    """Return CPU tensors as they are; NotFiniteError names the first that is not finite."""
    for name, tensor in tensors.items():
        # `aminmax` is ten times as fast as `isfinite`.
        is_checked = tensor.is_floating_point() and tensor.numel()
        if is_checked and not all(map(math.isfinite, tensor.aminmax())):
            raise NotFiniteError(f"{name} is not finite after update {updates}")
    return dict(tensors)

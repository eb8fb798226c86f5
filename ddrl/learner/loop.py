"""The learner's training loop: admit fragments, draw a batch, update.

The training thread owns the algorithm and the replay. It waits for fragments only: what the server must get, it leaves
in `Shared`, and the publisher writes it from the service thread. Off-policy experience is sampled from the replay and
weights are published now and then. On-policy experience is learned from once, and an iteration waits for the
publication of the one before, so that versions count iterations.

In lockstep (`learner.lockstep`) a round admits one fragment and makes all updates that the rate limiter allows then.
Checkpoints are taken between rounds, so what is learned depends on the stream alone, however often learners die.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ddrl.algorithms import base
from ddrl.algorithms.base import Resolved
from ddrl.config import RunConfig
from ddrl.learner.publisher import Publisher, Shared, Tensors
from ddrl.networks.device import to_device, to_host
from ddrl.replay.experience import longest_fragment_steps, make_experience, steps_to_refill
from ddrl.replay.reader import FragmentLimits, Reader, decode, decode_range
from ddrl.store import stream
from ddrl.store.checkpoints import Counters

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)

ADMIT_S = 0.05  # of admitting between two updates, so that updates go on during a backlog
WAIT_S = 0.05  # for fragments, between two looks at what else is to do
MAX_REFUSED = 1_000  # refusals to report; beyond it no more fragments are admitted
REPLAY = "replay."  # prefix of the replay's tensors in a checkpoint


class Learner:
    """One run's training.

    Args:
        client: connection of the service thread.
        feed_client: connection for the feed's blocking reads.
        run: its id.
        token: fencing token of the lease.
        config: the run's.
        resolved: its algorithm and spaces.
        device: where networks and batches live.
        on_checkpoint: gets tensors and meta of each checkpoint that the server has stored.
    """

    def __init__(
        self,
        client: Redis,
        feed_client: Redis,
        run: str,
        token: int,
        config: RunConfig,
        resolved: Resolved,
        *,
        device: torch.device,
        on_checkpoint: Callable[[bytes, Mapping[str, Any]], object] = lambda blob, meta: None,
    ) -> None:
        self._client, self._run, self._config = client, run, config
        self._device, self._spec = device, resolved.spec
        self._on_policy = resolved.on_policy
        self.algorithm = resolved.learner(device=device, seed=config.seed)
        self.replay = make_experience(
            config, resolved.config, resolved.spec, on_policy=self._on_policy, sequences=resolved.sequences
        )
        limits = FragmentLimits(
            longest_fragment_steps(config.rollout, resolved.sequences),
            config.env.num_envs,
            resolved.context,
            resolved.config.recurrent_state_size,
        )
        self._decode = functools.partial(
            decode, run=run, spaces=resolved.spec, limits=limits, pack=self.replay.pack
        )
        self._feed_client = feed_client
        self._feed: Reader | None = None  # from `restore` on
        self.shared = Shared()
        self.publisher = Publisher(
            client, run, token, config, replay=self.replay, shared=self.shared, on_checkpoint=on_checkpoint
        )
        self.stopping = threading.Event()
        self._publish_at = time.monotonic() + config.learner.publish_every_s
        self._changed_options: deque[tuple[RunConfig, Any]] = deque()  # from the service thread

    # --- begin and end -------------------------------------------------------------------------------

    def restore(self) -> None:
        """Continue from the newest checkpoint, if any; rebuild the replay from the stream; publish; start the feed.

        Raises:
            LeaseLostError: another learner took over.
            redis.exceptions.RedisError: the server has an outage; a new learner may try again.
        """
        shared, found = self.shared, self.publisher.load()
        latest = found.latest
        version = latest + 1  # of the weights to begin with, unless they are the published ones
        self.replay.first_version = version
        if found.checkpoint is not None:
            state, counters = found.checkpoint
            version = max(version, counters.version + 1)
            version -= self._on_policy and counters.version == latest
            self.replay.first_version = version if version > latest else 0
            self._load(state, counters, version)
        elif found.initial is not None:
            fresh = self.algorithm.load_initial_weights(found.initial)
            self.publisher.note("warm start", f"begins with {found.initial_source}; {fresh}")
        shared.oldest = self._oldest()
        size = len(self.replay)
        log.info(
            "starts at update %d, env step %d, holding %d transitions", shared.updates, shared.env_steps, size
        )
        # Off-policy, the weights of a learner that left no checkpoint play better; on-policy, they are another policy.
        is_newest = version == latest or (not self._on_policy and shared.updates == 0 and found.has_latest)
        self._feed = Reader(self._feed_client, self._run, shared.ledger.cursor, self._decode)
        parameters = None if is_newest else self.algorithm.weights()
        self.publisher.begin(self._feed, latest if is_newest else version, parameters)
        self._feed.start()

    def _load(self, state: Tensors, counters: Counters, version: int) -> None:
        """Load a checkpoint; admit again what was held when it was taken, as of `version`."""
        shared = self.shared
        replay_state = {name: value for name, value in state.items() if name.startswith(REPLAY)}
        self.algorithm.load_state({name: value for name, value in state.items() if name not in replay_state})
        oldest, cursor = counters.oldest.encode(), counters.cursor.encode()
        newest: dict[tuple[int, int], int] = {}  # (producer, incarnation) -> seq
        for entry in decode_range(self._client, self._run, oldest, cursor, self._decode):
            source = entry.producer, entry.incarnation
            if min(*source, entry.seq) < 0 or entry.seq <= newest.get(source, -1):
                continue  # not written by the append: refused before
            newest[source] = entry.seq
            if entry.fragment is not None:
                with contextlib.suppress(ValueError):  # refused before
                    self.replay.admit(entry.packed, entry.entry_id, version=version)
            shared.take(entry, consumed=False)
        shared.updates, shared.env_steps = counters.updates, counters.env_steps
        shared.fragments = max(counters.fragments, 0)
        shared.add_elapsed(counters.elapsed_s)
        shared.ledger.load(counters)
        self.replay.load_state(
            {name.removeprefix(REPLAY): value.numpy() for name, value in replay_state.items()}
        )
        self.replay.num_dropped = counters.dropped + counters.waiting - self.replay.num_waiting
        missing = steps_to_refill(counters.held, len(self.replay), self._config.replay.warmup_steps)
        shared.refilled = counters.refilled + missing

    def leave(self) -> None:
        """Stop the feed and the replay's threads; call it when `train` has returned."""
        if self._feed is not None:
            self._feed.stop()
        self.replay.close()

    def finish(self, *, saves: bool = True) -> None:
        """Publish what is left and store a checkpoint; call it when `train` has returned, and again after an outage.

        Args:
            saves: store the checkpoint.

        Raises:
            LeaseLostError: another learner took over.
            redis.exceptions.RedisError: the server has an outage.
        """
        self.leave()
        self.publisher.finish(self.checkpoint() if saves else None, self.algorithm.weights())

    # --- the training thread -------------------------------------------------------------------------

    def train(self) -> None:
        """Learn until `stopping` is set.

        Raises:
            BaseException: what ended the feed.
        """
        feed, is_lockstep = self._feed, self._config.learner.lockstep
        assert feed is not None, "restore() comes first"
        while not self.stopping.is_set():
            is_admitted = self._admit(feed)
            is_updated = (is_admitted or not is_lockstep) and self._update()
            while is_lockstep and is_updated and self._update():
                pass
            self._serve_requests()
            if not (is_admitted or is_updated):
                feed.wait(WAIT_S)

    def _admit(self, feed: Reader) -> bool:
        """Admit what the feed has read, for ADMIT_S or, in lockstep, one fragment; return False if there is nothing."""
        shared = self.shared
        if not feed.ready or len(shared.refused) >= MAX_REFUSED:
            return False
        for entry in feed.take(0.0 if self._config.learner.lockstep else ADMIT_S):
            reason = entry.reason or shared.ledger.objection(entry)
            if not reason:
                try:
                    self.replay.admit(entry.packed, entry.entry_id, version=shared.version)
                except ValueError as error:
                    reason = str(error)
            lost = shared.ledger.take(entry, consumed=not reason)
            if lost:
                log.warning("%s", lost)
                shared.lost.append(lost)
            shared.take(entry, consumed=not reason)
            if reason:
                log.warning("entry %s refused: %s", entry.entry_id.decode(), reason)
                shared.refused.append((entry.entry_id, entry.head, reason))
            elif entry.fragment is not None:
                shared.returns.extend(entry.fragment.episode_return.tolist())
        shared.oldest = self._oldest()
        return True

    def _update(self) -> bool:
        """Draw a batch and learn from it; False while it waits for fragments or, on-policy, for the publisher."""
        shared = self.shared
        if self._on_policy and shared.weights is not None:
            return False
        batch = self.replay.draw(
            num_steps=shared.paced_steps, num_updates=shared.updates, version=shared.version
        )
        if batch is None:
            return False
        metrics = dict(self.algorithm.update(to_device(batch, self._device)))
        priority = metrics.pop("priority", None)
        if priority is not None:
            self.replay.update_priorities(batch, to_host(priority))
        shared.metrics, shared.updates = metrics, self.algorithm.num_updates
        now = time.monotonic()
        if self._on_policy or now >= self._publish_at:
            self._publish_at = now + self._config.learner.publish_every_s
            shared.weights = shared.updates, self.algorithm.weights()
            if self._on_policy:
                shared.wake.set()
        return True

    def _serve_requests(self) -> None:
        """Apply changed options, and take a checkpoint if the service thread wants one."""
        while self._changed_options:
            self._config, options = self._changed_options.popleft()
            self._publish_at = min(self._publish_at, time.monotonic() + self._config.learner.publish_every_s)
            try:
                self.algorithm.apply_options(options)
                self.replay.apply_options(options)
            except ValueError as error:
                log.warning("%s", error)
        if self.shared.wants_checkpoint.is_set():
            self.shared.wants_checkpoint.clear()
            self.shared.checkpoint = self.checkpoint()

    def _oldest(self) -> bytes:
        return self.replay.oldest_entry_id or stream.following(self.shared.ledger.cursor)

    # --- for others ----------------------------------------------------------------------------------

    def apply(self, config: RunConfig) -> None:
        """Apply changed settings: the publisher's at once, the training thread's from the next update on.

        Raises:
            ConfigError: the algorithm does not know them.
        """
        resolved = base.resolve(config, self._spec)
        self.publisher.apply(config)
        self._changed_options.append((config, resolved.config))

    def checkpoint(self) -> tuple[Counters, Tensors]:
        """Return the state that continuing needs, as CPU copies; from the training thread, or when it has ended."""
        replay = {REPLAY + name: torch.from_numpy(array) for name, array in self.replay.state().items()}
        return self.counters, dict(self.algorithm.state()) | replay

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
            held=0 if self._on_policy else len(self.replay),
            refilled=shared.refilled,
            fragments=shared.fragments,
            ledger=shared.ledger.state(),
        )

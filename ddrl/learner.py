"""The learner's loop: admit, draw, update; and, on a second thread, publish and checkpoint.

Off-policy experience is sampled from a view, weights are published now and then; on-policy experience is learned
from once, and each iteration waits for the publication of the one before, so that versions count iterations.
The training thread owns the algorithm, the experience and the counters. The service thread owns the writes to the
server; what it needs of the algorithm is handed over as finished copies. Background Python steals updates
through the GIL, so the service thread works a few milliseconds a second.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ddrl import tensors
from ddrl.algorithms.base import Resolved
from ddrl.config import RunConfig
from ddrl.device import to_device, to_host
from ddrl.replay.experience import experience, longest_fragment
from ddrl.replay.feed import Bounds, Feed, Staged, stage, stored
from ddrl.replay.retention import Retention
from ddrl.replay.sampled import Drawn
from ddrl.store import checkpoints, lease, metrics, stream, weights
from ddrl.store.checkpoints import Counters
from ddrl.types import Trajectories

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)

RENEW_S = 2.0
ADMIT_S = 0.05  # of admitting between two updates: of a backlog a part, so that updates go on meanwhile
TRAILING_EPISODES = 20
REPLAY = "replay."  # before the names of the experience's part of a checkpoint
CHECKPOINT_BYTES_PER_S = 1e6  # what checkpoints may cost the server on average


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
    ) -> None:
        self._client, self._feed_client = client, feed_client
        self._run, self._token, self._config = run, token, config
        self._device = device
        self._on_policy = resolved.on_policy
        self.algorithm = resolved.learner(device=device, seed=config.seed)
        self.experience = experience(
            config, resolved.config, resolved.spec, on_policy=self._on_policy, sequences=resolved.sequences
        )
        most_steps = longest_fragment(config.rollout, resolved.sequences)
        memory_size = getattr(resolved.config, "memory_size", 0)
        bounds = Bounds(most_steps, config.env.num_envs, resolved.context, memory_size)
        self._stage = functools.partial(
            stage, run=run, spaces=resolved.spec, bounds=bounds, prepare=self.experience.prepare
        )
        self._retention = Retention(client, run, token, max_bytes=int(config.replay.max_bytes))
        self.counters = Counters()
        self.version = -1
        self.pinned: frozenset[int] = frozenset()  # versions that must not be dropped
        self.returns: deque[float] = deque(maxlen=TRAILING_EPISODES)
        self.stopping = threading.Event()
        self.due = threading.Event()
        """Something waits for `serve`."""
        self._feed: Feed | None = None
        self._updates = self._steps = self._admitted = self._dead = 0
        self._cursor = b"0-0"
        self._figures: Mapping[str, torch.Tensor] = {}
        self._refused: deque[tuple[bytes, bytes, str]] = deque()  # (entry, head, reason) to be told
        # Handed from the training thread to the service thread, each a finished copy.
        self._published: tuple[int, Mapping[str, torch.Tensor]] | None = None
        self._saved: tuple[Counters, Mapping[str, torch.Tensor]] | None = None
        self._checkpoint_due = threading.Event()
        self._checkpoint: Counters | None = None  # the newest one in the server
        self._published_updates = 0
        self._allowed = -1
        now = self._started = time.monotonic()
        self._elapsed_before_s = 0.0
        self._publish_at = now + config.learner.publish_every_s
        self._checkpoint_at = now + config.learner.checkpoint_every_s
        self._renew_at = self._metrics_at = now
        self._last_row = (now, 0, 0, 0.0)

    # --- start and end -------------------------------------------------------------------------------

    def restore(self) -> None:
        """Continue from the newest checkpoint, if any, and rebuild the view from the stream."""
        checkpoints.sweep(self._client, self._run)
        found = checkpoints.load(self._client, self._run)
        stored = weights.index(self._client, self._run)
        version = stored.latest + 1  # of the weights that begin, unless they are the published ones
        self.experience.first_version = version
        if found is not None:
            blob, meta = found
            arrays = tensors.decode_weights(blob)
            held = {name: arrays.pop(name) for name in list(arrays) if name.startswith(REPLAY)}
            self.algorithm.load_state({name: torch.from_numpy(array) for name, array in arrays.items()})
            counters = Counters(**meta)
            self._checkpoint = counters
            self._updates, self._steps = counters.updates, counters.env_steps
            self._admitted, self._dead = counters.admitted, counters.dead
            version -= self._on_policy and counters.version == stored.latest
            self._elapsed_before_s = counters.elapsed_s
            self._cursor = counters.cursor.encode()
            self.experience.first_version = version if version > stored.latest else 0
            self._rebuild(counters.oldest.encode(), self._cursor, version)
            self.experience.load_state({name.removeprefix(REPLAY): array for name, array in held.items()})
            self.experience.num_dropped = counters.dropped + counters.waiting - self.experience.num_waiting
        self._note()
        self._published_updates = self._updates
        size = len(self.experience)
        log.info("starts at update %d, env step %d, holding %d transitions", self._updates, self._steps, size)
        # Off-policy, what a learner without checkpoint left plays better; on-policy, it is another policy.
        if version == stored.latest or (not self._on_policy and self._updates == 0 and stored.latest >= 0):
            self.version = stored.latest
            self._raise_allowance()
        else:
            self._publish(self._updates, self.algorithm.weights())
        self._last_row = (time.monotonic(), self._updates, self._steps, 0.0)  # rates are this learner's own
        self._feed = Feed(self._feed_client, self._run, self._cursor, self._stage)
        self._feed.start()

    def _rebuild(self, oldest: bytes, cursor: bytes, version: int) -> None:
        """Admit again what was held when the checkpoint was taken; the counters stand already."""
        for staged in stored(self._client, self._run, oldest, cursor, self._stage):
            self._renew()
            if staged.fragment is not None:
                with contextlib.suppress(ValueError):  # refused and counted before
                    self.experience.admit(staged.prepared, staged.entry_id, version=version)
            self._retention.admitted(staged.entry_id, staged.cumulative_bytes, staged.num_bytes)
        stream.trim(self._client, self._run, self._token, oldest)  # what only the former learner's view held

    def finish(self) -> None:
        """Publish and checkpoint what there is; call when the training thread has returned."""
        if self._feed is not None:
            self._feed.stop()
        self._note()
        self._tell_refused()
        if self._updates > self._published_updates:
            self._publish(self._updates, self.algorithm.weights())
        self._save(replace(self.counters, version=self.version), self._state())
        self.experience.close()

    # --- the training thread -------------------------------------------------------------------------

    def train(self) -> None:
        """Learn until `stopping` is set.

        Raises:
            BaseException: what ended the feed.
        """
        assert self._feed is not None, "restore() comes first"
        while not self.stopping.is_set():
            if self._feed.ready:
                for staged in self._feed.take(ADMIT_S):
                    self._admit(staged)
                self._note()
            batch = self._draw()
            if batch is not None:
                self._update(batch)
                del batch  # its memory may serve the next one
            elif not self._feed.ready:
                self._feed.wait(0.05)
            if self._checkpoint_due.is_set():
                self._checkpoint_due.clear()
                self._note()
                self._saved = (self.counters, self._state())

    def _admit(self, staged: Staged) -> None:
        fragment, reason = staged.fragment, staged.reason
        if fragment is not None:
            try:
                self.experience.admit(staged.prepared, staged.entry_id, version=self.version)
            except ValueError as error:
                fragment, reason = None, str(error)
        if fragment is None:
            self._dead += 1
            log.warning("entry %s refused: %s", staged.entry_id.decode(), reason)
            self._refused.append((staged.entry_id, staged.head, reason))
        else:
            self._admitted += 1
            self.returns.extend(float(value) for value in fragment.episode_return)
        self._cursor = staged.entry_id
        self._steps = max(self._steps, staged.cumulative_steps)
        self._retention.admitted(staged.entry_id, staged.cumulative_bytes, staged.num_bytes)

    def _draw(self) -> Drawn | Trajectories | None:
        """What to learn from next; None while there is nothing, or the last iteration is still unpublished."""
        if self._on_policy and self._published is not None:
            return None
        return self.experience.draw(num_steps=self._steps, num_updates=self._updates, version=self.version)

    def _update(self, batch: Drawn | Trajectories) -> None:
        figures = dict(self.algorithm.update(to_device(batch, self._device)))
        priority = figures.pop("priority", None)
        if priority is not None:
            self.experience.prioritize(batch, to_host(priority))
        self._figures = figures
        self._updates = self.algorithm.num_updates
        now = time.monotonic()
        if self._on_policy or now >= self._publish_at:
            self._publish_at = now + self._config.learner.publish_every_s
            self._published = (self._updates, self.algorithm.weights())
            if self._on_policy:
                self.due.set()

    def _state(self) -> Mapping[str, torch.Tensor]:
        """All that continuation needs of algorithm and experience, as CPU copies."""
        held = {REPLAY + name: torch.from_numpy(array) for name, array in self.experience.state().items()}
        return dict(self.algorithm.state()) | held

    def _note(self) -> None:
        """Make the counters visible to the service thread, all at once."""
        oldest = self.experience.oldest_entry_id
        self.counters = Counters(
            updates=self._updates,
            env_steps=self._steps,
            admitted=self._admitted,
            dead=self._dead,
            elapsed_s=self.elapsed_s,
            cursor=self._cursor.decode(),
            oldest=(oldest or stream.following(self._cursor)).decode(),
            dropped=self.experience.num_dropped,
            waiting=self.experience.num_waiting,
        )

    @property
    def elapsed_s(self) -> float:
        """Time of learning, that of earlier learners of the run included as far as checkpoints tell."""
        return self._elapsed_before_s + time.monotonic() - self._started

    def skip(self, seconds: float) -> None:
        """Do not count some time that has passed as learning: the run was paused."""
        self._elapsed_before_s -= seconds

    @property
    def num_updates(self) -> int:
        """Updates so far."""
        return self._updates

    @property
    def num_steps(self) -> int:
        """Environment steps appended, up to the cursor."""
        return self._steps

    # --- the service thread --------------------------------------------------------------------------

    def serve(self) -> None:
        """One round of what the server must be told; call it about twenty times a second.

        Raises:
            LeaseLostError: another learner took over.
            redis.exceptions.ConnectionError: the server does not answer; call again.
        """
        now = time.monotonic()
        if self._renew() and self._checkpoint is not None:
            oldest, held = self.counters.oldest.encode(), self._checkpoint.oldest.encode()
            self._retention.trim(view_oldest=oldest, checkpoint_oldest=held)
        if self._retention.is_near_budget:
            self._make_room()
        self._tell_refused()
        published = self._published
        if published is not None:
            self._publish(*published)
            if self._published is published:  # the next one may have come meanwhile
                self._published = None
            if self._feed is not None:
                self._feed.wake()
        else:
            self._raise_allowance()
        saved, self._saved = self._saved, None
        if saved is not None:
            self._save(*saved)
        elif now >= self._checkpoint_at:
            self._checkpoint_at = now + self._config.learner.checkpoint_every_s
            self._checkpoint_due.set()
        if now >= self._metrics_at:
            self._metrics_at = now + self._config.learner.metrics_every_s
            metrics.add(self._client, self._run, self._row(now))

    def _renew(self) -> bool:
        """Keep the lease, where it is time to."""
        is_due = time.monotonic() >= self._renew_at
        if is_due:
            self._renew_at = time.monotonic() + RENEW_S
            lease.renew(self._client, self._run, self._token)
        return is_due

    def _tell_refused(self) -> None:
        while self._refused:
            stream.refuse(self._client, self._run, self._token, *self._refused[0])
            self._refused.popleft()

    def _publish(self, updates: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Store the next version of the weights; versions never go back."""
        stored = weights.index(self._client, self._run)
        policy = self._config.weights
        drop = weights.superseded(
            stored,
            keep_last=policy.keep_last,
            keep_every=policy.keep_every,
            max_bytes=int(policy.max_bytes),
            pinned=self.pinned,
        )
        version = stored.latest + 1
        allowance = self._allowance(version)
        weights.publish(
            self._client,
            self._run,
            self._token,
            version=version,
            blob=tensors.encode_weights({name: tensor.numpy() for name, tensor in parameters.items()}),
            allowance=allowance,
            players=self.experience.players,
            updates=self._updates,
            drop=drop,
        )
        self.version, self._allowed, self._published_updates = version, allowance, updates

    def _raise_allowance(self) -> None:
        """Tell collectors of more room, in steps worth a call."""
        allowance = self._allowance(self.version)
        if allowance >= self._allowed + self.experience.grain:
            players, updates = self.experience.players, self._updates
            stream.allow(self._client, self._run, self._token, allowance, players=players, updates=updates)
            self._allowed = allowance

    def _allowance(self, version: int) -> int:
        """Environment steps that may have been appended in all once `version` is published."""
        return self.experience.allowance(num_steps=self._steps, num_updates=self._updates, version=version)

    def _save(self, counters: Counters, state: Mapping[str, torch.Tensor]) -> None:
        blob = tensors.encode_weights({name: tensor.numpy() for name, tensor in state.items()})
        checkpoints.save(self._client, self._run, self._token, blob, asdict(counters))
        self._checkpoint = counters
        every = max(self._config.learner.checkpoint_every_s, len(blob) / CHECKPOINT_BYTES_PER_S)
        self._checkpoint_at = time.monotonic() + every

    def _make_room(self) -> None:
        """Have a checkpoint taken, and drop what it makes dispensable."""
        if self._checkpoint is None or self._checkpoint.cursor != self.counters.cursor:
            self._checkpoint_due.set()
        if self._checkpoint is not None:
            self._retention.make_room(checkpoint_cursor=self._checkpoint.cursor.encode())

    def _row(self, now: float) -> dict[str, float]:
        """Figures since the last row."""
        then, updates_then, steps_then, waited_then = self._last_row
        updates, steps = self._updates, self._steps
        waited = self._feed.waited_s if self._feed is not None else 0.0
        self._last_row = (now, updates, steps, waited)
        elapsed = max(now - then, 1e-9)
        row = {
            "elapsed_s": self.elapsed_s,
            "env_steps": steps,
            "updates": updates,
            "env_steps_per_s": (steps - steps_then) / elapsed,
            "updates_per_s": (updates - updates_then) / elapsed,
            **self.experience.figures(num_steps=steps, num_updates=updates),
            "admitted": self._admitted,
            "dead": self._dead,
            "version": self.version,
            "learner_wait": min(1.0, (waited - waited_then) / elapsed),
        }
        if self.returns:
            row["return_mean"] = float(np.mean(list(self.returns)))
        return row | {name: float(value) for name, value in dict(self._figures).items()}

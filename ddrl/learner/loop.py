"""The learner's loop: admit, draw, update. What the server must know of it is told by `ddrl.learner.publisher`.

Off-policy experience is sampled from a view, weights are published now and then; on-policy experience is learned
from once, and each iteration waits for the publication of the one before, so that versions count iterations.
The training thread owns the algorithm, the experience and the accounts of what it was sent; the service thread gets
finished copies.

In lockstep fragments are admitted one by one, with all updates that the pace allows between, and checkpoints are taken
between these rounds only. Then the stream alone decides what is learned, however often a learner is killed on the way.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ddrl.algorithms import base
from ddrl.algorithms.base import Resolved
from ddrl.config import RunConfig
from ddrl.learner.accounts import Accounts
from ddrl.learner.board import Board, Tensors
from ddrl.learner.publisher import Service
from ddrl.networks.device import to_device, to_host
from ddrl.replay.experience import longest_fragment_steps, make_experience, steps_to_refill
from ddrl.replay.fifo import Fifo
from ddrl.replay.reader import Decoded, FragmentLimits, Reader, decode, decode_range
from ddrl.replay.replay import Replay
from ddrl.store import stream
from ddrl.store.checkpoints import Counters
from ddrl.types import Batch, Sequences, Trajectories

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)

ADMIT_S = 0.05  # of admitting between two updates: of a backlog a part, so that updates go on meanwhile
WAIT_S = 0.05  # for fragments, before looking at what else is wanted
MOST_REFUSED = 1_000  # entries whose refusal is still to be told, before more are taken
REPLAY = "replay."  # before the names of the experience's part of a checkpoint


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
        held: experience to go on with, of a learner of this run whose server was lost; it is as of the checkpoint.
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
        held: Replay | Fifo | None = None,
    ) -> None:
        self._client, self._feed_client = client, feed_client
        self._run, self._config = run, config
        self._device, self._spec = device, resolved.spec
        self._on_policy = resolved.on_policy
        self.algorithm = resolved.learner(device=device, seed=config.seed)
        self._is_held = held is not None
        if held is None:
            held = make_experience(
                config,
                resolved.config,
                resolved.spec,
                on_policy=self._on_policy,
                sequences=resolved.sequences,
            )
        self.experience = held
        limits = FragmentLimits(
            longest_fragment_steps(config.rollout, resolved.sequences),
            config.env.num_envs,
            resolved.context,
            resolved.config.recurrent_state_size,
        )
        self._decode = functools.partial(
            decode, run=run, spaces=resolved.spec, limits=limits, pack=self.experience.pack
        )
        self.accounts = Accounts()
        self._board = Board()
        self.service = Service(
            client,
            run,
            token,
            config,
            experience=self.experience,
            accounts=self.accounts,
            board=self._board,
        )
        self.stopping = threading.Event()
        self.due = threading.Event()
        """Something waits for `serve`."""
        self._feed: Reader | None = None
        self._publish_at = time.monotonic() + config.learner.publish_every_s
        self._training = threading.Lock()  # held by the thread that may touch algorithm and experience
        self._is_between = True  # no round of lockstep is under way
        self._adopting: deque[tuple[RunConfig, Any]] = deque()
        self._wanted: threading.Event | None = None  # set when a snapshot is there
        self._snapshot: tuple[Counters, Tensors] = (Counters(), {})

    # --- start and end -------------------------------------------------------------------------------

    def restore(self) -> None:
        """Continue from the newest checkpoint, if any, and rebuild the view from the stream.

        Raises:
            LeaseLostError: another learner took over.
            redis.exceptions.RedisError: the server cannot serve; a new learner may try again.
        """
        service, board = self.service, self._board
        found, latest = service.load()
        version = latest + 1  # of the weights that begin, unless they are the published ones
        self.experience.first_version = version
        if found is not None:
            state, counters = found
            held = {
                name.removeprefix(REPLAY): state.pop(name).numpy()
                for name in list(state)
                if name.startswith(REPLAY)
            }
            self.algorithm.load_state(state)
            board.updates, board.steps = counters.updates, counters.env_steps
            version = max(version, counters.version + 1)
            version -= self._on_policy and counters.version == latest
            board.add_elapsed(counters.elapsed_s)
            self.accounts.load_state(counters)
            self.experience.first_version = version if version > latest else 0
            if not self._is_held:
                self._rebuild(counters, version)
                self.experience.load_state(held)
                waited = counters.waiting - self.experience.num_waiting
                self.experience.num_dropped = counters.dropped + waited
            missing = steps_to_refill(counters.held, len(self.experience), self._config.replay.warmup_steps)
            board.refilled = counters.refilled + missing
        elif (initial := service.initial()) is not None:
            source, parameters = initial
            fresh = self.algorithm.load_initial_weights(parameters)
            service.note("warm start", f"begins with {source}; {fresh}")
        self._note()
        size = len(self.experience)
        log.info("starts at update %d, env step %d, holding %d transitions", board.updates, board.steps, size)
        self._feed = Reader(self._feed_client, self._run, self.accounts.cursor, self._decode)
        # Off-policy, what a learner without checkpoint left plays better; on-policy, it is another policy.
        if version == latest or (not self._on_policy and board.updates == 0 and service.has_latest):
            service.begin(self._feed, latest, None)
        else:
            service.begin(self._feed, version, self.algorithm.weights())
        self._feed.start()

    def _rebuild(self, counters: Counters, version: int) -> None:
        """Admit again what was held when the checkpoint was taken; the counters stand already."""
        oldest, cursor = counters.oldest.encode(), counters.cursor.encode()
        newest: dict[tuple[int, int], int] = {}
        for staged in decode_range(self._client, self._run, oldest, cursor, self._decode):
            self.service.renew()
            who = (staged.producer, staged.incarnation)
            if staged.seq <= newest.get(who, -1):
                continue  # no append wrote it
            newest[who] = staged.seq
            if staged.fragment is not None:
                with contextlib.suppress(ValueError):  # refused and counted before
                    self.experience.admit(staged.packed, staged.entry_id, version=version)
            self.service.retention.admitted(staged.entry_id, staged.cumulative_bytes, staged.num_bytes)

    def leave(self, *, keep_experience: bool = False) -> None:
        """End what runs in the background, and tell nobody; call when the training thread has returned."""
        if self._feed is not None:
            self._feed.stop()
        if not keep_experience:
            self.experience.close()

    def finish(self) -> None:
        """Publish and checkpoint what there is; call when the training thread has returned, again if it fails.

        Raises:
            LeaseLostError: another learner took over.
            redis.exceptions.RedisError: the server cannot serve.
        """
        self.leave()
        counters, state = self._taken()
        is_whole = self._is_between or not self._config.learner.lockstep
        self.service.finish(counters if is_whole else None, state, self.algorithm.weights())

    # --- the training thread -------------------------------------------------------------------------

    def train(self) -> None:
        """Learn until `stopping` is set.

        Raises:
            BaseException: what ended the feed.
        """
        assert self._feed is not None, "restore() comes first"
        go = self._round if self._config.learner.lockstep else self._step
        with self._training:
            while not self.stopping.is_set():
                go(self._feed)
                self._answer()

    def _step(self, feed: Reader) -> None:
        """Admit what there is, and do one update."""
        is_flooded = len(self._board.refused) >= MOST_REFUSED
        if feed.ready and not is_flooded:
            for staged in feed.take(ADMIT_S):
                self._admit(staged)
            self._note()
        batch = self._draw()
        if batch is not None:
            self._update(batch)
            del batch  # its memory may serve the next one
        elif is_flooded:
            self.stopping.wait(WAIT_S)
        elif not feed.ready:
            feed.wait(WAIT_S)

    def _round(self, feed: Reader) -> None:
        """Admit one fragment, and do all updates that the pace allows then."""
        if not feed.ready:
            feed.wait(WAIT_S)
            return
        for staged in feed.take(0.0):
            self._is_between = False
            self._admit(staged)
        self._note()
        while (batch := self._draw()) is not None:
            self._update(batch)
            del batch
        self._is_between = True

    def _admit(self, staged: Decoded) -> None:
        fragment, reason = staged.fragment, staged.reason or self.accounts.objection(staged)
        if not reason:
            try:
                self.experience.admit(staged.packed, staged.entry_id, version=self.version)
            except ValueError as error:
                reason = str(error)
        gone = self.accounts.take(staged, consumed=not reason)
        if gone:
            log.warning("%s", gone)
            self._board.gone.append(gone)
        if reason:
            log.warning("entry %s refused: %s", staged.entry_id.decode(), reason)
            self._board.refused.append((staged.entry_id, staged.head, reason))
        elif fragment is not None:
            self.returns.extend(float(value) for value in fragment.episode_return)
            self._board.steps = max(self._board.steps, staged.cumulative_steps)
        total = None if reason else staged.cumulative_bytes  # counts of a refused entry may be anything
        self.service.retention.admitted(staged.entry_id, total, staged.num_bytes)

    def _draw(self) -> Batch | Sequences | Trajectories | None:
        """What to learn from next; None while there is nothing, or the last iteration is still unpublished."""
        board = self._board
        if self._on_policy and board.weights is not None:
            return None
        return self.experience.draw(
            num_steps=board.paced_steps, num_updates=board.updates, version=board.version
        )

    def _update(self, batch: Batch | Sequences | Trajectories) -> None:
        figures = dict(self.algorithm.update(to_device(batch, self._device)))
        priority = figures.pop("priority", None)
        if priority is not None:
            self.experience.update_priorities(batch, to_host(priority))
        self._board.figures = figures
        self._board.updates = self.algorithm.num_updates
        now = time.monotonic()
        if self._on_policy or now >= self._publish_at:
            self._publish_at = now + self._config.learner.publish_every_s
            self._board.weights = (self._board.updates, self.algorithm.weights())
            if self._on_policy:
                self.due.set()

    def _answer(self) -> None:
        """Do what the service thread has asked for."""
        while self._adopting:
            self._config, options = self._adopting.popleft()
            self._adopt(options)
        if self._board.wants_state.is_set():
            self._board.wants_state.clear()
            self._board.state = self._taken()
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self._snapshot = self._taken()
            wanted.set()

    def _adopt(self, options: Any) -> None:
        self._publish_at = min(self._publish_at, time.monotonic() + self._config.learner.publish_every_s)
        try:
            self.algorithm.apply_options(options)
        except ValueError as error:
            log.warning("%s", error)
            return
        self.experience.apply_options(options)

    def _taken(self) -> tuple[Counters, Tensors]:
        """All that continuation needs of algorithm and experience, as CPU copies, and the counters with it."""
        self._note()
        counters = replace(self.counters, **self.accounts.state())
        held = {REPLAY + name: torch.from_numpy(array) for name, array in self.experience.state().items()}
        return counters, dict(self.algorithm.state()) | held

    def _note(self) -> None:
        """Make the counters visible to the service thread, all at once."""
        oldest, cursor = self.experience.oldest_entry_id, self.accounts.cursor
        self._board.counters = Counters(
            updates=self._board.updates,
            env_steps=self._board.steps,
            admitted=self.accounts.consumed,
            dead=self.accounts.refused,
            elapsed_s=self.elapsed_s,
            cursor=cursor.decode(),
            oldest=(oldest or stream.following(cursor)).decode(),
            dropped=self.experience.num_dropped,
            waiting=self.experience.num_waiting,
            held=0 if self._on_policy else len(self.experience),
            refilled=self._board.refilled,
        )

    # --- the service thread --------------------------------------------------------------------------

    def serve(self) -> None:
        """One round of what the server must be told, as `Service.serve`; call it about twenty times a second."""
        self.service.serve()

    def snapshot(self) -> tuple[Counters, Tensors]:
        """Counters and tensors of a checkpoint taken now, or in lockstep soon; for other threads, after `restore`."""
        self._wanted = wanted = threading.Event()
        while not wanted.wait(WAIT_S / 5):
            if self._training.acquire(blocking=False):  # nobody trains
                try:
                    self._wanted = wanted  # the training thread may have failed on it
                    self._answer()
                finally:
                    self._training.release()
        return self._snapshot

    def adopt(self, config: RunConfig) -> None:
        """Go by other live settings: the service's at once, the training thread's from the next update on.

        Raises:
            ConfigError: the algorithm does not know them.
        """
        resolved = base.resolve(config, self._spec)
        self.service.adopt(config)
        self._adopting.append((config, resolved.config))

    # --- what anybody may ask ------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        """As of the last entry admitted."""
        return self._board.counters

    @property
    def returns(self) -> deque[float]:
        """Of the newest training episodes."""
        return self._board.returns

    @property
    def version(self) -> int:
        """Latest published; -1 before the first."""
        return self._board.version

    @property
    def elapsed_s(self) -> float:
        """Time of learning, that of earlier learners of the run included as far as checkpoints tell."""
        return self._board.elapsed_s

    def skip(self, seconds: float) -> None:
        """Do not count some time that has passed as learning: the run was paused."""
        self._board.add_elapsed(-seconds)

    @property
    def num_updates(self) -> int:
        """Updates so far."""
        return self._board.updates

    @property
    def num_steps(self) -> int:
        """Environment steps appended, up to the cursor."""
        return self._board.steps

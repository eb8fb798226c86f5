"""One segment of play, the work of one rollout task, and the players that a process keeps between segments.

A segment appends fragments until its time is over or the server ends it. The answer to an append is how weights,
pauses and hand-overs reach a running segment: it names the newest version, and says whether to go on (GO), to wait for
the learner (WAIT), to append again later (FULL), or to end the segment, because the run is paused, the machine leaves
or another run claims the process (YIELD), or because the run has ended (STOPPED).
"""

from __future__ import annotations

import logging
import math
import os
import random
import secrets
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import numpy as np

from ddrl import codec
from ddrl.algorithms import base
from ddrl.config import RunConfig
from ddrl.envs import requirements
from ddrl.store import connection, runs, segments, stream, weights
from ddrl.store.connection import Redis
from ddrl.store.segments import Process
from ddrl.store.stream import Answer, Appended
from ddrl.types import Fragment
from ddrl.worker import shared_weights
from ddrl.worker.collector import Collector
from ddrl.worker.watchdog import Watchdog

log = logging.getLogger(__name__)

MAX_CACHED_BYTES = 1024**3
WAIT_MS = 500  # for the learner, before the run's state is read again: a draining worker ends within a second
YIELD_AFTER_S = 1.0  # of waiting, until a segment first checks whether another run wants its process
WAKES_PER_S = 5_000  # of collectors that the learner wakes at once: so many ask the server in a second
RETRY_FULL_S = 0.25
DRAW_S = 2.0  # between two draws of the versions that a process plays against
LONGEST_FRAGMENT = 2.0  # times rollout.fragment_s, while the speed of the environments is unknown


class Clock:
    """The time that a process spends in one segment, and how much of it waiting, since its last report to the run."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self.waited_s = 0.0  # in the whole segment
        self.reported()

    def reported(self) -> None:
        """Start anew: the time until now was reported to the run."""
        self._since = time.monotonic()
        self._waited_s = {"allowance": 0.0, "room": 0.0}

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Count the block as time spent waiting, for "allowance" or for "room" in the stream."""
        begin = time.monotonic()
        try:
            yield
        finally:
            lasted = time.monotonic() - begin
            self.waited_s += lasted
            self._waited_s[what] += lasted

    @property
    def spent_ms(self) -> int:
        """Time of the whole segment."""
        return round(1e3 * (time.monotonic() - self._begun))

    def unreported(self) -> dict[str, int]:
        """Milliseconds since the last report, by the names of `stream.append` and `segments.end`."""
        waited = {f"{what}_wait_ms": round(1e3 * seconds) for what, seconds in self._waited_s.items()}
        return {"process_ms": round(1e3 * (time.monotonic() - self._since)), **waited}


class Player:
    """A run's collector in this process; its episodes go on from segment to segment.

    Args:
        client: connection to the server.
        run: its id.
        watch: watchdog over the environments.

    Raises:
        UnknownRunError, StoreError: the run is gone, or of another version of ddrl.
        UnfitError: this machine does not play the run.
        EnvError: the environment cannot be made.
    """

    def __init__(self, client: Redis, run: str, watch: Watchdog | None = None) -> None:
        self.run = run
        self.config: RunConfig = runs.config(client, run)
        self._watch = watch
        spaces, state = runs.spaces(client, run), runs.state(client, run)
        self.producer = stream.new_producer(client, run)
        with self._watched():
            requirements.check_machine(self.config, state.versions)
            resolved = base.resolve(self.config, spaces)
            at_random = self.config.rollout.random_until_learned
            if at_random is None:  # weights that the run started from have learned already
                at_random = resolved.can_start_at_random and not state.warm
            self.collector = Collector(
                run=run,
                producer=self.producer,
                incarnation=secrets.randbits(48),
                config=self.config,
                resolved=resolved,
                random_until_learned=at_random,
                on_step=(lambda: None) if watch is None else watch.step,
            )
        self._most_transitions: int = resolved.config.batch_size if resolved.on_policy else sys.maxsize
        # However little is left of the allowance, since a fragment repeats n_step - 1 steps as context.
        self._least_steps = 1 if resolved.on_policy else resolved.config.n_step
        self._unsent: tuple[Fragment, dict[bytes, bytes], int] | None = None  # and encoded, ms played
        self._draws_at = 0.0

    @property
    def has_unsent(self) -> bool:
        """Return True if a fragment was collected that the server has not taken yet."""
        return self._unsent is not None

    def _watched(self) -> AbstractContextManager[None]:
        """Return the watchdog over a block in which environments are made or stepped."""
        if self._watch is None:
            return nullcontext()
        return self._watch.watch(self.run, self.config.env.id, self.config.rollout.step_timeout_s)

    def load(self, client: Redis, version: int) -> bool:
        """Load a version of the weights; False if the server no longer keeps it."""
        if version == self.collector.version:
            return True
        if (arrays := self._fetch(client, version)) is None:
            return False
        self.collector.load(version, arrays)
        opponents, now = self.collector.opponents, time.monotonic()
        if opponents is not None and now >= self._draws_at:
            opponents.draw_versions(weights.index(client, self.run), partial(self._fetch, client))
            self._draws_at = now + DRAW_S
        return True

    def _fetch(self, client: Redis, version: int) -> dict[str, np.ndarray] | None:
        """Return the weights of a version; None if the server no longer keeps it."""
        blob = shared_weights.get(client, self.run, version)
        return None if blob is None else weights.decode_weights(blob)

    def append(
        self, client: Redis, remaining_steps: int, clock: Clock, *, node: str = "-"
    ) -> tuple[Appended, int]:
        """Append the fragment that the server has not taken yet, else a new one.

        A fragment is kept for the next call if the server has no room for it, or raises an error.

        Args:
            client: connection to the server.
            remaining_steps: about the most transitions of a new fragment.
            clock: of the segment.
            node: of the worker.

        Returns:
            The answer, and the number of transitions that the server took.
        """
        if self._unsent is None:
            started = time.monotonic()
            stop_at = started + max(1.0, LONGEST_FRAGMENT * self.config.rollout.fragment_s)
            steps = math.ceil(min(remaining_steps, self._most_transitions) / self.config.env.num_envs)
            with self._watched():
                fragment = self.collector.collect(max_steps=max(self._least_steps, steps), stop_at=stop_at)
            encoded = codec.encode(fragment)
            self._unsent = fragment, encoded, round(1e3 * (time.monotonic() - started))
        fragment, encoded, played_ms = self._unsent
        reply = stream.append(
            client,
            self.run,
            encoded,
            producer=self.producer,
            incarnation=fragment.incarnation,
            seq=fragment.seq,
            num_transitions=fragment.num_transitions,
            episode_returns=fragment.episode_return.tolist(),
            played_ms=played_ms,
            host=socket.gethostname(),
            node=node,
            pid=os.getpid(),
            durability=self.config.durability,
            **clock.unreported(),
        )
        if reply.answer is Answer.FULL:
            return reply, 0
        self._unsent = None
        clock.reported()
        return reply, 0 if reply.answer is Answer.STOPPED else fragment.num_transitions


class Players:
    """The recent players of a process or thread; beyond a bound in bytes the least recently used are closed.

    Args:
        max_bytes: the bound.
        watch: watchdog over their environments.
    """

    def __init__(self, max_bytes: int = MAX_CACHED_BYTES, watch: Watchdog | None = None) -> None:
        self._players: OrderedDict[str, Player] = OrderedDict()
        self._max_bytes, self._watch = max_bytes, watch
        self._look_at = 0.0
        self._unreported_end: tuple[str, Process, dict[str, int]] | None = None  # run, process, time

    def __contains__(self, run: str) -> bool:
        return run in self._players

    def get(self, client: Redis, run: str) -> Player:
        """Return the run's player, made on first use; raises what `Player` raises."""
        if run not in self._players:
            self._players[run] = Player(client, run, self._watch)
            segments.withdraw_refusal(client, run, socket.gethostname())
        self._players.move_to_end(run)
        for other in list(self._players)[:-1]:
            if sum(player.collector.num_bytes for player in self._players.values()) <= self._max_bytes:
                break
            if not self._players[other].has_unsent:
                self.drop(other)
        return self._players[run]

    def drop(self, run: str) -> None:
        """Close a run's player, if there is one; where its environment cannot be closed, log it."""
        if (player := self._players.pop(run, None)) is not None:
            try:
                player.collector.close()
            except Exception:
                log.warning("run %s: its environment cannot be closed", run, exc_info=True)

    @contextmanager
    def segment(self, client: Redis, run: str, clock: Clock, *, node: str) -> Iterator[None]:
        """Report to the server the end of the segment that the block plays; after an outage `report_end` does."""
        can_report = True
        try:
            yield
        except (*connection.OUTAGES, MemoryError):  # a process without memory ends, which its worker reports
            can_report = False
            raise
        finally:
            self._unreported_end = run, Process.this(node), {"spent_ms": clock.spent_ms, **clock.unreported()}
            if can_report:
                self.report_end(client)

    def report_end(self, client: Redis) -> None:
        """Report to the server that the last segment ended, unless that is done."""
        if self._unreported_end is not None:
            run, process, spent = self._unreported_end
            segments.end(client, run, process, **spent)
            self._unreported_end = None

    def may_look(self) -> bool:
        """Return True if it is time to look at the other runs again; seldom, as many processes may wait for long."""
        if (now := time.monotonic()) < self._look_at:
            return False
        self._look_at = now + YIELD_AFTER_S * random.uniform(1.0, 1.5)
        return True


def play(
    client: Redis,
    blocking: Redis,
    players: Players,
    run: str,
    *,
    node: str = "-",
    serves: Callable[[str], bool] = lambda queue: True,
) -> int:
    """Play one segment of the run that was chosen and return the number of transitions appended.

    It ends after `rollout.segment_s`; within one fragment when the run has stopped or is paused, when another run
    claims the process, or when the node drains; and after YIELD_AFTER_S of waiting if another run wants the process.
    A fragment for which the stream has no room until then is kept for the next segment. The allowance is exceeded by
    one fragment at most: of the steps that are left, or n_step, or 50 with hindsight, if that is more.

    Args:
        client: connection for commands.
        blocking: connection for blocking reads.
        players: of this process or thread.
        run: its id.
        node: of the worker.
        serves: returns whether the worker takes messages of a queue.

    Raises:
        UnknownRunError, StoreError, ConfigError, UnfitError, EnvError: the run cannot be played here.
        RedisError: the server cannot serve; a fragment that it has not taken is kept for the next segment.
    """
    clock = Clock()
    with players.segment(client, run, clock, node=node):
        reply = stream.remaining(client, run, node=node)
        if reply.answer is Answer.STOPPED or (reply.answer is Answer.YIELD and run not in players):
            players.drop(run)
            return 0
        player = players.get(client, run)
        deadline = time.monotonic() + player.config.rollout.segment_s
        yield_after_s = YIELD_AFTER_S * random.uniform(1.0, 1.5)
        appended, num_collectors = 0, reply.players
        if player.has_unsent:  # of an earlier segment: it is appended even if this one ends at once
            reply, appended = player.append(client, 0, clock, node=node)
        while reply.answer in (Answer.GO, Answer.WAIT, Answer.FULL) and time.monotonic() < deadline:
            is_impatient = clock.waited_s > yield_after_s and players.may_look()
            if is_impatient and _wanted_elsewhere(client, run, serves):
                break
            if reply.answer is Answer.WAIT:
                with clock.waiting("allowance"):
                    if stream.await_allowance(blocking, run, reply.allowance_id, block_ms=WAIT_MS):
                        # All collectors that wait for a learner are woken at once.
                        time.sleep(random.uniform(0.0, min(WAIT_MS / 1e3, num_collectors / WAKES_PER_S)))
                    reply = stream.remaining(client, run, node=node)
                    num_collectors = reply.players
                continue
            if reply.answer is Answer.FULL:
                with clock.waiting("room"):
                    time.sleep(RETRY_FULL_S)
                # FULL does not say whether the run is paused or the node drains. On WAIT the fragment is appended all
                # the same: the learner may need it before it makes room.
                reply = stream.remaining(client, run, node=node)
                if reply.answer in (Answer.YIELD, Answer.STOPPED):
                    break
            elif not player.load(client, reply.version):  # superseded since
                reply = stream.remaining(client, run, node=node)
                continue
            reply, num_transitions = player.append(client, reply.remaining_steps, clock, node=node)
            appended += num_transitions
        if reply.answer is Answer.STOPPED:
            players.drop(run)
        return appended


def _wanted_elsewhere(client: Redis, run: str, serves: Callable[[str], bool]) -> bool:
    """Return True if another run would use this process now."""
    return any(other.wants and other.run != run and serves(other.queue) for other in segments.active(client))

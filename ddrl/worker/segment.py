"""One segment of play: what a rollout task does, and the players that a process keeps between tasks.

A player is a collector with its connection to a run: environments, policy, producer id. Episodes go on across
segments; a player that is evicted takes its unfinished episodes with it, and they are counted as abandoned.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddrl import codec, envs
from ddrl.algorithms import base
from ddrl.config import RunConfig
from ddrl.envs import versions
from ddrl.store import connection, runs, segments, stream, tensors, weights
from ddrl.store.stream import Answer, Appended
from ddrl.worker.collector import Collector
from ddrl.worker.heartbeat import without_spaces
from ddrl.worker.watchdog import Watchdog

if TYPE_CHECKING:
    from redis import Redis

MAX_CACHED_BYTES = 1024**3
WAIT_MS = 500  # between two looks at whether to wait on: a machine that drains is left within a second
PATIENCE_S = (
    1.0  # of a segment that waits while other runs want its process; and between two looks whether they do
)
WAKES_PER_S = 5_000  # of players woken by the same word: they ask the server one after the other
RETRY_FULL_S = 0.25
LONGEST_FRAGMENT = 2.0  # times rollout.fragment_s, of the first ones while their speed is unknown
_STEPS_PER_SUM = 4  # of n rewards: less than a quarter of the sums are then cut by the fragment's end


@dataclass
class Unsent:
    """An encoded fragment that the server has not taken yet."""

    fields: dict[bytes, bytes]
    seq: int
    num_transitions: int
    episode_returns: tuple[float, ...]
    played_ms: int


class Clock:
    """The time of a process in one segment, as its run is told: in all, and waited for learner and for room."""

    def __init__(self) -> None:
        self._from = time.monotonic()
        self._allowance_s = self._room_s = 0.0
        self.waited_s = 0.0
        """In the segment, for either."""

    @contextmanager
    def waiting(self, *, for_room: bool) -> Iterator[None]:
        """Count the block as waited."""
        begin = time.monotonic()
        try:
            yield
        finally:
            lasted = time.monotonic() - begin
            self.waited_s += lasted
            if for_room:
                self._room_s += lasted
            else:
                self._allowance_s += lasted

    def untold(self) -> dict[str, int]:
        """What the run has not been told yet, in ms."""
        return {
            "process_ms": round((time.monotonic() - self._from) * 1e3),
            "allowance_wait_ms": round(self._allowance_s * 1e3),
            "room_wait_ms": round(self._room_s * 1e3),
        }

    def told(self) -> None:
        """It has been told."""
        self._from = time.monotonic()
        self._allowance_s = self._room_s = 0.0


class Player:
    """A run's collector in this process.

    Args:
        client: connection to the server.
        run: its id.
        watch: told of every step.

    Raises:
        UnknownRunError, StoreError, ConfigError: the run is gone, or of another version of ddrl.
        UnfitError: this machine does not play the run.
        EnvError: the environment cannot be made.
    """

    def __init__(self, client: Redis, run: str, watch: Watchdog | None = None) -> None:
        self.run = run
        self.config: RunConfig = runs.config(client, run)
        self._watch = watch
        spaces = runs.spaces(client, run)
        with self.watched():
            state = runs.state(client, run)
            versions.check(self.config, state.versions)
            resolved = base.resolve(self.config, spaces)
            at_random = self.config.rollout.random_until_learned
            if at_random is None:  # what a warm start begins with has learned
                at_random = resolved.can_begin_at_random and not state.warm
            self.producer = stream.new_producer(client)
            self.incarnation = secrets.randbits(48)
            self.collector = Collector(
                run=run,
                producer=self.producer,
                incarnation=self.incarnation,
                env=self.config.env,
                rollout=self.config.rollout,
                spec=spaces,
                policy=resolved.policy(producer=self.producer),
                random_until_learned=at_random,
                seed=self.config.seed,
                context=resolved.context,
                sequences=resolved.sequences,
                on_step=None if watch is None else watch.step,
            )
        self.most_steps: int = resolved.config.batch_size if resolved.on_policy else sys.maxsize
        """Transitions of one fragment that the learner has a use for."""
        self.least_steps = 1 if resolved.on_policy else _STEPS_PER_SUM * resolved.config.n_step
        """T that a fragment is worth, however little is left of the allowance: sums of rewards end with it."""
        self.unsent: Unsent | None = None
        self._host = without_spaces(socket.gethostname())

    def watched(self) -> AbstractContextManager[None]:
        """The watch over a block in which the environment works."""
        if self._watch is None:
            return nullcontext()
        return self._watch.watch(self.run, self.config.env.id, self.config.rollout.step_timeout_s)

    def load(self, client: Redis, version: int) -> bool:
        """Take over a version of the weights; False if it was dropped meanwhile."""
        if version == self.collector.version:
            return True
        blob = weights.get(client, self.run, version)
        if blob is not None:
            self.collector.load(version, tensors.decode_weights(blob))
        return blob is not None

    def play(self, max_steps: int) -> None:
        """Collect one fragment into `unsent`; of an environment slower than was thought, a shorter one."""
        started = time.monotonic()
        longest_s = max(1.0, LONGEST_FRAGMENT * self.config.rollout.fragment_s)
        with self.watched():
            fragment = self.collector.collect(max_steps=max_steps, stop_at=started + longest_s)
        self.unsent = Unsent(
            codec.encode(fragment),
            fragment.seq,
            fragment.num_transitions,
            tuple(fragment.episode_return.tolist()),
            round((time.monotonic() - started) * 1e3),
        )

    def send(self, client: Redis, *, clock: Clock | None = None, node: str = "-") -> Appended:
        """Append `unsent`; it stays when the server has no room, or does not answer."""
        unsent = self.unsent
        assert unsent is not None, "play() comes first"
        reply = stream.append(
            client,
            self.run,
            unsent.fields,
            producer=self.producer,
            incarnation=self.incarnation,
            seq=unsent.seq,
            num_transitions=unsent.num_transitions,
            episode_returns=unsent.episode_returns,
            played_ms=unsent.played_ms,
            host=self._host,
            node=node,
            **(clock.untold() if clock else {}),
        )
        if reply.answer is not Answer.FULL:
            self.unsent = None
            if clock:
                clock.told()
        return reply


class Players:
    """The recent players of a process or thread, the least recently used going first beyond a bound in bytes.

    Args:
        max_bytes: the bound.
        watch: over their environments.
    """

    def __init__(self, max_bytes: int = MAX_CACHED_BYTES, watch: Watchdog | None = None) -> None:
        self._players: OrderedDict[str, Player] = OrderedDict()
        self._max_bytes, self._watch = max_bytes, watch
        self._look_at = 0.0
        self._untold: tuple[str, int, dict[str, int]] | None = None  # run, producer, time of the last segment

    def __contains__(self, run: str) -> bool:
        return run in self._players

    def get(self, client: Redis, run: str) -> Player:
        """The run's player, made on first use; raises what that raises."""
        if run not in self._players:
            self._players[run] = Player(client, run, self._watch)
            segments.withdraw_refusal(client, run, socket.gethostname())
        self._players.move_to_end(run)
        for other in list(self._players)[:-1]:
            if self._num_bytes() <= self._max_bytes:
                break
            if self._players[other].unsent is None:  # else there is something to be sent yet
                self.drop(other)
        return self._players[run]

    def drop(self, run: str) -> None:
        """Close a run's player, if there is one."""
        player = self._players.pop(run, None)
        if player is not None:
            player.collector.close()

    @contextmanager
    def segment(self, client: Redis, player: Player, clock: Clock, *, node: str) -> Iterator[None]:
        """Have the server know who plays for a player during the block; that it ended, by `tell_end` at the latest."""
        is_hindered = False
        try:
            segments.playing(client, player.run, player.producer, node=node, pid=os.getpid())
            yield
        except connection.OUTAGES:
            is_hindered = True  # a server that cannot serve takes no word of the end either
            raise
        finally:
            self._untold = (player.run, player.producer, clock.untold())
            if not is_hindered:
                self.tell_end(client)

    def tell_end(self, client: Redis) -> None:
        """Tell of the end of the last segment, unless that was told."""
        if self._untold is not None:
            run, producer, told = self._untold
            segments.end(client, run, producer, **told)
            self._untold = None

    def may_look(self) -> bool:
        """Whether it is time to look at the other runs: many processes may wait, and they do so for long."""
        now = time.monotonic()
        is_time = now >= self._look_at
        if is_time:
            self._look_at = now + PATIENCE_S * random.uniform(1.0, 1.5)
        return is_time

    def _num_bytes(self) -> int:
        return sum(player.collector.num_bytes for player in self._players.values())


def play(
    client: Redis,
    blocking: Redis,
    players: Players,
    run: str,
    *,
    node: str = "-",
    serves: Callable[[str], bool] = lambda queue: True,
) -> int:
    """Play one segment of a run; the transitions appended.

    It ends after `rollout.segment_s`, or within one fragment when the run has stopped, is paused, must give way, or
    when its node drains; and when it has waited for PATIENCE_S while other runs want the process. A process passes the
    allowance by one fragment at most, of the steps that are left or a few times n_step where that is more.

    Args:
        client: connection for commands.
        blocking: connection for blocking reads.
        players: of this process or thread.
        run: its id.
        node: of the worker, without spaces.
        serves: whether the worker takes messages of a queue.

    Raises:
        UnknownRunError, StoreError, ConfigError, UnfitError, EnvError: the run cannot be played here.
        RedisError: the server cannot serve; what was played and not sent is kept.
    """
    players.tell_end(client)  # of an earlier segment that a hindrance ended
    clock = Clock()
    word = stream.remaining(client, run, node=node)
    if word.answer is Answer.STOPPED:
        players.drop(run)
        return 0
    if word.answer is Answer.YIELD and run not in players:
        return 0
    player = players.get(client, run)
    wanted = lambda: players.may_look() and _wanted_elsewhere(client, run, serves)  # noqa: E731
    with players.segment(client, player, clock, node=node):
        appended, word = _play(client, blocking, player, word, clock, node=node, wanted=wanted)
    if word.answer is Answer.STOPPED:
        players.drop(run)
    return appended


def _play(
    client: Redis,
    blocking: Redis,
    player: Player,
    word: Appended,
    clock: Clock,
    *,
    node: str,
    wanted: Callable[[], bool],
) -> tuple[int, Appended]:
    """Play on from the server's `word` until one ends the segment; transitions appended, and the last word.

    Whether the process is `wanted` elsewhere is asked once the segment has waited for its patience, which differs.
    """
    run, config = player.run, player.config
    deadline = time.monotonic() + config.rollout.segment_s
    patience_s = PATIENCE_S * random.uniform(1.0, 1.5)
    num_players = word.players
    appended = 0
    if player.unsent is not None:  # of an earlier segment: it goes even where this one ends at once
        transitions = player.unsent.num_transitions
        word = player.send(client, clock=clock, node=node)
        appended += transitions if word.answer not in (Answer.FULL, Answer.STOPPED) else 0
    while word.answer not in (Answer.YIELD, Answer.STOPPED) and time.monotonic() < deadline:
        if clock.waited_s > patience_s and wanted():
            break
        if word.answer is Answer.WAIT:
            with clock.waiting(for_room=False):
                if stream.await_allowance(blocking, run, word.allowance_id, block_ms=WAIT_MS):
                    time.sleep(random.uniform(0.0, min(WAIT_MS / 1e3, num_players / WAKES_PER_S)))
                word = stream.remaining(client, run, node=node)
                num_players = word.players
            continue
        if word.answer is Answer.FULL:
            with clock.waiting(for_room=True):
                time.sleep(RETRY_FULL_S)
        if player.unsent is None:
            if not player.load(client, word.version):
                word = stream.remaining(client, run, node=node)
                continue
            num_steps = min(word.remaining_steps, player.most_steps)
            player.play(max_steps=max(player.least_steps, -(-num_steps // config.env.num_envs)))
        transitions = player.unsent.num_transitions if player.unsent else 0
        word = player.send(client, clock=clock, node=node)
        appended += transitions if word.answer not in (Answer.FULL, Answer.STOPPED) else 0
    return appended, word


def _wanted_elsewhere(client: Redis, run: str, serves: Callable[[str], bool]) -> bool:
    """Whether another run would use this process now."""
    return any(rival.wants and rival.run != run and serves(rival.queue) for rival in runs.active(client))


def prepare(client: Redis, most: int = 3) -> None:
    """Import what the newest active runs will need of this process, so that its first segment begins at once.

    Modules of users are left to the watched first segment.
    """
    envs.prepare()
    for run in runs.active_names(client)[-most:]:
        config = runs.config(client, run)
        if ":" not in config.env.id and versions.custom_network(config) is None:
            envs.prepare(config.env.id)
            base.resolve(config, runs.spaces(client, run)).policy()

"""One segment of play: what a rollout task does, and the players that a process keeps between tasks.

A player is a collector with its connection to a run: environments, policy, producer id. Episodes go on across
segments; a player that is evicted takes its unfinished episodes with it, and they are counted as abandoned.
"""

from __future__ import annotations

import secrets
import socket
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddrl import codec, tensors
from ddrl.algorithms import base
from ddrl.collector import Collector
from ddrl.config import RunConfig
from ddrl.store import runs, stream, weights
from ddrl.store.stream import Answer, Appended

if TYPE_CHECKING:
    from redis import Redis

MAX_CACHED_BYTES = 1024**3
WAIT_MS = 1_000
RETRY_FULL_S = 0.25
_STEPS_PER_SUM = 4  # of n rewards: less than a quarter of the sums are then cut by the fragment's end


@dataclass
class Unsent:
    """An encoded fragment that the server had no room for."""

    fields: dict[bytes, bytes]
    seq: int
    num_transitions: int
    episode_returns: tuple[float, ...]
    played_ms: int


class Player:
    """A run's collector in this process."""

    def __init__(self, client: Redis, run: str) -> None:
        self.run = run
        self.config: RunConfig = runs.config(client, run)
        spaces = runs.spaces(client, run)
        resolved = base.resolve(self.config, spaces)
        at_random = self.config.rollout.random_until_learned
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
            random_until_learned=resolved.can_begin_at_random if at_random is None else at_random,
            seed=self.config.seed,
            context=resolved.context,
            sequences=resolved.sequences,
        )
        self.most_steps: int = resolved.config.batch_size if resolved.on_policy else sys.maxsize
        """Transitions of one fragment that the learner has a use for."""
        self.least_steps = 1 if resolved.on_policy else _STEPS_PER_SUM * resolved.config.n_step
        """T that a fragment is worth, however little is left of the allowance: sums of rewards end with it."""
        self.unsent: Unsent | None = None
        self._host = socket.gethostname()

    def load(self, client: Redis, version: int) -> bool:
        """Take over a version of the weights; False if it was dropped meanwhile."""
        if version == self.collector.version:
            return True
        blob = weights.get(client, self.run, version)
        if blob is not None:
            self.collector.load(version, tensors.decode_weights(blob))
        return blob is not None

    def play(self, max_steps: int) -> None:
        """Collect one fragment into `unsent`."""
        started = time.monotonic()
        fragment = self.collector.collect(max_steps=max_steps)
        self.unsent = Unsent(
            codec.encode(fragment),
            fragment.seq,
            fragment.num_transitions,
            tuple(fragment.episode_return.tolist()),
            round((time.monotonic() - started) * 1e3),
        )

    def send(self, client: Redis) -> Appended:
        """Append `unsent`; it stays when the server has no room."""
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
        )
        if reply.answer is not Answer.FULL:
            self.unsent = None
        return reply


class Players:
    """The recent players of a process, the least recently used going first beyond a bound in bytes."""

    def __init__(self, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._players: OrderedDict[str, Player] = OrderedDict()
        self._max_bytes = max_bytes
        self.num_abandoned = 0
        """Unfinished episodes that went with their players."""

    def get(self, client: Redis, run: str) -> Player:
        """The run's player, made on first use."""
        if run not in self._players:
            self._players[run] = Player(client, run)
        self._players.move_to_end(run)
        while len(self._players) > 1 and self._num_bytes() > self._max_bytes:
            self.drop(next(iter(self._players)))
        return self._players[run]

    def drop(self, run: str) -> None:
        """Close a run's player, if there is one."""
        player = self._players.pop(run, None)
        if player is not None:
            self.num_abandoned += player.collector.abandoned
            player.collector.close()

    def _num_bytes(self) -> int:
        return sum(player.collector.num_bytes for player in self._players.values())


def play(client: Redis, blocking: Redis, players: Players, run: str) -> int:
    """Play one segment of a run; the transitions appended.

    It ends after `rollout.segment_s`, or within one fragment when the run has stopped, is paused, or waits for
    its learner while other runs want the process. A process passes the allowance by one fragment at most, of the
    steps that are left or a few times n_step where that is more.

    Args:
        client: connection for commands.
        blocking: connection for blocking reads.
        players: of this process.
        run: its id.

    Raises:
        UnknownRunError, EnvError, ConfigError: the run cannot be played here.
    """
    word = stream.remaining(client, run)
    if word.answer is Answer.STOPPED:
        players.drop(run)
        return 0
    player = players.get(client, run)
    deadline = time.monotonic() + player.config.rollout.segment_s
    num_envs = player.config.env.num_envs
    appended = 0
    while word.answer not in (Answer.YIELD, Answer.STOPPED) and time.monotonic() < deadline:
        if word.answer is Answer.WAIT:
            told = stream.await_allowance(blocking, run, word.allowance_id, block_ms=WAIT_MS)
            if not told and runs.num_active(client) > 1:
                break
            word = stream.remaining(client, run)
            continue
        if word.answer is Answer.FULL:
            time.sleep(RETRY_FULL_S)
        if player.unsent is None:
            if not player.load(client, word.version):
                word = stream.remaining(client, run)
                continue
            wanted = min(word.remaining_steps, player.most_steps)
            player.play(max_steps=max(player.least_steps, -(-wanted // num_envs)))
        transitions = player.unsent.num_transitions if player.unsent else 0
        word = player.send(client)
        appended += transitions if word.answer not in (Answer.FULL, Answer.STOPPED) else 0
    if word.answer is Answer.STOPPED:
        players.drop(run)
    return appended

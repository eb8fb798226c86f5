"""The fleet, seen from the learner: rollout messages kept waiting, evaluations tracked to their results.

A rollout message is a permission to play one segment, not a piece of work: losing it or delivering it twice
changes nothing. An evaluation is work: it stays open in the server until its result is stored, and is sent
again when overdue. Sending is a callable, so nothing here knows Celery.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ddrl.config import RolloutConfig
from ddrl.learner.sharing import PROCESSES_PER_MESSAGE, Capacity, Shares
from ddrl.store import keys, runs, segments, stream, workers
from ddrl.store.run_state import Rival
from ddrl.store.runs import RunState
from ddrl.store.workers import Heartbeat

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)

LOOK_S = 0.1  # between two looks at the rivals
LOOK_PER_RUN_S = 0.01  # the same, of many
SURVEY_S = 2.0  # between two looks at the heartbeats
REFUSED_S = 1.0  # at most, between messages of a run that some machine refuses: they may be taken in vain
CLAIM_AFTER_S = 0.3  # of waiting
CLAIM_EVERY_S = 1.0


class Dispatcher:
    """Keeps a few rollout messages of one run waiting, so that it gets its share of the fleet (`ddrl.learner.sharing`).

    A run whose allowance is used up sends none while others want the processes. Where messages of a higher priority
    wait in vain, processes that play runs of lower ones are claimed.

    Args:
        client: connection to the server.
        run: whose messages.
        token: fencing token.
        rollout: the run's settings of play.
        send: sends one message, given queue and priority.
    """

    def __init__(
        self,
        client: Redis,
        run: str,
        token: int,
        rollout: RolloutConfig,
        *,
        send: Callable[[str, str], None],
    ) -> None:
        self._client, self._run, self._token = client, run, token
        self._rollout, self._send = rollout, send
        self._shares = Shares(run, rollout.segment_s)
        self._capacity = Capacity()
        self._names = [run]
        self._queue, self._priority = "", "normal"
        self._refused = False
        self._survey_at = self._look_at = self._send_at = self._claim_at = 0.0
        self._surveyed_at = self._trusted_at = time.monotonic()
        self._suspects: frozenset[int] = frozenset()

    def tick(self) -> int:
        """Send what is missing; the number sent.

        Raises:
            redis.exceptions.RedisError, UnreachableError: the server does not serve; call again.
            LeaseLostError: another learner took over.
        """
        now = time.monotonic()
        if now >= self._survey_at:
            self._survey(now)
        if now < self._look_at:
            return 0
        self._look_at = now + max(LOOK_S, LOOK_PER_RUN_S * len(self._names)) - 0.01
        told = segments.Standing(self._run, round(self._shares.ahead_s * 1e3), self._shares.recent)
        found, length = segments.look(self._client, self._names, self._queue, self._priority, told)
        mine = next((rival for rival in found if rival.run == self._run), None)
        if mine is None:  # paused or ended meanwhile
            return 0
        if mine.priority != self._priority:  # changed meanwhile
            self._survey_at = self._look_at = now
            return 0
        self._shares.look(found, self._capacity, length=length, now_s=now)
        self._claim(mine, now)
        missing = self._shares.wanted() - mine.waiting
        if missing <= 0 or now < self._send_at:
            return 0
        pause_s = self._rollout.segment_s / PROCESSES_PER_MESSAGE  # in which so many are taken where all play
        self._send_at = now + (min(REFUSED_S, pause_s) if self._refused else 0.0)
        segments.sent(self._client, self._run, missing)
        for _ in range(missing):
            self._send(self._queue, self._priority)
        return missing

    def _claim(self, mine: Rival, now: float) -> None:
        """Have processes of lower priorities end their segments while messages wait in vain."""
        if not (mine.waiting and mine.wants):
            self._claim_at = now + CLAIM_AFTER_S
            return
        if now < self._claim_at:
            return
        self._claim_at = now + CLAIM_EVERY_S
        level, left = keys.PRIORITIES, mine.waiting
        accounts = self._shares.accounts.values()
        lower = [one for one in accounts if level[one.rival.priority] > level[mine.priority]]
        for account in sorted(lower, key=lambda one: (-level[one.rival.priority], -one.playing)):
            claimed = min(left, math.ceil(account.playing - 0.1))
            if claimed > 0:
                stream.claim(self._client, account.rival.run, claimed, for_ms=round(CLAIM_EVERY_S * 1e3))
                left -= claimed

    # --- every few seconds -------------------------------------------------------------------------------

    def _survey(self, now: float) -> None:
        """Look at workers, rivals, lost producers, crashes; count the messages that wait."""
        self._survey_at = now + SURVEY_S
        fleet = workers.alive(self._client)
        self._capacity = Capacity(fleet)
        try:
            state = runs.state(self._client, self._run)
        except runs.UnknownRunError:  # the learner will notice
            return
        self._names = sorted({*runs.active_names(self._client), self._run})
        self._queue, self._priority = state.queue, state.priority
        segments.recount(self._client, self._run, self._queue, self._priority)
        refusals = segments.refusals(self._client, self._run)
        self._refused = any(worker.host in refusals for worker in fleet if self._queue in worker.queues)
        if now - self._surveyed_at > 2 * SURVEY_S:  # the server was away, and what it knows of workers is old
            self._trusted_at = now + 2 * workers.TTL_S
        self._surveyed_at = now
        if now >= self._trusted_at:
            self._find_lost(fleet)
        self._quarantine(state)

    def _find_lost(self, fleet: Sequence[Heartbeat]) -> None:
        """Note producers whose process is gone, seen so twice in a row: a worker tells of its processes in time."""
        gone, nodes = {}, defaultdict(list)
        for worker in fleet:
            nodes[worker.node].append(worker.pids)
        for producer, player in segments.players(self._client, self._run).items():
            named_so = nodes.get(player.node)
            if named_so is None:
                gone[producer] = f"worker {player.node} is gone"
            elif all(pids and player.pid not in pids for pids in named_so):
                gone[producer] = f"process {player.pid} of {player.node} is gone"
        for producer in self._suspects & gone.keys():
            log.warning("%s: producer %d ended without a word: %s", self._run, producer, gone[producer])
            segments.lost(self._client, self._run, [producer], gone.pop(producer))
        self._suspects = frozenset(gone)

    def _quarantine(self, state: RunState) -> None:
        """Pause a run that ends processes instead of playing."""
        if state.status == "active" and state.crashes >= self._rollout.max_crashes:
            reason = (
                f"quarantined: {state.crashes} processes ended without a fragment: {state.error}; "
                f"mend the environment and `ddrl resume {self._run}`"
            )
            log.error("%s: %s", self._run, reason)
            runs.set_status(self._client, self._run, "paused", reason, token=self._token)

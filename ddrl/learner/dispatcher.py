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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, pstdev
from typing import TYPE_CHECKING, Any

from ddrl.config import EvaluationConfig, RolloutConfig, StopConfig
from ddrl.learner.sharing import PROCESSES_PER_MESSAGE, Capacity, Shares
from ddrl.store import evaluations, keys, runs, segments, stream, weights, workers
from ddrl.store.evaluations import OpenEvaluation
from ddrl.store.run_state import Rival, RunState
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


@dataclass(frozen=True)
class Progress:
    """What decides whether to evaluate: latest version, mean of the last training returns, counters."""

    version: int
    return_mean: float | None
    env_steps: int
    updates: int


class Referee:
    """Chooses versions to evaluate and says when the run is solved.

    One evaluation is in flight at a time. A mean at or above `stop.return` must be confirmed on other seeds.

    Args:
        client: connection to the server.
        run: whose evaluations.
        token: fencing token.
        send: sends one evaluation's message, by its id.
    """

    def __init__(
        self,
        client: Redis,
        run: str,
        token: int,
        config: EvaluationConfig,
        stop: StopConfig,
        *,
        send: Callable[[str], None],
    ) -> None:
        self._client, self._run, self._token = client, run, token
        self._config, self._stop, self._send = config, stop, send
        self._returns: dict[int, list[float]] = {}  # of all evaluation episodes, by version
        self._open = next(iter(evaluations.opened(client, run).values()), None)
        self._last_at = self._overdue_at = time.monotonic()
        self.solved = False
        self._cursor = b"0-0"
        rows = self._results()
        for row in rows:
            self._returns.setdefault(row["version"], []).extend(row["returns"])
        if rows and self._open is None:  # its learner may have died before it judged
            self._decide(rows[-1])

    @property
    def pinned(self) -> frozenset[int]:
        """Versions that an open evaluation needs."""
        return frozenset({self._open.version} if self._open else ())

    def adopt(self, config: EvaluationConfig, stop: StopConfig) -> None:
        """Go by changed settings from now on."""
        self._config, self._stop = config, stop

    def tick(self, progress: Progress) -> None:
        """Take results, send again what is overdue, open what is due.

        Raises:
            LeaseLostError: another learner took over.
        """
        if self._open is not None:
            self._collect()
        elif self._is_due(progress):
            self._begin(progress.version, "watch", progress.env_steps, progress.updates)

    def _is_due(self, progress: Progress) -> bool:
        if progress.version < 1 or self.solved:
            return False
        target = self._stop.return_
        near = (
            target is not None
            and progress.return_mean is not None
            and progress.return_mean >= target - self._config.near
        )
        every_s = self._config.near_every_s if near else self._config.every_s
        return time.monotonic() - self._last_at >= every_s

    def _begin(self, version: int, purpose: str, env_steps: int, updates: int) -> None:
        watch, confirm = self._config.num_episodes, self._config.confirm_episodes
        opened = OpenEvaluation(
            version=version,
            first_seed=self._config.seed + (watch if purpose == "confirm" else 0),
            num_episodes=confirm if purpose == "confirm" else watch,
            purpose=purpose,
            sent_ms=runs.server_ms(self._client),
            env_steps=env_steps,
            updates=updates,
        )
        evaluations.open_(self._client, self._run, self._token, opened)
        self._open = opened
        self._resend()

    def _resend(self) -> None:
        """Send the open evaluation; due again at once where sending fails."""
        assert self._open is not None
        self._overdue_at = time.monotonic()
        self._send(self._open.evaluation_id)
        self._overdue_at += self._config.timeout_s

    def _collect(self) -> None:
        assert self._open is not None
        for row in self._results():
            self.keep_best(row)
            if row["version"] == self._open.version and row["purpose"] == self._open.purpose:
                self._open = None
                self._last_at = time.monotonic()
                self._decide(row)
                return
        if time.monotonic() < self._overdue_at:
            return
        if self._open.version not in weights.index(self._client, self._run).sizes:
            log.warning("evaluation %s cannot be played: its weights are gone", self._open.evaluation_id)
            evaluations.drop(self._client, self._run, self._token, self._open.evaluation_id)
            self._open = None
            return
        log.warning("evaluation %s is overdue; sent again", self._open.evaluation_id)
        again = replace(self._open, sent_ms=runs.server_ms(self._client))
        evaluations.open_(self._client, self._run, self._token, again)
        self._resend()

    def _results(self) -> list[dict[str, Any]]:
        """Results since the last call; those that nothing can be concluded from are passed over."""
        rows, self._cursor = evaluations.results(self._client, self._run, self._cursor)
        sound = []
        for row in rows:
            figures = (*row["returns"], row["return_mean"], row["return_std"])
            if len(row["returns"]) == row["num_episodes"] > 0 and all(map(math.isfinite, figures)):
                sound.append(row)
            else:
                log.warning("%s: a result of version %d is no result; passed over", self._run, row["version"])
        return sound

    def keep_best(self, row: Mapping[str, Any]) -> None:
        """Take a result: mark the version that is best by all its evaluation episodes together."""
        log.info(
            "%s of version %d: %.1f +- %.1f over %d episodes",
            row["purpose"], row["version"], row["return_mean"], row["return_std"], row["num_episodes"],
        )  # fmt: skip
        self._returns.setdefault(row["version"], []).extend(row["returns"])
        there = weights.index(self._client, self._run).sizes
        means = {version: mean(values) for version, values in self._returns.items() if version in there}
        if not means:
            return
        best = max(means, key=means.__getitem__)
        weights.mark_best(self._client, self._run, self._token, best, means[best])
        self._note(best, self._returns[best])

    def _decide(self, row: Mapping[str, Any]) -> None:
        """Confirm what has reached the target; solved is what was confirmed."""
        if self._stop.return_ is None or row["return_mean"] < self._stop.return_:
            return
        if row["purpose"] == "watch" and self._config.confirm_episodes:
            self._begin(row["version"], "confirm", row["env_steps"], row["updates"])
            return
        weights.mark_best(self._client, self._run, self._token, row["version"], row["return_mean"])
        self._note(row["version"], row["returns"])
        self.solved = True

    def _note(self, version: int, returns: Sequence[float]) -> None:
        """Let these episodes describe the run."""
        note = {"version": version, "return_mean": mean(returns), "return_std": pstdev(returns)}
        note["episodes"] = len(returns)
        runs.note_evaluation(self._client, self._run, self._token, note)

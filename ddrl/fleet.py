"""The fleet, seen from the learner: rollout messages kept waiting, evaluations tracked to their results.

A rollout message is a permission to play one segment, not a piece of work: losing it or delivering it twice
changes nothing. An evaluation is work: it stays open in the server until its result is stored, and is sent
again when overdue. Sending is a callable, so nothing here knows Celery.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, pstdev
from typing import TYPE_CHECKING, Any

from ddrl.config import EvaluationConfig, StopConfig
from ddrl.store import evaluations, messages, runs, weights, workers
from ddrl.store.evaluations import OpenEvaluation

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)

SURVEY_S = 2.0  # between two looks at the heartbeats
PROCESSES_PER_MESSAGE = 4  # a segment lasts seconds, the dispatcher looks many times a second


class Dispatcher:
    """Keeps rollout messages of one run waiting, in proportion to its weight and to the fleet.

    First-in-first-out service then shares the fleet by weight, and a new machine plays at once.

    Args:
        client: connection to the server.
        run: whose messages.
        weight: share relative to other runs.
        queue: where they wait.
        send: sends one message.
    """

    def __init__(
        self, client: Redis, run: str, *, weight: float, queue: str, send: Callable[[], None]
    ) -> None:
        self._client, self._run, self._weight = client, run, weight
        self._queue, self._send = queue, send
        self._target = max(1, math.ceil(weight))
        self._survey_at = 0.0

    def tick(self) -> int:
        """Send what is missing; the number sent."""
        now = time.monotonic()
        if now >= self._survey_at:
            self._survey_at = now + SURVEY_S
            processes = sum(
                worker.processes for worker in workers.alive(self._client) if self._queue in worker.queues
            )
            self._target = max(1, math.ceil(self._weight * max(1.0, processes / PROCESSES_PER_MESSAGE)))
        missing = self._target - messages.waiting(self._client, self._run, self._queue)
        if missing > 0:
            messages.sent(self._client, self._run, missing)
            for _ in range(missing):
                self._send()
        return max(missing, 0)


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
        rows, self._cursor = evaluations.results(client, run)
        for row in rows:
            self._returns.setdefault(row["version"], []).extend(row["returns"])
        if rows and self._open is None:  # its learner may have died before it judged
            self._decide(rows[-1])

    @property
    def pinned(self) -> frozenset[int]:
        """Versions that an open evaluation needs."""
        return frozenset({self._open.version} if self._open else ())

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
        rows, self._cursor = evaluations.results(self._client, self._run, self._cursor)
        for row in rows:
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

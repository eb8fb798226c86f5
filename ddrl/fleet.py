"""The fleet, seen from the learner: rollout messages kept waiting, evaluations tracked to their results.

A rollout message is a permission to play one segment, not a piece of work: losing it or delivering it twice
changes nothing. An evaluation is work: it stays open in the server until its result is stored, and is sent
again when overdue. Sending is a callable, so nothing here knows Celery.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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
        self._best = weights.index(client, run).best_return
        open_now = evaluations.opened(client, run)
        self._open = next(iter(open_now.values()), None)
        self._cursor = evaluations.results(client, run)[1]
        self._last_at = time.monotonic()
        self._overdue_at = self._last_at
        self.solved = False

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
        self._overdue_at = time.monotonic() + self._config.timeout_s
        self._send(opened.evaluation_id)

    def _collect(self) -> None:
        assert self._open is not None
        rows, self._cursor = evaluations.results(self._client, self._run, self._cursor)
        for row in rows:
            if row["version"] == self._open.version and row["purpose"] == self._open.purpose:
                finished, self._open = self._open, None
                self._last_at = time.monotonic()
                self.judge(finished, row["return_mean"], row["return_std"])
                return
        if time.monotonic() >= self._overdue_at:
            log.warning("evaluation %s is overdue; sent again", self._open.evaluation_id)
            again = replace(self._open, sent_ms=runs.server_ms(self._client))
            evaluations.open_(self._client, self._run, self._token, again)
            self._overdue_at = time.monotonic() + self._config.timeout_s
            self._send(again.evaluation_id)

    def judge(self, finished: OpenEvaluation, mean: float, std: float) -> None:
        """Take a result: keep the best, confirm what reached the target, say when that is confirmed."""
        log.info(
            "%s of version %d: %.1f +- %.1f over %d episodes",
            finished.purpose, finished.version, mean, std, finished.num_episodes,
        )  # fmt: skip
        note = {"version": finished.version, "return_mean": mean, "return_std": std}
        note["episodes"] = finished.num_episodes
        confirmed = finished.purpose == "confirm"
        reached = self._stop.return_ is not None and mean >= self._stop.return_
        if mean > self._best or confirmed:
            self._best = mean
            weights.mark_best(self._client, self._run, self._token, finished.version, mean)
            runs.note_evaluation(self._client, self._run, self._token, note)
        if reached and (confirmed or self._config.confirm_episodes == 0):
            self.solved = True
        elif reached:
            self._begin(finished.version, "confirm", finished.env_steps, finished.updates)

"""What is known of a run as it goes on, and why nothing happens when nothing does."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddrl.cli.output import Client
from ddrl.config import RunConfig
from ddrl.store import evaluations, metrics, runs, stream, workers
from ddrl.store.runs import RunState
from ddrl.store.workers import Heartbeat

WORKERS_S = 3.0  # between two looks for workers, which scan the server's keys


@dataclass
class Figures:
    """What is known of a run at one moment; the lists grow from poll to poll.

    Attributes:
        state: of the run.
        config: of the run.
        row: the learner's newest figures; empty before the first.
        returns: (seconds since the first step, return) of finished training episodes.
        evaluated: results of evaluations, oldest first.
        serving: workers that take the run's rollouts.
        now_s: the server's clock.
        hint: why nothing happens, and the remedy; empty while all is well.
    """

    state: RunState
    config: RunConfig
    row: Mapping[str, Any] = field(default_factory=dict)
    returns: list[tuple[float, float]] = field(default_factory=list)
    evaluated: list[dict[str, Any]] = field(default_factory=list)
    serving: list[Heartbeat] = field(default_factory=list)
    now_s: float = 0.0
    hint: str = ""

    @property
    def start_s(self) -> float:
        """The first environment step, or the creation before there is one; server's clock."""
        return self.state.first_step_s or self.state.created_s

    @property
    def elapsed_s(self) -> float:
        """Since `start_s`, up to the end of the run."""
        return max(0.0, (self.state.ended_s or self.now_s) - self.start_s)

    @property
    def left_s(self) -> float | None:
        """Until `stop.time`; None without such a limit."""
        limit = self.config.stop.time
        spent = self.row.get("elapsed_s", self.elapsed_s)  # the learner's own count survives a pause
        return None if limit is None else max(0.0, limit - spent)

    @property
    def env_steps(self) -> int:
        """Appended so far."""
        return self.state.appended_steps

    @property
    def updates(self) -> int:
        """As last told by the learner, in whichever way was later."""
        return max(self.state.updates, int(self.row.get("updates", 0)))


class Watcher:
    """Polls a run: a few cheap commands, and only what is new of each stream."""

    def __init__(self, client: Client, run: str, *, starting_s: float = 0.0) -> None:
        self._client = client
        self._run = run
        self._queue = rollout_queue(runs.config(client, run).env.id)
        self._figures = Figures(runs.state(client, run), runs.config(client, run))
        self._episodes_cursor = self._evaluations_cursor = b"0-0"
        self._quiet_until = time.monotonic() + starting_s
        self._next_workers = 0.0

    def poll(self) -> Figures:
        """What is known now; the same object every time."""
        client, run, figures = self._client, self._run, self._figures
        figures.state = runs.state(client, run)
        figures.now_s = runs.server_ms(client) / 1e3
        figures.row = metrics.last(client, run)
        rows, self._episodes_cursor = stream.episodes(client, run, self._episodes_cursor)
        for row in rows:
            when = max(0.0, row["time_s"] - figures.start_s)
            figures.returns.extend((when, value) for value in row["returns"])
        results, self._evaluations_cursor = evaluations.results(client, run, self._evaluations_cursor)
        figures.evaluated.extend(results)
        if time.monotonic() >= self._next_workers and not figures.state.ended:
            figures.serving = [w for w in workers.alive(client) if self._queue in w.queues]
            self._next_workers = time.monotonic() + WORKERS_S
        figures.hint = hint(figures, self._queue, starting=time.monotonic() < self._quiet_until)
        return figures


def rollout_queue(env_id: str) -> str:
    """Where rollouts of an environment wait: as in `ddrl.celery`, which is not imported for a name."""
    from ddrl import envs

    return envs.queue_for("ddrl.rollout", env_id)


def hint(figures: Figures, queue: str, *, starting: bool) -> str:
    """Why nothing plays or learns, and what to do; empty while all is well.

    Args:
        starting: the caller is starting a learner and workers, so that their absence says nothing yet.
    """
    state = figures.state
    if state.ended:
        return ""
    if state.status == "paused":
        return f"paused: {state.reason}; `ddrl resume {state.run}` goes on"
    if starting and not (state.appended_steps and state.leased and figures.serving):
        return "starting"
    if not state.leased:
        return "waiting for a learner: start `ddrl learner`"
    if not figures.serving:
        return f"no worker plays {queue}: start `celery -A ddrl worker`"
    if state.error and not state.appended_steps:
        return f"workers cannot play it: {state.error}"
    return "" if state.appended_steps else "waiting for the first steps"

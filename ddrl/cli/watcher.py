"""The state of a run, polled from the server."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddrl.cli import hints
from ddrl.cli.output import Client
from ddrl.config import RunConfig
from ddrl.store import evaluations, metrics, runs, segments, stream, workers
from ddrl.store.runs import RunState
from ddrl.store.segments import RunLoad
from ddrl.store.workers import Heartbeat

FLEET_S = 2.0  # between two polls of workers, other runs and the server, which cost more than the run's state
WINDOW_S = 60.0  # over which shares and waits are measured


@dataclass
class Figures:
    """The state of a run at one moment; the lists grow with each poll.

    Attributes:
        state: of the run.
        config: of the run, as of now.
        row: the learner's newest metrics; empty before the first.
        returns: (seconds since the first step, return) of finished training episodes.
        evaluated: results of evaluations, oldest first.
        present: all workers.
        loads: all active runs, with this one.
        refusals: host -> reason why it does not play the run.
        num_playing: processes that play it now.
        share: part of all runs' process time within WINDOW_S; None while unknown.
        allowance_wait, room_wait: parts of its own process time within WINDOW_S spent waiting; None while unknown.
        quiet_s: since env steps last grew.
        now_s: the server's clock.
        notices: entries of the journal other than changes of status, each once, oldest first.
        outage: why the server does not answer; empty while it does.
        hint: why nothing happens, and the remedy; empty while all is well.
    """

    state: RunState
    config: RunConfig
    row: Mapping[str, Any] = field(default_factory=dict)
    returns: list[tuple[float, float]] = field(default_factory=list)
    evaluated: list[dict[str, Any]] = field(default_factory=list)
    present: list[Heartbeat] = field(default_factory=list)
    loads: list[RunLoad] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    num_playing: int = 0
    share: float | None = None
    allowance_wait: float | None = None
    room_wait: float | None = None
    quiet_s: float = 0.0
    now_s: float = 0.0
    notices: list[str] = field(default_factory=list)
    outage: str = ""
    hint: str = ""

    @property
    def serving(self) -> list[Heartbeat]:
        """Workers that serve the run's queue."""
        return [worker for worker in self.present if self.state.queue in worker.queues]

    @property
    def start_s(self) -> float:
        """Time of the first environment step, or of the creation before it; server's clock."""
        return self.state.first_step_s or self.state.created_s

    @property
    def elapsed_s(self) -> float:
        """Seconds from `start_s` to now or to the end of the run."""
        return max(0.0, (self.state.ended_s or self.now_s) - self.start_s)

    @property
    def left_s(self) -> float | None:
        """Seconds until `stop.time`; None without that limit."""
        limit = self.config.stop.time
        spent = self.row.get("elapsed_s", self.elapsed_s)  # the learner's count leaves pauses out
        return None if limit is None else max(0.0, limit - spent)

    @property
    def env_steps(self) -> int:
        """Environment steps appended so far."""
        return self.state.appended_steps

    @property
    def updates(self) -> int:
        """Updates, from the run's state or the metrics, whichever is newer."""
        return max(self.state.updates, int(self.row.get("updates", 0)))

    @property
    def entitled(self) -> float:
        """The run's share by its weight, among the active runs of its priority."""
        peers = [load.weight for load in self.loads if load.priority == self.state.priority]
        return self.state.weight / total if (total := sum(peers)) else 1.0


class Watcher:
    """Polls a run with a few cheap commands, and reads only the new entries of each stream.

    Args:
        client: connection to the server.
        run: its id.
        starting_s: time that the caller's own learner and workers may take to start.

    Raises:
        UnknownRunError: the run does not exist.
    """

    def __init__(self, client: Client, run: str, *, starting_s: float = 0.0) -> None:
        self._client = client
        self._run = run
        self._figures = Figures(runs.state(client, run), runs.config(client, run))
        self._episodes_cursor = self._evaluations_cursor = b"0-0"
        self._journal_cursor = runs.journal_after(client, run)[1]
        self._quiet_until = time.monotonic() + starting_s
        self._fleet_at = self._grown_at = 0.0
        self._server = ""
        self._history: deque[_Times] = deque()

    def poll(self) -> Figures:
        """Poll the run and return its state; the same object each time."""
        client, run, figures, now = self._client, self._run, self._figures, time.monotonic()
        before, figures.state = figures.state, runs.state(client, run)
        if figures.state.config_version != before.config_version:
            figures.config = runs.config(client, run)
        if figures.state.appended_steps != before.appended_steps or not self._grown_at:
            self._grown_at = now
        figures.quiet_s = now - self._grown_at
        figures.now_s = runs.server_ms(client) / 1e3
        figures.row = metrics.last(client, run)
        rows, self._episodes_cursor = stream.episodes(client, run, self._episodes_cursor)
        for row in rows:
            when = max(0.0, row["time_s"] - figures.start_s)
            figures.returns.extend((when, value) for value in row["returns"])
        results, self._evaluations_cursor = evaluations.results(client, run, self._evaluations_cursor)
        figures.evaluated.extend(results)
        entries, self._journal_cursor = runs.journal_after(client, run, self._journal_cursor)
        texts = (hints.notice(entry) for entry in entries)
        figures.notices.extend(text for text in texts if text and text not in figures.notices)
        if now >= self._fleet_at and not figures.state.ended:
            self._fleet_at = now + FLEET_S
            self._poll_fleet()
        figures.outage = ""
        figures.hint = hints.hint(figures, server=self._server, starting=now < self._quiet_until)
        return figures

    def without_server(self, reason: str) -> Figures:
        """Return the last state, with the reason why the server does not answer."""
        self._figures.outage = self._figures.hint = reason
        return self._figures

    def _poll_fleet(self) -> None:
        client, figures = self._client, self._figures
        figures.present = workers.alive(client)
        figures.loads = segments.active(client)
        figures.refusals = segments.refusals(client, self._run)
        figures.num_playing = len(segments.playing(client, self._run))
        self._server = hints.server_trouble(client)
        self._history.append(_Times.of(figures))
        while len(self._history) > 2 and self._history[-1].at - self._history[1].at > WINDOW_S:
            self._history.popleft()
        first, last = self._history[0], self._history[-1]
        everybody = sum(
            max(0, last.process_ms[run] - first.process_ms.get(run, 0)) for run in last.process_ms
        )
        mine = last.process_ms.get(self._run, 0) - first.process_ms.get(self._run, 0)
        figures.share = mine / everybody if everybody > 0 and self._run in last.process_ms else None
        spent_s = last.process_s - first.process_s
        if spent_s > 0:
            figures.allowance_wait = min(1.0, (last.allowance_wait_s - first.allowance_wait_s) / spent_s)
            figures.room_wait = min(1.0, (last.room_wait_s - first.room_wait_s) / spent_s)


@dataclass(frozen=True)
class _Times:
    """Process time spent on each active run, and on waits of this run, up to one moment."""

    at: float
    process_ms: dict[str, int]
    process_s: float
    allowance_wait_s: float
    room_wait_s: float

    @classmethod
    def of(cls, figures: Figures) -> _Times:
        state = figures.state
        return cls(
            at=time.monotonic(),
            process_ms={load.run: load.process_ms for load in figures.loads},
            process_s=state.process_s,
            allowance_wait_s=state.allowance_wait_s,
            room_wait_s=state.room_wait_s,
        )

"""What is known of a run as it goes on, from poll to poll."""

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
from ddrl.store.run_state import Rival, RunState
from ddrl.store.workers import Heartbeat

LOOK_S = 2.0  # between two looks at workers, rivals and the server, which cost more than the run's own state
WINDOW_S = 60.0  # of shares and waits


@dataclass
class Figures:
    """What is known of a run at one moment; the lists grow from poll to poll.

    Attributes:
        state: of the run.
        config: of the run, as of now.
        row: the learner's newest figures; empty before the first.
        returns: (seconds since the first step, return) of finished training episodes.
        evaluated: results of evaluations, oldest first.
        present: all workers.
        rivals: active runs, this one included.
        refusals: host -> why it does not play the run.
        num_playing: processes that play it now.
        share: of all runs' process time within WINDOW_S; None while nothing is known.
        allowance_wait, room_wait: parts of its own process time within WINDOW_S; None likewise.
        quiet_s: since env steps last grew.
        now_s: the server's clock.
        notices: what the journal says beside changes of status, each once, oldest first.
        outage: why the server cannot be asked now; empty while it can.
        hint: why nothing happens, and the remedy; empty while all is well.
    """

    state: RunState
    config: RunConfig
    row: Mapping[str, Any] = field(default_factory=dict)
    returns: list[tuple[float, float]] = field(default_factory=list)
    evaluated: list[dict[str, Any]] = field(default_factory=list)
    present: list[Heartbeat] = field(default_factory=list)
    rivals: list[Rival] = field(default_factory=list)
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
        """Workers that take the run's rollouts."""
        return [worker for worker in self.present if self.state.queue in worker.queues]

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

    @property
    def entitled(self) -> float:
        """The share that the run's weight gives it among the active runs of its priority."""
        peers = [rival.weight for rival in self.rivals if rival.priority == self.state.priority]
        return self.state.weight / total if (total := sum(peers)) else 1.0


class Watcher:
    """Polls a run: a few cheap commands, and only what is new of each stream.

    Args:
        client: connection to the server.
        run: its id.
        starting_s: for so long the caller's own learner and workers may not be there yet.

    Raises:
        UnknownRunError: there is no such run.
    """

    def __init__(self, client: Client, run: str, *, starting_s: float = 0.0) -> None:
        self._client = client
        self._run = run
        self._figures = Figures(runs.state(client, run), runs.config(client, run))
        self._episodes_cursor = self._evaluations_cursor = b"0-0"
        self._journal_cursor = runs.journal_after(client, run)[1]
        self._quiet_until = time.monotonic() + starting_s
        self._look_at = self._grown_at = 0.0
        self._server = ""
        self._history: deque[_Times] = deque()

    def poll(self) -> Figures:
        """What is known now; the same object every time."""
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
        if now >= self._look_at and not figures.state.ended:
            self._look_at = now + LOOK_S
            self._look()
        figures.outage = ""
        figures.hint = hints.hint(figures, server=self._server, starting=now < self._quiet_until)
        return figures

    def without_server(self, reason: str) -> Figures:
        """What was known last, when the server cannot be asked."""
        self._figures.outage = self._figures.hint = reason
        return self._figures

    def _look(self) -> None:
        client, figures = self._client, self._figures
        figures.present = workers.alive(client)
        figures.rivals = runs.active(client)
        figures.refusals = segments.refusals(client, self._run)
        figures.num_playing = len(segments.players(client, self._run))
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
    """What processes had spent on each active run, and in which waits on this one."""

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
            process_ms={rival.run: rival.process_ms for rival in figures.rivals},
            process_s=state.process_s,
            allowance_wait_s=state.allowance_wait_s,
            room_wait_s=state.room_wait_s,
        )

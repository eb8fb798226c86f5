"""The state of a run, polled from the server."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ddrl.cli import hints
from ddrl.cli.output import Client
from ddrl.config import RunConfig
from ddrl.store import connection, evaluations, history, learners, metrics, runs, segments, stream, workers
from ddrl.store.learners import Member
from ddrl.store.runs import UnknownRunError

FLEET_S = 2.0  # between two polls of workers, other runs and the server, which cost more than the run's state
OUTAGE_S = 300.0  # after this long without the server, the command fails with the connection error
WINDOW_S = 60.0  # over which shares and waits are measured
# Only so many of the newest are held, as workers may write any number.
MOST_ROWS, MOST_RETURNS, MOST_NOTICES = 10_000, 1_000_000, 100
SPENT = ("process_s", "played_s", "allowance_wait_s", "room_wait_s")  # process time in all, and by purpose


class Shares(NamedTuple):
    """Parts of process time within some period; None while unknown.

    Attributes:
        share: of all active runs' process time, spent on this run.
        played, allowance_wait, room_wait: of this run's own, spent stepping, waiting for the learner, and for room.
    """

    share: float | None = None
    played: float | None = None
    allowance_wait: float | None = None
    room_wait: float | None = None


class Usage(NamedTuple):
    """Process time spent until one moment: on one run by purpose, and on each active run."""

    state: runs.RunState = runs.RunState("", "", leased=False)
    loads: Sequence[segments.RunLoad] = ()
    at: float = 0.0

    def since(self, before: Usage) -> Shares:
        """Return the shares of the run between two moments."""
        before_ms = {load.run: load.process_ms for load in before.loads}
        spent_ms = {load.run: max(0, load.process_ms - before_ms.get(load.run, 0)) for load in self.loads}
        share = _part(spent_ms.get(self.state.run), sum(spent_ms.values()))
        whole_s, *parts_s = (getattr(self.state, name) - getattr(before.state, name) for name in SPENT)
        return Shares(share, *(_part(part_s, whole_s) for part_s in parts_s))


def _part(part: float | None, whole: float) -> float | None:
    """Return a part of a whole as a share; None if the part is unknown or the whole is nothing."""
    return None if part is None or whole <= 0 else min(1.0, part / whole)


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
        learners: that learn it together, by rank, then those that wait; of a run that wants several.
        refusals: host -> reason why it does not play the run.
        num_playing: processes that play it now.
        recent: shares of process time within WINDOW_S.
        quiet_s: since env steps last grew.
        now_s: the server's clock.
        notices: entries of the journal other than changes of status, each once, oldest first.
        hint: why nothing happens, and the remedy; empty while all is well.
    """

    state: runs.RunState
    config: RunConfig
    row: Mapping[str, Any] = field(default_factory=dict)
    returns: list[tuple[float, float]] = field(default_factory=list)
    evaluated: list[dict[str, Any]] = field(default_factory=list)
    present: list[workers.Heartbeat] = field(default_factory=list)
    loads: list[segments.RunLoad] = field(default_factory=list)
    learners: list[Member] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    num_playing: int = 0
    recent: Shares = field(default_factory=Shares)
    quiet_s: float = 0.0
    now_s: float = 0.0
    notices: list[str] = field(default_factory=list)
    hint: str = ""

    @property
    def serving(self) -> list[workers.Heartbeat]:
        """Workers that serve the run's queue."""
        return [worker for worker in self.present if self.state.queue in worker.queues]

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, see `RunState.train_s`; 0 before the first environment step."""
        return max(0.0, self.state.train_s(self.now_s) or 0.0)

    @property
    def left_s(self) -> float | None:
        """Seconds until `stop.time`; None without that limit."""
        limit = self.config.stop.time
        spent = self.row.get("elapsed_s", self.elapsed_s)  # the learner's count leaves pauses out
        return None if limit is None else max(0.0, limit - spent)

    @property
    def updates(self) -> int:
        """Updates, from the run's state or the metrics, whichever is newer."""
        return max(self.state.updates, int(self.row.get("updates", 0)))

    def rate(self, name: str) -> str:
        """Return a rate of the metrics such as " (310/s)"; "" if it is unknown or the run has ended."""
        return f" ({self.row[name]:.0f}/s)" if name in self.row and not self.state.outcome else ""


def _without_episodes(row: dict[str, Any]) -> dict[str, Any]:
    """Return a result with means in place of what it holds of each episode."""
    kept = {name: value for name, value in row.items() if name not in ("returns", "lengths", "metrics")}
    return kept | evaluations.means(row["metrics"])


def entitled(run: runs.RunState | segments.RunLoad, loads: Iterable[segments.RunLoad]) -> float:
    """Return a run's share by its weight, among the active runs of its priority."""
    total = sum(load.weight for load in loads if load.priority == run.priority)
    return run.weight / total if total else 1.0


def polls(watchers: Sequence[Watcher]) -> Iterator[list[Figures]]:
    """Yield the states of runs, as often as they are asked for, until all have ended.

    Raises:
        UnknownRunError: a run has been missing for longer than OUTAGE_S.
        redis.RedisError: the server has not answered for longer than OUTAGE_S, or waiting does not help.
    """
    outage_at = math.inf
    while True:
        try:
            figures = [watcher.poll() for watcher in watchers]
            outage_at = math.inf
        except (UnknownRunError, *connection.OUTAGES) as error:
            reason, now = _outage_text(error), time.monotonic()
            outage_at = min(outage_at, now)
            if reason is None or now - outage_at > OUTAGE_S:
                raise
            figures = [watcher.without_server(reason) for watcher in watchers]
        yield figures
        if all(each.state.ended for each in figures):
            return


def _outage_text(error: Exception) -> str | None:
    """Return the message to show during an outage; None if the error is no outage."""
    if isinstance(error, UnknownRunError):
        return "the run is not on the server; waiting for its learner to restore it"
    text = connection.outage(error)
    return f"{text}; waiting for it" if text else None


class Watcher:
    """Polls a run with a few cheap commands, and reads only the new entries of each stream.

    Args:
        client: connection to the server.
        run: its id.
        starting_s: time that the caller's own learner and workers may take to start.
        after: entry after which episodes are read; by default all.

    Raises:
        UnknownRunError: the run does not exist.
    """

    def __init__(self, client: Client, run: str, *, starting_s: float = 0.0, after: bytes = b"0-0") -> None:
        self._client, self._run = client, run
        self._figures = Figures(runs.state(client, run), runs.config(client, run))
        self._episodes_cursor, self._evaluations_cursor = after, b"0-0"
        self._journal_cursor = runs.journal(client, run)[1]
        self._quiet_until = time.monotonic() + starting_s
        self._fleet_at = self._grown_at = 0.0
        self._server = ""
        self._history: deque[Usage] = deque()

    def poll(self) -> Figures:
        """Poll the run and return its state; the same object each time."""
        client, run, figures, now = self._client, self._run, self._figures, time.monotonic()
        figures.now_s = runs.server_ms(client) / 1e3  # before the state, whose end may not be earlier
        before, figures.state = figures.state, runs.state(client, run)
        if figures.state.config_version != before.config_version:
            figures.config = runs.config(client, run)
        if figures.state.appended_steps != before.appended_steps or not self._grown_at:
            self._grown_at = now
        figures.quiet_s = now - self._grown_at
        figures.row = metrics.last(client, run)
        is_first = self._episodes_cursor == b"0-0"
        rows, self._episodes_cursor = stream.episodes(client, run, self._episodes_cursor)
        returns = [
            (max(0.0, row["time_s"] - figures.state.start_s), value)
            for row in rows
            for value in row["returns"]
        ]
        if is_first and returns:
            older = history.read(client, run)["episodes"]
            figures.returns = [
                (row["time_s"], row["return"]) for row in older if row["time_s"] < returns[0][0]
            ]
        figures.returns.extend(returns)
        results, self._evaluations_cursor = evaluations.results(
            client, run, self._evaluations_cursor, keep=_without_episodes
        )
        figures.evaluated.extend(results)
        entries, self._journal_cursor = runs.journal(client, run, self._journal_cursor)
        texts = (hints.notice(entry) for entry in entries)
        figures.notices.extend(text for text in texts if text and text not in figures.notices[-MOST_NOTICES:])
        held = {"returns": MOST_RETURNS, "evaluated": MOST_ROWS, "notices": MOST_NOTICES}
        for name, most in held.items():
            del getattr(figures, name)[:-most]
        if now >= self._fleet_at and not figures.state.ended:
            self._fleet_at = now + FLEET_S
            self._poll_fleet()
        figures.hint = hints.hint(figures, server=self._server, starting=now < self._quiet_until)
        return figures

    def without_server(self, reason: str) -> Figures:
        """Return the last state, with the reason why the server does not answer as the hint."""
        self._figures.hint = reason
        return self._figures

    def _poll_fleet(self) -> None:
        client, figures, history = self._client, self._figures, self._history
        figures.present = workers.alive(client)
        figures.loads = segments.active(client)
        if figures.config.learner.num_learners > 1:
            figures.learners = learners.by_rank(client, self._run)
        figures.refusals = segments.refusals(client, self._run)
        figures.num_playing = len(segments.playing(client, self._run))
        self._server = hints.server_trouble(client)
        history.append(Usage(figures.state, figures.loads, time.monotonic()))
        while len(history) > 2 and history[-1].at - history[1].at > WINDOW_S:
            history.popleft()
        figures.recent = history[-1].since(history[0])

"""A run's state and history, read once for all who look at its page."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from ddrl.cli.output import Client
from ddrl.cli.watcher import Figures, Watcher
from ddrl.runs import records
from ddrl.runs.records import Records
from ddrl.store import metrics, runs

EVERY_S = 2.0  # between two looks at a run, however many people watch it
MOST_NEW = 100_000  # rows and returns, until all is read anew, as thinned out as the server keeps it
KEPT_S = 60.0  # a run that nobody watches is forgotten
SPARKS = 24  # points of a run's sparkline
LISTS = ("figures", "episodes", "evaluated", "journal")


class Feed:
    """State and history of one run.

    Args:
        client: connection to the server.
        run: its id.

    Raises:
        UnknownRunError: there is no such run.
    """

    def __init__(self, client: Client, run: str) -> None:
        self._client, self._run = client, run
        self._lock = threading.Lock()
        self._records = records.read(client, run)
        self._watcher = Watcher(client, run, after=self._records.ends["episodes"])
        self._figures = self._watcher.poll()
        self._looked_at = self.used_at = time.monotonic()
        self._num_new = 0  # since all was read

    def look(self) -> tuple[Figures, Records]:
        """Return the state and the history, at most EVERY_S old; the same history as before until it is read again."""
        with self._lock:
            self.used_at = now = time.monotonic()
            if now - self._looked_at >= EVERY_S:
                self._figures = self._watcher.poll()
                known, new = self._records, records.read(self._client, self._run, self._records.ends)
                lists = {name: getattr(known, name) + getattr(new, name) for name in LISTS}
                self._records = replace(new, **lists)
                self._num_new += sum(len(getattr(new, name)) for name in LISTS)
                if self._num_new > MOST_NEW:
                    self._records, self._num_new = records.read(self._client, self._run), 0
                self._looked_at = now
            return self._figures, self._records


class Feeds:
    """The runs that are watched.

    Args:
        client: connection to the server.
    """

    def __init__(self, client: Client) -> None:
        self._client, self._feeds, self._lock = client, dict[str, Feed](), threading.Lock()

    def look(self, run: str) -> tuple[Figures, Records]:
        """Return state and history of a run; see `Feed`.

        Raises:
            UnknownRunError: there is no such run.
        """
        with self._lock:
            since = time.monotonic() - KEPT_S
            self._feeds = {name: feed for name, feed in self._feeds.items() if feed.used_at > since}
            feed = self._feeds.get(run)
            if feed is None:
                feed = self._feeds[run] = Feed(self._client, run)
        return feed.look()

    def forget(self, run: str) -> None:
        """Read a run anew when it is looked at next, as it has been changed."""
        with self._lock:
            self._feeds.pop(run, None)


def sparks(client: Client, states: list[runs.RunState], now_s: float) -> list[list[float]]:
    """Return, for each run, mean returns of its learner's rows, evenly over its time; all with one request."""
    times = []
    for state in states:
        begin, end = state.start_s, state.ended_s or now_s
        times.append([begin + (end - begin) * place / SPARKS for place in range(1, SPARKS + 1)])
    rows = metrics.at(client, [state.run for state in states], times)
    return [[row["return_mean"] for row in some if "return_mean" in row] for some in rows]

"""Figures for Prometheus: what a learner process knows of its run, what a Celery worker knows of itself.

`DDRL_METRICS=HOST:PORT`, or PORT alone for the loopback, opens `/metrics` there; without it nothing is opened. An
address that cannot be had costs one warning, never the process. A learner's figures are read from the server when
somebody asks: nothing is counted twice, and a learner that nobody watches pays nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddrl.store import connection, metrics, runs

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

VARIABLE = "DDRL_METRICS"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Series:
    """One metric of a run.

    Attributes:
        name: as Prometheus knows it; one that ends in `_total` is a counter.
        help: what it counts, in one line.
        value: of the run's state.
    """

    name: str
    help: str
    value: Callable[[runs.RunState], float]


SERIES = (
    Series("ddrl_env_steps_total", "Environment steps appended.", lambda now: now.appended_steps),
    Series("ddrl_updates_total", "Updates of the learner.", lambda now: now.updates),
    Series("ddrl_fragments_total", "Fragments appended.", lambda now: now.appended_fragments),
    Series("ddrl_stream_written_bytes_total", "Bytes appended.", lambda now: now.appended_bytes),
    Series("ddrl_stream_bytes", "Bytes of the stream, entries trimmed left out.", lambda now: now.live_bytes),
    Series("ddrl_policy_version", "Latest version of the weights.", lambda now: now.version),
    Series("ddrl_allowance_steps", "Steps that may have been appended in all.", lambda now: now.allowance),
    Series("ddrl_messages_waiting", "Rollout messages that wait for a process.", lambda now: now.waiting),
    Series("ddrl_weight", "Share of the fleet, relative to other runs.", lambda now: now.weight),
    Series("ddrl_leased", "1 where a learner holds the run.", lambda now: now.leased),
    Series("ddrl_duplicates_total", "Repeated appends, dropped.", lambda now: now.duplicates),
    Series("ddrl_dead_entries_total", "Entries that the learner refused.", lambda now: now.dead),
    Series("ddrl_full_appends_total", "Appends that found no room.", lambda now: now.full),
    Series("ddrl_crashes_total", "Processes that could not play the run.", lambda now: now.crashes_total),
    Series("ddrl_lost_producers_total", "Ended without a word.", lambda now: now.lost_producers),
    Series("ddrl_process_seconds_total", "Process time spent on the run.", lambda now: now.process_s),
    Series("ddrl_played_seconds_total", "Of that, stepping environments.", lambda now: now.played_s),
    Series("ddrl_allowance_wait_seconds_total", "Of that, ahead of learning.", lambda now: now.allowance_wait_s),
    Series("ddrl_room_wait_seconds_total", "Of that, without room.", lambda now: now.room_wait_s),
)  # fmt: skip

ROW = {  # figure of the learner's row -> (metric, help)
    "env_steps_per_s": ("ddrl_env_steps_per_second", "Environment steps per second, as the learner sees them."),
    "updates_per_s": ("ddrl_updates_per_second", "Updates per second."),
    "return_mean": ("ddrl_return_mean", "Mean return of the last training episodes."),
    "staleness": ("ddrl_staleness_versions", "Versions between playing and learning, mean."),
    "samples_per_insert": ("ddrl_samples_per_insert", "Transitions sampled per transition appended."),
    "replay_size": ("ddrl_replay_transitions", "Transitions that the learner holds."),
    "replay_bytes": ("ddrl_replay_bytes", "Bytes of them."),
    "learner_wait": ("ddrl_learner_wait_ratio", "Share of its time that the learner waits for experience."),
    "server_wait_s": ("ddrl_server_wait_seconds", "Of the last row: waiting for the server."),
}  # fmt: skip
FIGURE = "ddrl_learner_figure"  # of the algorithm, by name

_run: str | None = None
_serving = threading.Lock()
_served: bool | None = None  # None: not tried yet


def start_learner() -> bool:
    """Serve the figures of the run that `learning` names; where they are served already, nothing."""
    return _start(lambda: _Learning())


@contextlib.contextmanager
def learning(run: str) -> Iterator[None]:
    """While it lasts this process learns `run`; its figures are served."""
    global _run
    start_learner()
    _run = run
    try:
        yield
    finally:
        _run = None


def start_worker(
    node: str,
    pids: Callable[[], Iterable[int]],
    busy: Callable[[], int],
    tasks: Callable[[], Mapping[str, int]],
) -> bool:
    """Serve the figures of a Celery worker; where they are served already, nothing.

    Args:
        node: the worker's name.
        pids: of its processes, now.
        busy: processes with a task, now.
        tasks: started since it said ready, by name.

    Returns:
        Whether they are served.
    """
    return _start(lambda: _Working(node, pids, busy, tasks))


def address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, `:PORT` or `PORT`; without a host, the loopback.

    Raises:
        ValueError: it is neither, or the port is not one that others could find.
    """
    match = re.fullmatch(r"(?:(?:\[([^\]]+)\]|([^:\[\]]*)):)?(\d{1,5})", text.strip())
    if match is None or not 0 < int(match[3]) < 65536:
        raise ValueError(f"{VARIABLE}={text}: expected HOST:PORT with a port from 1 to 65535, or PORT alone")
    return match[1] or match[2] or LOOPBACK, int(match[3])


def _start(collector: Callable[[], Any]) -> bool:
    """Open the port that the environment names, once a process; whether it is open."""
    global _served
    text = os.environ.get(VARIABLE)
    if not text:
        return False
    with _serving:
        if _served is None:  # once, also where it fails: one warning is enough
            _served = _open(text, collector)
        return _served


def _open(text: str, collector: Callable[[], Any]) -> bool:
    """Serve a collector's figures at an address; one line if that cannot be."""
    try:
        host, port = address(text)
        from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(collector())
        start_http_server(port, host, registry)
    except ValueError as error:
        log.warning("%s; no figures are served", error)
    except OSError as error:
        log.warning("%s=%s: %s; no figures are served", VARIABLE, text, error.strerror or error)
    else:
        log.info("figures for Prometheus at http://%s:%d/metrics", host, port)
        return True
    return False


class _Learning:
    """The run's figures, read when asked for."""

    def __init__(self) -> None:
        self._client = connection.connect()
        self._reading = threading.Lock()
        self._last: list[Metric] = []
        self._budget = ("", -1, 0)  # run, config version, bytes

    def describe(self) -> list[Metric]:
        """Nothing: registering reads nothing."""
        return []

    def collect(self) -> list[Metric]:
        """All figures; the last known where another request is waiting for the server already."""
        if self._reading.acquire(blocking=False):
            try:
                self._last = list(self._read())
            finally:
                self._reading.release()
        return self._last

    def _read(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        up = GaugeMetricFamily("ddrl_server_up", "1 where the learner's server answers.")
        run, found = _run, []
        try:
            self._client.ping()
            if run is not None:
                found = list(self._of_run(run))
        except connection.OUTAGES:
            up.add_metric([], 0)
        except connection.StoreError:  # deleted meanwhile
            up.add_metric([], 1)
        else:
            up.add_metric([], 1)
        yield up
        yield from found

    def _of_run(self, run: str) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        now, row = runs.state(self._client, run), metrics.last(self._client, run)
        for series in SERIES:
            yield _family(series.name, series.help, {"run": run}, series.value(now))
        yield _family(
            "ddrl_stream_budget_bytes", "replay.max_bytes.", {"run": run}, self._budget_of(run, now)
        )
        yield _family("ddrl_status", "1 for the run's status.", {"run": run, "status": now.status}, 1)
        if now.evaluation is not None:
            mean = now.evaluation["return_mean"]
            yield _family("ddrl_evaluation_return_mean", "Of the version that is best.", {"run": run}, mean)
        for name, (metric, text) in ROW.items():
            if name in row:
                yield _family(metric, text, {"run": run}, row[name])
        others = GaugeMetricFamily(FIGURE, "Any other figure of the learner's row.", labels=["run", "figure"])
        for name in sorted(
            row.keys() - ROW.keys() - {"env_steps", "updates", "elapsed_s", "version", "dead"}
        ):
            others.add_metric([run, name], _number(row[name]))
        yield others

    def _budget_of(self, run: str, now: runs.RunState) -> int:
        if self._budget[:2] != (run, now.config_version):
            size = int(runs.config(self._client, run).replay.max_bytes)
            self._budget = (run, now.config_version, size)
        return self._budget[2]


class _Working:
    """A worker's figures."""

    def __init__(
        self,
        node: str,
        pids: Callable[[], Iterable[int]],
        busy: Callable[[], int],
        tasks: Callable[[], Mapping[str, int]],
    ) -> None:
        self._labels = {"node": node}
        self._pids, self._busy, self._tasks = pids, busy, tasks
        self._started = time.monotonic()

    def describe(self) -> list[Metric]:
        """Nothing: registering reads nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All figures."""
        from prometheus_client.core import CounterMetricFamily

        pids, labels = list(self._pids()), self._labels
        sizes = [resident_bytes(pid) for pid in pids]
        yield _family("ddrl_worker_processes", "Processes of the pool.", labels, len(pids))
        yield _family("ddrl_worker_busy_processes", "Those with a task.", labels, self._busy())
        uptime = time.monotonic() - self._started
        yield _family("ddrl_worker_uptime_seconds", "Time since it said ready.", labels, uptime)
        yield _family("ddrl_worker_resident_bytes", "Memory of all processes.", labels, sum(sizes))
        largest = max(sizes, default=0)
        yield _family("ddrl_worker_largest_resident_bytes", "Memory of the largest.", labels, largest)
        tasks = CounterMetricFamily("ddrl_worker_tasks_total", "Tasks started.", labels=["node", "task"])
        for name, count in sorted(self._tasks().items()):
            tasks.add_metric([labels["node"], name], count)
        yield tasks


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 where it is gone or the system does not tell."""
    try:
        pages = int(Path("/proc", str(pid), "statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _family(name: str, text: str, labels: Mapping[str, str], value: object) -> Metric:
    """One metric with one value."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family: Metric = kind(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), _number(value))  # type: ignore[attr-defined]
    return family


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan

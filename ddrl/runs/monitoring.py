"""Metrics for Prometheus: a learner process reports its run, a Celery worker reports itself.

`DDRL_METRICS=HOST:PORT`, or PORT alone for the loopback, serves `/metrics` there; without it nothing is served. For an
address that cannot be used, one warning is logged. A learner's metrics are read from the server at each request.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ddrl.store import connection, metrics, runs, segments

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

VARIABLE = "DDRL_METRICS"

SERIES: dict[str, tuple[str, Callable[[runs.RunState], float]]] = {  # metric -> (help, value of the state)
    "ddrl_env_steps_total": ("Environment steps appended.", lambda now: now.appended_steps),
    "ddrl_updates_total": ("Updates of the learner.", lambda now: now.updates),
    "ddrl_fragments_total": ("Fragments appended.", lambda now: now.appended_fragments),
    "ddrl_stream_written_bytes_total": ("Bytes appended.", lambda now: now.appended_bytes),
    "ddrl_stream_bytes": ("Bytes of the stream, without trimmed entries.", lambda now: now.live_bytes),
    "ddrl_policy_version": ("Latest version of the weights.", lambda now: now.version),
    "ddrl_allowance_steps": ("Steps that may have been appended in all.", lambda now: now.allowance),
    "ddrl_weight": ("Share of the fleet, relative to other runs.", lambda now: now.weight),
    "ddrl_leased": ("1 if a learner holds the run.", lambda now: now.leased),
    "ddrl_duplicates_total": ("Repeated appends, ignored.", lambda now: now.duplicates),
    "ddrl_dead_entries_total": ("Entries that the learner rejected.", lambda now: now.dead),
    "ddrl_full_appends_total": ("Appends that found the stream full.", lambda now: now.full),
    "ddrl_crashes_total": ("Processes that could not play the run.", lambda now: now.crashes_total),
    "ddrl_lost_producers_total": ("Producers whose process was lost.", lambda now: now.lost_producers),
    "ddrl_process_seconds_total": ("Process time spent on the run.", lambda now: now.process_s),
    "ddrl_played_seconds_total": ("Of that, stepping environments.", lambda now: now.played_s),
    "ddrl_allowance_wait_seconds_total": ("Of that, waiting for the learner.", lambda now: now.allowance_wait_s),
    "ddrl_room_wait_seconds_total": ("Of that, waiting for room in the stream.", lambda now: now.room_wait_s),
}  # fmt: skip

ROW = {  # figure of the learner's metrics row -> (metric, help)
    "env_steps_per_s": ("ddrl_env_steps_per_second", "Environment steps per second, as counted by the learner."),
    "updates_per_s": ("ddrl_updates_per_second", "Updates per second."),
    "return_mean": ("ddrl_return_mean", "Mean return of the last training episodes."),
    "staleness": ("ddrl_staleness_versions", "Mean number of versions between playing and learning."),
    "samples_per_insert": ("ddrl_samples_per_insert", "Transitions sampled per transition appended."),
    "replay_size": ("ddrl_replay_transitions", "Transitions that the learner holds."),
    "replay_bytes": ("ddrl_replay_bytes", "Bytes of these transitions."),
    "learner_wait": ("ddrl_learner_wait_ratio", "Share of its time that the learner waits for experience."),
    "server_wait_s": ("ddrl_server_wait_seconds", "Of the last row, waiting for the server."),
}  # fmt: skip
FIGURE = "ddrl_learner_figure"  # any other figure of the row, by name
_NO_FIGURES = {"env_steps", "updates", "elapsed_s", "version", "dead"}  # in SERIES, or of no use

_run: str | None = None  # that this process learns


@contextlib.contextmanager
def learning(run: str) -> Iterator[None]:
    """Let the learner's metrics be those of `run` while the context lasts."""
    global _run
    _run = run
    try:
        yield
    finally:
        _run = None


def address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, `:PORT` or `PORT`; without a host, the loopback.

    Raises:
        ValueError: it is none of these, or the port is not from 1 to 65535.
    """
    match = re.fullmatch(r"(?:(?:\[([^\]]+)\]|([^:\[\]]*)):)?(\d{1,5})", text.strip())
    if match is None or not 0 < int(match[3]) < 65536:
        raise ValueError(f"{VARIABLE}={text}: expected HOST:PORT with a port from 1 to 65535, or PORT alone")
    return match[1] or match[2] or "127.0.0.1", int(match[3])


def serve(metrics_of: LearnerMetrics | WorkerMetrics) -> None:
    """Serve metrics at the address in DDRL_METRICS, if any; log one line if that fails."""
    if not (text := os.environ.get(VARIABLE)):
        return
    try:
        host, port = address(text)
        from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(metrics_of)
        start_http_server(port, host, registry)
    except ValueError as error:
        log.warning("%s; no metrics are served", error)
    except OSError as error:
        log.warning("%s=%s: %s; no metrics are served", VARIABLE, text, error.strerror or error)
    else:
        log.info("metrics for Prometheus at http://%s:%d/metrics", host, port)


class LearnerMetrics:
    """The metrics of the run that `learning` names, read at each request."""

    def __init__(self) -> None:
        self._client = connection.connect()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, or only `ddrl_server_up` if the server does not answer."""
        run, is_up, found = _run, True, []
        try:
            wanted = sum(load.wanted_processes for load in segments.active(self._client))
            text = "Processes for which a fleet should have room, for all runs of the server."
            found = [_family("ddrl_processes_wanted", text, ({}, wanted))]
            if run is not None:
                with contextlib.suppress(connection.StoreError):  # the run was deleted meanwhile
                    found += self._of_run(run)
        except connection.OUTAGES:
            is_up = False
        yield _family("ddrl_server_up", "1 if the learner's server answers.", ({}, is_up))
        yield from found

    def _of_run(self, run: str) -> Iterator[Metric]:
        state, row, labels = runs.state(self._client, run), metrics.last(self._client, run), {"run": run}
        for name, (text, value) in SERIES.items():
            yield _family(name, text, (labels, value(state)))
        waiting = segments.waiting(self._client, state.queue)
        yield _family("ddrl_messages_waiting", "Rollout messages in the queue of the run.", (labels, waiting))
        budget = int(runs.config(self._client, run).replay.max_bytes)
        yield _family("ddrl_stream_budget_bytes", "replay.max_bytes.", (labels, budget))
        yield _family("ddrl_status", "1 for the run's status.", ({**labels, "status": state.status}, 1))
        if state.evaluation is not None:
            mean = state.evaluation["return_mean"]
            yield _family("ddrl_evaluation_return_mean", "Of the best version.", (labels, mean))
        for name, (metric, text) in ROW.items():
            if name in row:
                yield _family(metric, text, (labels, row[name]))
        others = sorted(row.keys() - ROW.keys() - _NO_FIGURES)
        figures = [({**labels, "figure": name}, row[name]) for name in others]
        yield _family(FIGURE, "Another figure of the learner.", *figures)


@dataclass(frozen=True)
class WorkerMetrics:
    """The metrics of a Celery worker.

    Attributes:
        node: the worker's name.
        pids: returns the process ids of its pool.
        busy: returns the number of processes with a task.
        tasks: returns the number of tasks started, by name.
        started: of `time.monotonic()`.
    """

    node: str
    pids: Callable[[], Iterable[int]]
    busy: Callable[[], int]
    tasks: Callable[[], Mapping[str, int]]
    started: float = field(default_factory=time.monotonic)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        sizes = [resident_bytes(pid) for pid in self.pids()]
        for name, text, value in (
            ("processes", "Processes of the pool.", len(sizes)),
            ("busy_processes", "Processes with a task.", self.busy()),
            ("uptime_seconds", "Time since the worker was ready.", time.monotonic() - self.started),
            ("resident_bytes", "Memory of all processes.", sum(sizes)),
            ("largest_resident_bytes", "Memory of the largest process.", max(sizes, default=0)),
        ):
            yield _family(f"ddrl_worker_{name}", text, ({"node": self.node}, value))
        tasks = [({"node": self.node, "task": task}, count) for task, count in sorted(self.tasks().items())]
        yield _family("ddrl_worker_tasks_total", "Tasks started.", *tasks)


def resident_bytes(pid: int) -> int:
    """Return the memory that a process holds; 0 if it has ended or the system does not say."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path("/proc", str(pid), "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _family(name: str, text: str, *samples: tuple[dict[str, str], object]) -> Metric:
    """Return a metric with the values of these labels; a name that ends in `_total` makes a counter."""
    from prometheus_client.core import Metric

    family = Metric(name.removesuffix("_total"), text, "counter" if name.endswith("_total") else "gauge")
    for labels, value in samples:
        family.add_sample(name, labels, float(value) if isinstance(value, int | float) else math.nan)
    return family

"""A worker's heartbeat, and what else its main process reports to the server; what it reports about its machine."""

from __future__ import annotations

import logging
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ddrl.store import connection, segments, workers
from ddrl.store.workers import Heartbeat

log = logging.getLogger(__name__)

DRAIN_EVERY_S = 0.5  # a run may start while the worker drains
STOP_S = 2.0  # for the last message to the server
_DRAIN, _STOP = "drain", "stop"


class HeartbeatSender:
    """Sends a worker's heartbeats, its drain and its lost processes from a thread of its own.

    A worker's main thread must never wait for the server. Requests go to the thread through a queue whose `put` may
    be called in a signal handler.

    Args:
        heartbeat: what is sent, except what changes.
        pids: returns the process ids of the pool.
    """

    def __init__(self, heartbeat: Heartbeat, pids: Callable[[], tuple[int, ...]]) -> None:
        self.node, self.pids = heartbeat.node, pids
        self._heartbeat = heartbeat
        self._requests: queue.SimpleQueue[str | tuple[str, str, str]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Send heartbeats from now on."""
        self._thread.start()

    def drain(self) -> None:
        """End the segments of this worker at their next append, until it stops."""
        self._requests.put(_DRAIN)

    def report_crash(self, task: str, run: str, reason: str) -> None:
        """Report to a run that a process could not play it; an empty `run` is the one that the task plays."""
        self._requests.put((task, run, reason))

    def stop(self) -> None:
        """Remove the heartbeat; wait at most STOP_S for the server."""
        self._requests.put(_STOP)
        self._thread.join(STOP_S)

    def _work(self) -> None:
        client = connection.connect()
        crashes: list[tuple[str, str, str]] = []
        draining, is_first, pause_s = False, True, 0.0
        while True:
            try:
                request = self._requests.get(timeout=pause_s)
            except queue.Empty:
                request = ""
            if isinstance(request, tuple):
                crashes.append(request)
            draining = draining or request == _DRAIN
            pause_s = DRAIN_EVERY_S if draining else workers.BEAT_S
            try:
                if request == _STOP:
                    workers.leave(client, self._heartbeat)
                    return
                if is_first:
                    segments.stay(client, self.node)
                    is_first = False
                if draining:
                    segments.drain(client, self.node)
                while crashes:
                    task, run, reason = crashes[0]
                    run = run or segments.run_of_task(client, task) or ""
                    segments.note_crash(client, run, reason)
                    crashes.pop(0)
                workers.beat(client, replace(self._heartbeat, pids=self.pids(), draining=draining))
            except Exception as error:  # the next round tries again
                if request == _STOP:
                    return
                if not isinstance(error, connection.OUTAGES):
                    log.exception("worker %s: cannot send its heartbeat", self.node)


def gpus() -> tuple[str, ...]:
    """Return the names of this machine's NVIDIA GPUs as its driver reports them; none without a driver."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for path in files for line in _lines(path)]
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]
    if names or shutil.which("nvidia-smi") is None:
        return tuple(names)
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())


def memory_bytes() -> int:
    """Return the memory of this machine, or of its container; 0 if the system does not say."""
    try:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
    limit = _lines(Path("/sys/fs/cgroup/memory.max"))
    return min(physical, int(limit[0])) if limit and limit[0].isdigit() else physical


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def without_spaces(name: str) -> str:
    """Return the name of a host or node as it is kept on the server, where spaces separate fields."""
    return "_".join(name.split())
